"""Episodes of agent tasks: a program in an env worker, the real gateway, and a scripted engine."""

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import ClassVar

import pytest
from support.chat_templates import tokenizer_with
from support.clock import pass_s
from support.gateways import LIMITS, Scripted, agent_parts, env_return
from support.pace import scaled, until
from support.talks import result

from rollart_core.errors import InferenceFailure
from rollart_core.rollout import agent_episode, loop
from rollart_core.rollout.agent_episode import run_agent_episode
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.types import FailureKind, Task, Ticket
from rollart_testing.agents import FakeAgent

FAKE = "rollart_testing.agents:FakeAgent"


def ticket(index: int = 0) -> Ticket:
    return Ticket(f"g{index}.0", Task(FAKE, "train", index, 7), f"g{index}", 0)


class Signalling(FakeAgent):
    """Tells when its program comes to its trouble; its first turn is recorded by then."""

    begun: ClassVar[threading.Event]

    async def _meet(self, endpoint, messages):
        if self._in_trouble:
            self.begun.set()
        await super()._meet(endpoint, messages)


async def in_trouble():
    """Wait until a program is in trouble."""
    assert await asyncio.to_thread(Signalling.begun.wait, scaled(60))


@pytest.fixture(autouse=True)
def _untold():
    Signalling.begun = threading.Event()


class Parrot(Scripted):
    """Says the word it was last asked for; or raises, from a turn on."""

    error_from: int | None = None

    async def generate(self, request):
        self.requests.append(request)
        if self.error_from is not None and len(self.requests) > self.error_from:
            raise InferenceFailure("the engine is gone", boundary="generate")
        text = self.tokenizer.decode(request.token_ids)
        word = text.rsplit("say ", 1)[-1].split("<")[0].strip()
        ids = [*self.tokenizer.encode(word), self.tokenizer.stop_token_ids[0]]
        return result(ids[: request.max_new_tokens], len(self.requests), "stop")


@asynccontextmanager
async def agents(engine=None, *, score=env_return, limits=None, **options):
    """Give the parts of episodes of a fake agent, its pool and the engine."""
    engine = engine or Parrot(tokenizer_with("ours"))
    env, full = EnvRef(f"{__name__}:Signalling", options), replace(LIMITS, **(limits or {}))
    async with agent_parts(env, engine, full, max_context_tokens=2000, score=score) as parts:
        yield parts, parts.envs, engine


async def no_thread_is_left():
    await until(
        lambda: all(thread.name != "agent" for thread in threading.enumerate()),
        "the end of the programs' threads",
    )


def play(engine=None, **options):
    async def main():
        async with agents(engine, **options) as (parts, pool, used):
            trajectory = await run_agent_episode(ticket(), 3, parts)
            return trajectory, pool, used

    return asyncio.run(main())


def test_a_reward_is_told_what_the_task_hands_it():
    told = []

    async def score(request):
        told.append(request)
        return await env_return(request)

    trajectory, _, engine = play(turns=2, score=score)
    assert trajectory.reward == 1.0
    (request,) = told
    assert request.context["reference"] == " ".join(turn.action for turn in trajectory.turns)
    assert request.answer == trajectory.turns[-1].action
    said = [engine.tokenizer.decode(asked.token_ids) for asked in engine.requests]
    assert not any(request.context["reference"] in text for text in said)


def test_what_the_program_asks_is_the_trajectory():
    trajectory, _, engine = play(turns=3)
    assert (trajectory.status, trajectory.reward, trajectory.score) == ("finished", 1.0, 1.0)
    assert (trajectory.success, trajectory.reward_components) == (True, {"right": 3.0})
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    (sample,) = trajectory.samples
    last = engine.requests[-1]
    assert sample.token_ids[: len(last.token_ids)].tolist() == list(last.token_ids)
    assert trajectory.start_version == 3
    assert set(sample.turn_ids.tolist()) == {-1, 0, 1, 2}
    assert engine.released == ["g0.0#0"]


def test_many_programs_run_at_once_each_with_its_own_endpoint():
    async def main():
        async with agents(turns=2) as (parts, pool, engine):
            found = await asyncio.gather(
                *(run_agent_episode(ticket(i), 0, parts) for i in range(24))
            )
            assert pool.num_episodes == 0
        await no_thread_is_left()
        return found, engine

    found, engine = asyncio.run(main())
    assert [t.reward for t in found] == [1.0] * 24
    assert len(engine.requests) == 48
    for index, trajectory in enumerate(found):
        own = [r for r in engine.requests if r.session_id == f"g{index}.0#0"]
        assert len(own) == len(trajectory.turns) == 2
        row = trajectory.samples[0].token_ids.tolist()
        assert row[: len(own[1].token_ids)] == list(own[1].token_ids)


