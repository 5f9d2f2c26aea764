"""``check_env``: does an environment keep the contract that the engine counts on?

Takes: an environment, or something that makes one, and its spec. Gives: check results. Never:
needs a model or a network of its own; a few short episodes per check.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, cast

import numpy as np

from rollart_core.contracts.env import EnvSpec, TextEnv
from rollart_core.spaces import Messages, Text
from rollart_core.testing.results import CheckResult, SkipCheck, expect, run_checks
from rollart_core.types import Observation

_Step: TypeAlias = tuple[Observation, float, bool, bool, dict[str, Any]]
_Policy: TypeAlias = Callable[[Any, dict[str, Any], int], str]
"""From (env, info, turn) to an action."""

GARBAGE = (
    "",
    " \n\t",
    "é雪😀",
    "]][[ click[",
    "\x00\x1b[31m",
    "DROP TABLE x; --",
    "x" * 10_000,
    "0",
)
_NEVER_SAID = EnvSpec(id="unregistered/Env-v0", entry_point="unregistered:Env")
_MAX_TURNS = 200


def check_env(
    env: TextEnv | Callable[[], TextEnv],
    *,
    spec: EnvSpec | None = None,
    seed: int = 0,
    num_tasks: int = 3,
) -> list[CheckResult]:
    """Check an environment against the contract.

    Args:
        env: A class or function that makes a fresh one (best), or one environment, which is closed
            at the end.
        spec: What it says of itself: splits, reward range, determinism; None: the defaults.
        seed: Seed of the episodes.
        num_tasks: Tasks of each split that are played.

    Returns:
        One result per check; SKIP where the environment has nothing to check.
    """
    opened = _Opener(env)
    subject = _Subject(opened, spec or _NEVER_SAID, seed, num_tasks)
    return run_checks(
        {
            "reset": partial(_check_reset, subject),
            "step": partial(_check_step, subject),
            "tasks": partial(_check_tasks, subject),
            "same_seed_same_episode": partial(_check_same_episode, subject),
            "reset_in_the_middle": partial(_check_reset_in_the_middle, subject),
            "oracle_reaches_the_top": partial(_check_oracle, subject),
            "garbage_actions": partial(_check_garbage, subject),
            "reward_in_range": partial(_check_reward, subject),
            "async_agrees": partial(_check_async, subject),
            "corpus": partial(_check_corpus, subject),
            "close_twice": partial(_check_close, subject),
        }
    )


class _Opener:
    """Makes environments and closes them; a single given one is left open between checks."""

    def __init__(self, env: TextEnv | Callable[[], TextEnv]) -> None:
        is_made = not isinstance(env, type) and hasattr(env, "reset")
        self.given = cast("TextEnv", env) if is_made else None
        self._make = cast("Callable[[], TextEnv]", env)

    @contextmanager
    def __call__(self) -> Iterator[Any]:
        if self.given is not None:
            yield self.given
            return
        env = self._make()
        try:
            yield env
        finally:
            env.close()


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is checked, and how."""

    open: _Opener
    spec: EnvSpec
    seed: int
    num_tasks: int

    def tasks(self, env: Any) -> list[dict[str, Any]]:
        """Return reset options of the first tasks of every split."""
        return [
            {"split": split, "task": index}
            for split in self.spec.splits
            for index in range(min(self.num_tasks, _num_tasks(env, split) or self.num_tasks))
        ]


def _check_reset(subject: _Subject) -> None:
    with subject.open() as env:
        _reset(env, seed=subject.seed)
        _reset(env, seed=subject.seed, options={})
        _reset(env)


def _check_step(subject: _Subject) -> None:
    with subject.open() as env:
        _, info = _reset(env, seed=subject.seed)
        for turn in range(3):
            *_, terminated, truncated, info = _step(env, _good_action(env, info, turn))
            if terminated or truncated:
                return


