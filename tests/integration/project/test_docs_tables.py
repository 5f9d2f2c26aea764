"""The tables of the documentation are those of the code."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [str(p.relative_to(ROOT)) for p in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))]


@pytest.fixture(scope="module")
def tables(repo_root: Path) -> dict[str, Any]:
    return runpy.run_path(str(repo_root / "docs/tables.py"))


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_up_to_date(page: str, repo_root: Path, tables: Any) -> None:
    text = (repo_root / page).read_text(encoding="utf-8")
    assert text == tables["rendered"](text), "out of date: run `python docs/tables.py`"


def test_every_table_stands_on_a_page(repo_root: Path, tables: Any) -> None:
    texts = "".join((repo_root / page).read_text(encoding="utf-8") for page in PAGES)
    shown = [found[1] for found in tables["MARKED"].finditer(texts)]
    assert sorted(shown) == sorted(tables["all_tables"]())


def test_every_key_and_option_says_what_it_is(tables: Any) -> None:
    models = {**tables["sections"](), **tables["plugin_models"](), **tables["adapter_models"]()}
    fields_of = tables["fields_of"]
    assert not [f"{n}.{f.name}" for n, m in models.items() for f in fields_of(m) if not f.help]


def test_usage_and_table_of_a_command_name_an_argument_alike(tables: Any) -> None:
    shown = tables["_command_options"]()
    assert "Usage: rollart registry init [OPTIONS] REGISTRY\n" in shown
    assert "| `REGISTRY` | The folder to create. |" in shown
    assert not re.search(r"Usage: .*[{}]", shown)


def test_every_module_says_what_it_is(tables: Any) -> None:
    assert not [path for path in tables["python_files"]() if not tables["sentence"](path)]


def test_every_module_says_what_it_is_and_what_it_takes_gives_or_never_does(tables: Any) -> None:
    docs = {path: said(path) for path in tables["python_files"]()}
    ends = re.compile(r"[.!?)](\s|$)")
    poor = [
        str(path)
        for path, doc in docs.items()
        if not ("Takes: " in doc or "Gives: " in doc or "Never: " in doc)
        and len(ends.findall(doc)) < 2
    ]
    assert poor == [], "say in a second sentence what it takes, gives and never does"


def said(path: Path) -> str:
    """Return the docstring of a module, on one line."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(doc.split())
