import asyncio
import math
import threading
from contextlib import AsyncExitStack
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from support.clock import pass_s
from support.pace import scaled

from rollart_core.errors import DeadlineFailure, EnvironmentFailure, WorkerDied, WorkerLost
from rollart_core.rollout.env_answers import MAX_CONTEXT_BYTES, observed, return_problem
from rollart_core.rollout.env_pool import EnvPool, LocalWorker, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_core.types import Task, Ticket
from rollart_testing.envs import FakeEnv

FAKE = "rollart_testing.envs:FakeEnv"
TICKET = Ticket("g0.0", Task(FAKE, "train", 3, 7), "g0", 0)


def ref(**options: object) -> EnvRef:
    return EnvRef(FAKE, options)


async def reset(worker: EnvWorker, env: EnvRef, episode: str = "e", timeout_s: float = 60.0):
    options = {"task": 3, "split": "train"}
    return await worker.reset(episode, env, seed=7, options=options, timeout_s=timeout_s)


def test_an_episode_goes_through_and_its_environment_serves_the_next():
    async def main() -> None:
        worker = EnvWorker()
        before = FakeEnv.num_open()
        first = await reset(worker, ref(turns=1))
        word = str(first.observation).rsplit(" ", 1)[1]
        answer = await worker.step("e", word, timeout_s=60)
        assert (answer.reward, answer.done, answer.success) == (1.0, True, True)
        await worker.end("e", reusable=True)
        await reset(worker, ref(turns=1), "e2")
        assert FakeEnv.num_open() == before + 1
        await worker.shutdown()
        assert FakeEnv.num_open() == before

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "boundary", "words"),
    [
        ({"trouble": "raise", "at": "reset"}, "env.reset", "RuntimeError: trouble on demand"),
        ({"trouble": "raise", "at": 0}, "env.step", "RuntimeError: trouble on demand"),
        ({"trouble": "nan", "at": 0}, "env.step", "reward is nan"),
    ],
)
def test_what_an_environment_does_wrong_is_a_typed_failure(options, boundary, words):
    async def main() -> None:
        worker = EnvWorker()
        with pytest.raises(EnvironmentFailure, match=words) as caught:
            await reset(worker, ref(**options))
            await worker.step("e", "red", timeout_s=60)
        assert caught.value.boundary == boundary
        await worker.shutdown()

    asyncio.run(main())


class Hangs(FakeEnv):
    """Says when it hangs."""

    begun: ClassVar[threading.Event]

    def _meet(self, where):
        if self._has("hang", where):
            self.begun.set()
        super()._meet(where)


@pytest.fixture(autouse=True)
def _unhung():
    Hangs.begun = threading.Event()


@pytest.mark.parametrize("at", ["reset", 0])
def test_a_hanging_environment_is_given_up_and_counted(at):
    async def main() -> None:
        worker = EnvWorker()
        env = EnvRef(f"{__name__}:Hangs", {"trouble": "hang", "at": at})

        async def play() -> None:
            await reset(worker, env, timeout_s=60)
            await worker.step("e", "red", timeout_s=60)

        playing = asyncio.create_task(play())
        assert await asyncio.to_thread(Hangs.begun.wait, scaled(60))
        pass_s(60)
        with pytest.raises(DeadlineFailure, match=r"longer than 60 s"):
            await playing
        assert await worker.num_hung() == 1
        await worker.shutdown()

    asyncio.run(main())


def test_a_huge_observation_is_cut_in_the_middle_and_counted():
    async def main() -> None:
        worker = EnvWorker(max_observation_chars=100)
        observed = await reset(worker, ref(trouble="huge", at="reset", huge_chars=1_000_000))
        assert len(observed.observation) < 200
        assert observed.cut_chars == 1_000_000 - 100
        assert "999900 characters left out" in observed.observation
        await worker.shutdown()

    asyncio.run(main())


