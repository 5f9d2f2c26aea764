"""Does an agent task reward what it means to reward, and keep its answers to itself?

Takes: a subject. Gives: checks that raise. Never: asks a model; idlers, dice and the task's own
expert play. The lines are drawn where those of environments with steps are.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final

from rollart_testing.agent_play import (
    AgentSubject,
    Played,
    calls_of,
    difference,
    edge_answer,
    garbage_answer,
    garbage_from,
    noop_answer,
    plain_answer,
    play_agent,
    prepare,
    random_answer,
)
from rollart_testing.agent_running import solved
from rollart_testing.endpoint import Answer
from rollart_testing.play import GARBAGE, Options, Player
from rollart_testing.results import SkipCheck, expect
from rollart_testing.sandbox_checks import sandbox_of, searched, telling_lines
from rollart_testing.semantic_checks import (
    CLOSE,
    PROBES,
    expect_far_from_top,
    expect_floor,
    floor_of,
    random_tasks,
    secrets_of,
    shows,
    texts_of,
)

_POLICIES: Final[tuple[Answer, ...]] = (plain_answer, random_answer("verdict"), garbage_answer)


def check_solution(subject: AgentSubject) -> str | None:
    """``solve`` earns the top of the reward range on the first tasks of every split."""
    top = subject.spec.reward_range[1]
    if math.isinf(top):
        raise SkipCheck("its reward range has no top")
    with subject.open() as player:
        if not player.has("solve"):
            raise SkipCheck("it has no solve()")
        tasks, played = subject.tasks(player), 0
        for options in subject.paced(tasks):
            reward, success = asyncio.run(solved(player, options, subject.seed))
            expect(
                math.isclose(reward, top, abs_tol=CLOSE),
                f"{options}: its solve() earned {reward:g}, and the top is {top:g}",
            )
            expect(success in (None, True), f"{options}: top reward, but success is False")
            played += 1
    return None if played == len(tasks) else f"{played} of {len(tasks)} tasks, for they take long"


def check_noop(subject: AgentSubject) -> None:
    """A policy that says nothing, turn after turn, earns no more than the floor."""
    floor_of(subject)  # where there is none, nothing need be played
    with subject.open() as player:
        earned = [
            play_agent(subject, player, noop_answer, options).result.reward
            for options in subject.paced(subject.tasks(player))
        ]
    expect_floor(subject, earned, "answers")


def check_random(subject: AgentSubject) -> str:
    """Random answers earn clearly less than the top."""
    with subject.open() as player:
        earned = [
            play_agent(subject, player, random_answer(n), options, seed=n).result.reward
            for n, options in random_tasks(subject, player)
        ]
    return expect_far_from_top(subject, earned, "answers")


def check_same_verdict(subject: AgentSubject) -> None:
    """The same answers earn the same again, on one task, with other episodes in between."""
    if not subject.spec.deterministic:
        raise SkipCheck("its spec says that it is not deterministic")
    with subject.open() as player:
        tasks = subject.tasks(player)[: max(2, len(subject.spec.splits))]
        can_solve = player.has("solve")
        for options in subject.paced(tasks):
            first = [play_agent(subject, player, answer, options) for answer in _POLICIES]
            best = asyncio.run(solved(player, options, subject.seed)) if can_solve else None
            for one, answer in zip(first, _POLICIES, strict=True):
                found = difference(one, play_agent(subject, player, answer, options))
                expect(found is None, f"{options}: {found}")
            again = asyncio.run(solved(player, options, subject.seed)) if can_solve else None
            expect(best == again, f"{options}: its solve() earned {best}, and then {again}")


def check_secrets(subject: AgentSubject) -> None:
    """No secret of the task stands in what the program shows to the policy."""
    answers: tuple[Answer, ...] = (
        garbage_answer,
        lambda asked: PROBES[asked.turn % len(PROBES)],
        random_answer("secrets"),
        edge_answer(0),
    )
    with subject.open() as player:
        if not player.has("secrets"):
            raise SkipCheck("it has no secrets()")
        for options in subject.paced(subject.tasks(player)):
            for answer in answers:
                played = play_agent(subject, player, answer, options)
                _look(played, secrets_of(player), options)


def _look(played: Played, secrets: list[str], options: Options) -> None:
    shown: list[tuple[str, str]] = [("the prompt", played.start.prompt)]
    shown += texts_of("info", dict(played.start.info))
    said = ""
    for n, asked in enumerate(played.asked):
        shown += texts_of(f"request {n}", [*asked.messages, *asked.tools])
        said += "\n" + str(asked.answer)
    for secret in secrets:
        if secret.casefold() in said.casefold():
            continue  # the policy said it itself: it may read it
        for place, text in shown:
            expect(not shows(text, secret), f"{options}: {place} shows the secret {secret[:40]!r}")


def check_sandbox_hides_secrets(subject: AgentSubject) -> str | None:
    """No file of the agent's box shows a secret of the task when the program begins."""
    num_files, is_cut = 0, False
    with subject.open() as player:
        if not player.has("secrets"):
            return "it has no secrets()"
        for options in subject.paced(subject.tasks(player)):
            found = _searched(player, options, subject.seed)
            if found is None:
                return "it has no box"
            num_files, is_cut = num_files + found["num_files"], is_cut or found["is_cut"]
    return f"{num_files} files looked at" + (", not all: time was over" if is_cut else "")


def _searched(player: Player, options: Options, seed: int) -> dict[str, Any] | None:
    start = asyncio.run(prepare(player, options, seed))
    box = sandbox_of(player)
    if box is None:
        return None
    found = searched(box, telling_lines(player.call("secrets"), start.prompt))
    where, counts = found.get("where"), found.get("lines") or (0, 0)
    expect(
        where is None,
        f"{options}: {where} of its box holds {counts[0]} of {counts[1]} lines of a secret",
    )
    return found


def check_malformed(subject: AgentSubject) -> None:
    """A program takes whatever a policy answers: nonsense, nothing, calls that make no sense."""
    with subject.open() as player:
        for first in range(len(GARBAGE)):
            _expect_no_fault(play_agent(subject, player, garbage_from(first), {}), "malformed")
        played = play_agent(subject, player, edge_answer(0), {})
        _expect_no_fault(played, "fitting")
        most = max((len(calls_of(asked)) for asked in played.asked), default=0)
        for first in subject.paced(range(len(played.asked), most, subject.max_requests), least=0):
            _expect_no_fault(play_agent(subject, player, edge_answer(first), {}), "fitting")


def _expect_no_fault(played: Played, what: str) -> None:
    after = f"after {len(played.asked)} {what} answers"
    expect(not played.fault, f"{after} run raised {played.fault}")


def check_reward_range(subject: AgentSubject) -> None:
    """The reward of every episode lies within the declared range."""
    low, high = subject.spec.reward_range
    with subject.open() as player:
        for options in subject.paced(subject.tasks(player)):
            rewards = [
                play_agent(subject, player, answer, options).result.reward
                for answer in (*_POLICIES, noop_answer)
            ]
            if player.has("solve"):
                rewards.append(asyncio.run(solved(player, options, subject.seed))[0])
            for reward in rewards:
                expect(
                    low - CLOSE <= reward <= high + CLOSE,
                    f"{options}: a reward of {reward:g} is outside {low:g} to {high:g}",
                )
