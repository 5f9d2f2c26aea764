"""A five-turn echo as an environment of RollArt, gymnasium, gem and skyrl-gym.

Takes: text. Gives: the same text, and a reward of 1 in total for an episode of nonempty actions.
Never: imports gem or skyrl-gym before one of their players is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeAlias

import gymnasium

from rollart_core.spaces import Text

TURNS: Final = 5
FIRST: Final = "Say something."
SAYS: Final = "hello there"
"""The action of every turn."""
NUM_TASKS: Final = 1_000_000

_Step: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]
Player: TypeAlias = Callable[[int], float]
"""Plays the episode of a seed and returns its return."""


class EchoEnv(gymnasium.Env[str, str]):
    """Returns each action to the policy.

    Args:
        turns: Number of turns in an episode.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(self, turns: int = TURNS) -> None:
        self.observation_space = self.action_space = Text()
        self._turns, self._turn = turns, 0

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has. All are the same."""
        return NUM_TASKS

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin."""
        super().reset(seed=seed)
        self._turn = 0
        return FIRST, {}

    def step(self, action: str) -> _Step:
        """Repeat."""
        self._turn += 1
        return action, bool(action) / self._turns, self._turn >= self._turns, False, {}


class AsyncEchoEnv(EchoEnv):
    """:class:`EchoEnv` that RollArt calls without a thread."""

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin, as ``reset``."""
        return self.reset(seed=seed, options=options)

    async def astep(self, action: str) -> _Step:
        """Repeat, as ``step``."""
        return self.step(action)


def made(turns: int = TURNS) -> Any:
    """Return the environment as ``gymnasium.make`` returns it, with its default wrappers."""
    env_id = "rollart_bench/Echo-v1"
    if env_id not in gymnasium.registry:
        gymnasium.register(env_id, entry_point="rollart_bench.echo:EchoEnv")
    return gymnasium.make(env_id, turns=turns)


def stepped(env: Any) -> Player:
    """Return a player of an environment of gymnasium or gem: reset and step, nothing else."""

    def play(seed: int) -> float:
        env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(SAYS)
            total, over = total + reward, terminated or truncated
        return total

    return play


def gem() -> Player:
    """Return a player of the echo as an environment of gem."""
    library: Any = importlib.import_module("gem")

    class Echo(library.Env):  # type: ignore[misc]
        """Returns each action to the policy."""

        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            """Begin."""
            super().reset(seed)
            self.turn = 0
            return FIRST, {}

        def step(self, action: str) -> _Step:
            """Repeat."""
            self.turn += 1
            return action, bool(action) / TURNS, self.turn >= TURNS, False, {}

    return stepped(Echo())


def skyrl_gym() -> Player:
    """Return a player of the echo as an environment of skyrl-gym: one object for each episode."""
    base: Any = importlib.import_module("skyrl_gym.envs.base_text_env")
    output = base.BaseTextEnvStepOutput

    class Echo(base.BaseTextEnv):  # type: ignore[misc]
        """Returns each action to the policy."""

        def step(self, action: str) -> Any:
            """Repeat."""
            self.turns += 1
            said = [{"role": "user", "content": action}]
            reward, done = bool(action) / TURNS, self.turns >= TURNS
            return output(observations=said, reward=reward, done=done, metadata={})

    prompt = [{"role": "user", "content": FIRST}]

    def play(seed: int) -> float:
        env = Echo()
        env.init(list(prompt))
        total, over = 0.0, False
        while not over:
            out = env.step(SAYS)
            total, over = total + out["reward"], out["done"]
        env.close()
        return total

    return play
