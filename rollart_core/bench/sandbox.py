"""`rollart bench sandbox`: how long a box takes to start, to run a command, and to be reset.

Takes: which sandbox, and how often. Gives: rows in milliseconds. Never: knows a wall by anything
but its name, or compares with a peer that is not there (``docker exec`` has no row yet).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from statistics import quantiles

from rollart_core import registry
from rollart_core.bench.rows import machine, row, tell
from rollart_core.contracts.sandbox import Sandbox

MARK_START_MS = 60.0


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``sandbox`` (``bubblewrap``), ``boxes`` (20) one after the other, ``execs`` (50) in
            each, ``short`` for a fifth of both.

    Returns:
        The object of ``rollart bench --json``.
    """
    share = 5 if options.get("short") else 1
    name = str(options.get("sandbox") or "bubblewrap")
    num_boxes = max(2, int(str(options.get("boxes") or 20)) // share)
    num_execs = max(2, int(str(options.get("execs") or 50)) // share)
    times = asyncio.run(measure(name, num_boxes, num_execs))
    rows = [made for case, values in times.items() for made in _rows(name, case, values)]
    return {"name": "sandbox", "machine": machine(), "rows": rows}


async def measure(name: str, num_boxes: int, num_execs: int) -> dict[str, list[float]]:
    """Return milliseconds of each thing a box does."""
    times: dict[str, list[float]] = {"start": [], "exec true": [], "reset": [], "close": []}
    model = registry.config_model("sandboxes", name)
    needs_trust = model is not None and "trusted" in model.model_fields
    for number in range(num_boxes):
        tell(f"box {number + 1} of {num_boxes}")
        box: Sandbox = registry.build("sandboxes", name, {"trusted": True} if needs_trust else {})
        times["start"].append(await _timed(box.start))
        try:
            for _ in range(num_execs):
                times["exec true"].append(await _timed(partial(box.exec, ["true"], timeout_s=60)))
            await box.write_file("file", bytes(100_000))
            times["reset"].append(await _timed(partial(box.restore, await box.snapshot())))
        finally:
            times["close"].append(await _timed(box.close))
    return times


async def _timed(action: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await action()
    return (time.perf_counter() - began) * 1e3


def _rows(name: str, case: str, values: Sequence[float]) -> list[dict[str, object]]:
    cuts = quantiles(values, n=100, method="inclusive")
    mark = MARK_START_MS if case == "start" and name == "bubblewrap" else None
    met = cuts[49] < mark if mark is not None else None
    return [
        row(f"{name}: {case}, p50", cuts[49], None, None, "ms", mark=mark, meets_mark=met),
        row(f"{name}: {case}, p95", cuts[94], None, None, "ms"),
    ]
