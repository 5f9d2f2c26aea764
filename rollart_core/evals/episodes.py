"""The recorded episodes of an evaluation, one line of JSON each.

Takes: trajectories. Gives: :class:`Episode` records, and ``episodes.jsonl`` with observations and
actions. Never: loses a written line, or reads a partial line (after a kill during a write) as an
episode.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rollart_core.errors import ConfigError
from rollart_core.scheduling.evaluate import rewards_of
from rollart_core.types import FailureKind, Trajectory

FILE = "episodes.jsonl"
_PLAIN = ("ticket", "attempt", "column", "env", "split", "task", "status", "success", "score")
"""Fields of an episode that have the same names in its line."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task, without its text."""

    ticket: str
    attempt: int
    column: str
    """The player: ``model``, ``greedy``, or a baseline."""
    env: str
    split: str
    task: int
    status: str
    success: bool | None
    score: float | None
    """The environment's own return, or the reward if it decides success. None if the episode
    failed."""
    failure: FailureKind | None
    why: str
    """Message of the failure."""
    num_turns: int
    num_prompt_tokens: int
    num_new_tokens: int
    num_loss_tokens: int
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The ``reward`` and its components. Empty if the episode failed."""

    @property
    def failed(self) -> bool:
        """True if the episode failed."""
        return self.failure is not None


def episode_of(column: str, trajectory: Trajectory) -> Episode:
    """Return the record of a trajectory that is kept in memory."""
    ticket, failure = trajectory.ticket, trajectory.failure
    return Episode(
        ticket=ticket.ticket_id,
        attempt=ticket.attempt,
        column=column,
        env=ticket.task.env_id,
        split=ticket.task.split,
        task=ticket.task.index,
        status=trajectory.status,
        success=None if trajectory.success is None else bool(trajectory.success),
        score=None if trajectory.score is None else float(trajectory.score),
        failure=FailureKind(failure.kind) if failure else None,
        why=failure.message if failure else "",
        num_turns=len(trajectory.turns),
        num_prompt_tokens=sum(t.num_prompt_tokens for t in trajectory.turns),
        num_new_tokens=sum(t.num_new_tokens for t in trajectory.turns),
        num_loss_tokens=trajectory.num_loss_tokens,
        rewards={} if failure else rewards_of(trajectory),
    )


class EpisodeLog:
    """The log of played episodes, including those before a kill. Use it in a ``with`` statement.

    Args:
        folder: Folder of the evaluation. The log file is created or continued.

    Raises:
        ConfigError: If a line in the middle is not an episode of this release.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.episodes: list[Episode] = []
        self.finished: dict[str, Episode] = {}
        """Ticket -> the completed attempt."""
        self.attempts: Counter[str] = Counter()
        """Ticket -> number of attempts so far."""
        for episode in self._read():
            self._take(episode)
        self._file: IO[str] = self._path.open("a", encoding="utf-8")

    def __enter__(self) -> EpisodeLog:
        return self

    def __exit__(self, *left: object) -> None:
        self._file.close()

    def add(self, column: str, trajectory: Trajectory) -> Episode:
        """Write an attempt. It is kept even if the process is killed afterwards."""
        episode = episode_of(column, trajectory)
        line = json.dumps(_line(episode, trajectory), ensure_ascii=True)
        self._file.write(line + "\n")
        self._file.flush()
        self._take(episode)
        return episode

    def sync(self) -> None:
        """Flush the log to disk."""
        os.fsync(self._file.fileno())

    def _take(self, episode: Episode) -> None:
        self.episodes.append(episode)
        self.attempts[episode.ticket] += 1
        if not episode.failed:
            self.finished[episode.ticket] = episode

    def _read(self) -> list[Episode]:
        if not self._path.exists():
            return []
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # killed during a write
            os.truncate(self._path, len(whole))
        found = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                found.append(_read_line(json.loads(line)))
            except (KeyError, TypeError, ValueError) as e:
                message = f"{self._path}, line {number}: not an episode of this release: {e}"
                raise ConfigError(message) from None
        return found


def _line(episode: Episode, trajectory: Trajectory) -> dict[str, object]:
    failure = trajectory.failure
    return {
        **{name: getattr(episode, name) for name in _PLAIN},
        "reward": trajectory.reward,
        "rewards": episode.rewards,
        "failure": {"kind": str(episode.failure), "why": episode.why} if failure else None,
        "wall_s": round(trajectory.wall_s, 3),
        "tokens": {
            "prompt": episode.num_prompt_tokens,
            "new": episode.num_new_tokens,
            "loss": episode.num_loss_tokens,
        },
        "turns": [
            {
                "observation": t.observation,
                "action": t.action,
                "finish": t.finish_reason,
                "reasoning": t.reasoning,
            }
            for t in trajectory.turns
        ],
    }


def _read_line(line: Mapping[str, Any]) -> Episode:
    failure, tokens = line["failure"], line["tokens"]
    return Episode(
        **{name: line[name] for name in _PLAIN},
        failure=FailureKind(failure["kind"]) if failure else None,
        why=failure["why"] if failure else "",
        num_turns=len(line["turns"]),
        num_prompt_tokens=tokens["prompt"],
        num_new_tokens=tokens["new"],
        num_loss_tokens=tokens["loss"],
        rewards=line.get("rewards", {}),
    )
