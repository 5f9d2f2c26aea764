"""``check_agent``: check that an agent task follows the contract of the engine.

Takes: an id, a task or a factory of tasks, and its spec. Gives: check results. Never: needs a model
or the gateway; a local endpoint answers instead.

This module has the checks of a program. The other checks are shared with environments; they call
``solve()`` instead of ``oracle()``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

from rollart_core.contracts.env import EnvSpec
from rollart_core.plugins import registry
from rollart_testing.agent_play import (
    AgentEpisode,
    AgentSubject,
    calls_of,
    cancelled,
    plain_answer,
    prepare,
    run,
)
from rollart_testing.endpoint import ScriptedEndpoint
from rollart_testing.play import GARBAGE, GOOD, Player, Policy
from rollart_testing.results import CheckCourse, CheckResult, expect, run_checks
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
        task: An id (or alias, or ``module:Class``), a class or function that creates a new task, or
            one task, which is closed at the end.
        spec: Its spec: splits, reward range, determinism. None means the spec of its id, or the
            defaults.
        seed: Seed of the episodes.
        num_tasks: Number of tasks played per split.
        only: Names of the checks to run; None means all.

    Returns:
        One result per check; SKIP if the task has nothing to check.
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
        subject: The task under check.
        course: The checks to run and the progress callback; see
            :class:`rollart_testing.results.CheckCourse`.
    """
    checks = {name: partial(check, subject) for name, check in AGENT_CHECKS.items()}
    return run_checks(checks, AGENT_NEEDS, basic=AGENT_BASIC, **course)


def check_prepare(subject: AgentSubject) -> None:
    """``prepare`` returns an AgentStart, with a task and without, in every episode."""
    with subject.open() as player:
        for options in ({}, {"split": next(iter(subject.spec.splits), "train"), "task": 0}):
            asyncio.run(prepare(player, options, subject.seed))


def check_run(subject: AgentSubject) -> str | None:
    """The program calls its endpoint with its key, and ends without being cancelled."""

    async def prepare_and_run(player: Player, server: ScriptedEndpoint) -> str:
        await prepare(player, {}, subject.seed)
        return await run(subject, player, server)

    wanted = subject.max_turns
    with subject.open() as player, ScriptedEndpoint(plain_answer, max_requests=wanted) as server:
        error = asyncio.run(prepare_and_run(player, server))
    expect(not server.strangers, f"its endpoint received {', '.join(server.strangers[:2])}")
    expect(not error or server.num_refused, f"run raised {error}")
    expect(server.asked, "it sent no request to its endpoint: there is no trajectory")
    return f"{len(server.asked)} requests"


def check_finish(subject: AgentSubject) -> None:
    """``finish`` returns an AgentResult with finite values of the right types."""
    with subject.open() as player:
        subject.play(player, GOOD, {})


def check_refused(subject: AgentSubject) -> None:
    """The program ends after its requests are refused, and its result can be scored."""
    with subject.open() as player:
        for answers in (0, 1):
            subject.play(player, GOOD, {}, max_turns=answers)


def check_cancelled(subject: AgentSubject) -> str:
    """A program that waits for a response ends soon after ``run`` is cancelled."""
    took_s = cancelled(subject)
    limit_s = subject.spec.timeouts.close_s
    expect(
        took_s <= limit_s,
        f"its program runs for {took_s:.2g} s after run was cancelled and its endpoint closed; "
        f"the close_s of its spec allows {limit_s:g} s",
    )
    return f"after {took_s:.2g} s"


def check_malformed(subject: AgentSubject) -> None:
    """A program handles any response of a policy: garbage, empty text, invalid calls."""
    with subject.open() as player:
        for first in range(len(GARBAGE)):
            played = subject.play(player, Policy("malformed", first), {})
            _expect_no_fault(played, "malformed")
        played = subject.play(player, Policy("edge", 0), {})
        _expect_no_fault(played, "fitting")
        most = max((len(calls_of(asked)) for asked in played.asked), default=0)
        for first in subject.paced(range(len(played.asked), most, subject.max_turns), least=0):
            _expect_no_fault(subject.play(player, Policy("edge", first), {}), "fitting")


def _expect_no_fault(played: AgentEpisode, what: str) -> None:
    after = f"after {played.num_turns} {what} responses"
    expect(not played.fault, f"{after} run raised {played.fault}")


AGENT_BASIC: Final = ("make", "prepare", "run", "finish")
"""The checks that nearly all others depend on."""
_TASKS: Final = (*AGENT_BASIC, "tasks")
_REPEATS: Final = (*_TASKS, "same_seed_same_episode")

AGENT_CHECKS: Final[Mapping[str, Check]] = {
    "make": check_make,
    "prepare": check_prepare,
    "run": check_run,
    "finish": check_finish,
    "tasks": check_tasks,
    "same_seed_same_episode": check_same_episode,
    "global_random_state": check_global_random_state,
    "interleaved_instances": check_interleaved,
    "refused_requests": check_refused,
    "ends_when_cancelled": check_cancelled,
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
    "malformed_actions": check_malformed,
    "reward_in_range": check_reward_range,
    "within_timeouts": check_timeouts,
    "close_twice": check_close,
}
"""All checks that run in one process, in this order."""

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
"""Check -> checks that it depends on; those not listed depend on ``AGENT_BASIC``."""
