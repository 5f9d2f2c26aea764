"""What reward backends say and do when something is not as it should be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from support.marks_reward import Marks
from support.pace import until
from support.processes import wait_gone
from support.sandbox_types import no_bubblewrap

from rollart_core.config.runtime import RayRuntime
from rollart_core.contracts.reward import RewardCall, RewardRef, RewardRequest, RewardResult
from rollart_core.errors import (
    BackendFailure,
    ConfigError,
    DeadlineFailure,
    RewardFailure,
    UserError,
)
from rollart_plugins.serverless import wire
from rollart_plugins.serverless.function import RewardFunction
from rollart_plugins.serverless.http_backend import HttpBackend
from rollart_plugins.serverless.pool import PoolBackend
from rollart_plugins.serverless.serve_command import Listening, application
from rollart_plugins.serverless.wire import WireAnswer
from rollart_ray.cluster import RayCluster
from rollart_testing import example_request

pytestmark = pytest.mark.starts_normally  # a worker imports little

MARKS = "support.marks_reward:Marks"
REF = RewardRef(MARKS)
TOKEN = "a-very-secret-token"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def call(*requests: RewardRequest, key: str = "key", deadline_s: float = 30.0) -> RewardCall:
    return RewardCall(requests or (example_request(),), key, deadline_s)


def told(how: str) -> RewardRequest:
    return replace(example_request(), context={"how": how})


@asynccontextmanager
async def http(app: web.Application, **options: Any) -> AsyncIterator[HttpBackend]:
    """Ask an application."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    options = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}", **options}
    made = HttpBackend(reward=REF, reward_range=(0.0, 1.0), timeout_s=30.0, **options)
    try:
        yield made
    finally:
        await made.close()
        await made.close()
        await runner.cleanup()


def answering(handler: Handler) -> web.Application:
    app = web.Application()
    app.router.add_post("/", handler)
    return app


def served(reward: str = MARKS, **options: Any) -> web.Application:
    return application(RewardFunction(reward, options), Listening(token=TOKEN))


async def failure(made: HttpBackend, *requests: RewardRequest) -> BackendFailure:
    with pytest.raises(BackendFailure) as caught:
        await made.invoke(call(*requests))
    return caught.value


def answered(body: bytes, *results: wire.Outcome) -> bytes:
    """Return the answer to a call."""
    asked = wire.read_call(body)
    return wire.answer_bytes(WireAnswer(asked.key, asked.ids, results))


BODY = wire.answer_bytes(WireAnswer("key", ("t0",), (RewardResult(0.5),)))


@pytest.mark.parametrize(
    ("status", "body", "again", "says"),
    [
        (200, b"<html>oops", True, "is not valid JSON"),
        (200, b'{"version":2}', True, "'key' is missing"),
        (200, b'{"version":1}', True, "version 1, not 2"),
        (200, BODY, True, "'key' belongs to another call"),
        (200, b"[]", True, "is a list, not an object"),
        (200, BODY.replace(b"0.5", b"NaN"), True, "NaN is not valid JSON"),
        (404, b"", False, "status 404: there is no function at this URL"),
        (401, b"", False, "rejects the token"),
        (413, b"", False, "above its size limit"),
        (418, b"teapot", False, "status 418: it returned"),
        (429, b"", True, "it is overloaded"),
        (429, b'{"error": {"message": "slow down"}}', True, "it is overloaded"),
        (403, b'{"error": {"message": "no", "code": 403}}', False, "rejects the token"),
        (500, b"Traceback", True, "status 500: it returned"),
        (503, b"", True, "status 503"),
        (302, b"", False, "status 302"),
    ],
)
def test_what_a_url_may_answer(status: int, body: bytes, again: bool, says: str) -> None:
    async def main() -> None:
        async def handler(request: web.Request) -> web.Response:
            headers = {"Retry-After": "7", "Location": "http://elsewhere.invalid/"}
            return web.Response(status=status, body=body, headers=headers)

        async with http(answering(handler)) as made:
            error = await failure(made)
            assert says in str(error)
            assert error.again is again
            assert error.wait_s == (None if status == 200 else 7.0)

    asyncio.run(main())


