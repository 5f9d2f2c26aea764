"""The JSON form of all benchmarks: the machine, and rows of ours beside a peer's.

    {"name": "sandbox", "machine": {...}, "rows": [...], "skipped_cases": {"docker": "why"}}

Takes: figures. Gives: plain JSON values; progress goes to stderr. Never: measures.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median

from rollart_bench.skip import BenchSkipped

PACKAGES = ("torch", "transformers", "trl", "ray", "gymnasium")
"""Whose versions a figure may depend on."""


def row(
    case: str,
    ours: float | None,
    peer: float | None,
    peer_name: str | None,
    unit: str,
    *,
    ratios: Sequence[float] | None = None,
    mark: float | str | None = None,
    meets_mark: bool | None = None,
    required: bool = False,
) -> dict[str, object]:
    """Return one row.

    Args:
        case: What was measured.
        ours: Our figure.
        peer: The peer's, from the same run.
        peer_name: Who the peer is.
        unit: Of both figures.
        ratios: Ours over theirs (more is better), one for each interleaved pair.
        mark: What was to be reached: the least median ratio, or words.
        meets_mark: Whether it was; None: the median ratio against a number, else unknown.
        required: Whether the mark holds on every machine and in the short form too, as "no ticket
            is lost" does. A mark of speed or of learning does not.
    """
    spread = {"min": min(ratios), "median": median(ratios), "max": max(ratios)} if ratios else None
    if meets_mark is None and spread is not None and isinstance(mark, int | float):
        meets_mark = spread["median"] >= mark
    return {
        "case": case,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "unit": unit,
        "ratio": spread,
        "mark": mark,
        "meets_mark": meets_mark,
        "required": required,
    }


def result(
    name: str,
    rows: Iterable[Mapping[str, object]],
    *,
    skipped_cases: Mapping[str, str] | None = None,
    conditions: Mapping[str, object] | None = None,
    **more: object,
) -> dict[str, object]:
    """Return the object that ``rollart bench --json`` prints.

    Args:
        name: Of the benchmark.
        rows: What was measured.
        skipped_cases: Case -> why it was not measured here.
        conditions: What else the figures depend on, besides the machine.
        more: Further keys.

    Raises:
        BenchSkipped: If every case was skipped.
    """
    found, skipped = list(rows), dict(skipped_cases or {})
    if not found and skipped:
        raise BenchSkipped("; ".join(f"{case}: {why}" for case, why in skipped.items()))
    return {
        "name": name,
        "machine": machine() | dict(conditions or {}),
        "rows": found,
        "skipped_cases": skipped,
        **more,
    }


def tell(progress: str) -> None:
    """Say on stderr how far a benchmark is; stdout is for its object alone."""
    print(progress, file=sys.stderr, flush=True)


def machine() -> dict[str, object]:
    """Return what the figures of this machine depend on; load is that of the last minute."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.system(),
        "python": platform.python_version(),
        **_versions(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> dict[str, object]:
    found: dict[str, object] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
