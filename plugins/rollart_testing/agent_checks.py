"""``check_agent``: does an agent task keep the contract that the engine counts on?

Takes: an id, a task, or something that makes one, and its spec. Gives: check results. Never: needs
a model or the gateway: an endpoint of the standard library answers in its place.

The same names as for environments with steps mean the same here; where those ask ``oracle()``,
these ask ``solve()``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

from rollart_core.contracts.env import EnvSpec
from rollart_core.plugins import registry
from rollart_testing import agent_running, agent_semantics, split_checks
from rollart_testing.agent_play import (
    AgentSubject,
    difference,
    garbage_answer,
    plain_answer,
    play_agent,
    prepare,
    run,
)
from rollart_testing.endpoint import ScriptedEndpoint
from rollart_testing.env_checks import check_corpus, check_make
from rollart_testing.play import Player
from rollart_testing.results import CheckCourse, CheckResult, SkipCheck, expect, run_checks

if TYPE_CHECKING:
    from rollart_core.contracts.agent import AgentTask

Check = Callable[[AgentSubject], str | None]


def check_agent(
    task: str | AgentTask | Callable[[], AgentTask],
    *,
    spec: EnvSpec | None = None,
    seed: int = 0,
    num_tasks: int = 3,
    only: Sequence[str] | None = None,
) -> list[CheckResult]:
    """Check an agent task against the contract, in this process.

    Args:
        task: An id (or alias, or ``module:Class``), a class or function that makes a fresh one, or
            one task, which is closed at the end.
        spec: What it says of itself: splits, reward range, determinism; None: what its id says,
            or the defaults.
        seed: Seed of the episodes.
        num_tasks: Tasks of each split that are played.
        only: Names of the checks to run; None: all.

    Returns:
        One result per check; SKIP where the task has nothing to check.
    """
    made: Any = task
    if isinstance(task, str):
        spec = spec or registry.env_spec(task)
        made = partial(registry.make, task)
    subject = AgentSubject(made, spec, seed=seed, num_tasks=num_tasks)
    return run_agent_checks(subject, only=only)


def run_agent_checks(subject: AgentSubject, **course: Unpack[CheckCourse]) -> list[CheckResult]:
    """Run the checks of ``AGENT_CHECKS`` in their order.

    Args:
        subject: What to check.
        course: Which of them, and who is told; see :class:`rollart_testing.results.CheckCourse`.
    """
    checks = {name: partial(check, subject) for name, check in AGENT_CHECKS.items()}
    return run_checks(checks, AGENT_NEEDS, basic=AGENT_BASIC, **course)


def check_prepare(subject: AgentSubject) -> None:
    """``prepare`` answers an AgentStart, with a task and without, time after time."""
    with subject.open() as player:
        for options in ({}, {"split": next(iter(subject.spec.splits), "train"), "task": 0}):
            asyncio.run(prepare(player, options, subject.seed))


def check_run(subject: AgentSubject) -> str | None:
    """The program asks its endpoint, with its key, and ends by itself."""

    async def prepare_and_run(player: Player, server: ScriptedEndpoint) -> str:
        await prepare(player, {}, subject.seed)
        return await run(subject, player, server)

    wanted = subject.max_requests
    with subject.open() as player, ScriptedEndpoint(plain_answer, max_requests=wanted) as server:
        error = asyncio.run(prepare_and_run(player, server))
    expect(not server.strangers, f"its endpoint was sent {', '.join(server.strangers[:2])}")
    expect(not error or server.num_refused, f"run raised {error}")
    expect(server.asked, "it asked its endpoint nothing: there is no trajectory")
    return f"{len(server.asked)} requests"


def check_finish(subject: AgentSubject) -> None:
    """``finish`` answers an AgentResult, finite and of the right kinds."""
    with subject.open() as player:
        play_agent(subject, player, plain_answer, {})


def check_tasks(subject: AgentSubject) -> None:
    """Each split has tasks, in clusters or not, and a task begins alike each time."""
    with subject.open() as player:
        expect(subject.spec.splits, "the spec names no splits")
        for split in subject.spec.splits:
            player.task_clusters(split)
        for options in subject.tasks(player):
            first = asyncio.run(prepare(player, options, subject.seed))
            again = asyncio.run(prepare(player, options, subject.seed))
            same = first.prompt == again.prompt or not subject.spec.deterministic
            expect(same, f"prepare({options}) asks something else the second time")


def check_same_episode(subject: AgentSubject) -> None:
    """The same seed, options and answers give the same requests and verdict on a fresh task."""
    if not subject.spec.deterministic:
        raise SkipCheck("its spec says that it is not deterministic")
    for answer in (plain_answer, garbage_answer):
        for options in ({}, {"split": subject.spec.splits[0], "task": 0}):
            with subject.open() as player:
                first = play_agent(subject, player, answer, options)
            with subject.open() as player:
                second = play_agent(subject, player, answer, options)
            found = difference(first, second)
            expect(found is None, f"{options or 'no options'}: {found}")


def check_close(subject: AgentSubject) -> None:
    """``close`` may be called twice, before and after an episode."""
    if subject.given is not None:
        subject.given.close()
        subject.given.close()
        return
    with subject.open() as fresh:
        fresh.close()  # before any prepare, and once more when the block ends
    with subject.open() as player:
        asyncio.run(prepare(player, {}, subject.seed))
        player.close()


AGENT_BASIC: Final = ("make", "prepare", "run", "finish")
"""What nearly all others need."""
_TASKS: Final = (*AGENT_BASIC, "tasks")
_REPEATS: Final = (*_TASKS, "same_seed_same_episode")

AGENT_CHECKS: Final[Mapping[str, Check]] = {
    "make": check_make,
    "prepare": check_prepare,
    "run": check_run,
    "finish": check_finish,
    "tasks": check_tasks,
    "same_seed_same_episode": check_same_episode,
    "global_random_state": agent_running.check_global_random_state,
    "interleaved_instances": agent_running.check_interleaved,
    "refused_requests": agent_running.check_refused,
    "ends_when_cancelled": agent_running.check_cancelled,
    "corpus": check_corpus,
    "nothing_left_open": agent_running.check_nothing_left_open,
    "no_box_left": agent_running.check_no_sandbox_left,
    "splits_differ": split_checks.check_agent_splits,
    "oracle_reaches_the_top": agent_semantics.check_solution,
    "noop_stays_at_the_floor": agent_semantics.check_noop,
    "random_stays_below_the_oracle": agent_semantics.check_random,
    "same_verdict_twice": agent_semantics.check_same_verdict,
    "secrets_are_hidden": agent_semantics.check_secrets,
    "box_hides_secrets": agent_semantics.check_sandbox_hides_secrets,
    "malformed_actions": agent_semantics.check_malformed,
    "reward_in_range": agent_semantics.check_reward_range,
    "within_timeouts": agent_running.check_timeouts,
    "close_twice": check_close,
}
"""Every check that one process can do, in the order in which they run."""

AGENT_NEEDS: Final[Mapping[str, Sequence[str]]] = {
    "make": (),
    "prepare": ("make",),
    "run": ("make", "prepare"),
    "finish": ("make", "prepare", "run"),
    "close_twice": ("make", "prepare"),
    "interleaved_instances": _REPEATS,
    "nothing_left_open": (*AGENT_BASIC, "refused_requests", "ends_when_cancelled"),
    "no_box_left": (*AGENT_BASIC, "refused_requests"),
    "same_verdict_twice": _REPEATS,
    **dict.fromkeys(
        (
            "same_seed_same_episode",
            "splits_differ",
            "oracle_reaches_the_top",
            "noop_stays_at_the_floor",
            "random_stays_below_the_oracle",
            "secrets_are_hidden",
            "box_hides_secrets",
            "reward_in_range",
        ),
        _TASKS,
    ),
}
"""What a check cannot be judged without; those not named here need ``AGENT_BASIC``."""
