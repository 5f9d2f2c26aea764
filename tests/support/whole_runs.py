"""Whole runs with a tiny model and a fake environment, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.runtime.launch import launch
from rollart_core.runtime.report import RunReport
from rollart_core.store.journal_reader import JournalReader, read_trajectories
from support import fork_server

ENV = "rollart_testing:AsyncFakeEnv"
BASE: dict[str, Any] = {
    "name": "test",
    "seed": 3,
    "mode": "async",
    "max_staleness": 1,
    "model": {"kind": "new", "num_layers": 1, "width": 32, "ffn_width": 48, "vocab_size": 320},
    "env": {"id": ENV, "turns": 2},
    "reward": f"{__name__}:LetterReward",
    "trackers": [],
    "rollout": {
        "groups_per_batch": 2,
        "group_size": 4,
        "max_turns": 2,
        "max_new_tokens": 4,
        "max_context_tokens": 128,
    },
    "trainer": {"lr": 1e-3},
    "evaluation": {"tasks": 4, "greedy": False},
    "stop": {"batches": 3},
}


class LetterReward(Reward):
    """Likes long and early letters: a random model's answers differ in it."""

    def score(self, request: RewardRequest) -> RewardResult:
        text = "".join(m["content"] for m in request.messages if m["role"] == "assistant")
        return RewardResult(sum(map(ord, text)) % 101 / 101)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` laid over it, section by section; None removes a key."""
    result = dict(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def write(folder: Path, changes: Mapping[str, Any]) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(merged(BASE, {"runs_dir": str(folder / "runs"), **changes})))
    return path


def run(folder: Path, resume: Path | None = None, **changes: Any) -> RunReport:
    folder.mkdir(exist_ok=True)
    return launch(resolve_run(load_config(write(folder, changes))), resume=resume)


def losses(report: RunReport) -> list[float]:
    with JournalReader(Path(report.run_dir)) as journal:
        return [m.value for m in journal.metrics("train/loss")]


def tokens(report: RunReport) -> dict[str, list[list[int]]]:
    return {
        t.ticket.ticket_id: [s.token_ids.tolist() for s in t.samples]
        for t in read_trajectories(Path(report.run_dir))
    }


def left_behind() -> list[Path]:
    folder = Path("/dev/shm")
    return list(folder.glob(f"rollart-run-{os.getpid()}-*")) if folder.is_dir() else []


def start(path: Path, *further: str) -> fork_server.Program:
    """Start ``rollart run`` in a process of its own."""
    return fork_server.start_program("run", str(path), "--json", *further, cwd=path.parent)


def num_trained(run_dir: Path) -> int:
    with JournalReader(run_dir) as journal:
        return sum(b.state == "trained" for b in journal.batches())


def wait_for_batches(
    runs: Path, n: int, process: fork_server.Program | subprocess.Popen[str]
) -> Path:
    """Wait until the journal of the only run counts ``n`` batches; the test's timeout bounds it."""
    while process.poll() is None:
        found = list(runs.glob("*/journal.db"))
        if found:
            try:
                if num_trained(found[0].parent) >= n:
                    return found[0].parent
            except Exception:  # not yet created, or just being created
                pass
        time.sleep(0.02)  # the run needs the processor more than who looks at it
    raise AssertionError(process.communicate())
