"""Tables keep their shape where stdout is no terminal."""

from __future__ import annotations

import sys

import pytest
from rich.table import Table

from rollart_core.cli.output import print_columns, print_table, stdout_console

LONG = "word " * 100 + "end"


@pytest.fixture(params=["", "60"])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """COLUMNS as a shell may export it."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if request.param:
        monkeypatch.setenv("COLUMNS", request.param)


@pytest.mark.usefixtures("columns")
def test_each_row_is_one_whole_line_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(f"title {LONG}", ("a", "b"), [("1", LONG), (LONG, "2")])
    own = Table("narrow", title=f"title {LONG}")
    own.add_row(LONG)
    stdout_console().print(own)
    print_columns("c", ("a", "b"), [("1", LONG)])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert sum(LONG in line for line in lines) == 6
    assert lines.count(f"title {LONG}") == 2
    assert any(line.split()[:1] == ["1"] and line.endswith(LONG) for line in lines)
    assert not any(LONG.startswith(line) for line in lines if line and line != LONG)


def test_a_terminal_wraps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table("t", ("a", "b"), [("1", LONG)])
    print_columns("c", ("a", "b"), [("1", LONG)])
    out = capsys.readouterr().out
    assert LONG not in out
    assert out.count("end") == 2
