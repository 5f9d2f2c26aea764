"""``check_env``: does an environment keep the contract that the engine counts on?

Takes: an id, an environment, or something that makes one, and its spec. Gives: check results.
Never: needs a model, a network or a process of its own; ``rollart check`` adds what needs those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final, Unpack

from rollart_core.contracts.env import EnvSpec, TextEnv
from rollart_core.plugins import registry
from rollart_core.spaces import Text
from rollart_testing import runtime_checks, semantic_checks, split_checks
from rollart_testing import sandbox_checks as box_checks
from rollart_testing.answers import checked_reset, checked_step, difference, first_difference
from rollart_testing.play import (
    Policy,
    Subject,
    garbage_action,
    good_action,
    play,
)
from rollart_testing.results import CheckCourse, CheckResult, SkipCheck, expect, run_checks

Check = Callable[[Subject], str | None]
"""Raises when the environment breaks the rule; returns a remark or nothing."""


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
        env: An id (or alias, or ``module:Class``), a class or function that makes a fresh one, or
            one environment, which is closed at the end.
        spec: What it says of itself: splits, reward range, determinism; None: what its id says,
            or the defaults.
        seed: Seed of the episodes.
        num_tasks: Tasks of each split that are played.
        only: Names of the checks to run; None: all.

    Returns:
        One result per check; SKIP where the environment has nothing to check.
    """
    if isinstance(env, str):
        spec = spec or registry.env_spec(env)
        env = partial(registry.make, env)
    subject = Subject(env, spec, seed=seed, num_tasks=num_tasks)
    return run_env_checks(subject, only=only)


def run_env_checks(subject: Subject, **course: Unpack[CheckCourse]) -> list[CheckResult]:
    """Run the checks of ``CHECKS`` in their order.

    Args:
        subject: What to check.
        course: Which of them, and who is told; see :class:`rollart_testing.results.CheckCourse`.
    """
    checks = {name: partial(check, subject) for name, check in CHECKS.items()}
    return run_checks(checks, NEEDS, basic=BASIC, **course)


def check_make(subject: Subject) -> None:
    """It can be made without further options, and closed."""
    with subject.open():
        return


def check_reset(subject: Subject) -> None:
    """``reset`` answers (observation, info), with and without a seed and options."""
    with subject.open() as player:
        player.reset(seed=subject.seed)
        player.reset(seed=subject.seed, options={})
        player.reset()


def check_step(subject: Subject) -> None:
    """``step`` answers its five values, each of its kind."""
    with subject.open() as player:
        last = player.reset(seed=subject.seed)
        for turn in range(3):
            last = player.step(good_action(player, last, turn))
            if last.over:
                return


def check_tasks(subject: Subject) -> None:
    """Each split has tasks, in clusters or not, and a task begins alike each time."""
    with subject.open() as player:
        expect(subject.spec.splits, "the spec names no splits")
        for split in subject.spec.splits:
            player.task_clusters(split)
        for options in subject.tasks(player):
            first = player.reset(seed=subject.seed, options=options)
            again = player.reset(seed=subject.seed, options=options)
            if subject.spec.deterministic:
                same = first.observation == again.observation
                expect(same, f"reset({options}) shows another page the second time")


def check_same_episode(subject: Subject) -> None:
    """The same seed, options and actions give the same episode on a fresh instance."""
    if not subject.spec.deterministic:
        raise SkipCheck("its spec says that it is not deterministic")
    policies: tuple[Policy, ...] = (good_action, garbage_action)
    for policy in policies:
        for options in ({}, {"split": subject.spec.splits[0], "task": 0}):
            with subject.open() as player:
                first = play(player, policy, subject.seed, options)
            with subject.open() as player:
                second = play(player, policy, subject.seed, options)
            found = first_difference(first, second)
            expect(found is None, f"{options or 'no options'}: {found}")


def check_reset_in_the_middle(subject: Subject) -> None:
    """``reset`` after a step begins at the beginning."""
    with subject.open() as player:
        first = player.reset(seed=subject.seed)
        player.step(good_action(player, first, 0))
        again = player.reset(seed=subject.seed)
        if subject.spec.deterministic:
            same = first.observation == again.observation
            expect(same, "reset after a step does not begin at the beginning")


def check_async(subject: Subject) -> None:
    """``areset`` and ``astep`` answer what ``reset`` and ``step`` do."""
    with subject.open() as player:
        has = {name: player.has(name) for name in ("areset", "astep")}
        if not any(has.values()):
            raise SkipCheck("it has no areset() and astep()")
        for name, is_there in has.items():
            other = "astep" if name == "areset" else "areset"
            expect(is_there, f"it has {other}() and no {name}(): a run would mix the two ways")
        env = player.env
        begun = checked_reset(asyncio.run(env.areset(seed=subject.seed, options={})))
        action = good_action(player, begun, 0)
        awaited = checked_step(asyncio.run(env.astep(action)))
        if subject.spec.deterministic:
            first = player.reset(seed=subject.seed)
            expect(first.observation == begun.observation, "areset and reset differ")
            found = difference(awaited, player.step(action))
            expect(found is None, f"astep and step differ: {found}")


def check_corpus(subject: Subject) -> None:
    """``corpus()`` yields text."""
    with subject.open() as player:
        if not player.has("corpus"):
            raise SkipCheck("it has no corpus()")
        texts = list(islice(player.call("corpus"), 20))
        expect(texts, "corpus() yields nothing")
        expect(all(text in Text() for text in texts), "corpus() yields something other than text")


def check_close(subject: Subject) -> None:
    """``close`` may be called twice, before and after an episode."""
    if subject.given is not None:
        subject.given.close()
        subject.given.close()
        return
    with subject.open() as fresh:
        fresh.close()  # before any reset, and once more when the block ends
    with subject.open() as player:
        player.reset(seed=subject.seed)
        player.close()


BASIC: Final = ("make", "reset", "step")
"""What nearly all others need."""
_TASKS: Final = (*BASIC, "tasks")
_REPEATS: Final = (*_TASKS, "same_seed_same_episode")
_RANDOM: Final = (*_TASKS, "malformed_actions")
"""Of those whose random players call tools too."""

CHECKS: Final[Mapping[str, Check]] = {
    "make": check_make,
    "reset": check_reset,
    "step": check_step,
    "tasks": check_tasks,
    "malformed_actions": semantic_checks.check_malformed,
    "same_seed_same_episode": check_same_episode,
    "reset_in_the_middle": check_reset_in_the_middle,
    "gymnasium_check_env": runtime_checks.check_gymnasium,
    "global_random_state": runtime_checks.check_global_random_state,
    "interleaved_instances": runtime_checks.check_interleaved,
    "async_agrees": check_async,
    "corpus": check_corpus,
    "nothing_left_open": runtime_checks.check_nothing_left_open,
    "no_box_left": box_checks.check_no_sandbox_left,
    "splits_differ": split_checks.check_splits,
    "oracle_reaches_the_top": semantic_checks.check_oracle,
    "noop_stays_at_the_floor": semantic_checks.check_noop,
    "random_stays_below_the_oracle": semantic_checks.check_random,
    "same_verdict_twice": semantic_checks.check_same_verdict,
    "secrets_are_hidden": semantic_checks.check_secrets,
    "box_hides_secrets": box_checks.check_sandbox_hides_secrets,
    "reward_in_range": semantic_checks.check_reward_range,
    "within_timeouts": runtime_checks.check_timeouts,
    "close_twice": check_close,
}
"""Every check that one process can do, in the order in which they run."""

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
"""What a check cannot be judged without; those not named here need ``BASIC``."""
