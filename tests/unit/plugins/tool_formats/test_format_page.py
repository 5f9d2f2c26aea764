"""The documentation names all tool formats and all families that are tested."""

import re
from pathlib import Path

from support.tool_cases import FAMILIES, KINDS

from rollart_core.plugins.manager import plugins

DOCS = Path(__file__).resolve().parents[4] / "docs"


def test_the_guide_names_each_tool_format():
    guide = (DOCS / "guides" / "tools.md").read_text()
    table = guide.partition("## Call formats")[2].partition("\n\nRollArt renders")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(cells)))
    registered = plugins().registered("tool_formats").values()
    assert named == {getattr(each.spec, "alias", None) for each in registered}


def test_the_page_has_the_results_of_each_family():
    page = (DOCS / "reference" / "tool-formats.md").read_text()
    for family in FAMILIES:
        template = "" if family.template else " (no template)"
        (row,) = re.findall(rf"^\| {re.escape(family.name + template)} \| `.*$", page, re.MULTILINE)
        cells = row.split(" | ")
        assert cells[1] == f"`{family.alias}`"
        assert len(cells[2:]) == len(KINDS)
        assert all(cell.startswith("100/100") for cell in cells[2:]), row
