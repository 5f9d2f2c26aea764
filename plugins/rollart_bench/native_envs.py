"""The environments of `rollart bench adapters` in the native loops of their libraries.

Takes: a third-party id. Gives: a player: one episode of a seed, with actions from a generator.
Never: imports anything of RollArt, so that only the library is measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

Player: TypeAlias = Callable[[int, Random], float]
"""Plays the episode of a seed and returns its return."""

FREE_NUMBERS = 50
"""Guesses are numbers from 1 to this."""


def boxed(rng: Random) -> str:
    """Return a number in the answer format of gem's environments."""
    return f"\\boxed{{{rng.randint(1, FREE_NUMBERS)}}}"


def bracketed(rng: Random) -> str:
    """Return a number in the answer format of TextArena's environments."""
    return f"[{rng.randint(1, FREE_NUMBERS)}]"


def number(rng: Random) -> str:
    """Return a number."""
    return str(rng.randint(1, FREE_NUMBERS))


def gymnasium(env_id: str, max_turns: int) -> Player:
    """Return a player of an environment with Discrete actions. It renders if the env can."""
    gym: Any = importlib.import_module("gymnasium")
    draws = env_id != "Blackjack-v1"
    env = gym.make(env_id, render_mode="ansi") if draws else gym.make(env_id)
    num_actions = int(env.action_space.n)

    def play(seed: int, rng: Random) -> float:
        env.reset(seed=seed)
        total = 0.0
        for _ in range(max_turns):
            _, reward, terminated, truncated, _ = env.step(rng.randrange(num_actions))
            total += float(reward)
            if draws:
                env.render()
            if terminated or truncated:
                break
        return total

    return play


def reasoning_gym(name: str, max_turns: int) -> Player:
    """Return a player of a dataset: one question, one answer."""
    dataset = importlib.import_module("reasoning_gym").create_dataset(name, seed=0, size=20_000)

    def play(seed: int, rng: Random) -> float:
        entry = dataset[seed]
        return float(dataset.score_answer(number(rng), entry=entry))

    return play


def gem(env_id: str, max_turns: int) -> Player:
    """Return a player of one of gem's environments."""
    importlib.import_module("gem.envs")
    env = importlib.import_module("gem").make(env_id)

    def play(seed: int, rng: Random) -> float:
        env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(boxed(rng))
            total, over = total + float(reward), terminated or truncated
        return total

    return play


def textarena(env_id: str, max_turns: int) -> Player:
    """Return a player of one of TextArena's single-player games."""
    env = importlib.import_module("textarena").make(env_id)

    def play(seed: int, rng: Random) -> float:
        env.reset(num_players=1, seed=seed)
        done = False
        while not done:
            env.get_observation()
            done, _ = env.step(bracketed(rng))
        rewards, _ = env.close()
        return float(rewards[0])

    return play


def skyrl_gym(env_id: str, max_turns: int) -> Player:
    """Return a player of rows of :func:`gsm8k_rows`."""
    skyrl: Any = importlib.import_module("skyrl_gym")
    rows = gsm8k_rows()

    def play(seed: int, rng: Random) -> float:
        row = rows[seed % len(rows)]
        extras = {k: v for k, v in row.items() if k != "prompt"}
        env = skyrl.make(env_id, extras=extras)
        env.init(list(row["prompt"]))
        out = env.step(f"#### {number(rng)}")
        env.close()
        return float(out["reward"])

    return play


def gsm8k_rows() -> list[dict[str, Any]]:
    """Return rows in the format of SkyRL's datasets."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {i} + 1? End with #### and it."}],
            "reward_spec": {"method": "rule", "ground_truth": str(i + 1)},
        }
        for i in range(FREE_NUMBERS)
    ]


def cells(env_id: str, max_turns: int) -> Player:
    """Return a player of :class:`Corridor`."""
    env = Corridor()

    def play(seed: int, rng: Random) -> float:
        env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(Corridor.WORDS[rng.randrange(2)])
            total, over = total + reward, terminated or truncated
        return total

    return play


class Corridor:
    """A class with the interface of ROLL's environments: walk right to the end."""

    WORDS = ("left", "right")

    def __init__(self, length: int = 6, max_steps: int = 12) -> None:
        self.length, self.max_steps = length, max_steps
        self.at = self.num_steps = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start at a random cell."""
        self.at, self.num_steps = Random(seed).randrange(self.length - 1), 0
        return "Reach G.", {"suffix": self.render()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Walk."""
        self.num_steps += 1
        self.at = max(0, self.at + (1 if action == "right" else -1))
        done = self.at == self.length - 1
        info = {"suffix": self.render(), "metrics": {"success": done, "action_is_valid": True}}
        return "", float(done), done, self.num_steps >= self.max_steps, info

    def render(self, mode: str = "text") -> str:
        """Return the corridor, one letter a cell."""
        letters = ["_"] * (self.length - 1) + ["G"]
        letters[self.at] = "P"
        return " ".join(letters)
