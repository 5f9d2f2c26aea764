"""`rollart bench isolation`: what a step of an environment costs in a box, beside one in process.

Takes: which kinds, how many steps. Gives: rows in milliseconds and in steps a second, as an env
worker has them. Never: measures the environment itself, which does next to nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from rollart_core.bench.rows import machine, row, tell
from rollart_core.errors import RollartError, first_line
from rollart_core.rollout.env_worker import EnvRef, EnvWorker

TAKES: Final = ("kinds", "steps", "image", "short")

MARK_MS: Final = 1.0
"""What a step in a box is to cost at most, at the median."""
KINDS: Final = ("venv", "bubblewrap", "docker")
MANY: Final = 16
_FOLDER: Final = Path(__file__).with_name("inside")
_ENV: Final = "echo_env:EchoEnv"
_TIMEOUT_S: Final = 120.0


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``kinds`` (all), ``steps`` (2000) of an episode, ``image`` of the container
            (rollart-test:latest; any with Python 3.8), ``short`` for a tenth of the steps.

    Returns:
        The object of ``rollart bench --json``.
    """
    num_steps = max(
        20, int(str(options.get("steps") or 2000)) // (10 if options.get("short") else 1)
    )
    chosen = options.get("kinds") or KINDS
    kinds = [chosen] if isinstance(chosen, str) else [str(k) for k in chosen]  # type: ignore[attr-defined]
    image = str(options.get("image") or "rollart-test:latest")
    sys.path.insert(0, str(_FOLDER))
    try:
        rows = asyncio.run(_rows(kinds, image, num_steps))
    finally:
        sys.path.remove(str(_FOLDER))
    return {"name": "isolation", "machine": machine(), "rows": rows}


async def _rows(kinds: list[str], image: str, num_steps: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for kind in kinds:
        tell(f"{kind}: {num_steps} steps of 1 and of {MANY} episodes")
        try:
            rows += await _compared(kind, _isolation(kind, image), num_steps)
        except RollartError as e:
            why = f"not measured: {first_line(str(e), 120)}"
            rows.append(row(f"{kind}: env.step", None, None, None, "ms", mark=why))
    return rows


async def _compared(
    kind: str, isolation: Mapping[str, Any], num_steps: int
) -> list[dict[str, object]]:
    """Return the rows of one kind; ours and in process take turns."""
    boxed, plain = EnvRef(_ENV, {"isolation": isolation}), EnvRef(_ENV)
    pairs = [(await _times(plain, 1, num_steps), await _times(boxed, 1, num_steps))]
    ours, theirs = pairs[0][1], pairs[0][0]
    cuts = quantiles(ours.step_ms, n=100, method="inclusive")
    met = cuts[49] <= MARK_MS
    beside = (median(theirs.step_ms), "in process")
    rows = [
        row(f"{kind}: env.step, p50", cuts[49], *beside, "ms", mark=MARK_MS, meets_mark=met),
        row(f"{kind}: env.step, p95", cuts[94], None, None, "ms"),
        row(f"{kind}: first reset", ours.reset_ms, theirs.reset_ms, "in process", "ms"),
        row(f"{kind}: 1 episode", ours.rate, theirs.rate, "in process", "steps/s"),
    ]
    each = max(20, num_steps // MANY)
    many, plainly = await _times(boxed, MANY, each), await _times(plain, MANY, each)
    rows.append(row(f"{kind}: {MANY} episodes", many.rate, plainly.rate, "in process", "steps/s"))
    return rows


class _Times:
    """What an env worker saw."""

    def __init__(self, reset_ms: float, step_ms: list[float], wall_s: float) -> None:
        self.reset_ms = reset_ms
        self.step_ms = step_ms
        self.rate = len(step_ms) / wall_s


async def _times(env: EnvRef, num_episodes: int, num_steps: int) -> _Times:
    worker = EnvWorker(num_threads=num_episodes)
    names = [f"episode {n}" for n in range(num_episodes)]
    try:
        began = time.perf_counter()
        await asyncio.gather(
            *(worker.reset(n, env, seed=0, options={}, timeout_s=_TIMEOUT_S) for n in names)
        )
        reset = time.perf_counter()
        each = await asyncio.gather(*(_episode(worker, name, num_steps) for name in names))
        wall_s = time.perf_counter() - reset
    finally:
        await worker.shutdown()
    return _Times((reset - began) * 1e3, [ms for times in each for ms in times], wall_s)


async def _episode(worker: EnvWorker, name: str, num_steps: int) -> list[float]:
    times = []
    for _ in range(num_steps):
        began = time.perf_counter()
        await worker.step(name, "go left", timeout_s=_TIMEOUT_S)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def _isolation(kind: str, image: str) -> dict[str, Any]:
    said: dict[str, Any] = {"kind": kind, "env": {"PYTHONPATH": str(_FOLDER)}}
    if kind == "venv":
        return {**said, "python": sys.executable}
    if kind == "docker":
        return {**said, "ro_binds": [str(_FOLDER)], "image": image}
    return {**said, "ro_binds": [str(_FOLDER)]}