def test_nobody_at_the_url() -> None:
    async def main() -> None:
        made = HttpBackend(
            reward=REF, reward_range=(0.0, 1.0), timeout_s=5.0, url="http://127.0.0.1:9"
        )
        error = await failure(made)
        assert error.again
        with pytest.raises(
            ConfigError, match=r"reward support\.marks_reward:Marks on http: .*127\.0\.0\.1:9"
        ):
            await made.open()
        await made.close()

    asyncio.run(main())


def test_a_kept_connection_that_was_closed_meanwhile_is_no_failure() -> None:
    num_asked = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        body = await request.read()
        if num_asked in (2, 4, 5):
            assert request.transport is not None
            request.transport.close()
        return web.Response(body=answered(body, RewardResult(0.5)))

    async def main() -> None:
        async with http(answering(handler)) as made:
            for _ in range(2):
                assert (await made.score([example_request()]))[0].value == 0.5
            assert num_asked == 3
            assert (await failure(made)).again
            assert num_asked == 5

    asyncio.run(main())


def test_an_answer_without_end_is_cut_off() -> None:
    async def main() -> None:
        async def handler(request: web.Request) -> web.Response:
            return web.Response(body=b"x" * 100_000)

        async with http(answering(handler), max_answer_bytes=4096) as made:
            assert "larger than 4096 bytes" in str(await failure(made))

    asyncio.run(main())


def test_a_function_that_hangs_is_late() -> None:
    async def main() -> None:
        over = asyncio.Event()

        async def handler(request: web.Request) -> web.Response:
            await over.wait()
            return web.Response(status=500)

        async with http(answering(handler)) as made:
            with pytest.raises(DeadlineFailure, match=r"http did not answer within 0\.1 s"):
                await made.invoke(call(deadline_s=0.1))
            over.set()  # the server waits for its handlers

    asyncio.run(main())


