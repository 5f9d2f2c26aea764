"""SECURITY.md promises nothing that no test holds."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(f.name for f in functions if f.name.startswith("test_"))


def boundaries() -> dict[str, str]:
    """Return what stands under each ``###`` of the page, by its heading."""
    parts = re.split(r"^### (.+)$", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows() -> list[str]:
    lines = [line for line in TEXT.splitlines() if line.startswith("| ")]
    return [line for line in lines if line not in {"| may not | tested by |", "| --- | --- |"}]


def test_every_test_it_names_exists() -> None:
    named = NAMED.findall(TEXT)
    assert len(named) > 40
    assert [f"{p}::{n}" for p, n in named if not (ROOT / p).is_file() or n not in names_in(p)] == []


@pytest.mark.parametrize("boundary", boundaries())
def test_every_boundary_is_held_by_a_test(boundary: str) -> None:
    assert NAMED.search(boundaries()[boundary])


def test_every_line_names_a_test_and_says_what_it_holds() -> None:
    assert rows()
    for row in rows():
        _, what, held, _ = row.split("|")
        assert what.strip()
        assert all(NAMED.fullmatch(one) for one in held.strip().split(", ")), row


def test_the_parties_that_run_code_or_send_data_all_have_a_boundary() -> None:
    heads = " ".join(boundaries()).lower()
    parties = ("plugin", "reward", "model's code", "gateway", "registry", "ray", "run directory")
    assert [p for p in (*parties, "reward function server") if p not in heads] == []


def test_links_of_the_page_lead_somewhere() -> None:
    links = re.findall(r"\]\(([\w/.-]+)\)", TEXT)
    assert [link for link in links if not (ROOT / link).is_file()] == []
