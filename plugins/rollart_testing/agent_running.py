"""Is a program a good neighbour: to the event loop, to its siblings, and when its time is over?

Takes: a subject. Gives: checks that raise. Never: leaves a program or an endpoint running.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Final

from rollart_core.contracts.agent import Recorded
from rollart_testing.agent_play import (
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
from rollart_testing.endpoint import Answer, RecordedRequest, ScriptedEndpoint
from rollart_testing.left_open import expect_nothing_left
from rollart_testing.play import Options, Player
from rollart_testing.results import SkipCheck, expect
from rollart_testing.runtime_checks import random_state_kept
from rollart_testing.sandbox_checks import live_sandboxes_here

NUM_INSTANCES: Final = 8
_BARRIER_S: Final = 2.0
_NUM_ROUNDS: Final = 3


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
        def wait(asked: RecordedRequest) -> object:
            if asked.turn == 0:
                with suppress(threading.BrokenBarrierError):
                    barrier.wait(_BARRIER_S)
            return answer(asked)

        return wait  # type: ignore[return-value]

    def played(player: Player, server: ScriptedEndpoint, options: Options) -> Played:
        return asyncio.run(episode(subject, player, server, options, subject.seed))

    with ExitStack() as stack:
        players = [stack.enter_context(subject.open()) for _ in chosen]
        servers = [
            ScriptedEndpoint(after_all(random_answer(n)), max_requests=subject.max_requests)
            for n in range(len(chosen))
        ]
        for server in servers:
            stack.enter_context(server)
        # A thread and a loop for each, as the engine has them.
        with ThreadPoolExecutor(len(chosen)) as threads:
            return list(threads.map(played, players, servers, chosen))


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
        took_s <= limit_s,
        f"its program goes on for {took_s:.2g} s after run was cancelled and its endpoint gone; "
        f"the close_s of its spec allows {limit_s:g} s",
    )
    return f"after {took_s:.2g} s"


def _cancelled(subject: AgentSubject) -> float:
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


def check_nothing_left_open(subject: AgentSubject) -> str | None:
    """No thread, process or file stays behind ``close``, whole or cancelled."""
    if subject.given is not None:
        subject.fresh()  # which says why not
    _one_of_each(subject)
    rounds = f"{_NUM_ROUNDS} whole and as many cancelled episodes"
    return expect_nothing_left(lambda: _one_of_each(subject), _NUM_ROUNDS, rounds)


def _one_of_each(subject: AgentSubject) -> None:
    with subject.open() as player:
        play_agent(subject, player, plain_answer, {}, max_requests=2)
    _cancelled(subject)


def check_no_sandbox_left(subject: AgentSubject) -> str | None:
    """When a task is closed, so is every box that it opened."""
    before = live_sandboxes_here()
    with subject.open() as player:
        play_agent(subject, player, plain_answer, {}, max_requests=1)
        asyncio.run(prepare(player, {}, subject.seed))
        during = live_sandboxes_here()
    opened = {name: left for name, left in during.items() if name not in before}
    if subject.given is not None:
        return "not judged to the end: the task is not the check's to close"
    still = [name for name in live_sandboxes_here() if name not in before]
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
