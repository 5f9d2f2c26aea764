"""Small runs for tests of `runtime: ray`."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any, Final

from rollart_core.config.load import validate
from rollart_core.config.resolve import ResolvedRun, resolve_run
from rollart_core.store.journal_reader import JournalReader
from support.pace import scaled, wait_until

PLACEMENT_S: Final = scaled(300.0)
"""For the parts of a run to find room and come up: several processes import torch at once."""
_TESTS: Final = Path(__file__).parents[1]
TEST_PATHS: Final = [str(_TESTS / "integration/plugins/ray"), str(_TESTS)]
"""Where an actor finds a test's own modules."""

POOLS = {
    "id": "static",
    "trainer": "train_node",
    "engines": {"*": "gen_node"},
    "envs": {"*": "env_node"},
}


def processes_with(text: bytes, *, named: str = "", besides: int = 0) -> dict[int, str]:
    """Return the processes whose environment holds this text, with their command lines.

    Args:
        text: Such as the name of a folder.
        named: How their command lines begin.
        besides: A process that is not looked at; nor is this one, nor any that has ended.
    """
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = text in (process / "environ").read_bytes()
            zombie = (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            argv = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        other = int(process.name) not in (os.getpid(), besides)
        if mine and other and not zombie and argv.startswith(named):
            found[int(process.name)] = argv
    return found


def assert_none_left(
    text: bytes,
    *,
    named: str = "",
    besides: int = 0,
    but: tuple[str, ...] = (),
    limit_s: float = 60.0,
) -> None:
    """Assert that soon there is no such process, as :func:`processes_with` finds: a leak stays.

    Args:
        text: See there, also for ``named`` and ``besides``.
        but: How the command lines of those begin that may stay.
        limit_s: How long to wait, before scaling.
    """
    left: dict[int, str] = {}

    def none_left() -> bool:
        time.sleep(0.1)  # there are many processes to look at
        found = processes_with(text, named=named, besides=besides)
        left.clear()
        left.update({pid: argv for pid, argv in found.items() if not argv.startswith(but or "\0")})
        return not left

    try:
        wait_until(none_left, "the end of processes", limit_s=limit_s)
    except TimeoutError:
        raise AssertionError(f"still there: {left}") from None


def small_run(runs_dir: Path, **changes: Any) -> ResolvedRun:
    """Return a deterministic run of some seconds."""
    mapping: dict[str, Any] = {
        "name": "small",
        "deterministic": True,
        "max_staleness": 0,
        "runs_dir": str(runs_dir),
        "model": {
            **{"kind": "new", "num_layers": 2, "width": 64, "num_heads": 2, "num_kv_heads": 1},
            **{"head_dim": 32, "ffn_width": 128, "vocab_size": 320},
        },
        "env": {"id": "toy/FrozenLake-v1", "hint": False},
        "warm_start": {"max_train_steps": 60, "check_every": 30, "check_tasks": 8},
        "rollout": {
            **{"groups_per_batch": 2, "group_size": 4, "max_turns": 8, "max_new_tokens": 4},
            "max_context_tokens": 384,
        },
        "evaluation": {"tasks": 8, "greedy": False},
        "trackers": [],
        "stop": {"batches": 5},
        "deadlines": {
            **{"generate_s": scaled(300), "episode_s": scaled(600), "ticket_s": scaled(900)},
        },
        "failures": {"hang_s": scaled(300)},
        **changes,
    }
    config, problems = validate(mapping)
    assert config is not None, problems
    assert not problems
    return resolve_run(config)


def gradients_of(run_dir: str) -> list[float]:
    """Return the norm of the gradient of each update of a run."""
    with JournalReader(Path(run_dir)) as journal:
        return [m.value for m in journal.metrics("train/grad_norm") if m.value is not None]


def weights_of(run_dir: str) -> str:
    """Return a digest of the weights a run ended with."""
    path = Path(run_dir) / "model-trained" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()
