"""Is a program a good neighbour: to the event loop, to its siblings, and when its time is over?

Takes: a subject. Gives: checks that raise. Never: leaves a program or an endpoint running.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final

from rollart_core.contracts.agent import Recorded
from rollart_core.testing.agent_play import (
    AgentSubject,
    Played,
    difference,
    episode,
    finish,
    limits_s,
    noop_answer,
    plain_answer,
    play_agent,
    prepare,
    random_answer,
)
from rollart_core.testing.box_checks import live_boxes_here
from rollart_core.testing.endpoint import Answer, Asked, ScriptedEndpoint
from rollart_core.testing.play import Options, Player
from rollart_core.testing.results import SkipCheck, expect
from rollart_core.testing.runtime_checks import census, grown, random_state_kept

NUM_INSTANCES: Final = 8
_BARRIER_S: Final = 2.0
_PATIENCE_S: Final = 3.0
_NUM_ROUNDS: Final = 3
_GRACE_S: Final = 1.0


def check_global_random_state(subject: AgentSubject) -> None:
    """It neither draws from nor seeds ``random``, ``numpy.random`` or torch's generator."""
    with subject.open() as player:  # what is seeded once, at an import, is not the episode's
        play_agent(subject, player, plain_answer, {})
    with random_state_kept(), subject.open() as player:
        play_agent(subject, player, plain_answer, {}, seed=subject.seed + 1)


def check_interleaved(subject: AgentSubject) -> str | None:
    """Episodes of several tasks that run at once are those that each plays alone."""
    if not subject.spec.deterministic:
        raise SkipCheck("its spec says that it is not deterministic")
    split = subject.spec.splits[0]
    with subject.open() as player:
        num_tasks = player.num_tasks(split) or NUM_INSTANCES
    chosen = [{"split": split, "task": n % num_tasks} for n in range(NUM_INSTANCES)]
    alone: list[Played] = []
    for n, options in enumerate(subject.paced(chosen, least=2)):
        with subject.open() as player:
            alone.append(play_agent(subject, player, random_answer(n), options))
    together = _play_together(subject, chosen[: len(alone)])
    for n, (one, other) in enumerate(zip(alone, together, strict=True)):
        found = difference(one, other)
        where = f"episode {n} of {len(alone)}"
        expect(not other.strangers, f"{where} was sent {', '.join(other.strangers[:2])}")
        expect(one.fault == other.fault, f"{where}: run raised {other.fault or 'nothing'}")
        expect(found is None, f"{where} goes otherwise beside others: {found}")
    return None if len(alone) == NUM_INSTANCES else f"{len(alone)} instances, for they take long"


def _play_together(subject: AgentSubject, chosen: list[Options]) -> list[Played]:
    """Play all at once; none gets its first answer before all have asked."""
    barrier = threading.Barrier(len(chosen))

    def after_all(answer: Answer) -> Answer:
        def wait(asked: Asked) -> object:
            if asked.turn == 0:
                with suppress(threading.BrokenBarrierError):
                    barrier.wait(_BARRIER_S)
            return answer(asked)

        return wait  # type: ignore[return-value]

    async def all_of_them(players: list[Player], servers: list[ScriptedEndpoint]) -> list[Played]:
        pairs = zip(players, servers, chosen, strict=True)
        return await asyncio.gather(*(episode(subject, p, s, o, subject.seed) for p, s, o in pairs))

    with ExitStack() as stack:
        players = [stack.enter_context(subject.open()) for _ in chosen]
        servers = [
            ScriptedEndpoint(after_all(random_answer(n)), max_requests=subject.max_requests)
            for n in range(len(chosen))
        ]
        for server in servers:
            stack.enter_context(server)
        return asyncio.run(all_of_them(players, servers))


def check_loop_free(subject: AgentSubject) -> None:
    """While the program waits for an answer, other episodes of the loop go on."""
    asked, free = threading.Event(), threading.Event()
    went_on: list[bool] = []

    def answer(request: Asked) -> str:
        asked.set()
        if not went_on:
            went_on.append(free.wait(_PATIENCE_S))
        return "ok"

    async def another_episode() -> None:
        while not asked.is_set():
            await asyncio.sleep(0.005)
        free.set()

    async def both(player: Player, server: ScriptedEndpoint) -> None:
        beside = asyncio.create_task(another_episode())
        try:
            await episode(subject, player, server, {}, subject.seed)
        finally:
            beside.cancel()

    with (
        subject.open() as player,
        ScriptedEndpoint(answer, max_requests=subject.max_requests) as server,
    ):
        asyncio.run(both(player, server))
    expect(
        all(went_on),
        "while it waits for an answer, the event loop stands still, and all other episodes with "
        "it: await what it does, or put it into asyncio.to_thread or a process",
    )


