"""`rollart bench repair`: episodes of ``swe/Repair-v1`` per minute, and where their time goes.

An expert plays each task: three episodes with the gold patch, and one without a change. With
``peer``, a checkout of RollArt at another commit plays the same episodes, in turn with this one.

Takes: ``tasks``, ``repos_dir``, ``concurrency``, ``episodes``, ``rounds``, ``peer``, ``short``.
Gives: rows for the rates, and whether all verdicts are equal. Never: counts the first episode of a
task, which exports the tree.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.sides import checkout_of, in_fresh_process
from rollart_bench.skip import why_no_sandbox
from rollart_core.plugins import registry
from rollart_envs.swe.taskbook import own_file, repair_tasks

TAKES: Final = ("tasks", "repos_dir", "concurrency", "episodes", "rounds", "peer", "short")
MARK: Final = 1.7
SANDBOX: Final = "bubblewrap"
_EMPTY_EVERY: Final = 4
_SUBMIT: Final = "```bash\nsubmit\n```"


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``tasks`` (a task file; the built-in tasks), ``repos_dir`` (``repos`` next to it),
            ``concurrency`` (16), ``episodes`` (64) per round, ``rounds`` (3), ``peer`` (the folder
            of a checkout), or ``short``: one round of 8 episodes, 4 at a time.

    Returns:
        The object of ``rollart bench --json``.

    Raises:
        UserError: If an option is wrong.
    """
    asked = Options("repair", options)
    work: dict[str, object] = {
        "tasks": asked.text("tasks", ""),
        "repos_dir": asked.text("repos_dir", ""),
        "concurrency": asked.integer("concurrency", 4 if asked.short else 16),
        "episodes": asked.integer("episodes", 8 if asked.short else 64),
    }
    peer = checkout_of("repair", asked.text("peer", ""))
    if tasks := str(work["tasks"]):
        repair_tasks(Path(tasks))  # fail now if it cannot be read
    if why := why_no_sandbox(SANDBOX, {}):
        return result("repair", [], skipped_cases={SANDBOX: why})
    sides = [peer, ""] if peer else [""]
    played: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(asked.integer("rounds", 1 if asked.short else 3)):
        for side in sides if number % 2 == 0 else sides[::-1]:
            played[side].append(in_fresh_process(f"{__name__}:measure", work, checkout=side))
            rate = played[side][-1]["rate"]
            echo(f"round {number + 1}: {side or 'ours'}: {rate:.1f} episodes per minute")
    return result("repair", _rows(played, peer, str(work["concurrency"])))


def _rows(
    played: Mapping[str, list[dict[str, Any]]], peer: str, concurrency: str
) -> list[dict[str, object]]:
    def of(side: str, name: str) -> float:
        return float(median(one[name] for one in played[side]))

    pairs = list(zip(played[""], played.get(peer, []), strict=True)) if peer else []
    name = peer or None
    rows = []
    for what, unit, is_mark in (("rate", "episodes/min", True), ("cpu_s", "CPU s/episode", False)):
        ratios = [ours[what] / theirs[what] for ours, theirs in pairs] or None
        theirs = of(peer, what) if peer else None
        case = f"{concurrency} at once: {what}"
        mark = MARK if peer and is_mark else None
        rows.append(row(case, of("", what), theirs, name, unit, ratios=ratios, mark=mark))
    for what in ("reset", "judge"):
        theirs = of(peer, what) if peer else None
        rows.append(row(f"share of time: {what}", of("", what), theirs, name, ""))
    verdicts = [one["verdicts"] for side in played.values() for one in side]
    is_equal = all(one == verdicts[0] for one in verdicts)
    rows.append(
        row(
            "verdicts: equal in all rounds, as episodes",
            len(verdicts[0]),
            None,
            None,
            "episodes",
            mark="equal",
            meets_mark=is_equal,
            required=True,
        )
    )
    return rows


def measure(work: Mapping[str, Any]) -> dict[str, Any]:
    """Play the episodes of one side, and measure them."""
    return asyncio.run(_measure(work))


async def _measure(work: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: work[name] for name in ("tasks", "repos_dir") if work[name]}
    options = {**given, "sandbox": {"id": SANDBOX}}
    names = sorted(repair_tasks(Path(given.get("tasks") or own_file("repair_tasks.jsonl"))).tasks)
    env_class = registry.resolve("environments", "swe/Repair-v1")
    envs = [env_class(**options) for _ in range(work["concurrency"])]
    seconds = {"reset": 0.0, "act": 0.0, "judge": 0.0}
    verdicts: dict[int, list[object]] = {}

    async def play(env: Any, numbers: list[int]) -> None:
        while numbers:
            number = numbers.pop(0)
            began = time.perf_counter()
            await env.areset(seed=number, options={"instance": names[number % len(names)]})
            seconds["reset"] += time.perf_counter() - began
            over = False
            while not over:
                is_empty = number % _EMPTY_EVERY == _EMPTY_EVERY - 1
                action = _SUBMIT if is_empty else env.oracle()
                began = time.perf_counter()
                _, _, over, _, info = await env.astep(action)
                seconds["judge" if over else "act"] += time.perf_counter() - began
            verdicts[number] = [env.task.instance_id, info["resolution"], info["reward_components"]]

    async def all_of(numbers: list[int]) -> None:
        await asyncio.gather(*(play(env, numbers) for env in envs))

    try:
        await all_of(list(range(len(names))))
        seconds.update(reset=0.0, act=0.0, judge=0.0)
        began, before = time.perf_counter(), os.times()
        await all_of(list(range(work["episodes"])))
        wall_s, after = time.perf_counter() - began, os.times()
    finally:
        for env in envs:
            await asyncio.to_thread(env.close)
    cpu_s = sum(after[:4]) - sum(before[:4])
    total = sum(seconds.values())
    return {
        "rate": 60 * work["episodes"] / wall_s,
        "cpu_s": cpu_s / work["episodes"],
        "reset": seconds["reset"] / total,
        "judge": seconds["judge"] / total,
        "verdicts": {str(number): verdicts[number] for number in range(work["episodes"])},
    }
