"""Implement ``rollart bench``: each module of ``rollart_bench`` is a benchmark against a peer.

Takes: the name of one, a case, options. Gives: its rows as a table or JSON; without a name, the
list of benchmarks. Never: imports other benchmarks, or prints anything else on stdout.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, util
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Final

import typer

from rollart_bench.skip import BenchSkipped
from rollart_core.cli.options import as_options
from rollart_core.cli.output import print_json, print_table
from rollart_core.cli.progress import spell
from rollart_core.errors import UserError, did_you_mean
from rollart_core.runtime.interrupts import sigterm_is_ctrl_c

_PACKAGE = "rollart_bench"
SKIPPED: Final = 77
"""Exit code of a skipped benchmark; automake and meson treat it as a skipped test."""


def bench(
    name: Annotated[
        str | None, typer.Argument(help="Name of the benchmark. Default: list all.")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of the benchmark.")
    ] = None,
    case: Annotated[
        str | None, typer.Option(help="The case to run if the benchmark has several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a benchmark. If no name is given, list all benchmarks.

    Each benchmark accepts short=true, a quick run of a few seconds to check that it works:
    rollart bench scale short=true --json

    The exit code is 77 if the benchmark is skipped because a requirement is missing. The reason is
    printed in one line, and with --json in {"name": ..., "skipped": "...", "rows": []}. If only
    some of its cases can run here, the others are listed in "skipped_cases".
    """
    names = benchmarks()
    if name is None:
        if as_json:
            print_json({"benchmarks": names})
        else:
            typer.echo("\n".join(names))
        return
    if name not in names:
        near = did_you_mean(name, names)
        raise UserError(f"there is no benchmark {name!r}.{near} There are: {', '.join(names)}.")
    given = [*(options or []), *([f"case={case}"] if case else [])]
    benchmark = import_module(f"{_PACKAGE}.{_module(name)}")
    asked = as_options(given)
    _check(name, asked, benchmark.TAKES, takes_config=hasattr(benchmark, "CONFIG"))
    try:
        with sigterm_is_ctrl_c(), _stdout_for_the_result():
            result = {
                "command": shlex.join(("rollart", "bench", name, *given)),
                "date": time.strftime("%Y-%m-%d"),
                **benchmark.run(asked),
            }
    except BenchSkipped as e:
        if as_json:
            print_json({"name": name, "skipped": str(e), "rows": []})
        typer.echo(f"bench {name} is skipped: {e}", err=True)
        raise typer.Exit(SKIPPED) from None
    if as_json:
        print_json(result)
    else:
        _show(result)


def benchmarks() -> list[str]:
    """Return the modules that have a ``run``, without importing them."""
    package = util.find_spec(_PACKAGE)
    folders = package.submodule_search_locations if package else None
    files = [path for folder in folders or [] for path in Path(folder).glob("*.py")]
    found = [f.stem for f in files if "\ndef run(" in f.read_text(encoding="utf-8")]
    return sorted(stem.removesuffix("_") for stem in found)


@contextmanager
def _stdout_for_the_result() -> Iterator[None]:
    """Redirect stdout to stderr, including that of child processes such as Ray's."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _check(
    name: str, asked: Mapping[str, object], takes: Sequence[str], *, takes_config: bool
) -> None:
    """Reject an option that a benchmark does not have, before it runs.

    Args:
        name: The benchmark.
        asked: The given options.
        takes: Its own options.
        takes_config: Whether other options are keys of its run config, and are checked as such.
    """
    unknown = [key for key in asked if key not in takes]
    if unknown and not takes_config:
        near = did_you_mean(unknown[0], tuple(takes))
        raise UserError(f"bench {name} has no {unknown[0]!r}.{near} It takes: {', '.join(takes)}.")


def _module(name: str) -> str:
    """Return the module of a benchmark. A name reserved by Python has a trailing ``_``."""
    return f"{name}_" if iskeyword(name) else name


def _show(result: Mapping[str, object]) -> None:
    rows = result.get("rows")
    assert isinstance(rows, list)
    columns = ("case", "ours", "peer", "unit", "ratio (min to max)", "mark", "met")
    print_table(f"{result['name']} on {_machine(result.get('machine'))}", columns, map(_row, rows))
    skipped = result.get("skipped_cases")
    for case, why in skipped.items() if isinstance(skipped, Mapping) else ():
        typer.echo(f"skipped: {case}: {why}")


def _machine(machine: object) -> str:
    if isinstance(machine, Mapping):
        return spell({str(k): v for k, v in machine.items() if isinstance(v, int | float | str)})
    return str(machine)


def _row(row: Mapping[str, object]) -> tuple[str, ...]:
    ratio = row.get("ratio")
    spread = ""
    if isinstance(ratio, Mapping):
        spread = f"{_cell(ratio['median'])} ({_cell(ratio['min'])} to {_cell(ratio['max'])})"
    peer = f"{_cell(row.get('peer'))} {row.get('peer_name') or ''}".strip()
    met = {True: "yes", False: "no"}.get(row.get("meets_mark"), "")  # type: ignore[call-overload]
    first = (str(row["case"]), _cell(row.get("ours")), peer, str(row.get("unit") or ""))
    return (*first, spread, _cell(row.get("mark")), met)


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return spell({"": value}).strip()
    return "" if value is None else str(value)