def _check_tasks(subject: _Subject) -> None:
    with subject.open() as env:
        expect(subject.spec.splits, "the spec names no splits")
        for options in subject.tasks(env):
            first, _ = _reset(env, seed=subject.seed, options=options)
            again, _ = _reset(env, seed=subject.seed, options=options)
            if subject.spec.deterministic:
                expect(first == again, f"reset({options}) shows another page the second time")


def _check_same_episode(subject: _Subject) -> None:
    if not subject.spec.deterministic:
        raise SkipCheck("its spec says that it is not deterministic")
    for policy in (_good_action, _garbage_action):
        for options in ({}, {"split": subject.spec.splits[0], "task": 0}):
            with subject.open() as env:
                first = _play(env, policy, subject.seed, options)
            with subject.open() as env:
                second = _play(env, policy, subject.seed, options)
            for turn, (one, two) in enumerate(zip(first, second, strict=False)):
                expect(one == two, f"turn {turn} differs: {_differs(one, two)}")
            expect(len(first) == len(second), f"{len(first)} turns, then {len(second)}")


def _check_reset_in_the_middle(subject: _Subject) -> None:
    with subject.open() as env:
        first, info = _reset(env, seed=subject.seed)
        _step(env, _good_action(env, info, 0))
        again, _ = _reset(env, seed=subject.seed)
        if subject.spec.deterministic:
            expect(first == again, "reset after a step does not begin at the beginning")


def _check_oracle(subject: _Subject) -> None:
    top = subject.spec.reward_range[1]
    with subject.open() as env:
        if not hasattr(env, "oracle"):
            raise SkipCheck("it has no oracle()")
        for options in subject.tasks(env):
            steps = _play(env, _oracle_action, subject.seed, options)
            total = sum(step[1] for step in steps)
            expect(_over(steps[-1]), f"{options}: not over after {len(steps)} turns of its oracle")
            expect(
                math.isclose(total, top, abs_tol=1e-6),
                f"{options}: its oracle earned {total:g}, and the top is {top:g}",
            )
            success = steps[-1][4].get("success")
            expect(success in (None, True), f"{options}: top reward, but info['success'] is False")


def _check_garbage(subject: _Subject) -> None:
    with subject.open() as env:
        for action in GARBAGE:
            _reset(env, seed=subject.seed)
            *_, terminated, truncated, info = _step(env, action)
            if not (terminated or truncated):
                _step(env, _good_action(env, info, 0))


def _check_reward(subject: _Subject) -> None:
    low, high = subject.spec.reward_range
    with subject.open() as env:
        for policy in (_good_action, _garbage_action):
            for options in subject.tasks(env):
                total = sum(step[1] for step in _play(env, policy, subject.seed, options))
                expect(
                    low - 1e-6 <= total <= high + 1e-6,
                    f"{options}: a return of {total:g} is outside {low:g} to {high:g}",
                )


def _check_async(subject: _Subject) -> None:
    with subject.open() as env:
        if not (hasattr(env, "areset") and hasattr(env, "astep")):
            raise SkipCheck("it has no areset() and astep()")
        observation, info = asyncio.run(env.areset(seed=subject.seed, options={}))
        _expect_observation("areset", observation)
        action = _good_action(env, info, 0)
        awaited = asyncio.run(env.astep(action))
        if subject.spec.deterministic:
            expect(_reset(env, seed=subject.seed)[0] == observation, "areset and reset differ")
            expect(_step(env, action) == awaited, "astep and step differ")


def _check_corpus(subject: _Subject) -> None:
    with subject.open() as env:
        if not hasattr(env, "corpus"):
            raise SkipCheck("it has no corpus()")
        texts = list(islice(env.corpus(), 20))
        expect(texts, "corpus() yields nothing")
        expect(all(text in Text() for text in texts), "corpus() yields something other than text")


def _check_close(subject: _Subject) -> None:
    if subject.open.given is not None:
        subject.open.given.close()
        subject.open.given.close()
        return
    with subject.open() as fresh:
        fresh.close()  # before any reset, and once more when the block ends
    with subject.open() as env:
        _reset(env, seed=subject.seed)
        env.close()