@pytest.mark.parametrize(
    ("options", "kind", "boundary", "words"),
    [
        ({"trouble": "raise"}, "environment", "agent.run", "RuntimeError: trouble on demand"),
        ({"trouble": "exit"}, "environment", "agent.run", "SystemExit: 3"),
        ({"trouble": "silent"}, "environment", "agent.run", "without a request to"),
        ({"trouble": "nan"}, "environment", "agent.finish", "reward is nan"),
    ],
)
def test_what_goes_wrong_is_a_typed_failure_and_never_a_reward(options, kind, boundary, words):
    trajectory, _, _ = play(**options)
    assert (trajectory.status, trajectory.reward) == ("failed", None)
    assert trajectory.failure.kind == FailureKind(kind)
    assert trajectory.failure.boundary == boundary
    assert words in trajectory.failure.message
    assert trajectory.samples == ()


@pytest.mark.parametrize(
    "trouble",
    ["hang", *(pytest.param(t, marks=pytest.mark.slow) for t in ("block", "deaf"))],
)
def test_a_program_past_its_deadline_is_ended_and_its_worker_serves_on(trouble, monkeypatch):
    if trouble != "hang":  # the others do not end when they are told to
        monkeypatch.setattr(loop, "END_S", 0.3)

    async def main():
        async with agents(trouble=trouble, trouble_every=2) as (parts, pool, _):
            first = await run_agent_episode(ticket(), 0, parts)
            assert first.status == "finished"
            # The second episode of the same object.
            second = asyncio.create_task(run_agent_episode(ticket(), 0, parts))
            await in_trouble()
            pass_s(parts.limits.episode_s)
            late = await second
            assert (late.status, late.failure.kind) == ("failed", FailureKind.TIMEOUT)
            assert len(late.turns) == 1
            again = await run_agent_episode(ticket(), 0, parts)
            assert again.status == "finished"
            assert pool.num_episodes == 0
        await no_thread_is_left()

    asyncio.run(main())


def test_a_program_over_its_budget_is_judged_and_truncated_though_it_raised():
    trajectory, _, _ = play(turns=2, trouble="greedy", limits={"max_turns": 4})
    assert (trajectory.status, trajectory.reward) == ("truncated", 0.5)
    assert (len(trajectory.turns), trajectory.failure) == (4, None)
    assert trajectory.samples


def test_a_program_that_goes_on_after_its_budget_is_stopped_and_judged(monkeypatch):
    monkeypatch.setattr(agent_episode, "LAST_WORDS_S", 0.2)
    options = {"turns": 2, "trouble": "stubborn", "limits": {"max_turns": 1}}
    trajectory, _, _ = play(**options)
    assert (trajectory.status, trajectory.reward) == ("truncated", 0.5)


def test_a_task_may_say_itself_that_it_was_cut_short():
    trajectory, _, _ = play(cut=True)
    assert (trajectory.status, trajectory.reward) == ("truncated", 1.0)


@pytest.mark.parametrize("trouble", [None, "shrug"])
def test_an_engine_that_fails_is_its_failure_whatever_the_program_made_of_it(trouble):
    engine = Parrot(tokenizer_with("ours"))
    engine.error_from = 1
    trajectory, _, _ = play(engine, trouble=trouble)
    assert trajectory.status == "failed"
    assert trajectory.failure.kind == FailureKind.INFERENCE
    assert "the engine is gone" in trajectory.failure.message
    assert len(trajectory.turns) == 1


def test_cancelling_ends_the_program_and_notifies_how_far_it_came():
    told = []

    async def main():
        async with agents(trouble="hang") as (parts, pool, _):
            task = asyncio.create_task(run_agent_episode(ticket(), 0, parts, on_cancel=told.append))
            await in_trouble()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert pool.num_episodes == 0

    asyncio.run(main())
    assert told[0].failure.kind == FailureKind.CANCELLED
    assert len(told[0].turns) == 1


def test_an_environment_that_is_stepped_is_no_agent():
    async def main():
        async with agents() as (parts, _, _):
            stepped = EnvRef("rollart_testing.envs:FakeEnv", {})
            return await run_agent_episode(ticket(), 0, replace(parts, env=stepped))

    failure = asyncio.run(main()).failure
    assert "is not an agent task" in failure.message
    assert failure.boundary == "agent.prepare"
