"""Resuming a run: checks of the config, and the position of the task source.

Takes: a run directory and a resolved config. Gives: an error that names the differing keys, or a
task source that continues where the journal ends. Never: writes anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rollart_core.errors import ConfigError, JournalError
from rollart_core.scheduling.task_mix import Tasks
from rollart_core.store.checkpoints import Checkpoints
from rollart_core.store.journal_reader import JournalReader, ordinal
from rollart_core.store.run_dir import RunState, run_lock

FREE_KEYS = (
    "checkpoint",
    "deadlines",
    "engine",
    "evaluation",
    "failures",
    "guard",
    "lora.sync",
    "mapper",
    "name",
    "on_stale",
    "plugins",
    "resolved_with",
    "rollout.max_concurrent",
    "rollout.redundant",
    "runs_dir",
    "runtime",
    "scaling",
    "scoring",
    "stop",
    "trackers",
    "trainer",
    "warm_start",
    "weights",
)
"""Keys that may change when a run is resumed: hardware, speed, duration, monitoring, and the size
of an update. All other keys determine what is trained, or which guarantees hold."""


BEFORE: Mapping[str, object] = {"task_seeds": "by_index"}
"""Keys that an earlier release did not have, and the behaviour of its runs as a value."""


def check_resume(run_dir: Path, config: Mapping[str, object]) -> None:
    """Check before anything starts that a run can be resumed.

    Raises:
        ConfigError: If it cannot, with the reason and a fix.
    """
    check_same_run(run_dir, config)
    with run_lock(run_dir):
        Checkpoints(run_dir, 1, lambda text: None).expect_one()


def settings_before(config: Mapping[str, object]) -> list[str]:
    """Return the keys missing in the config of an earlier release, as ``KEY=VALUE``."""
    return [f"{key}={value}" for key, value in BEFORE.items() if key not in config]


def check_same_run(run_dir: Path, config: Mapping[str, object]) -> None:
    """Check that a config does not change what the run trains.

    Args:
        run_dir: The run directory.
        config: The resolved config to resume with.

    Raises:
        ConfigError: If keys differ, with their names, or if the journal cannot be read.
    """
    try:
        with JournalReader(run_dir) as journal:
            recorded = journal.config()
    except JournalError as e:
        raise ConfigError(f"--resume {run_dir}: its journal cannot be continued: {e}") from e
    now = dict(_flat(config))
    before = {k: v for k, v in BEFORE.items() if k in now} | dict(_flat(recorded))
    differing = [
        f"{key} ({before[key]!r} in the run, {now.get(key)!r} now)"
        for key in sorted(before)
        if before[key] != now.get(key) and not _is_free(key)
    ]
    differing += _other_tasks(before, now)
    if differing:
        raise ConfigError(
            f"--resume {run_dir}: its journal has a different config: {'; '.join(differing)}. "
            "Set these keys to the values of the run, or start a new run"
        )


def _other_tasks(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the changed keys that would hold out other training tasks for validation."""
    keys = [f"evaluation.{key}" for key in ("every_batches", "validation_tasks")]
    held_out = [
        tuple(config.get(key) for key in keys[1:])
        if config.get(keys[0]) is not None and config.get("evaluation.validation_split") is None
        else None
        for config in (before, now)
    ]
    if held_out[0] == held_out[1]:
        return []
    return [
        f"{key} ({before.get(key)!r} in the run, {now.get(key)!r} now, which would hold out other "
        "training tasks for validation)"
        for key in (*keys, "evaluation.validation_split")
        if before.get(key) != now.get(key)
    ]


def restore_source(source: Tasks, state: RunState, run_dir: Path) -> int:
    """Advance a task source from its position in a checkpoint to the end of the journal.

    The journal contains all later groups, and they run again with the same ids. So their tasks are
    skipped here.

    Returns:
        The number of tasks that the run has put back so far.
    """
    source.restore(state.task_source)
    num_requeued = 0
    with JournalReader(run_dir) as journal:
        for group_id, task, put_back in journal.source_history():
            num_requeued += put_back
            if put_back and num_requeued > state.num_requeued:
                source.requeue(task)
            elif not put_back and ordinal(group_id) >= state.next_ordinal:
                source.given(task)
    return num_requeued


def _flat(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(v, Mapping) for v in value):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{prefix}[{i}]")
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith((f"{free}.", f"{free}[")) for free in FREE_KEYS)
