"""Episodes of agent tasks as the checks play them: a function is the policy, every call is timed.

Takes: a subject, a policy and a task. Gives: what was asked, what came of it, and how the program
ended. Never: judges more than the form of an answer, or leaves a program or an endpoint running.
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
"""Answers an episode of a check gives at most; then its budget is spent."""
NUM_INSTANCES: Final = 8
_BARRIER_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEpisode(Episode):
    """What a program asked, and what came of it."""

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
        """Yield the prompt, and all that was asked."""
        yield "the prompt is another:", self.start.prompt
        yield "the info of prepare is another:", plain(dict(self.start.info))
        for n, asked in enumerate(self.asked, start=1):
            yield (
                f"request {n} is another:",
                [plain(list(p)) for p in (asked.messages, asked.tools)],
            )

    def tells(self) -> list[Any]:
        """Return what was shown, and the verdict."""
        return [[page for _, page in self.pages()], self.verdict]

    def notes(self) -> list[dict[str, Any]]:
        """Return each thing that was shown, and the verdict."""
        return [*({"request": page} for _, page in self.pages()), {"verdict": self.verdict}]


class AgentSubject(Subject):
    """An agent task under check, or what makes one.

    Args:
        made: A class or function that makes a fresh one, or one task, which stays open.
        spec: What it says of itself; None: the defaults.
        run_s: Seconds for the program of one episode.
        others: As for :class:`~rollart_testing.play.Subject`.
    """

    default_spec = EnvSpec(
        id="unregistered/Agent-v0", entry_point="unregistered:Agent", kind="agent"
    )
    expert, advice = "solve", ""
    telling = (GOOD,)
    few_turns = 1
    num_warm_ups, num_rounds, rounds = 1, 3, "3 whole and as many cancelled episodes"
    noun, begin_call, good_acts = "task", "prepare", "plain answers"
    returns, its_expert = "reward", "its solve()"
    no_secrets, no_sandbox = "it has no secrets()", "it has no box"

    def __init__(
        self, made: object, spec: EnvSpec | None = None, *, run_s: float = 60.0, **others: Any
    ) -> None:
        super().__init__(made, spec, **others)
        self.run_s = run_s

    @property
    def max_turns(self) -> int:
        """Answers that an episode gets before its budget is spent."""
        return max(2, min(self.spec.max_turns, MAX_REQUESTS))

    @property
    def limits_s(self) -> dict[str, float]:
        """The seconds that the spec gives to each call."""
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
        """Play one episode on a loop of its own; the expert asks nothing."""
        at = self.seed if seed is None else seed
        if policy is EXPERT:
            return asyncio.run(_solved(player, options, at))
        most = self.max_turns if max_turns is None else min(max_turns, self.max_turns)
        with ScriptedEndpoint(answering(policy), max_requests=most) as server:
            return asyncio.run(episode(self, player, server, policy, options, at))

    def verdict_again(self, player: Player, episode: AgentEpisode) -> str | None:
        """Give the same answers again; return where the two part."""
        again = self.play(player, episode.policy, episode.options, seed=episode.seed)
        if episode.policy is not EXPERT:
            return episode.difference(again)
        one, two = (episode.earned, episode.success), (again.earned, again.success)
        return None if one == two else f"its solve() earned {one}, and then {two}"

    def players(self, player: Player) -> Iterator[Policy]:
        """Yield who plays where verdicts and returns are looked at."""
        yield from (GOOD, Policy("random", "verdict"), MALFORMED)
        if player.has(self.expert):
            yield EXPERT

    def random_players(self, player: Player) -> Iterator[tuple[Literal["random", "calls"], str]]:
        """Yield random answers, which call tools as well."""
        yield "random", "answers"

    def play_varied(self, player: Player) -> None:
        """Play with another seed."""
        self.play(player, GOOD, {}, seed=self.seed + 1)

    def instances(self) -> Iterator[tuple[Policy, int]]:
        """Yield policy and seed of as many as the budget allows."""
        for n in self.paced(range(NUM_INSTANCES), least=2):
            yield Policy("random", n), self.seed

    def play_together(self, alone: Sequence[AgentEpisode]) -> list[AgentEpisode]:
        """Play all at once; none gets its first answer before all have asked."""
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
            # A thread and a loop for each, as the engine has them.
            with ThreadPoolExecutor(len(alone)) as threads:
                together = list(threads.map(played, players, servers, alone))
        for n, (one, other) in enumerate(zip(alone, together, strict=True)):
            where = f"episode {n} of {len(alone)}"
            expect(not other.strangers, f"{where} was sent {', '.join(other.strangers[:2])}")
            expect(one.fault == other.fault, f"{where}: run raised {other.fault or 'nothing'}")
        return together

    def fewer(self, num_played: int, slowest_s: float) -> str | None:
        """Return why fewer were played beside each other than wanted; None when all were."""
        return (
            None if num_played == NUM_INSTANCES else f"{num_played} instances, for they take long"
        )

    def open_and_close(self) -> None:
        """Play an episode whose budget is spent and one that is cancelled, on a fresh task each."""
        if self.given is not None:
            self.fresh()  # which says why not
        with self.open() as player:
            self.play(player, GOOD, {}, max_turns=2)
        cancelled(self)

    def views(self, player: Player, tasks: Iterable[Options]) -> Iterator[View]:
        """Yield all that the program of an episode shows to what answers it."""
        ways = (MALFORMED, Policy("probe"), Policy("random", "secrets"), Policy("edge"))
        for options in tasks:
            for policy in ways:
                yield _view(self.play(player, policy, options))

    def early_pages(self, player: Player, options: Options) -> Iterator[tuple[str, Observation]]:
        """Yield the prompt: then the program begins."""
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
        # Whose budget is spent may end as it likes.
        fault="" if server.num_refused else error,
        num_turns=len(server.asked),
        infos=[start.info],
        start=start,
        asked=tuple(server.asked),
        strangers=tuple(server.strangers),
        **_judged(await finish(player, recorded)),
    )


async def _solved(player: Player, options: Options, seed: int) -> AgentEpisode:
    """Let the expert do the task."""
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


def cancelled(subject: AgentSubject) -> float:
    """Cancel a program that waits for its first answer; return the seconds until it ended."""
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
                over.set()  # the endpoint is gone: who blocks the loop is free again

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
        expect(began, "run ended before it asked anything")
        return ended - began[0]

    with subject.open() as player, ScriptedEndpoint(answer) as server:
        return asyncio.run(program(player, server))


def answering(policy: Policy) -> Answer:
    """Return how a policy answers a program."""
    if policy.way in _KEYED:
        return _KEYED[policy.way](cast("Any", policy.key))
    return _ANSWERS[policy.way]


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
