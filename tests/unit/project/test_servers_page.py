"""The page of inference servers has a row for each probe of its script."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_has_the_rows_of_the_script():
    spec = importlib.util.spec_from_file_location("probe", ROOT / "scripts/probe_servers.py")
    assert spec is not None
    assert spec.loader is not None
    probe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(probe)
    page = (ROOT / "docs/reference/servers.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    assert [row[1].strip() for row in rows] == list(probe.ROWS)
    assert all(cell.strip() for row in rows for cell in row[2:-1])
    assert page.startswith(probe.page({}, "a day").split("\n\n")[0])