def step_answer(**changed):
    """Return what is made of an answer of ``step`` that differs from a good one."""
    answer = {"reward": 0.5, "terminated": True, "truncated": False, "info": {}, **changed}
    ends = answer["terminated"], answer["truncated"]
    return observed("ok", answer["reward"], ends, answer["info"], max_chars=100)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"reward": "1.0"}, "reward must be a finite number, not str: '1.0'"),
        ({"reward": None}, "reward must be a finite number, not NoneType"),
        ({"reward": 10**400}, "reward must be a finite number, not int"),
        ({"reward": np.array([1.0, 2.0])}, "reward must be a finite number, not ndarray"),
        ({"reward": -math.inf}, "reward is -inf"),
        ({"terminated": 1}, "terminated must be a bool, not int: 1"),
        ({"terminated": "no"}, "terminated must be a bool, not str: 'no'"),
        ({"truncated": None}, "truncated must be a bool, not NoneType"),
        ({"info": {"success": "no"}}, "success must be a bool, not str: 'no'"),
        ({"info": {"reward_components": {"a": math.nan}}}, r"reward_components\['a'\] is nan"),
        ({"info": {"reward_components": {"a": "1"}}}, r"reward_components\['a'\] must be a finite"),
        ({"info": {"reward_components": [1.0]}}, "reward_components must be a dict, not list"),
    ],
)
def test_a_field_of_a_wrong_type_is_refused_by_its_name(changed, words):
    with pytest.raises((TypeError, ValueError), match=words):
        step_answer(**changed)


def test_scalars_of_numpy_are_numbers_and_bools():
    found = step_answer(
        reward=np.float32(0.25),
        terminated=np.bool_(True),
        info={"success": np.bool_(False), "reward_components": {"a": np.int64(2)}},
    )
    assert (found.reward, found.terminated, found.success) == (0.25, True, False)
    assert found.components == {"a": 2.0}
    assert step_answer(reward=True).reward == 1.0


@pytest.mark.parametrize(
    ("value", "reward_range", "words"),
    [
        (1.0, (0.0, 1.0), ""),
        (1.0 + 1e-7, (0.0, 1.0), ""),
        (1.1, (0.0, 1.0), "the return 1.1 is outside its spec's reward_range, 0 to 1"),
        (-0.1, (0.0, math.inf), "the return -0.1 is outside its spec's reward_range, 0 to 1e+06"),
        (-1e6, None, ""),
        (-2e6, None, "the return -2e+06 is outside what is allowed without a range"),
        (2e6, (0.0, 5e6), ""),
        (math.inf, None, "the return is inf"),
    ],
)
def test_returns_are_in_the_declared_range_and_bounded_without_one(value, reward_range, words):
    problem = return_problem(value, reward_range)
    assert words in problem
    assert bool(problem) == bool(words)


class Odd(gymnasium.Env[object, str]):
    """Answers outside the contract, as its option says."""

    def __init__(self, *, answer: str) -> None:
        self._answer = answer

    def reset(self, *, seed=None, options=None):
        observation = {"lone": "a\ud800b", "number": 3, "list": ["no message"]}.get(
            self._answer, "ok"
        )
        return observation, {"reward_context": {"reference": "4", "tests": ["a"]}}

    def step(self, action):
        if self._answer == "four":
            return "ok", 0.0, True, {}
        if self._answer == "context":
            return "ok", 0.0, True, False, {"reward_context": {"at": object()}}
        if self._answer == "large":
            return "ok", 0.0, True, False, {"reward_context": {"at": "x" * MAX_CONTEXT_BYTES}}
        return "ok", math.inf, True, False, {}


@pytest.mark.parametrize("answer", ["number", "list", "four", "inf", "context", "large"])
def test_answers_outside_the_contract_are_environment_failures(answer):
    async def main() -> None:
        worker = EnvWorker()
        env = EnvRef(f"{__name__}:Odd", {"answer": answer})
        with pytest.raises(EnvironmentFailure):
            await reset(worker, env)
            await worker.step("e", "x", timeout_s=60)
        await worker.shutdown()

    asyncio.run(main())


def test_what_an_environment_hands_to_its_reward_is_kept_apart():
    async def main() -> None:
        worker = EnvWorker()
        observed = await reset(worker, EnvRef(f"{__name__}:Odd", {"answer": "inf"}))
        assert observed.context == {"reference": "4", "tests": ["a"]}
        assert observed.observation == "ok"
        await worker.shutdown()

    asyncio.run(main())


def test_lone_surrogates_never_reach_a_tokenizer():
    async def main() -> None:
        worker = EnvWorker()
        observed = await reset(worker, EnvRef(f"{__name__}:Odd", {"answer": "lone"}))
        assert observed.observation.encode() == b"a?b"
        await worker.shutdown()

    asyncio.run(main())


