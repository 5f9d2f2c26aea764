"""`rollart bench rewards`: the throughput and latency of each reward backend, cold and warm.

    cold    the time from a stopped backend to the first score
    warm    a thousand concurrent requests, in calls of 16: scores per second; then four callers:
            p50 and p95
    idle    the time until the last worker of the pool has ended

The rewards wait 1 ms, compute in Python, or wait a long-tailed time with a mean of 2 s. Lambda is a
local runtime (boto3 and awslambdaric are real, AWS is not used), http is `rollart serve-reward` in
a separate process. The pool has two workers, like its peer, `concurrent.futures`.

Takes: ``ways``, ``rounds``, ``short``. Gives: a row for each figure. Never: counts a wrong score,
or leaves a server, a worker or a cluster behind.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, Final

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.sides import in_fresh_process
from rollart_bench.waiting_reward import ID, WaitingReward, wait_of
from rollart_core.contracts.reward import RewardBackend, RewardRef, RewardRequest, RewardResult
from rollart_core.errors import RollartError
from rollart_core.plugins import registry
from rollart_testing import example_request

TAKES: Final = ("ways", "rounds", "short")

WAYS: Final = ("inline", "pool", "http", "lambda", "ray_serve")
PEER: Final = "ProcessPoolExecutor"
NUM_WORKERS: Final = 2
MARK_RATE: Final = 1500.0
MARK_IDLE_S: Final = 2.0
_CALL: Final = 16
"""Requests per call: the maximum that the scoring queue sends together."""
_SLOW_S: Final = 2.0
_NUM_FAST: Final = {"inline": 8000, "pool": 8000, "http": 4000, "lambda": 1000, "ray_serve": 1000}
_NUM_SLOW: Final = 96
_COMPUTING: Final = ("inline", "pool")
"""Backends that are also measured with a reward that computes."""
_NUM_COMPUTED: Final = 2000
_STEPS: Final = 100_000
"""Steps of Python of a reward that computes: 1 to 2 ms."""
_PACKAGES: Final = {
    "http": ("aiohttp",),
    "lambda": ("aiohttp", "awslambdaric", "boto3"),
    "ray_serve": ("ray", "fastapi"),
}
_THREADS: Final = 64
"""Threads of each process that scores. Rewards that wait need many."""


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``ways`` (a list of ``WAYS``; all), ``rounds`` (3), or ``short``: one round, a
            tenth of the requests, no slow rewards, and no `ray_serve`, which takes 20 seconds to
            start.

    Returns:
        The object of ``rollart bench --json``.

    Raises:
        UserError: If an option is wrong.
    """
    asked = Options("rewards", options)
    rounds = asked.integer("rounds", 1 if asked.short else 3)
    chosen = asked.names("ways", WAYS, [w for w in WAYS if not asked.short or w != "ray_serve"])
    reasons = {way: _why_not(way) for way in WAYS if way in chosen}
    ways = [way for way, why in reasons.items() if not why]
    got: dict[str, list[dict[str, float]]] = {}
    computed: dict[str, list[float]] = {}
    for number in range(1, rounds + 1):
        for way in [*ways, PEER]:
            if way == PEER and "pool" not in ways:
                continue
            num = _NUM_FAST.get(way, _NUM_FAST["pool"]) // (10 if asked.short else 1)
            work = {"way": way, "wait_s": 0.001, "spread": False, "num": num}
            measured = in_fresh_process(f"{__name__}:measure", work)
            got.setdefault(way, []).append(measured)
            rate = measured["rate"]
            echo(f"round {number} of {rounds}: {way}: {rate:.0f} scores/s of 1 ms")
        for way in [*(way for way in _COMPUTING if way in ways), PEER]:
            work = {"way": way, "wait_s": 0.0, "spread": False, "steps": _STEPS}
            work["num"] = _NUM_COMPUTED // (10 if asked.short else 1)
            measured = in_fresh_process(f"{__name__}:measure", work)
            computed.setdefault(way, []).append(measured["rate"])
            echo(f"round {number} of {rounds}: {way}: {measured['rate']:.0f} scores/s, computed")
    rows = [made for way in ways for made in _fast_rows(way, got)]
    rows += [_computed_row(way, computed) for way in computed if way != PEER]
    for way in () if asked.short else ways:
        work = {"way": way, "wait_s": _SLOW_S, "spread": True, "num": _NUM_SLOW}
        measured = in_fresh_process(f"{__name__}:measure", work)
        echo(f"{way}: {measured['rate']:.1f} scores/s of 2 s")
        rows += _slow_rows(way, measured)
    skipped: dict[str, str] = {way: why for way, why in reasons.items() if why}
    return result("rewards", rows, skipped_cases=skipped)


