"""The documentation site: its navigation and its links."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def site(repo_root: Path) -> dict[str, Any]:
    return runpy.run_path(str(repo_root / "scripts/site.py"))


def test_the_index_lists_every_page_once(repo_root: Path, site: dict[str, Any]) -> None:
    sections = site["navigation"]((repo_root / "docs/index.md").read_text(encoding="utf-8"))
    assert [next(iter(section)) for section in sections] == [
        "Home",
        "Tutorials",
        "How-to guides",
        "Reference",
        "Explanation",
        "Project",
    ]
    entries = [page for section in sections[1:] for page in section.popitem()[1]]
    listed = [url for page in entries for url in page.values()]
    pages = {str(p.relative_to(repo_root / "docs")) for p in (repo_root / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == (pages - {"index.md"}) | {*site["PROJECT"].values(), site["MODULES"]}


@pytest.mark.parametrize(
    ("markdown", "converted"),
    [
        ("[a](lora.md#b)", "[a](lora.md#b)"),
        ("[a](../reference/config.md)", "[a](../reference/config.md)"),
        ("[a](../../SECURITY.md)", "[a](../project/security.md)"),
        ("[a](../../examples/suite.yaml)", "a (`examples/suite.yaml`)"),
        ("[a](https://x.org/y.md)", "[a](https://x.org/y.md)"),
        ("![a](../pictures/x.png)", "![a](../pictures/x.png)"),
        ("[a](#b)", "[a](#b)"),
    ],
)
def test_links_lead_to_pages_of_the_site(
    markdown: str, converted: str, site: dict[str, Any]
) -> None:
    page = site["on_the_site"](markdown, "docs/guides/x.md", "guides/x.md")
    assert page == converted


def test_a_page_of_the_project_links_into_the_documentation(site: dict[str, Any]) -> None:
    page = site["on_the_site"]("[a](docs/guides/lora.md)", "SECURITY.md", "project/security.md")
    assert page == "[a](../guides/lora.md)"