def test_one_slow_environment_does_not_block_another():
    async def main() -> None:
        worker = EnvWorker()
        await reset(worker, ref(trouble="hang", at=0), "slow")
        await reset(worker, ref(), "quick")
        slow = asyncio.create_task(worker.step("slow", "red", timeout_s=30))
        await worker.step("quick", "red", timeout_s=60)
        assert not slow.done()
        slow.cancel()
        await worker.shutdown()

    asyncio.run(main())


class PoolProbe:
    """A pool over local workers that counts how many it started."""

    def __init__(self) -> None:
        self.workers: list[LocalWorker] = []
        self.pool = EnvPool(self._start, num_workers=1)

    async def _start(self) -> LocalWorker:
        self.workers.append(LocalWorker(EnvWorker()))
        return self.workers[-1]


def test_a_worker_with_a_hung_thread_gets_no_more_episodes_and_ends_when_idle():
    async def main() -> None:
        probe = PoolProbe()
        await probe.pool.start()
        timeouts = PhaseTimeouts(60, 60)
        with pytest.raises(DeadlineFailure):
            async with probe.pool.episode("e", timeouts) as episode:
                await episode.reset(EnvRef(f"{__name__}:Hangs", {"trouble": "hang"}), TICKET)
                step = asyncio.create_task(episode.step("red"))
                assert await asyncio.to_thread(Hangs.begun.wait, scaled(60))
                pass_s(60)
                await step
        async with probe.pool.episode("e2", timeouts) as episode:
            await episode.reset(ref(), TICKET)
        await probe.pool.close()
        assert [w.alive for w in probe.workers] == [False, False]
        assert probe.pool.num_replaced == 1

    asyncio.run(main())


class Dead:
    """A worker whose process is gone."""

    alive = True

    async def call(self, method: str, *args: object, **kwargs: object) -> object:
        self.alive = False
        raise WorkerDied("the env process is gone (signal SIGKILL)")

    async def close(self) -> None:
        self.alive = False


def test_a_dead_worker_fails_its_episode_and_is_replaced():
    async def main() -> None:
        workers = [Dead(), LocalWorker(EnvWorker())]
        upcoming = iter(workers)

        async def start():
            return next(upcoming)

        pool = EnvPool(start, num_workers=1)
        await pool.start()
        timeouts = PhaseTimeouts(60, 60)
        with pytest.raises(WorkerLost, match="SIGKILL"):
            async with pool.episode("e", timeouts) as episode:
                await episode.reset(ref(), TICKET)
        async with pool.episode("e2", timeouts) as episode:
            assert (await episode.reset(ref(), TICKET)).observation
        await pool.close()

    asyncio.run(main())


def test_a_pool_grows_and_shrinks_and_lets_episodes_end_first():
    async def main() -> None:
        probe = PoolProbe()
        await probe.pool.start()
        timeouts = PhaseTimeouts(60, 60)
        await probe.pool.resize(3)
        assert len(probe.workers) == 3
        async with AsyncExitStack() as stack:
            for n in range(3):
                episode = await stack.enter_async_context(probe.pool.episode(f"e{n}", timeouts))
                await episode.reset(ref(), TICKET)
            await probe.pool.resize(1)
            assert [w.alive for w in probe.workers] == [True] * 3
            assert (await episode.step("red")).observation
        await asyncio.sleep(0)
        assert sum(w.alive for w in probe.workers) == 1
        assert probe.pool.num_replaced == 0
        with pytest.raises(ValueError, match="at least 1"):
            await probe.pool.resize(0)
        await probe.pool.close()
        assert not any(w.alive for w in probe.workers)

    asyncio.run(main())


def test_episodes_go_on_beside_a_worker_that_is_being_started():
    async def main() -> None:
        first, dead = LocalWorker(EnvWorker()), Dead()
        upcoming = iter([first, dead])

        async def start():
            worker = next(upcoming, None)
            if worker is None:
                await asyncio.Event().wait()
            return worker

        pool = EnvPool(start, num_workers=2)
        await pool.start()
        dead.alive = False
        async with asyncio.timeout(scaled(60)):
            async with pool.episode("e", PhaseTimeouts(60, 60)) as episode:
                assert (await episode.reset(ref(), TICKET)).observation
        assert pool.num_replaced == 1
        await pool.close()

    asyncio.run(main())