@pytest.mark.parametrize(
    ("app", "says"),
    [
        (
            lambda: served("rollart/EnvReturn-v1"),
            "the function serves rollart/EnvReturn-v1, not support.marks_reward",
        ),
        (lambda: served(limit=3), "with other options"),
    ],
)
def test_a_function_for_something_else_is_found_out_before_the_run(
    app: Callable[[], web.Application], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_TOKEN", TOKEN)

    async def main() -> None:
        async with http(app(), token_env="THE_TOKEN") as made:
            with pytest.raises(ConfigError, match=says):
                await made.open()
            assert not (await failure(made)).again

    asyncio.run(main())


def test_the_token_is_wanted_and_goes_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    monkeypatch.setenv("ANOTHER", "another-token")
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE is not set"):
        HttpBackend(
            reward=REF,
            reward_range=(0.0, 1.0),
            timeout_s=5.0,
            url="http://127.0.0.1:9",
            token_env="NO_SUCH_VARIABLE",
        )

    async def echo(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        assert TOKEN.encode() not in await request.read()
        return web.Response(status=500, body=f"I was told {TOKEN}".encode())

    async def main() -> None:
        async with http(served(), token_env="ANOTHER") as made:
            with pytest.raises(ConfigError, match="the token is missing or wrong"):
                await made.open()
        async with http(served(), token_env="THE_TOKEN") as made:
            await made.open()
        async with http(answering(echo), token_env="THE_TOKEN") as made:
            error = await failure(made)
            assert TOKEN not in str(error)
            assert "[secret]" in str(error)
            holds = replace(example_request(), context={"a": f"x{TOKEN}x"})
            error = await failure(made, holds)
            assert "contains its own token" in str(error)
            assert not error.again

    asyncio.run(main())


def test_a_traceback_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    broken = RewardFailure("it raised", detail=f"Traceback: wrong key {TOKEN}")

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=answered(await request.read(), broken))

    async def cannot(*args: object, **more: object) -> wire.WireAnswer:
        raise BackendFailure("not sent", detail=f"Traceback: {TOKEN}")

    async def main() -> None:
        async with http(answering(handler), token_env="THE_TOKEN") as made:
            (failed,) = (await made.invoke(call())).results
            assert isinstance(failed, RewardFailure)
            assert failed.detail == "Traceback: wrong key [secret]"
            monkeypatch.setattr(made, "send", cannot)
            assert (await failure(made)).detail == "Traceback: [secret]"

    asyncio.run(main())


def test_large_calls_go_in_pieces_and_what_is_too_large_fails_alone() -> None:
    seen: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        body = await request.read()
        num = len(json.loads(body)["requests"])
        seen.append(len(body))
        return web.Response(body=answered(body, *(RewardResult(0.5),) * num))

    async def main() -> None:
        async with http(answering(handler), max_request_bytes=8192, num_requests=50) as made:
            given = [replace(example_request(), split="x" * 1500) for _ in range(20)]
            given[7] = replace(given[7], split="x" * 9000)
            answer = await made.invoke(call(*given))
            failed = [n for n, r in enumerate(answer.results) if not isinstance(r, RewardResult)]
            assert failed == [7]
            assert "the limit of http is 0.0 MB" in str(answer.results[7])
            assert answer.cost.num_invocations == len(seen) > 1
            assert max(seen) <= 8192
            whole = RewardCall(tuple(given), "key", 5.0, group=True)
            with pytest.raises(BackendFailure, match="the limit of http"):
                await made.invoke(whole)

    asyncio.run(main())


def test_no_reward_is_wrong_with_a_server_that_reorders_its_results() -> None:
    num_calls = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal num_calls
        num_calls += 1
        raw = json.loads(await request.read())
        results = [
            {"id": one["id"], "value": one["task_index"] / 200, "components": {}}
            for one in raw["requests"]
        ]
        if num_calls % 2:
            results.reverse()
        said = {"version": 2, "key": raw["key"], "results": results}
        return web.json_response({**said, "run_s": 0.0, "cold": False, "num_hung": 0})

    async def main() -> None:
        async with http(answering(handler), num_requests=20) as made:
            given = [
                replace(example_request(), ticket_id=f"g.{index}", task_index=index)
                for index in range(200)
            ]
            results = (await made.invoke(call(*given))).results
        right = [
            isinstance(one, RewardResult) and one.value == index / 200
            for index, one in enumerate(results)
        ]
        garbage = [one for one in results if isinstance(one, BackendFailure)]
        assert (sum(right), len(garbage)) == (100, 100)
        assert all("instead of" in str(one) and one.again for one in garbage)

    asyncio.run(main())


def test_a_call_that_comes_twice_is_scored_once() -> None:
    async def main() -> None:
        function = RewardFunction(MARKS)
        scored: list[RewardRequest] = []
        marks = function._reward
        assert isinstance(marks, Marks)
        score = marks.score
        marks.score = lambda request: (scored.append(request), score(request))[1]  # type: ignore[method-assign]
        body = wire.call_bytes(
            REF, [wire.request_bytes(example_request())], group=False, key="k", deadline_s=5.0
        )
        first, second = await function.answer(body), await function.answer(body)
        assert json.loads(first)["results"] == json.loads(second)["results"]
        assert len(scored) == 1
        assert (json.loads(first)["cold"], json.loads(second)["cold"]) == (True, False)
        await function.close()

    asyncio.run(main())


def test_a_function_never_listens_to_all_by_mistake() -> None:
    with pytest.raises(UserError, match="ROLLART_REWARD_TOKEN"):
        Listening(host="0.0.0.0").check()
    Listening(host="0.0.0.0", token="t").check()
    Listening(host="0.0.0.0", open_to_all=True).check()


# The pool


@asynccontextmanager
async def pool(ref: RewardRef = REF, **options: Any) -> AsyncIterator[PoolBackend]:
    made = PoolBackend(
        reward=ref, reward_range=(0.0, 1.0), timeout_s=60.0, **{"num_workers": 1, **options}
    )
    try:
        yield made
    finally:
        await made.close()
        assert made.gauges()["workers"] == 0


@pytest.mark.parametrize(
    ("options", "more", "says"),
    [
        ({}, {"sandbox": "bubblewrp"}, "bubblewrp"),
        ({}, {"sandbox": "process"}, "a worker could not start"),
        ({"limit": lambda: 20}, {}, "a worker could not start: .*pickle"),
    ],
)
def test_a_mistake_in_the_options_hangs_nobody(
    options: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), pool(RewardRef(MARKS, options), **more) as made:
            with pytest.raises(ConfigError, match=says):
                await made.open()
            assert made.gauges()["workers"] == 0
            with pytest.raises(BackendFailure, match=says) as caught:
                await made.invoke(call())
            assert not caught.value.again

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", [None, "bubblewrap"])
def test_a_worker_that_dies_or_hangs_is_replaced(sandbox: str | None) -> None:
    if sandbox and (why := no_bubblewrap()):
        pytest.skip(why)

    async def main() -> None:
        async with pool(num_threads=8, sandbox=sandbox) as made:
            await made.open()
            gone = r"the reward worker .*is gone \(exit code 3.*\): a reward may print$"
            with pytest.raises(BackendFailure, match=gone) as caught:
                await made.invoke(call(told("exit")))
            assert caught.value.again
            assert (await made.score([example_request()]))[0].value == 0.5
            hung = call(told("stuck"), deadline_s=1.0)
            with pytest.raises((BackendFailure, DeadlineFailure)):
                await made.invoke(hung)
            assert (await made.score([example_request()]))[0].value == 0.5
            assert made.num_started >= 3

    asyncio.run(main())


def test_what_a_reward_leaves_ends_with_its_worker() -> None:
    async def main() -> int:
        async with pool() as made:
            answer = await made.invoke(call(told("leave a process")))
            return int(answer.results[0].components["pid"])

    wait_gone(asyncio.run(main()))


@pytest.mark.slow
def test_a_pool_grows_on_demand_and_shrinks_to_nothing() -> None:
    async def main() -> None:
        ref = RewardRef(MARKS, {"wait_s": 0.05})
        async with pool(ref, num_workers=2, num_threads=1, idle_s=600) as made:
            assert made.gauges()["workers"] == 0
            given = [example_request() for _ in range(12)]
            await asyncio.gather(*(made.score([request]) for request in given))
            await until(lambda: made.num_started == 2, "both workers")
            assert made.gauges()["workers"] == 2
            made.config = made.config.model_copy(update={"idle_s": 0.01})
            await asyncio.gather(*(made.score([request]) for request in given[:2]))
            await until(lambda: not made.gauges()["workers"], "the end of idle workers")
            assert made.num_started == 2
            assert (await made.score(given[:1]))[0].value == 0.5
            assert made.num_started == 3

    asyncio.run(main())


@pytest.mark.slow
def test_a_reward_that_cannot_be_made_is_a_mistake_of_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ITS_KEY", "kept-to-myself")

    async def main() -> None:
        for ref, says in (
            (RewardRef("rollart/NoSuch-v1"), "no reward 'rollart/NoSuch-v1' is installed"),
            (RewardRef(MARKS, {"limit": -1}), "limit is -1: below 0"),
        ):
            async with pool(ref) as made:
                with pytest.raises(ConfigError, match=says):
                    await made.open()
                with pytest.raises(BackendFailure, match=says) as caught:
                    await made.invoke(call())
                assert not caught.value.again
        async with pool(RewardRef(MARKS, {"key_env": "ITS_KEY"})) as made:
            holds = replace(example_request(), context={"reference": "kept-to-myself"})
            with pytest.raises(RewardFailure, match="contains its own token or key"):
                await made.invoke(call(holds))

    asyncio.run(main())


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_deployment_that_fails_says_why_and_is_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve = pytest.importorskip("ray.serve")
    from rollart_plugins.serverless.ray_serve import RayServeBackend

    left: list[list[str]] = []
    monkeypatch.setattr(
        RayServeBackend, "_leave", lambda _: left.append(list(serve.status().applications))
    )

    async def main() -> None:
        cluster = RayCluster(RayRuntime(), "test", 3)
        cluster.open()
        try:
            serve.start(proxy_location="Disabled")
            made = RayServeBackend(
                reward=RewardRef(MARKS, {"limit": -1}),
                reward_range=(0.0, 1.0),
                timeout_s=30.0,
                cpus=0.5,
                start_s=240.0,
            )
            with pytest.raises(ConfigError, match=f"^reward {MARKS} on ray_serve: .*limit is -1"):
                await made.open()
            assert serve.status().applications
            await made.close()
            serve.shutdown()
        finally:
            cluster.close()

    asyncio.run(main())
    assert left == [[]]


@pytest.mark.slow
def test_closing_a_pool_ends_what_is_under_way() -> None:
    async def main() -> None:
        async with pool() as made:
            await made.open()
            under_way = asyncio.create_task(made.invoke(call(told("hang"))))
            await until(lambda: made.gauges()["workers_busy"], "a busy worker")
            await made.close()
            with pytest.raises(BackendFailure):
                await under_way

    asyncio.run(main())
