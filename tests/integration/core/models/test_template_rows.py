"""25 turns are one row with every stored template, and the published table is what is measured."""

import importlib.util
import sys
from functools import cache
from pathlib import Path

import pytest


@cache
def _script(root: Path):
    """Return scripts/template_rows.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "template_rows", root / "scripts/template_rows.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def counts(shared_dir, repo_root):
    paths = sorted((shared_dir / "data/chat_templates").glob("*.jinja"))
    if not paths:
        pytest.skip("no stored chat templates")
    return [_script(Path(repo_root)).measure(path) for path in paths]


def test_with_the_published_options_every_template_needs_one_row(counts):
    chosen = {one.name: (one.chosen.rows, one.tools_chosen) for one in counts}
    assert {name: rows for name, (rows, _) in chosen.items() if rows != 1} == {}
    with_tools = {name: tools.rows for name, (_, tools) in chosen.items() if tools}
    assert set(with_tools.values()) == {1}
    assert len(with_tools) >= 15


def test_a_template_needs_options_only_where_a_reason_is_given(counts):
    several = {one.name for one in counts if one.default.rows > 1}
    assert several == {one.name for one in counts if one.why}
    assert all(
        one.why.startswith("the chat template removes earlier thoughts")
        for one in counts
        if one.why
    )
    dropped = [one for one in counts if one.thinks and one.user.rows == 25]
    assert {one.name for one in dropped} >= {"qwen3", "gptoss", "glm4moe", "nemotron_3_nano"}
    assert all(one.user.tokens > 6 * one.chosen.tokens for one in dropped)


def test_the_published_table_is_the_measured_one(counts, repo_root):
    script = _script(Path(repo_root))
    page = script.PAGE.read_text(encoding="utf-8")
    published = page.partition(script.BEGIN)[2].partition(script.END)[0].strip()
    command = "run scripts/template_rows.py FOLDER --write"
    assert published == script.table_of(counts), command
