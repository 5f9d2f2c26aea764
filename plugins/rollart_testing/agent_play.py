"""Play episodes of agent tasks for the checks: a function is the policy, every call is timed.

Takes: a subject, a policy and a task. Gives: the requests, the result, and how the program ended.
Never: checks more than the form of a value, or leaves a program or an endpoint running.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, Literal, cast

import numpy as np

from rollart_core.contracts.agent import AgentResult, AgentStart, Recorded
from rollart_core.contracts.env import EnvSpec
from rollart_core.rollout.tools.action import Call
from rollart_core.rollout.tools.draw import drawn_call, edge_calls
from rollart_core.types import Message, Observation, ToolSpec
from rollart_testing.answers import plain, texts_of
from rollart_testing.endpoint import Answer, Json, RecordedRequest, ScriptedEndpoint, call_tool
from rollart_testing.play import (
    EXPERT,
    GARBAGE,
    GOOD,
    MALFORMED,
    NOOP,
    PROBES,
    Episode,
    Options,
    Player,
    Policy,
    Subject,
    View,
)
from rollart_testing.results import CheckFailed, expect, raised

MAX_REQUESTS: Final = 12
"""The maximum number of responses in an episode of a check; then its budget is spent."""
NUM_INSTANCES: Final = 8
_BARRIER_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEpisode(Episode):
    """The requests of a program, and its result."""

    acts: ClassVar[str] = "answers"
    max_chars: ClassVar[int] = 80

    start: AgentStart
    asked: Sequence[RecordedRequest]
    result: AgentResult
    strangers: Sequence[str] = ()

    @property
    def verdict(self) -> dict[str, object]:
        """The result."""
        whole = replace(self.result, components=dict(self.result.components))
        values = {name: getattr(whole, name) for name in whole.__slots__}
        return cast("dict[str, object]", plain(values))

    def pages(self) -> Iterator[tuple[str, Any]]:
        """Yield the prompt and all requests."""
        yield "the prompt differs:", self.start.prompt
        yield "the info of prepare differs:", plain(dict(self.start.info))
        for n, asked in enumerate(self.asked, start=1):
            yield (
                f"request {n} differs:",
                [plain(list(p)) for p in (asked.messages, asked.tools)],
            )

    def outcomes(self) -> list[Any]:
        """Return the requests and the result."""
        return [[page for _, page in self.pages()], self.verdict]

    def notes(self) -> list[dict[str, Any]]:
        """Return each request, and the result."""
        return [*({"request": page} for _, page in self.pages()), {"verdict": self.verdict}]


class AgentSubject(Subject):
    """An agent task under check, or a factory of one.

    Args:
        made: A class or function that creates a new task, or one task, which stays open.
        spec: Its spec; None means the defaults.
        run_s: Time limit in seconds for the program of one episode.
        others: See :class:`~rollart_testing.play.Subject`.
    """

    default_spec = EnvSpec(
        id="unregistered/Agent-v0", entry_point="unregistered:Agent", kind="agent"
    )
    expert, advice = "solve", ""
    compared = (GOOD,)
    few_turns = 1
    num_warm_ups, num_rounds, rounds = 1, 3, "3 complete and 3 cancelled episodes"
    noun, begin_call, good_acts = "task", "prepare", "plain responses"
    returns, its_expert = "reward", "its solve()"
    no_secrets, no_sandbox = "it has no secrets()", "it has no sandbox"

    def __init__(
        self, made: object, spec: EnvSpec | None = None, *, run_s: float = 60.0, **others: Any
    ) -> None:
        super().__init__(made, spec, **others)
        self.run_s = run_s

    @property
    def max_turns(self) -> int:
        """The number of responses in an episode before its budget is spent."""
        return max(2, min(self.spec.max_turns, MAX_REQUESTS))

    @property
    def limits_s(self) -> dict[str, float]:
        """The time limit in seconds that the spec gives to each call."""
        timeouts = self.spec.timeouts
        return {"prepare": timeouts.reset_s, "finish": timeouts.step_s, "close": timeouts.close_s}

    def begin(
        self, player: Player, options: Options | None = None, seed: int | None = None
    ) -> Observation:
        """Begin an episode, and return its prompt."""
        at = self.seed if seed is None else seed
        return asyncio.run(prepare(player, options or {}, at)).prompt

    def play(
        self,
        player: Player,
        policy: Policy,
        options: Options,
        *,
        seed: int | None = None,
        max_turns: int | None = None,
    ) -> AgentEpisode:
        """Play one episode on its own event loop; the expert sends no requests."""
        at = self.seed if seed is None else seed
        if policy is EXPERT:
            return asyncio.run(_solved(player, options, at))
        most = self.max_turns if max_turns is None else min(max_turns, self.max_turns)
        with ScriptedEndpoint(answering(policy), max_requests=most) as server:
            return asyncio.run(episode(self, player, server, policy, options, at))

    def verdict_again(self, player: Player, episode: AgentEpisode) -> str | None:
        """Give the same responses again; return where the two episodes differ."""
        again = self.play(player, episode.policy, episode.options, seed=episode.seed)
        if episode.policy is not EXPERT:
            return episode.difference(again)
        one, two = (episode.earned, episode.success), (again.earned, again.success)
        return None if one == two else f"its solve() earned {one}, then {two}"

    def players(self, player: Player) -> Iterator[Policy]:
        """Yield the policies for checks of results and returns."""
        yield from (GOOD, Policy("random", "verdict"), MALFORMED)
        if player.has(self.expert):
            yield EXPERT

    def random_players(self, player: Player) -> Iterator[tuple[Literal["random", "calls"], str]]:
        """Yield random policies, which also call tools."""
        yield "random", "answers"

    def play_varied(self, player: Player) -> None:
        """Play with another seed."""
        self.play(player, GOOD, {}, seed=self.seed + 1)

    def instances(self) -> Iterator[tuple[Policy, int]]:
        """Yield policy and seed of each instance, as many as the budget allows."""
        for n in self.paced(range(NUM_INSTANCES), least=2):
            yield Policy("random", n), self.seed

    def play_together(self, alone: Sequence[AgentEpisode]) -> list[AgentEpisode]:
        """Play all concurrently; each gets its first response after all have sent a request."""
        barrier = threading.Barrier(len(alone))

        def after_all(answer: Answer) -> Answer:
            def wait(asked: RecordedRequest) -> str | Json:
                if asked.turn == 0:
                    with suppress(threading.BrokenBarrierError):
                        barrier.wait(_BARRIER_S)
                return answer(asked)

            return wait

        def played(player: Player, server: ScriptedEndpoint, one: AgentEpisode) -> AgentEpisode:
            return asyncio.run(episode(self, player, server, one.policy, one.options, one.seed))

        with ExitStack() as stack:
            players: list[Player] = []
            for _ in alone:
                players.append(self.fresh())
                stack.callback(players[-1].close)
            servers = [
                ScriptedEndpoint(after_all(answering(one.policy)), max_requests=self.max_turns)
                for one in alone
            ]
            for server in servers:
                stack.enter_context(server)
            # One thread and one event loop each, as in the engine.
            with ThreadPoolExecutor(len(alone)) as threads:
                together = list(threads.map(played, players, servers, alone))
        for n, (one, other) in enumerate(zip(alone, together, strict=True)):
            where = f"episode {n} of {len(alone)}"
            expect(not other.strangers, f"{where} received {', '.join(other.strangers[:2])}")
            expect(one.fault == other.fault, f"{where}: run raised {other.fault or 'nothing'}")
        return together

    def fewer(self, num_played: int, slowest_s: float) -> str | None:
        """Return why fewer instances were played than wanted; None if all were."""
        return None if num_played == NUM_INSTANCES else f"{num_played} instances: they are slow"

    def open_and_close(self) -> None:
        """Play an episode with a spent budget and a cancelled one, each on a new task."""
        if self.given is not None:
            self.fresh()  # raises with the reason
        with self.open() as player:
            self.play(player, GOOD, {}, max_turns=2)
        cancelled(self)

    def views(self, player: Player, tasks: Iterable[Options]) -> Iterator[View]:
        """Yield all that the program of an episode shows to the policy."""
        ways = (MALFORMED, Policy("probe"), Policy("random", "secrets"), Policy("edge"))
        for options in tasks:
            for policy in ways:
                yield _view(self.play(player, policy, options))

    def early_pages(self, player: Player, options: Options) -> Iterator[tuple[str, Observation]]:
        """Yield the prompt; the program starts after it."""
        yield str(options), self.begin(player, options)


async def episode(
    subject: AgentSubject,
    player: Player,
    server: ScriptedEndpoint,
    policy: Policy,
    options: Options,
    seed: int,
) -> AgentEpisode:
    """Prepare, run and finish."""
    start = await prepare(player, options, seed)
    error = await run(subject, player, server)
    recorded = Recorded(_as_messages(server), len(server.asked), server.num_refused > 0)
    return AgentEpisode(
        policy=policy,
        options=options,
        seed=seed,
        # A program with a spent budget may end in any way.
        fault="" if server.num_refused else error,
        num_turns=len(server.asked),
        infos=[start.info],
        start=start,
        asked=tuple(server.asked),
        strangers=tuple(server.strangers),
        **_judged(await finish(player, recorded)),
    )


async def _solved(player: Player, options: Options, seed: int) -> AgentEpisode:
    """Run the expert on the task."""
    start = await prepare(player, options, seed)
    with player.during("solve"):
        await player.env.solve()
    return AgentEpisode(
        policy=EXPERT,
        options=options,
        seed=seed,
        num_turns=0,
        infos=[start.info],
        start=start,
        asked=(),
        **_judged(await finish(player, Recorded())),
    )


def _view(played: AgentEpisode) -> View:
    places = [("the prompt", played.start.prompt), *texts_of("info", dict(played.start.info))]
    for n, asked in enumerate(played.asked):
        places += texts_of(f"request {n}", [*asked.messages, *asked.tools])
    return View(str(played.options), places, [str(asked.answer) for asked in played.asked])


def _judged(result: AgentResult) -> dict[str, Any]:
    return {"result": result, "earned": float(result.reward), "success": result.success}


async def prepare(player: Player, options: Options, seed: int) -> AgentStart:
    """Begin an episode, and check the form of the returned value."""
    with player.during("prepare"):
        start = await player.env.prepare(seed=seed, options=options)
    expect(isinstance(start, AgentStart), f"prepare returned {start!r:.60}, not an AgentStart")
    assert isinstance(start, AgentStart)
    is_text = isinstance(start.prompt, str) and start.prompt.strip()
    expect(is_text, f"prepare's prompt is {start.prompt!r:.60}, not a non-empty string")
    expect(hasattr(start.info, "keys"), f"prepare's info is {start.info!r:.60}, not a mapping")
    return start


async def run(subject: AgentSubject, player: Player, server: ScriptedEndpoint) -> str:
    """Run the program; return what it raised, empty if it returned.

    Raises:
        CheckFailed: If it does not end in time.
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
                f"{len(server.asked)} responses and {server.num_refused} refusals"
            ) from e
        return raised(e)
    return ""


