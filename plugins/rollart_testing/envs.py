"""A scripted environment that injects the faults of environments on demand.

Takes: options (plain values, so that a run config can set them). Gives: an environment whose
episodes depend on the task only. Never: draws from anything except task, seed and options.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar, Literal, TypeAlias

import gymnasium

from rollart_core.spaces import Messages, Text
from rollart_core.types import Message, Observation

Trouble: TypeAlias = Literal["raise", "hang", "nan", "huge"]
_Step: TypeAlias = tuple[Observation, float, bool, bool, dict[str, Any]]

WORDS = ("red", "green", "blue", "gold", "grey", "pink", "teal", "lime")
SPLITS = ("train", "warm", "test")
_RESETS = count(1)


class FakeEnv(gymnasium.Env[Observation, str]):
    """Each turn asks for a word; each right answer earns ``1 / turns``.

    Args:
        turns: Number of turns in an episode.
        script: The requested words in order, repeated; None draws them by task.
        tasks: Number of tasks in each split (``train``, ``warm``, ``test``).
        messages: Observe chat messages instead of text.
        trouble: ``raise`` an error, ``hang`` until closed, reward ``nan``, or observe ``huge``
            text.
        at: Place of the fault: ``"reset"``, or the turn, from 0.
        trouble_every: Inject the fault only in every n-th reset of this process.
        trouble_tasks: Inject the fault only in these tasks; None means all.
        huge_chars: Length of a huge observation.
        delay_s: Mean duration of a step in seconds, lognormally distributed.
        delay_sigma: Sigma of the logarithm of that delay; 0 makes all delays equal.
        delay_by: ``episode`` draws new delays for every reset in this process (siblings differ);
            ``task`` makes delays depend on seed, task and turn only.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _num_open: ClassVar[int] = 0

    def __init__(
        self,
        *,
        turns: int = 3,
        script: Sequence[str] | None = None,
        tasks: int = 64,
        messages: bool = False,
        trouble: Trouble | None = None,
        at: Literal["reset"] | int = 0,
        trouble_every: int = 1,
        trouble_tasks: Sequence[int] | None = None,
        huge_chars: int = 1_000_000,
        delay_s: float = 0.0,
        delay_sigma: float = 1.0,
        delay_by: Literal["episode", "task"] = "episode",
    ) -> None:
        if trouble == "nan" and at == "reset":
            raise ValueError("reset returns no reward: trouble 'nan' needs a turn in `at`")
        self.observation_space = Messages() if messages else Text()
        self.action_space = Text()
        self.turns, self._script, self._tasks, self._messages = turns, script, tasks, messages
        self._trouble, self._at, self._trouble_every = trouble, at, trouble_every
        self._trouble_tasks, self._huge_chars = trouble_tasks, huge_chars
        self._delay_s, self._delay_sigma, self._delay_by = delay_s, delay_sigma, delay_by
        self._closing = threading.Event()
        self._turn, self._right, self._words, self._key = turns, 0, [""], ""
        self._in_trouble = False
        with FakeEnv._lock:
            FakeEnv._num_open += 1

    @classmethod
    def num_open(cls) -> int:
        """Return the number of open fake environments in this process."""
        return FakeEnv._num_open

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
        return self._tasks

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin the task of ``options``, or one drawn by ``seed``."""
        self._begin(seed, options or {})
        self._meet("reset")
        return self._observe("reset"), self._info()

    def step(self, action: str) -> _Step:
        """Answer one action, after the delay."""
        turn = self._turn
        delay_s = self._delay()
        if delay_s and self._closing.wait(delay_s):
            raise RuntimeError("the environment was closed during a step")
        self._meet(turn)
        return self._answer(action)

    def oracle(self) -> str | None:
        """Return the requested word."""
        return None if self._turn >= self.turns else self._words[self._turn]

    def close(self) -> None:
        """End all waiting calls; may be called twice."""
        if not self._closing.is_set():
            self._closing.set()
            with FakeEnv._lock:
                FakeEnv._num_open -= 1

    def corpus(self) -> Iterator[str]:
        """Yield the prompts and answers of every training task."""
        for index in range(self._tasks):
            for turn, word in enumerate(self._draw_words("train", index)):
                yield self._text(turn, word)
                yield word

    def _begin(self, seed: int | None, options: dict[str, Any]) -> None:
        super().reset(seed=seed)
        if self._closing.is_set():
            raise RuntimeError("the environment is closed")
        split, index = options.get("split", "train"), options.get("task")
        if index is None:
            index = int(self.np_random.integers(self.num_tasks(split)))
        if not 0 <= index < self.num_tasks(split):
            raise ValueError(f"task {index} is not in split {split!r}: 0 to {self._tasks - 1}")
        resets = next(_RESETS)
        self._words = self._draw_words(split, index)
        self._turn, self._right = 0, 0
        self._key = f"{seed}/{split}/{index}" + (
            f"/{resets}" if self._delay_by == "episode" else ""
        )
        self._in_trouble = resets % self._trouble_every == 0 and (
            self._trouble_tasks is None or index in self._trouble_tasks
        )

    def _draw_words(self, split: str, index: int) -> list[str]:
        if self._script:
            return [self._script[turn % len(self._script)] for turn in range(self.turns)]
        return random.Random(f"{split}/{index}").choices(WORDS, k=self.turns)

    def _delay(self) -> float:
        if not self._delay_s:
            return 0.0
        sigma = self._delay_sigma
        rng = random.Random(f"{self._key}/{self._turn}")
        return rng.lognormvariate(math.log(self._delay_s) - sigma * sigma / 2, sigma)

    def _has(self, trouble: Trouble, where: str | int) -> bool:
        return self._in_trouble and self._trouble == trouble and self._at == where

    def _meet(self, where: str | int) -> None:
        if self._has("raise", where):
            raise RuntimeError(f"trouble on demand at {where}")
        if self._has("hang", where):
            self._closing.wait()
            raise RuntimeError("the environment was closed while it hung")

    def _answer(self, action: str) -> _Step:
        if self._turn >= self.turns:
            raise RuntimeError("the episode is over: call reset() first")
        turn, right = self._turn, action.strip() == self._words[self._turn]
        self._turn += 1
        self._right += right
        # Rewards are differences of scores, so that their sum has no rounding error.
        reward = self._score(self._right) - self._score(self._right - right)
        if self._has("nan", turn):
            reward = math.nan
        return self._observe(turn), reward, self._turn >= self.turns, False, self._info()

    def _score(self, num_right: int) -> float:
        return num_right / self.turns

    def _observe(self, where: str | int) -> Observation:
        if self._has("huge", where):
            text = "x" * self._huge_chars
        elif self._turn < self.turns:
            text = self._text(self._turn, self._words[self._turn])
        else:
            text = "the end"
        return [Message(role="user", content=text)] if self._messages else text

    def _text(self, turn: int, word: str) -> str:
        return f"turn {turn + 1} of {self.turns}: say {word}"

    def _info(self) -> dict[str, Any]:
        return {
            "available_actions": list(WORDS),
            "success": self._right == self.turns,
            "reward_components": {"right": self._score(self._right)},
        }


class AsyncFakeEnv(FakeEnv):
    """:class:`FakeEnv` that waits without a thread, by ``areset`` and ``astep``."""

    _waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin, as ``reset``."""
        self._begin(seed, options or {})
        await self._await_trouble("reset")
        return self._observe("reset"), self._info()

    async def astep(self, action: str) -> _Step:
        """Answer one action, as ``step``."""
        turn = self._turn
        if delay_s := self._delay():
            await asyncio.sleep(delay_s)
        await self._await_trouble(turn)
        return self._answer(action)

    def close(self) -> None:
        """End all waiting calls; may be called twice, from any thread."""
        super().close()
        if self._waiting:
            loop, closed = self._waiting
            with suppress(RuntimeError):  # the loop is closed: no call waits
                loop.call_soon_threadsafe(closed.set)

    async def _await_trouble(self, where: str | int) -> None:
        if self._has("hang", where):
            closed = asyncio.Event()
            self._waiting = (asyncio.get_running_loop(), closed)
            await closed.wait()
            raise RuntimeError("the environment was closed while it hung")
        self._meet(where)