def test_a_worker_that_cannot_be_started_is_tried_again_and_then_says_why(monkeypatch):
    monkeypatch.setattr("rollart_core.rollout.env_pool.RETRY_S", 0.0)

    async def main() -> None:
        worker, tries = Dead(), []

        async def start():
            if not tries:
                tries.append("first")
                return worker
            tries.append("again")
            raise WorkerDied("no memory")

        pool = EnvPool(start, num_workers=1)
        await pool.start()
        worker.alive = False
        with pytest.raises(WorkerDied, match="no memory"):
            async with pool.episode("e", PhaseTimeouts(60, 60)):
                pass
        assert tries == ["first", *["again"] * 3]
        await pool.close()

    asyncio.run(main())


def test_one_worker_that_does_not_start_leaves_none_of_the_others_behind():
    async def main() -> None:
        workers = [LocalWorker(EnvWorker()), LocalWorker(EnvWorker())]
        upcoming = iter([workers[0], None, workers[1]])

        async def start():
            worker = next(upcoming)
            await asyncio.sleep(0)
            if worker is None:
                raise WorkerDied("no memory")
            return worker

        pool = EnvPool(start, num_workers=3)
        with pytest.raises(WorkerDied, match="no memory"):
            await pool.start()
        await pool.close()
        assert [worker.alive for worker in workers] == [False, False]

    asyncio.run(main())


def test_a_pool_that_is_closed_says_so():
    async def main() -> None:
        probe = PoolProbe()
        await probe.pool.start()
        await probe.pool.close()
        with pytest.raises(WorkerDied, match="closed"):
            await probe.pool.call("num_hung")
        assert len(probe.workers) == 1

    asyncio.run(main())


def test_who_waits_for_a_worker_when_the_pool_is_closed_hears_of_it():
    async def main() -> None:
        dead, starting = Dead(), asyncio.Event()
        upcoming = iter([dead])

        async def start():
            worker = next(upcoming, None)
            if worker is None:
                starting.set()
                await asyncio.Event().wait()
            return worker

        pool = EnvPool(start, num_workers=1)
        await pool.start()
        dead.alive = False
        waiting = asyncio.create_task(pool.call("num_hung"))
        await starting.wait()
        await pool.close()
        with pytest.raises(WorkerDied, match="closed"):
            await waiting

    asyncio.run(main())


def test_a_worker_that_dies_as_it_comes_up_is_replaced_too():
    async def main() -> None:
        workers = [Dead(), Dead(), LocalWorker(EnvWorker())]
        upcoming = iter(workers)

        async def start():
            return next(upcoming)

        def die() -> None:
            workers[1].alive = False
            pool._drop_dead()

        pool = EnvPool(start, num_workers=1)
        # Between the last step of what starts workers, and the first of what waits for that.
        pool.on_back = lambda: workers[1].alive and asyncio.get_running_loop().call_soon(die)
        await pool.start()
        workers[0].alive = False
        assert await pool.call("num_hung") == 0
        assert pool.num_replaced == 2
        await pool.close()

    asyncio.run(main())


def test_a_cancelled_episode_gives_its_environment_back():
    async def main() -> None:
        probe, before = PoolProbe(), FakeEnv.num_open()
        await probe.pool.start()
        inside = asyncio.Event()

        async def play() -> None:
            async with probe.pool.episode("e", PhaseTimeouts(60, 60)) as episode:
                await episode.reset(ref(), TICKET)
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(play())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert FakeEnv.num_open() == before
        await probe.pool.close()

    asyncio.run(main())


def test_an_episode_that_never_began_does_not_end_a_later_one_of_its_name():
    async def main() -> None:
        pool = PoolProbe().pool
        await pool.start()
        timeouts = PhaseTimeouts(60, 60)
        async with pool.episode("eval-0", timeouts):
            pass  # given up before its reset: as an evaluation that is cut off and played again
        async with pool.episode("eval-0", timeouts) as episode:
            assert (await episode.reset(ref(), TICKET)).observation
        await pool.close()

    asyncio.run(main())


def test_idle_threads_end_with_the_worker():
    async def main() -> None:
        worker = EnvWorker()
        await reset(worker, ref())
        await worker.shutdown()

    before = set(threading.enumerate())  # one that hangs in another test does so for good
    asyncio.run(main())
    for thread in set(threading.enumerate()) - before:
        if thread.name in ("env", "env-close"):
            thread.join(scaled(60))
            assert not thread.is_alive()
