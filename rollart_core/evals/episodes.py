"""The episodes of an evaluation as they are written down, one line of JSON each.

Takes: trajectories. Gives: :class:`Episode` records, and ``episodes.jsonl`` with what was seen and
said. Never: loses a line that was written, or takes half a line (a kill in mid-write) for one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rollart_core.errors import ConfigError
from rollart_core.types import FailureKind, Trajectory

FILE = "episodes.jsonl"
_PLAIN = ("ticket", "attempt", "column", "env", "split", "task", "status", "success", "score")
"""Fields of an episode that its line has by the same names."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task, without what was said."""

    ticket: str
    attempt: int
    column: str
    """Who played: ``model``, ``greedy``, or a baseline."""
    env: str
    split: str
    task: int
    status: str
    success: bool | None
    score: float | None
    """The environment's own return; None when it failed."""
    failure: FailureKind | None
    why: str
    """Of a failure."""
    num_turns: int
    num_prompt_tokens: int
    num_new_tokens: int
    num_loss_tokens: int

    @property
    def failed(self) -> bool:
        """True when it did not come to an end."""
        return self.failure is not None


def episode_of(column: str, trajectory: Trajectory) -> Episode:
    """Return what is kept in memory of a trajectory."""
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
    )


class EpisodeLog:
    """What has been played, also before a kill; use it in a ``with`` statement.

    Args:
        folder: The evaluation's; its file is made, or gone on with.

    Raises:
        ConfigError: When a line in the middle of it is none that this release wrote.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.episodes: list[Episode] = []
        self.finished: dict[str, Episode] = {}
        """Ticket -> the attempt that came to an end."""
        self.attempts: Counter[str] = Counter()
        """Ticket -> attempts so far."""
        for episode in self._read():
            self._take(episode)
        self._file: IO[str] = self._path.open("a", encoding="utf-8")

    def __enter__(self) -> EpisodeLog:
        return self

    def __exit__(self, *left: object) -> None:
        self._file.close()

    def add(self, column: str, trajectory: Trajectory) -> Episode:
        """Write an attempt down; from then on a kill does not undo it."""
        episode = episode_of(column, trajectory)
        line = json.dumps(_line(episode, trajectory), ensure_ascii=True)
        self._file.write(line + "\n")
        self._file.flush()
        self._take(episode)
        return episode

    def sync(self) -> None:
        """Have the disk hold all of it."""
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
        if len(whole) < len(content):  # killed in mid-write
            os.truncate(self._path, len(whole))
        found = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                found.append(_read_line(json.loads(line)))
            except (KeyError, TypeError, ValueError) as e:
                message = f"{self._path}, line {number}: is no episode of this release: {e}"
                raise ConfigError(message) from None
        return found


def _line(episode: Episode, trajectory: Trajectory) -> dict[str, object]:
    failure = trajectory.failure
    return {
        **{name: getattr(episode, name) for name in _PLAIN},
        "reward": trajectory.reward,
        "failure": {"kind": str(episode.failure), "why": episode.why} if failure else None,
        "wall_s": round(trajectory.wall_s, 3),
        "tokens": {
            "prompt": episode.num_prompt_tokens,
            "new": episode.num_new_tokens,
            "loss": episode.num_loss_tokens,
        },
        "turns": [
            {"observation": t.observation, "action": t.action, "finish": t.finish_reason}
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
    )