def _why_not(way: str) -> str:
    """Return why a backend cannot be measured here; empty if it can."""
    missing = [package for package in _PACKAGES.get(way, ()) if find_spec(package) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return "" if way in registry.names("reward_backends") else "no such backend is installed"


def _fast_rows(way: str, got: Mapping[str, list[dict[str, float]]]) -> list[dict[str, object]]:
    def of(side: str, name: str) -> float:
        return median(measured[name] for measured in got[side])

    case, rate = f"{way}, 1 ms", of(way, "rate")
    pool = way == "pool"
    peer = of(PEER, "rate") if pool else None
    ratios = (
        [a["rate"] / b["rate"] for a, b in zip(got[way], got[PEER], strict=True)] if pool else None
    )
    rows = [
        row(
            f"{case}: warm, {NUM_WORKERS} workers" if pool else f"{case}: warm",
            rate,
            peer,
            PEER if pool else None,
            "scores/s",
            ratios=ratios,
            mark=f">= {MARK_RATE:g} scores/s" if pool else None,
            meets_mark=rate >= MARK_RATE if pool else None,
        ),
        row(f"{case}: warm, four callers, p50", of(way, "p50_ms"), None, None, "ms"),
        row(f"{case}: warm, four callers, p95", of(way, "p95_ms"), None, None, "ms"),
        row(f"{case}: cold, first score", of(way, "cold_s"), None, None, "s"),
    ]
    if pool:
        idle_s = max(measured["idle_s"] for measured in got[way])
        rows.append(
            row(
                f"{case}: idle until no worker is left (longest)",
                idle_s,
                None,
                None,
                "s",
                mark=f"< {MARK_IDLE_S:g} s",
                meets_mark=idle_s < MARK_IDLE_S,
            )
        )
    return rows


def _computed_row(way: str, rates: Mapping[str, Sequence[float]]) -> dict[str, object]:
    return row(
        f"{way}, {_STEPS:,} steps of Python: warm",
        median(rates[way]),
        median(rates[PEER]),
        PEER,
        "scores/s",
        ratios=[ours / theirs for ours, theirs in zip(rates[way], rates[PEER], strict=True)],
    )


def _slow_rows(way: str, measured: Mapping[str, float]) -> list[dict[str, object]]:
    case = f"{way}, long-tailed waits of 2 s in the mean"
    return [
        row(f"{case}: {_NUM_SLOW} at once", measured["rate"], None, None, "scores/s"),
        row(f"{case}: over the reward's own wait, p50", measured["p50_ms"], None, None, "ms"),
        row(f"{case}: over the reward's own wait, p95", measured["p95_ms"], None, None, "ms"),
    ]


def measure(asked: Mapping[str, Any]) -> dict[str, float]:
    """Measure one way in this process.

    Args:
        asked: ``way`` (one of ``WAYS`` or ``PEER``), ``num`` requests, and the options of the
            reward: ``wait_s``, ``spread`` and ``steps``.

    Returns:
        ``rate`` (scores/s); except for the peer, ``p50_ms`` and ``p95_ms`` over the reward's own
        wait, and ``cold_s``; and for the pool ``idle_s``.
    """
    options = {name: asked[name] for name in ("wait_s", "spread", "steps") if name in asked}
    if asked["way"] == PEER:
        return _peer(options, asked["num"])
    return asyncio.run(_measure(asked["way"], options, asked["num"]))


async def _measure(way: str, options: Mapping[str, Any], num: int) -> dict[str, float]:
    given = [replace(example_request(0.5, index=i), task_index=i) for i in range(num)]
    wait_s, spread = options["wait_s"], options["spread"]
    began = time.perf_counter()
    async with _backend(way, options) as backend:
        # Index 0 of long-tailed waits has the median, which is subtracted.
        await backend.score(given[:1])
        cold_s = time.perf_counter() - began - (wait_of(0, wait_s) if spread else wait_s)
        if not spread:
            await _at_once(backend, given[: num // 10])
        began = time.perf_counter()
        late_s = await (_each(backend, given, wait_s) if spread else _at_once(backend, given))
        rate = num / (time.perf_counter() - began)
        if not spread:
            late_s = await _four_callers(backend, given[: max(100, num // 10)], wait_s)
        found = {"rate": rate, "cold_s": cold_s, **_quantiles(late_s)}
        if way == "pool" and not spread:
            found["idle_s"] = await _idle(backend)
    return found


def _quantiles(late_s: list[float]) -> dict[str, float]:
    ordered = sorted(late_s)
    p95 = ordered[int(0.95 * len(ordered))]
    return {"p50_ms": 1000 * median(ordered), "p95_ms": 1000 * p95}


async def _at_once(backend: RewardBackend, given: list[RewardRequest]) -> list[float]:
    """Score all of them concurrently, in calls."""
    calls = (given[at : at + _CALL] for at in range(0, len(given), _CALL))
    _check(given, [r for some in await asyncio.gather(*map(backend.score, calls)) for r in some])
    return []


async def _each(backend: RewardBackend, given: list[RewardRequest], mean_s: float) -> list[float]:
    """Score all of them concurrently, in one call each. Return the delay of each in seconds."""

    async def one(request: RewardRequest) -> float:
        began = time.perf_counter()
        _check([request], await backend.score([request]))
        return time.perf_counter() - began - wait_of(request.task_index, mean_s)

    return await asyncio.gather(*map(one, given))


async def _four_callers(
    backend: RewardBackend, given: list[RewardRequest], wait_s: float
) -> list[float]:
    late_s: list[float] = []

    async def caller(requests: list[RewardRequest]) -> None:
        for request in requests:
            began = time.perf_counter()
            _check([request], await backend.score([request]))
            late_s.append(time.perf_counter() - began - wait_s)

    await asyncio.gather(*(caller(given[n::4]) for n in range(4)))
    return late_s


async def _idle(backend: RewardBackend) -> float:
    """Return how long the pool keeps workers without work."""
    began = time.perf_counter()
    while backend.gauges()["workers"]:
        await asyncio.sleep(0.01)
        if time.perf_counter() - began > 30:
            raise RollartError("the pool's workers did not end within 30 s")
    return time.perf_counter() - began


def _check(given: Sequence[RewardRequest], results: Sequence[RewardResult]) -> None:
    if [result.value for result in results] != [request.env_return for request in given]:
        raise RollartError("a score is wrong or missing")


@asynccontextmanager
async def _backend(way: str, options: Mapping[str, Any]) -> AsyncIterator[RewardBackend]:
    """Make a backend and its requirements; its client may exist before."""
    async with _PLACES[way](options) as needs:
        spec: Any = registry.spec("reward_backends", way)
        ref = RewardRef(ID, dict(options))
        backend: RewardBackend = registry.build(
            "reward_backends",
            way,
            needs,
            reward=WaitingReward(**options) if spec.in_process else ref,
            reward_range=(0.0, 1.0),
            timeout_s=120.0,
        )
        try:
            yield backend
        finally:
            await backend.close()


@asynccontextmanager
async def _needs(needs: Mapping[str, Any], options: Mapping[str, Any]) -> AsyncIterator[Any]:
    yield needs


@asynccontextmanager
async def _served(options: Mapping[str, Any]) -> AsyncIterator[Any]:
    """Run `rollart serve-reward` in a separate process."""
    asked = [f"{key}={str(value).lower()}" for key, value in options.items()]
    command = "from rollart_core.cli import main; main()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", command, "serve-reward", ID, *asked),
        *("--port", "0", "--threads", str(_THREADS)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode().split()
        if not said:
            raise RollartError("serve-reward did not start")
        yield {"url": said[-1], "check": False}
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def _on_lambda(options: Mapping[str, Any]) -> AsyncIterator[Any]:
    from rollart_bench.local_lambda import FunctionSettings, LocalLambda

    os.environ.update(AWS_ACCESS_KEY_ID="local", AWS_SECRET_ACCESS_KEY="local")
    # An instance runs one call at a time, as on AWS. AWS would have as many instances as calls.
    num = 16 if options["spread"] else NUM_WORKERS
    settings = FunctionSettings(ID, options, concurrency=num, timeout_s=120)
    async with LocalLambda(settings) as local:
        yield {
            "function": settings.name,
            "endpoint_url": local.url,
            "region": "local",
            "max_concurrent": num,
        }


_PLACES: Final[Mapping[str, Any]] = {
    "inline": partial(_needs, {}),
    "pool": partial(_needs, {"num_workers": NUM_WORKERS, "num_threads": _THREADS}),
    "http": _served,
    "lambda": _on_lambda,
    "ray_serve": partial(
        _needs, {"max_replicas": NUM_WORKERS, "cpus": 0.5, "num_threads": _THREADS}
    ),
}


def _peer(options: Mapping[str, Any], num: int) -> dict[str, float]:
    """Score in processes of the standard library, with chunks as large as our calls."""
    with ProcessPoolExecutor(NUM_WORKERS) as pool:
        reward = partial(_peer_score, options)
        list(pool.map(reward, range(NUM_WORKERS * _CALL), chunksize=_CALL))
        began = time.perf_counter()
        values = list(pool.map(reward, range(num), chunksize=_CALL))
        rate = num / (time.perf_counter() - began)
    if values != [0.5] * num:
        raise RollartError("a score of the peer is wrong")
    return {"rate": rate}


def _peer_score(options: Mapping[str, Any], index: int) -> float:
    return WaitingReward(**options).score(example_request(0.5, index=index)).value
