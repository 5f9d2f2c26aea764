"""Episodes of agent tasks as the checks play them: a function is the policy, every call is timed.

Takes: a player of an agent task, and what its policy answers. Gives: what was asked, what came of
it, and how the program ended. Never: judges more than the form of an answer, or leaves a program
running.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import numpy as np

from rollart_core.contracts.agent import AgentResult, AgentStart, Recorded
from rollart_core.contracts.env import EnvSpec, Timeouts
from rollart_core.rollout.tools.action import Call
from rollart_core.rollout.tools.draw import drawn_call, edge_calls
from rollart_core.types import Message, ToolSpec
from rollart_testing.answers import plain
from rollart_testing.endpoint import Answer, Json, RecordedRequest, ScriptedEndpoint, call_tool
from rollart_testing.play import GARBAGE, Options, Player, Subject
from rollart_testing.results import CheckFailed, expect, raised

MAX_REQUESTS: Final = 12
"""Answers an episode of a check gives at most; then its budget is spent."""
_NEVER_SAID = EnvSpec(id="unregistered/Agent-v0", entry_point="unregistered:Agent", kind="agent")


class AgentSubject(Subject):
    """The agent task under check: how to open it, and what it says of itself.

    Args:
        task: A class or function that makes a fresh one, or one task, which stays open.
        spec: What it says of itself; None: the defaults.
        run_s: Seconds for the program of one episode.
        others: As for :class:`~rollart_testing.play.Subject`.
    """

    def __init__(
        self, task: Any, spec: EnvSpec | None = None, *, run_s: float = 60.0, **others: Any
    ) -> None:
        super().__init__(task, spec or _NEVER_SAID, **others)
        self.run_s = run_s

    @property
    def max_requests(self) -> int:
        """Answers that an episode gets before its budget is spent."""
        return max(2, min(self.spec.max_turns, MAX_REQUESTS))


@dataclass(frozen=True, slots=True)
class Played:
    """One episode."""

    start: AgentStart
    asked: tuple[RecordedRequest, ...]
    result: AgentResult
    error: str = ""
    """What ``run`` raised; empty when it returned."""
    num_refused: int = 0
    strangers: tuple[str, ...] = ()

    @property
    def seen(self) -> list[Any]:
        """What the policy was shown, as plain values: the prompt and all that was asked."""
        asked = [[plain(list(a.messages)), plain(list(a.tools))] for a in self.asked]
        return [self.start.prompt, plain(dict(self.start.info)), *asked]

    @property
    def fault(self) -> str:
        """What ``run`` raised, unless its budget was spent: then it may end as it likes."""
        return "" if self.num_refused else self.error

    @property
    def verdict(self) -> dict[str, object]:
        """What came of it."""
        return cast("dict[str, object]", plain(_result_values(self.result)))


def play_agent(
    subject: AgentSubject,
    player: Player,
    answer: Answer,
    options: Options,
    *,
    seed: int | None = None,
    max_requests: int | None = None,
) -> Played:
    """Play one episode on a loop of its own.

    Args:
        subject: Whose limits hold.
        player: Of the task.
        answer: The policy.
        options: ``task`` and ``split``, or neither.
        seed: Of the episode; None: the subject's.
        max_requests: Answers before the rest is refused; None: the subject's.
    """
    wanted = subject.max_requests if max_requests is None else max_requests
    at = subject.seed if seed is None else seed
    with ScriptedEndpoint(answer, max_requests=wanted) as server:
        return asyncio.run(episode(subject, player, server, options, at))


async def episode(
    subject: AgentSubject, player: Player, server: ScriptedEndpoint, options: Options, seed: int
) -> Played:
    """Prepare, run and finish."""
    start = await prepare(player, options, seed)
    error = await run(subject, player, server)
    recorded = Recorded(_as_messages(server), len(server.asked), server.num_refused > 0)
    result = await finish(player, recorded)
    return Played(
        start, tuple(server.asked), result, error, server.num_refused, tuple(server.strangers)
    )


async def prepare(player: Player, options: Options, seed: int) -> AgentStart:
    """Begin an episode, and look at the form of the answer."""
    with player.during("prepare"):
        start = await player.env.prepare(seed=seed, options=options)
    expect(isinstance(start, AgentStart), f"prepare returned {start!r:.60}, not an AgentStart")
    assert isinstance(start, AgentStart)
    is_text = isinstance(start.prompt, str) and start.prompt.strip()
    expect(is_text, f"prepare's prompt is {start.prompt!r:.60}, not a text that says something")
    expect(hasattr(start.info, "keys"), f"prepare's info is {start.info!r:.60}, not a mapping")
    return start


async def run(subject: AgentSubject, player: Player, server: ScriptedEndpoint) -> str:
    """Run the program; return what it raised, empty when it returned.

    Raises:
        CheckFailed: When it does not end in time.
    """
    limit = asyncio.timeout(subject.run_s)
    try:
        async with limit:
            with player.watch.during("run"):
                await player.env.run(server.endpoint)
    except Exception as e:
        if limit.expired():
            raise CheckFailed(
                f"its program did not end within {subject.run_s:g} s, after "
                f"{len(server.asked)} answers and {server.num_refused} refusals"
            ) from e
        return raised(e)
    return ""


async def finish(player: Player, recorded: Recorded) -> AgentResult:
    """Let the task judge, and look at the form of the verdict."""
    with player.during("finish"):
        result = await player.env.finish(recorded)
    expect(isinstance(result, AgentResult), f"finish returned {result!r:.60}, not an AgentResult")
    assert isinstance(result, AgentResult)
    for name, value in (("reward", result.reward), *_components(result)):
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        expect(is_number and math.isfinite(value), f"finish's {name} is {value!r}")
    flags = (("success", result.success), ("truncated", result.truncated))
    for name, flag in flags:
        is_flag = isinstance(flag, bool | np.bool_) or (flag is None and name == "success")
        expect(is_flag, f"finish's {name} is {flag!r}")
    return result


def difference(one: Played, two: Played) -> str | None:
    """Return where two episodes part and in what; None when they are alike."""
    for n, (a, b) in enumerate(zip(one.seen, two.seen, strict=False)):
        if a != b:
            where = ("the prompt", "the info of prepare")[n] if n < 2 else f"request {n - 1}"
            return f"{where} is another: {_short(a)} against {_short(b)}"
    if len(one.asked) != len(two.asked):
        return f"{len(one.asked)} requests, then {len(two.asked)}"
    if one.verdict != two.verdict:
        return f"{_short(one.verdict)}, and for the same answers {_short(two.verdict)}"
    return None


def noop_answer(asked: RecordedRequest) -> str:
    """Say nothing."""
    return ""


def plain_answer(asked: RecordedRequest) -> str:
    """Say what says nothing."""
    return "ok"


def garbage_from(first: int) -> Answer:
    """Return a policy that says what no program expects, and calls tools without sense.

    Args:
        first: Which piece of garbage is the first.
    """

    def answer(asked: RecordedRequest) -> str | Json:
        turn = first + asked.turn
        if asked.tools and turn % 2 == 0:
            name = str(asked.tools[0].get("function", {}).get("name", "tool"))
            half, unknown = call_tool(name, '{"half": '), call_tool("no_such_tool", {})
            return (half, unknown, call_tool(name, "[]"), call_tool(name, {}))[turn // 2 % 4]
        return GARBAGE[turn % len(GARBAGE)]

    return answer


garbage_answer: Final = garbage_from(0)


def random_answer(key: object) -> Answer:
    """Return a policy that says random words, half of them words it was shown.

    Args:
        key: What the draws follow from, beside the turn.
    """

    def answer(asked: RecordedRequest) -> str | Json:
        rng = random.Random(f"random answer/{key}/{asked.turn}")
        words = " ".join(str(m.get("content") or "") for m in asked.messages).split() or ["ok"]
        said = [_word(rng, words) for _ in range(rng.randint(1, 3))]
        tools = [tool for tool in asked.tools if tool.get("function", {}).get("name")]
        if tools and rng.random() < 0.7:
            call = drawn_call(rng, cast("list[ToolSpec]", tools), partial(_word, rng, words))
            return _call_message(call, asked)
        return " ".join(said)

    return answer


def edge_answer(first: int) -> Answer:
    """Return a policy that calls every tool at the edges of what its schema allows, in turn.

    Args:
        first: Which call is the first.
    """

    def answer(asked: RecordedRequest) -> str | Json:
        calls = calls_of(asked)
        return _call_message(calls[(first + asked.turn) % len(calls)], asked) if calls else "ok"

    return answer


def calls_of(asked: RecordedRequest) -> list[Call]:
    """Return the calls at the edges of the tools of a request; none of what is no tool."""
    try:
        return edge_calls(cast("Sequence[ToolSpec]", asked.tools))
    except ValueError:
        return []


def limits_s(timeouts: Timeouts) -> dict[str, float]:
    """Return the seconds that a spec gives to each call."""
    return {
        "prepare": timeouts.reset_s,
        "finish": timeouts.step_s,
        "close": timeouts.close_s,
    }


def _word(rng: random.Random, words: list[str]) -> str:
    if rng.random() < 0.5:
        return rng.choice(words).strip(".,:;!?'\"()`*")
    return str(rng.randint(0, 99)) if rng.random() < 0.5 else rng.choice("abcdefgh") * 3


def _call_message(call: Call, asked: RecordedRequest) -> Json:
    return call_tool(call.name, call.arguments, f"call_{asked.turn}")


def _as_messages(server: ScriptedEndpoint) -> tuple[Message, ...]:
    said = [{**m, "content": m.get("content") or ""} for m in server.messages]
    return tuple(cast("Message", message) for message in said)


def _result_values(result: AgentResult) -> dict[str, Any]:
    whole = replace(result, components=dict(result.components))
    return {name: getattr(whole, name) for name in whole.__slots__}


def _components(result: AgentResult) -> list[tuple[str, Any]]:
    return [(f"component {name!r}", value) for name, value in dict(result.components).items()]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
