"""``check_env``: check that an environment follows the contract of the engine.

Takes: an id, an environment or a factory of environments, and its spec. Gives: check results.
Never: needs a model, a network or a separate process; ``rollart check`` adds the checks that do.
This module has the checks of ``reset`` and ``step``; the others are shared with agent tasks.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, Unpack

from rollart_core.contracts.env import EnvSpec, TextEnv
from rollart_core.plugins import registry
from rollart_testing.answers import checked_reset, checked_step, difference
from rollart_testing.env_play import EnvSubject, good_action
from rollart_testing.play import GARBAGE
from rollart_testing.results import CheckCourse, CheckResult, SkipCheck, expect, run_checks
from rollart_testing.runtime_checks import (
    check_close,
    check_corpus,
    check_global_random_state,
    check_interleaved,
    check_make,
    check_nothing_left_open,
    check_same_episode,
    check_tasks,
    check_timeouts,
)
from rollart_testing.sandbox_checks import check_no_sandbox_left, check_sandbox_hides_secrets
from rollart_testing.semantic_checks import (
    check_noop,
    check_oracle,
    check_random,
    check_reward_range,
    check_same_verdict,
    check_secrets,
)
from rollart_testing.split_checks import check_splits

Check = Callable[[EnvSubject], str | None]
"""Raises if the environment breaks the rule; returns a remark or nothing."""
# Gymnasium only warns of these; its other warnings are about rendering and style.
_GRAVE: Final = ("not within the observation space", "share an object")


def check_env(
    env: str | TextEnv | Callable[[], TextEnv],
    *,
    spec: EnvSpec | None = None,
    seed: int = 0,
    num_tasks: int = 3,
    only: Sequence[str] | None = None,
) -> list[CheckResult]:
    """Check an environment against the contract, in this process.

    Args:
        env: An id (or alias, or ``module:Class``), a class or function that creates a new
            environment, or one environment, which is closed at the end.
        spec: Its spec: splits, reward range, determinism. None means the spec of its id, or the
            defaults.
        seed: Seed of the episodes.
        num_tasks: Number of tasks played per split.
        only: Names of the checks to run; None means all.

    Returns:
        One result per check; SKIP if the environment has nothing to check.
    """
    if isinstance(env, str):
        spec = spec or registry.env_spec(env)
        env = partial(registry.make, env)
    subject = EnvSubject(env, spec, seed=seed, num_tasks=num_tasks)
    return run_env_checks(subject, only=only)


def run_env_checks(subject: EnvSubject, **course: Unpack[CheckCourse]) -> list[CheckResult]:
    """Run the checks of ``CHECKS`` in their order.

    Args:
        subject: The environment under check.
        course: The checks to run and the progress callback; see
            :class:`rollart_testing.results.CheckCourse`.
    """
    checks = {name: partial(check, subject) for name, check in CHECKS.items()}
    return run_checks(checks, NEEDS, basic=BASIC, **course)


def check_reset(subject: EnvSubject) -> None:
    """``reset`` returns (observation, info), with and without a seed and options."""
    with subject.open() as player:
        player.reset(seed=subject.seed)
        player.reset(seed=subject.seed, options={})
        player.reset()


def check_step(subject: EnvSubject) -> None:
    """``step`` returns five values of the right types."""
    with subject.open() as player:
        last = player.reset(seed=subject.seed)
        for turn in range(3):
            last = player.step(good_action(player, last, turn))
            if last.over:
                return


def check_reset_in_the_middle(subject: EnvSubject) -> None:
    """``reset`` after a step restarts the episode."""
    with subject.open() as player:
        first = player.reset(seed=subject.seed)
        player.step(good_action(player, first, 0))
        again = player.reset(seed=subject.seed)
        if subject.spec.deterministic:
            same = first.observation == again.observation
            expect(same, "reset after a step does not restart the episode")


def check_gymnasium(subject: EnvSubject) -> None:
    """Gymnasium's ``check_env`` accepts it; seeds are checked if its spec is deterministic."""
    import gymnasium
    from gymnasium.utils.env_checker import check_env

    with subject.open() as player, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not isinstance(player.env, gymnasium.Env):
            raise SkipCheck(f"{type(player.env).__name__} is not a gymnasium.Env")
        with _said_to_be(player.env, deterministic=subject.spec.deterministic):
            check_env(player.env, skip_render_check=True, skip_close_check=True)
    for warning in caught:
        text = str(warning.message)
        expect(not any(grave in text for grave in _GRAVE), text)