async def finish(player: Player, recorded: Recorded) -> AgentResult:
    """Let the task score the episode, and check the form of the result."""
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


def cancelled(subject: AgentSubject) -> float:
    """Cancel a program that waits for its first response; return the seconds until it ended."""
    asked, over = threading.Event(), threading.Event()

    def answer(request: RecordedRequest) -> str:
        asked.set()
        over.wait(subject.run_s)
        return ""

    async def program(player: Player, server: ScriptedEndpoint) -> float:
        await prepare(player, {}, subject.seed)
        loop, running = asyncio.get_running_loop(), asyncio.current_task()
        assert running is not None
        began: list[float] = []

        def cancel() -> None:
            if asked.wait(subject.run_s) and not over.is_set():
                began.append(time.monotonic())
                server.stop_answering()
                loop.call_soon_threadsafe(running.cancel)
                over.set()  # closing the endpoint unblocks a program that blocks the loop

        canceller = threading.Thread(target=cancel)
        canceller.start()
        try:
            await player.env.run(server.endpoint)
        except (Exception, asyncio.CancelledError):
            running.uncancel()
        ended = time.monotonic()
        over.set()
        asked.set()
        canceller.join()
        expect(began, "run ended before it sent a request")
        return ended - began[0]

    with subject.open() as player, ScriptedEndpoint(answer) as server:
        return asyncio.run(program(player, server))