def check_refused(subject: AgentSubject) -> None:
    """Once its requests are refused, the program ends, and what it has left can be judged."""
    with subject.open() as player:
        for answers in (0, 1):
            play_agent(subject, player, plain_answer, {}, max_requests=answers)


def check_cancelled(subject: AgentSubject) -> str:
    """A program that waits for an answer ends soon after ``run`` is cancelled."""
    took_s = _cancelled(subject)
    limit_s = subject.spec.timeouts.close_s
    expect(
        took_s is not None,
        f"its program goes on {limit_s:g} s (the close_s of its spec) after run was cancelled",
    )
    return f"after {took_s:.2g} s"


def _cancelled(subject: AgentSubject, keep: Callable[[Player], None] | None = None) -> float | None:
    """Cancel a program in its first request; return the seconds it went on, None: for too long."""
    asked, over = threading.Event(), threading.Event()

    def answer(request: Asked) -> str:
        asked.set()
        over.wait(subject.spec.timeouts.close_s + _PATIENCE_S)
        return "ok"

    async def begin_and_cancel(player: Player, server: ScriptedEndpoint) -> float | None:
        await prepare(player, {}, subject.seed)
        running = asyncio.create_task(player.env.run(server.endpoint))
        while not asked.is_set() and not running.done():
            await asyncio.sleep(0.005)
        expect(asked.is_set(), "run ended before it asked anything")
        began = time.monotonic()
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=subject.spec.timeouts.close_s)
        took_s = time.monotonic() - began
        server.stop_answering()
        over.set()  # whoever has not ended by now is answered once more, and then refused
        with suppress(Exception, asyncio.CancelledError):
            await asyncio.wait_for(running, subject.run_s)
        return took_s if done else None

    with subject.open() as player:
        try:
            with ScriptedEndpoint(answer) as server:
                return asyncio.run(begin_and_cancel(player, server))
        finally:
            over.set()


def check_nothing_left_open(subject: AgentSubject) -> str | None:
    """No thread, process or file stays behind ``close``, whole or cancelled."""
    if subject.given is not None:
        subject.fresh()  # which says why not
    _one_of_each(subject)
    before = census()
    for _ in range(_NUM_ROUNDS):
        _one_of_each(subject)
    deadline = time.monotonic() + _GRACE_S
    while more := grown(before, _NUM_ROUNDS):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)  # a thread or process that was told to end may take a moment
    many = [f"{n} {what}" for what, n in more.items()]
    expect(
        not many,
        f"after {_NUM_ROUNDS} whole and as many cancelled episodes: {' and '.join(many)} more",
    )
    return None if "processes" in before else "only threads: this system does not list the others"


def _one_of_each(subject: AgentSubject) -> None:
    with subject.open() as player:
        play_agent(subject, player, plain_answer, {}, max_requests=2)
    _cancelled(subject)


def check_no_box_left(subject: AgentSubject) -> str | None:
    """When a task is closed, so is every box that it opened."""
    before = live_boxes_here()
    with subject.open() as player:
        play_agent(subject, player, plain_answer, {}, max_requests=1)
        asyncio.run(prepare(player, {}, subject.seed))
        during = live_boxes_here()
    opened = {name: left for name, left in during.items() if name not in before}
    if subject.given is not None:
        return "not judged to the end: the task is not the check's to close"
    still = [name for name in live_boxes_here() if name not in before]
    expect(not still, f"{len(still)} of its boxes live on after close()")
    return None if opened else "it opened no box"


def check_timeouts(subject: AgentSubject) -> str | None:
    """Every call so far returned within the seconds that its spec gives it."""
    with subject.open() as player:
        play_agent(subject, player, noop_answer, {})
    limits = limits_s(subject.spec.timeouts)
    took = subject.watch.longest_s
    for call, limit_s in limits.items():
        expect(
            took.get(call, 0.0) <= limit_s,
            f"the slowest {call} took {took.get(call, 0.0):.2f} s, its spec allows {limit_s:g} s",
        )
    return "slowest: " + ", ".join(f"{call} {took[call]:.2g} s" for call in limits if call in took)


async def solved(player: Player, options: Options, seed: int) -> tuple[float, object]:
    """Let the expert do the task; return reward and success."""
    await prepare(player, options, seed)
    with player.during("solve"):
        await player.env.solve()
    result = await finish(player, Recorded())
    return float(result.reward), result.success
