"""`rollart bench isolation`: the cost of an environment's step in a sandbox and in process.

Takes: the kinds, the number of steps. Gives: rows in milliseconds and in steps per second, as
measured by an env worker. Never: measures the environment, which does almost nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import why_no_sandbox
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_sandboxes.isolation.config import SANDBOX

TAKES: Final = ("kinds", "steps", "image", "short")

MARK_MS: Final = 1.0
"""The target for the median of a step in a sandbox."""
KINDS: Final = ("venv", "bubblewrap", "docker")
MANY: Final = 16
_FOLDER: Final = Path(__file__).with_name("inside")
_ENV: Final = "echo_env:EchoEnv"
_TIMEOUT_S: Final = 120.0


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``kinds`` (all), ``steps`` (2000) per episode, ``image`` of the container
            (rollart-test:latest; any with Python 3.8), ``short``: 200 steps.

    Returns:
        The object of ``rollart bench --json``.
    """
    asked = Options("isolation", options)
    num_steps = asked.integer("steps", 200 if asked.short else 2000, least=20)
    kinds = asked.names("kinds", KINDS)
    image = asked.text("image", "rollart-test:latest")
    reasons = {kind: _why_not(kind, image) for kind in kinds}
    skipped = {kind: why for kind, why in reasons.items() if why}
    works = [kind for kind in kinds if kind not in skipped]
    sys.path.insert(0, str(_FOLDER))
    try:
        rows = asyncio.run(_rows(works, image, num_steps))
    finally:
        sys.path.remove(str(_FOLDER))
    return result("isolation", rows, skipped_cases=skipped)


async def _rows(kinds: Sequence[str], image: str, num_steps: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for kind in kinds:
        isolation = _isolation(kind, image)
        echo(f"{kind}: {num_steps} steps of 1 and of {MANY} episodes")
        rows += await _compared(kind, isolation, num_steps)
    return rows


def _why_not(kind: str, image: str) -> str:
    """Return why an isolation is not available on this machine; empty if it is."""
    options = {"image": image, "pull": "never"} if kind == "docker" else {}
    return why_no_sandbox(SANDBOX[kind], options)


async def _compared(
    kind: str, isolation: Mapping[str, Any], num_steps: int
) -> list[dict[str, object]]:
    """Return the rows of one kind. Ours and in process alternate."""
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
    """The measurements of an env worker."""

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
        return {**said, "ro_binds": [str(_FOLDER)], "image": image, "pull": "never"}
    return {**said, "ro_binds": [str(_FOLDER)]}
