#!/usr/bin/env python3
"""Run the cases of `make test-gpu`: each in a process of its own, with a time limit.

    python3 tests/gpu/runner.py [--part trainer|engine|multi] [--device cuda|cpu] [--json FILE]

It uses the Python that runs it, installs and downloads nothing, and needs no network. The modules
of the clone are imported from their folders. The results file is replaced after every case, so a
crash or a time limit keeps the results of earlier cases. Exit code: 0 if something passed and
nothing failed, 1 if something failed, 77 if everything was skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = (".", "envs", "rewards", "algorithms", "plugins", "tests/gpu")
LIMIT_S = 480.0
"""Time limit of a part."""
LIST_S = 120.0
"""Time in which the cases of a part can be listed, even if its time limit is shorter."""
LOG_CHARACTERS = 2000


class Part(NamedTuple):
    """Where the cases of a part are: in `CASES` of a module, function -> time limit in seconds."""

    module: str
    needs: tuple[str, ...]
    """The packages without which all cases are skipped."""


PARTS = {
    "trainer": Part("trainer_part", ("torch", "transformers")),
    "engine": Part("engine_part", ("torch", "transformers", "pydantic", "gymnasium", "aiohttp")),
    "multi": Part("multi_part", ("torch", "transformers")),
}


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--part", choices=[*PARTS], help="one part; all by default")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    given = parser.parse_args()
    chosen = {given.part: PARTS[given.part]} if given.part else PARTS
    return run(chosen, given.device, given.json)


def run(parts: Mapping[str, Part], device: str, path: Path | None, limit_s: float = LIMIT_S) -> int:
    """Run all cases of some parts, and return the exit code.

    Args:
        parts: Name -> part.
        device: `cuda` or `cpu`.
        path: The results file, if one is wanted.
        limit_s: Time limit of each part, in seconds.
    """
    paths = [str(ROOT / folder) for folder in FOLDERS]
    sys.path[:0] = paths
    # The processes of cases read sys.path from here.
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([given] if given else [])])
    # Processes are forked, which a process that has used CUDA cannot be: torch asks NVML instead.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [part.module for part in parts.values()]
    )
    results = Results(path)
    with tempfile.TemporaryDirectory() as folder:
        for name, part in parts.items():
            run_part(name, part, device, results, Path(folder), time.monotonic() + limit_s)
    return results.exit_code()


def run_part(
    name: str, part: Part, device: str, results: Results, folder: Path, ends_at: float
) -> None:
    """Run the cases of one part, one after another, until the clock is at `ends_at`."""
    missing = [package for package in part.needs if find_spec(package) is None]
    facts = {"device": device, "folder": folder}
    if missing:
        why = Outcome("skipped", f"this Python has no {', '.join(missing)}")
        results.add(name, "all cases", why)
        return
    # It imports torch, which can take minutes on a busy machine.
    found = isolated(part.module, "", facts, max(LIST_S, ends_at - time.monotonic()))
    if found.result != "passed":
        results.add(name, "all cases", found)
        return
    (listed,) = found.figures
    results.describe(listed["machine"])
    facts["num_devices"] = listed["machine"]["num_devices"]
    for case, limit_s in listed["cases"].items():
        left_s = ends_at - time.monotonic()
        if left_s < 1:
            outcome = Outcome("skipped", "not started: the time limit of the part is over")
        else:
            (own := folder / f"{name}-{case}").mkdir()
            outcome = isolated(part.module, case, {**facts, "folder": own}, min(limit_s, left_s))
        results.add(name, case, outcome)


@dataclass
class Outcome:
    """The result of one case."""

    result: str
    """`passed`, `failed` or `skipped`."""
    reason: str = ""
    """Why it did not pass."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """What it measured, also before it failed."""
    seconds: float = 0.0
    log: str = ""
    """The end of what a failed case wrote."""


def isolated(module: str, name: str, facts: Mapping[str, Any], limit_s: float) -> Outcome:
    """Run a case in a process of its own, which ends with all that it started.

    Args:
        module: The module of the case.
        name: The name of the case. Empty: describe the machine, and list the cases of the module.
        facts: The fields of the `Machine` that it takes.
        limit_s: Time limit in seconds.
    """
    start = time.monotonic()
    lines, log = (Path(facts["folder"]) / f"{module}.{end}" for end in ("jsonl", "log"))
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_case, args=(module, name, dict(facts), lines, log))
    process.start()
    process.join(limit_s)
    has_ended = process.exitcode is not None
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it started, too
    process.kill()
    process.join()
    figures, ending = _read(lines)
    if not has_ended:
        ending = {"result": "failed", "reason": f"it did not end within {limit_s:.0f} s"}
    elif ending is None:
        ending = {"result": "failed", "reason": f"its process ended with {_code(process.exitcode)}"}
    outcome = Outcome(**ending, figures=figures, seconds=round(time.monotonic() - start, 2))
    if outcome.result == "failed" and log.is_file():
        outcome.log = log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
    return outcome


def _case(module: str, name: str, facts: dict[str, Any], lines: Path, log: Path) -> None:
    """Run a case, and write a line for each figure and one for the end."""
    os.setsid()
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    from cases import Figure, Machine, Skipped, list_cases

    missed = []
    with lines.open("w", encoding="utf-8", buffering=1) as file:

        def write(record: object) -> None:
            file.write(json.dumps(record) + "\n")

        try:
            cases = import_module(module)
            case = getattr(cases, name) if name else partial(list_cases, cases.CASES)
            for found in case(Machine(**facts)):
                is_figure = isinstance(found, Figure)
                write(found.record() if is_figure else found)
                if is_figure and not found.meets_mark:
                    missed.append(str(found))
            result, reason = ("failed", "; ".join(missed)) if missed else ("passed", "")
        except Skipped as e:
            result, reason = "skipped", str(e)
        except BaseException as e:
            traceback.print_exc()
            result, reason = "failed", f"{type(e).__name__}: {e}".split("\n")[0][:300]
        write({"result": result, "reason": reason})


def _read(lines: Path) -> tuple[list[dict[str, Any]], dict[str, str] | None]:
    """Return the figures that a case wrote, and its ending if it wrote one."""
    records = (
        [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    )
    if records and "result" in records[-1]:
        return records[:-1], records[-1]
    return records, None


def _code(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


class Results:
    """The results of a run, on the screen and in a file.

    Args:
        path: The file, if one is wanted.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._record: dict[str, Any] = {
            "commit": _commit(),
            "python": platform.python_version(),
            "cases": [],
        }

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Add facts of the machine."""
        self._record = {**self._record, **facts, "cases": self._record["cases"]}

    def add(self, part: str, case: str, outcome: Outcome) -> None:
        """Add and show the result of a case."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        kept = {key: value for key, value in asdict(outcome).items() if value or key == "result"}
        self._record["cases"].append({"part": part, "case": case, "date": now, **kept})
        print(f"{outcome.result}  {part}/{case}  {outcome.seconds:.1f} s", flush=True)
        for figure in outcome.figures:
            print(f"    {shown(figure)}", flush=True)
        if outcome.reason:
            print(f"    {outcome.reason}", flush=True)
        if outcome.log:
            print("    | " + outcome.log.strip().replace("\n", "\n    | "), flush=True)
        if self._path is not None:
            part_file = self._path.with_name(f".{self._path.name}.part")
            part_file.write_text(json.dumps(self._record, indent=1) + "\n", encoding="utf-8")
            part_file.replace(self._path)

    def exit_code(self) -> int:
        """Show the number of each result, and return the exit code."""
        counts = Counter(case["result"] for case in self._record["cases"])
        print(", ".join(f"{counts[result]} {result}" for result in ("passed", "failed", "skipped")))
        if counts["failed"]:
            return 1
        return 0 if counts["passed"] else 77


def shown(figure: Mapping[str, Any]) -> str:
    """Return a figure in words."""
    from cases import Figure

    return str(Figure(**figure)) if "name" in figure else json.dumps(figure)


def _commit() -> str | None:
    """Return the commit of the clone; None if this is no clone of git."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError):
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        return asked.stdout.strip() or None
    return None


if __name__ == "__main__":
    sys.exit(main())
