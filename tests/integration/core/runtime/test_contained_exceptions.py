"""No exception of a plugin, whatever its class or text, ends a run or escapes a boundary."""

import asyncio
import os
import pickle
import signal
import sys

import gymnasium
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.pace import scaled

from rollart_core.contracts.reward import Reward, RewardCall, RewardRequest, RewardResult
from rollart_core.errors import (
    EnvironmentFailure,
    InferenceFailure,
    RewardFailure,
    boundary,
    contained,
    described,
    traced,
)
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_core.runtime.child import portable
from rollart_core.runtime.process import WorkerProcess
from rollart_plugins.serverless.inline import InlineBackend

BASES = (
    *(Exception, BaseException, ValueError, SystemExit, KeyboardInterrupt, GeneratorExit),
    *(StopIteration, StopAsyncIteration, asyncio.CancelledError, RecursionError, TimeoutError),
    *(UnicodeDecodeError, OSError, ExceptionGroup, EOFError),
)
TEXTS = ("plain", "raises", "exits", "number", "subclass", "\ud800", "", "x" * 100_000, "a\nb")


class HostileText(str):
    """A text whose methods raise."""

    def strip(self, *args):
        raise RuntimeError("no strip")

    splitlines = encode = __len__ = strip


def made(base: type[BaseException], text: str, pickles: str) -> BaseException:
    """Return an exception of a class of its own, with methods that misbehave as asked."""

    def shown(self):
        if text == "raises":
            raise ZeroDivisionError
        if text == "exits":
            sys.exit(3)
        return {"number": 3, "subclass": HostileText("hidden")}.get(text, text)

    def reduced(self, *protocol):
        if pickles == "exits":
            sys.exit(4)
        if pickles == "differs":
            return (str, ("not an exception",))
        raise pickle.PicklingError("no")

    methods = {"__str__": shown, "__repr__": shown}
    if pickles != "class":
        methods["__reduce_ex__"] = reduced
    kind = base if text == "plain" else type("Odd", (base,), methods)
    arguments = {
        UnicodeDecodeError: ("utf-8", b"x", 0, 1, "odd"),
        ExceptionGroup: ("odd", [ValueError("inner")]),
    }
    return kind(*arguments.get(base, ("odd",)))


EXCEPTIONS = st.builds(
    made,
    st.sampled_from(BASES),
    st.sampled_from(TEXTS),
    st.sampled_from(("class", "exits", "differs", "raises")),
)
TO_RAISE: list[BaseException] = []
"""What the plugins below raise."""


class Raises(gymnasium.Env[str, str]):
    """Raises in reset or in step, at once or awaited."""

    def __init__(self, *, at: str) -> None:
        self._at = at

    def _meet(self, where):
        if self._at == where:
            raise TO_RAISE[-1]

    def reset(self, *, seed=None, options=None):
        self._meet("reset")
        return "begin", {}

    def step(self, action):
        self._meet("step")
        return "end", 1.0, True, False, {}


class RaisesAwaited(Raises):
    """The same in coroutines."""

    async def areset(self, *, seed=None, options=None):
        return super().reset()

    async def astep(self, action):
        return super().step(action)


class RaisesReward(Reward):
    """Raises instead of scoring."""

    def score(self, request: RewardRequest) -> RewardResult:
        raise TO_RAISE[-1]


async def play(env: str, at: str) -> None:
    worker = EnvWorker()
    try:
        async with asyncio.timeout(scaled(60)):
            reference = EnvRef(f"{__name__}:{env}", {"at": at})
            await worker.reset("e", reference, seed=0, options={}, timeout_s=scaled(50))
            await worker.step("e", "x", timeout_s=scaled(50))
    finally:
        await worker.shutdown()


@example(StopIteration("odd"), "Raises", "step")
@example(asyncio.CancelledError("odd"), "RaisesAwaited", "step")
@example(KeyboardInterrupt("odd"), "Raises", "reset")
@given(EXCEPTIONS, st.sampled_from(("Raises", "RaisesAwaited")), st.sampled_from(("reset", "step")))
def test_whatever_an_environment_raises_is_its_typed_failure_at_once(error, env, at):
    TO_RAISE.append(error)
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in every env worker's process
    try:
        with pytest.raises(EnvironmentFailure, match=rf"env\.{at}: ") as caught:
            asyncio.run(play(env, at))
    finally:
        signal.signal(signal.SIGINT, previous)
    failure = caught.value.failure()
    assert (failure.kind, failure.boundary) == ("environment", f"env.{at}")
    assert len(failure.message) < 500
    failure.message.encode()
    failure.detail.encode()
    assert str(portable(caught.value)) == failure.message


@given(EXCEPTIONS)
def test_whatever_a_reward_raises_is_its_typed_failure_at_once(error):
    TO_RAISE.append(error)

    async def main() -> None:
        backend = InlineBackend(RaisesReward(), reward_range=(0.0, 1.0), timeout_s=scaled(60))
        request = RewardRequest("g.0", "any", "train", 0, (), 0.0, None)
        answer = await backend.invoke(RewardCall((request,), "key", scaled(60)))
        (found,) = answer.results
        assert isinstance(found, RewardFailure)
        assert str(found).startswith("reward.score: ")
        await backend.close()

    asyncio.run(main())


@given(EXCEPTIONS)
def test_whatever_is_raised_can_be_shown_sent_and_carried(error):
    described(error).encode()
    traced(error).encode()
    again = pickle.loads(pickle.dumps(portable(error)))
    assert isinstance(again, Exception)
    str(again)
    carried = contained(error)
    assert isinstance(carried, Exception)
    assert not isinstance(carried, StopIteration)


class Part:
    """What a process holds in the test below."""

    def fail(self, number: int) -> None:
        raise made(BASES[number], "raises", "exits")

    async def afail(self, number: int) -> None:
        raise made(BASES[number], "exits", "raises")


def test_a_part_process_outlives_whatever_its_methods_raise():
    async def main() -> None:
        part = WorkerProcess("test")
        await part.start(f"{__name__}:Part")
        for number in range(len(BASES)):
            for method in ("fail", "afail"):
                async with asyncio.timeout(scaled(60)):
                    with pytest.raises(Exception, match=r"Odd|coroutine raised StopIteration"):
                        await part.call(method, number)
        assert await part.call("os:getpid") == part.pid
        await part.close()

    asyncio.run(main())


def test_a_real_cancellation_and_ctrl_c_pass_a_boundary():
    async def waits() -> None:
        with boundary(InferenceFailure, "generate"):
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    with pytest.raises(KeyboardInterrupt), boundary(InferenceFailure, "generate"):
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
