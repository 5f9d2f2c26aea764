"""``rollart bench``: each module of ``rollart_core.bench`` is a benchmark, ours beside a peer's.

Takes: the name of one, a case, options. Gives: its rows as a table or JSON; without a name the list
of all. Never: imports a benchmark that was not asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module, util
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

from rollart_core.cli.options import as_options
from rollart_core.cli.output import print_json, print_table
from rollart_core.cli.progress import spell
from rollart_core.errors import UserError, did_you_mean
from rollart_core.runtime.interrupts import sigterm_is_ctrl_c

_PACKAGE = "rollart_core.bench"


def bench(
    name: Annotated[str | None, typer.Argument(help="Which; none lists them.")] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Its options.")
    ] = None,
    case: Annotated[str | None, typer.Option(help="Which of its cases, where it has several.")] = (
        None
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a benchmark, ours beside a peer's; without a name, list them."""
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
    _check(name, asked, benchmark.TAKES)
    with sigterm_is_ctrl_c():
        result = benchmark.run(asked)
    if as_json:
        print_json(result)
    else:
        _show(result)


def benchmarks() -> list[str]:
    """Return the modules that have a ``run``, without importing one."""
    package = util.find_spec(_PACKAGE)
    folders = package.submodule_search_locations if package else None
    files = [path for folder in folders or [] for path in Path(folder).glob("*.py")]
    found = [f.stem for f in files if "\ndef run(" in f.read_text(encoding="utf-8")]
    return sorted(stem.removesuffix("_") for stem in found)


def _check(name: str, asked: Mapping[str, object], takes: Sequence[str] | None) -> None:
    """Refuse an option that a benchmark does not take, before it runs."""
    unknown = [key for key in asked if takes is not None and key not in takes]
    if takes is not None and unknown:
        near = did_you_mean(unknown[0], tuple(takes))
        raise UserError(f"bench {name} has no {unknown[0]!r}.{near} It takes: {', '.join(takes)}.")


def _module(name: str) -> str:
    """Return the module of a benchmark: a name that Python keeps for itself has ``_`` after it."""
    return f"{name}_" if iskeyword(name) else name


def _show(result: Mapping[str, object]) -> None:
    rows = result.get("rows")
    assert isinstance(rows, list)
    columns = ("case", "ours", "peer", "unit", "ratio (min to max)", "mark", "met")
    print_table(f"{result['name']} on {_machine(result.get('machine'))}", columns, map(_row, rows))


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
