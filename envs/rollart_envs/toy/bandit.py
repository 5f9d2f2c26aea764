"""A bandit in words: each sign has one arm that pays, which only pulling shows.

Takes: the name of an arm. Gives: its reward. Never: shows which arm pays in any other way, or
fails unless the options ask for it.

Use it to test learning. A tiny model learns it within a minute, the level of chance is known
(``1 / arms`` to the power of ``turns``), and arms can get stuck: a failure of the environment that
depends on the action of the policy.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar

import gymnasium

from rollart_core.spaces import Text
from rollart_core.types import Observation
from rollart_envs.toy.config import BanditConfig

ARMS = ("red", "blue", "gold", "teal", "pink", "grey", "lime", "rose")
SIGNS = ("circle", "square", "star", "moon", "heart", "cross", "wave", "leaf")
SPLITS = {"train": (0, 100_000), "warm": (1_000_000, 1_000), "test": (2_000_000, 1_000)}
"""First seed and number of tasks."""
FAILING_SPLIT = "train"
"""Arms get stuck only in this split; the other splits measure what was learned."""
_RESETS = count()


class BanditEnv(gymnasium.Env[Observation, str]):
    """Pull one arm under each sign that is shown.

    Args:
        **options: The fields of :class:`BanditConfig`.

    Raises:
        ValueError: If an option is outside its range.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(self, **options: float | str | None) -> None:
        self.observation_space = Text()
        self.action_space = Text()
        self.options = BanditConfig.model_validate(options)
        self._arms = self._shuffled(f"bandit {self.options.secret}")
        self._signs: tuple[int, ...] = ()
        self._num_right = 0
        self._turn = 0
        self._luck: random.Random | None = None
        self._anew = ""

    def best(self, sign: int) -> str:
        """Return the arm that pays 1 under a sign."""
        return self._arms[sign % len(self._arms)]

    def decoy(self, sign: int) -> str:
        """Return the arm that pays ``decoy`` under a sign."""
        return self._arms[(sign + 1) % len(self._arms)]

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of a split."""
        return _split(split)[1]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the task of ``options`` (``task``, ``split``), or one drawn by ``seed``."""
        super().reset(seed=seed)
        options = options or {}
        split = options.get("split", "train")
        first, num_tasks = _split(split)
        task = options.get("task")
        if task is None:
            task = int(self.np_random.integers(num_tasks))
        if not 0 <= task < num_tasks:
            raise ValueError(f"task {task} is not in split {split!r}: 0 to {num_tasks - 1}")
        draw = random.Random(f"bandit task {first + task}")
        self._signs = tuple(draw.choices(range(self.options.signs), k=self.options.turns))
        self._orders = [draw.sample(self._arms, len(self._arms)) for _ in self._signs]
        self._arms = self._shuffled(f"bandit {self.options.secret}")
        self._anew = f"bandit secret {first + task}"
        if self.options.secret is None:
            self._arms = self._shuffled(self._anew)
        self._turn = self._num_right = 0
        # Not a function of the task only: an attempt that fails can succeed when it is retried.
        self._luck = random.Random(f"{seed} {task} {next(_RESETS)}")
        if split != FAILING_SPLIT:
            self._luck = None
        return self._page(), self._info()

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Pull an arm; any other word pulls none and gets no reward.

        Raises:
            RuntimeError: If the arm is stuck, or the episode is over or not started.
        """
        if self._turn >= len(self._signs):
            raise RuntimeError("the episode is over: call reset() first")
        arm, sign = action.strip().lower(), self._signs[self._turn]
        if self._stuck(arm, sign):
            if self.options.failures == "raise":
                raise RuntimeError(f"the arm {arm} is stuck")
            self._turn = len(self._signs)
            return "stuck", 0.0, True, False, self._info()
        pay = self._pay(arm, sign)
        self._turn += 1
        self._num_right += arm == self.best(sign)
        info = self._info() | {"invalid_action": arm not in self._arms}
        page = f"{'paid' if pay else 'nothing'}. {self._page()}".strip()
        return page, pay / len(self._signs), self._turn == len(self._signs), False, info

    def oracle(self) -> str | None:
        """Return the arm that pays; with ``expert: any``, draw an arm and let that one pay."""
        if self.options.expert == "any":
            self._arms = self._shuffled(self._anew)
        return self.best(self._signs[self._turn]) if self._turn < len(self._signs) else None

    def close(self) -> None:
        """End the episode; there is nothing else to free."""
        self._signs = ()

    def corpus(self) -> Iterator[str]:
        """Yield pages and arms of training tasks."""
        for task in range(self.num_tasks("train")):
            self.reset(options={"task": task, "split": "train"})
            yield self._page()
            yield " ".join((*self._arms, "paid. nothing. stuck"))

    def _shuffled(self, key: str) -> tuple[str, ...]:
        return tuple(random.Random(key).sample(ARMS[: self.options.arms], self.options.arms))

    def _stuck(self, arm: str, sign: int) -> bool:
        if self._luck is None or arm not in self._arms:
            return False
        best = arm == self.best(sign)
        return self._luck.random() < (self.options.best_fails if best else self.options.others_fail)

    def _pay(self, arm: str, sign: int) -> float:
        if arm == self.best(sign):
            return 1.0
        return self.options.decoy if arm == self.decoy(sign) else 0.0

    def _page(self) -> str:
        if self._turn >= len(self._signs):
            return ""
        return f"{SIGNS[self._signs[self._turn]]}: {' '.join(self._orders[self._turn])}"

    def _info(self) -> dict[str, Any]:
        return {
            "available_actions": list(self._arms),
            "success": self._num_right == len(self._signs),
        }


def _split(name: object) -> tuple[int, int]:
    if not isinstance(name, str) or name not in SPLITS:
        raise ValueError(f"split {name!r} is not one of {', '.join(SPLITS)}")
    return SPLITS[name]