def _reset(env: Any, **arguments: Any) -> tuple[Observation, dict[str, Any]]:
    answer = env.reset(**arguments)
    expect(
        isinstance(answer, tuple) and len(answer) == 2,
        f"reset returned {_kind(answer)}, not (observation, info)",
    )
    observation, info = answer
    _expect_observation("reset", observation)
    _expect_info("reset", info)
    return observation, info


def _step(env: Any, action: str) -> _Step:
    answer = env.step(action)
    expect(
        isinstance(answer, tuple) and len(answer) == 5,
        f"step returned {_kind(answer)}, not (observation, reward, terminated, truncated, info)",
    )
    observation, reward, terminated, truncated, info = answer
    _expect_observation("step", observation)
    is_number = isinstance(reward, int | float | np.number) and not isinstance(reward, bool)
    expect(is_number, f"step's reward is {_kind(reward)}, not a number")
    expect(math.isfinite(reward), f"step's reward is {reward}")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        expect(isinstance(flag, bool | np.bool_), f"step's {name} is {_kind(flag)}, not a bool")
    _expect_info("step", info)
    return observation, float(reward), bool(terminated), bool(truncated), info


def _expect_observation(call: str, observation: object) -> None:
    expect(
        observation in Text() or (observation in Messages() and observation),
        f"{call}'s observation is {_kind(observation)}, neither text nor a list of messages",
    )


def _expect_info(call: str, info: object) -> None:
    expect(isinstance(info, dict), f"{call}'s info is {_kind(info)}, not a dict")
    assert isinstance(info, dict)
    success = info.get("success")
    expect(
        success is None or isinstance(success, bool | np.bool_), f"{call}: success is {success!r}"
    )
    actions = info.get("available_actions", [])
    is_texts = isinstance(actions, list | tuple) and all(isinstance(a, str) for a in actions)
    expect(is_texts, f"{call}: available_actions is not a list of strings")
    components = info.get("reward_components", {})
    expect(isinstance(components, dict), f"{call}: reward_components is not a dict")
    for name, value in components.items():
        is_finite = isinstance(value, int | float | np.number) and math.isfinite(value)
        expect(is_finite, f"{call}: reward_components[{name!r}] is {value!r}")


def _play(env: Any, policy: _Policy, seed: int, options: dict[str, Any]) -> list[_Step]:
    observation, info = _reset(env, seed=seed, options=options)
    steps: list[_Step] = [(observation, 0.0, False, False, info)]
    while not _over(steps[-1]) and len(steps) <= _MAX_TURNS:
        steps.append(_step(env, policy(env, steps[-1][4], len(steps) - 1)))
    return steps


def _good_action(env: Any, info: dict[str, Any], turn: int) -> str:
    action = env.oracle() if hasattr(env, "oracle") else None
    actions = info.get("available_actions") or ["ok"]
    return action or str(actions[turn % len(actions)])


def _garbage_action(env: Any, info: dict[str, Any], turn: int) -> str:
    return GARBAGE[turn % len(GARBAGE)]


def _oracle_action(env: Any, info: dict[str, Any], turn: int) -> str:
    action = env.oracle()
    expect(isinstance(action, str), f"turn {turn}: oracle() is {action!r} before the end")
    return str(action)


def _over(step: _Step) -> bool:
    return step[2] or step[3]


def _num_tasks(env: Any, split: str) -> int | None:
    if not hasattr(env, "num_tasks"):
        return None
    num_tasks = env.num_tasks(split)
    expect(
        num_tasks is None or (isinstance(num_tasks, int) and num_tasks > 0),
        f"num_tasks({split!r}) is {num_tasks!r}, neither None nor a positive int",
    )
    return num_tasks if isinstance(num_tasks, int) else None


def _differs(one: _Step, two: _Step) -> str:
    names = ("observation", "reward", "terminated", "truncated", "info")
    return ", ".join(n for n, a, b in zip(names, one, two, strict=True) if a != b)


def _kind(value: object) -> str:
    if isinstance(value, tuple | list | str):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r}"[:60]