def answering(policy: Policy) -> Answer:
    """Return the response function of a policy."""
    if policy.way in _KEYED:
        return _KEYED[policy.way](cast("Any", policy.key))
    return _ANSWERS[policy.way]


def noop_answer(asked: RecordedRequest) -> str:
    """Respond with empty text."""
    return ""


def plain_answer(asked: RecordedRequest) -> str:
    """Respond with blank texts."""
    return "ok"


def garbage_from(first: int) -> Answer:
    """Return a policy that sends unexpected texts and invalid tool calls.

    Args:
        first: Index of the first piece of garbage.
    """

    def answer(asked: RecordedRequest) -> str | Json:
        turn = first + asked.turn
        if asked.tools and turn % 2 == 0:
            name = str(asked.tools[0].get("function", {}).get("name", "tool"))
            half, unknown = call_tool(name, '{"half": '), call_tool("no_such_tool", {})
            return (half, unknown, call_tool(name, "[]"), call_tool(name, {}))[turn // 2 % 4]
        return GARBAGE[turn % len(GARBAGE)]

    return answer


def random_answer(key: object) -> Answer:
    """Return a policy that sends random words, half of them from the request.

    Args:
        key: Seed of the draws, with the turn.
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
    """Return a policy that calls every tool in turn with edge values of its schema.

    Args:
        first: Index of the first call.
    """

    def answer(asked: RecordedRequest) -> str | Json:
        calls = calls_of(asked)
        return _call_message(calls[(first + asked.turn) % len(calls)], asked) if calls else "ok"

    return answer


def calls_of(asked: RecordedRequest) -> list[Call]:
    """Return calls with edge values for the tools of a request; malformed tools are left out."""
    try:
        return edge_calls(cast("Sequence[ToolSpec]", asked.tools))
    except ValueError:
        return []


def _word(rng: random.Random, words: list[str]) -> str:
    if rng.random() < 0.5:
        return rng.choice(words).strip(".,:;!?'\"()`*")
    return str(rng.randint(0, 99)) if rng.random() < 0.5 else rng.choice("abcdefgh") * 3


def _call_message(call: Call, asked: RecordedRequest) -> Json:
    return call_tool(call.name, call.arguments, f"call_{asked.turn}")


def _as_messages(server: ScriptedEndpoint) -> tuple[Message, ...]:
    said = [{**m, "content": m.get("content") or ""} for m in server.messages]
    return tuple(cast("Message", message) for message in said)


def _components(result: AgentResult) -> list[tuple[str, Any]]:
    return [(f"component {name!r}", value) for name, value in dict(result.components).items()]


def _probe(asked: RecordedRequest) -> str:
    return PROBES[asked.turn % len(PROBES)]


_ANSWERS: Final[dict[str, Answer]] = {
    GOOD.way: plain_answer,
    NOOP.way: noop_answer,
    "probe": _probe,
}
_KEYED: Final[dict[str, Callable[[Any], Answer]]] = {
    MALFORMED.way: garbage_from,
    "random": random_answer,
    "edge": edge_answer,
}