@contextmanager
def _said_to_be(env: Any, *, deterministic: bool) -> Iterator[None]:
    """Set a spec on an environment that gymnasium did not create, to enable more of its checks."""
    from gymnasium.envs.registration import EnvSpec

    if env.spec is not None:
        yield
        return
    with suppress(AttributeError):  # the spec of a wrapper is read-only
        env.spec = EnvSpec("rollart/Checked-v0", nondeterministic=not deterministic)
    try:
        yield
    finally:
        with suppress(AttributeError):
            env.spec = None


def check_async(subject: EnvSubject) -> None:
    """``areset`` and ``astep`` return the same as ``reset`` and ``step``."""
    with subject.open() as player:
        has = {name: player.has(name) for name in ("areset", "astep")}
        if not any(has.values()):
            raise SkipCheck("it has no areset() and astep()")
        for name, is_there in has.items():
            other = "astep" if name == "areset" else "areset"
            expect(is_there, f"it has {other}() but no {name}(): a run would mix the two")
        env = player.env
        begun = checked_reset(asyncio.run(env.areset(seed=subject.seed, options={})))
        action = good_action(player, begun, 0)
        awaited = checked_step(asyncio.run(env.astep(action)))
        if subject.spec.deterministic:
            first = player.reset(seed=subject.seed)
            expect(first.observation == begun.observation, "areset and reset differ")
            found = difference(awaited, player.step(action))
            expect(found is None, f"astep and step differ: {found}")


def check_malformed(subject: EnvSubject) -> None:
    """Malformed actions and a good one after them get a response; so does any valid call."""
    with subject.open() as player:
        for action in GARBAGE:
            player.reset(seed=subject.seed)
            step = player.step(action)
            if not step.over:
                player.step(good_action(player, step, 0))
        for _ in subject.called(player, {}):
            pass


BASIC: Final = ("make", "reset", "step")
"""The checks that nearly all others depend on."""
_TASKS: Final = (*BASIC, "tasks")
_REPEATS: Final = (*_TASKS, "same_seed_same_episode")
_RANDOM: Final = (*_TASKS, "malformed_actions")
"""Dependencies of checks whose random policies also call tools."""

CHECKS: Final[Mapping[str, Check]] = {
    "make": check_make,
    "reset": check_reset,
    "step": check_step,
    "tasks": check_tasks,
    "malformed_actions": check_malformed,
    "same_seed_same_episode": check_same_episode,
    "reset_in_the_middle": check_reset_in_the_middle,
    "gymnasium_check_env": check_gymnasium,
    "global_random_state": check_global_random_state,
    "interleaved_instances": check_interleaved,
    "async_agrees": check_async,
    "corpus": check_corpus,
    "nothing_left_open": check_nothing_left_open,
    "no_box_left": check_no_sandbox_left,
    "splits_differ": check_splits,
    "oracle_reaches_the_top": check_oracle,
    "noop_stays_at_the_floor": check_noop,
    "random_stays_below_the_oracle": check_random,
    "same_verdict_twice": check_same_verdict,
    "secrets_are_hidden": check_secrets,
    "box_hides_secrets": check_sandbox_hides_secrets,
    "reward_in_range": check_reward_range,
    "within_timeouts": check_timeouts,
    "close_twice": check_close,
}
"""All checks that run in one process, in this order."""

NEEDS: Final[Mapping[str, Sequence[str]]] = {
    "make": (),
    "reset": ("make",),
    "step": ("make", "reset"),
    "close_twice": ("make", "reset"),
    "async_agrees": (*BASIC, "reset_in_the_middle"),
    "global_random_state": (*BASIC, "malformed_actions"),
    "interleaved_instances": (*_REPEATS, "malformed_actions"),
    "same_verdict_twice": (*_REPEATS, "malformed_actions"),
    **dict.fromkeys(
        (
            "same_seed_same_episode",
            "oracle_reaches_the_top",
            "noop_stays_at_the_floor",
            "box_hides_secrets",
        ),
        _TASKS,
    ),
    **dict.fromkeys(
        (
            "splits_differ",
            "random_stays_below_the_oracle",
            "secrets_are_hidden",
            "reward_in_range",
        ),
        _RANDOM,
    ),
}
"""Check -> checks that it depends on; those not listed depend on ``BASIC``."""
