"""One reward, written once, runs unchanged on every backend."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.marks_reward import MISBEHAVE, Marks, Rank
from support.pace import scaled
from support.sandbox_types import no_bubblewrap

from rollart_bench.local_lambda import FunctionSettings, LocalLambda
from rollart_core.contracts.reward import (
    RewardBackend,
    RewardBackendSpec,
    RewardCall,
    RewardRef,
    RewardRequest,
    RewardResult,
)
from rollart_core.errors import BackendFailure, DeadlineFailure, RewardFailure
from rollart_core.plugins import registry
from rollart_core.plugins.manager import plugins
from rollart_plugins.engines.server_process import free_port
from rollart_plugins.serverless import google_function
from rollart_plugins.serverless.function import RewardFunction
from rollart_plugins.serverless.serve_command import Listening, serve
from rollart_testing import example_request

pytestmark = pytest.mark.starts_normally  # a worker of the pool imports little

TOKEN = "a-token-of-this-test"
PORTS_TRIED = 5
SLOW = pytest.mark.slow
WAYS = [
    "inline",
    "pool",
    "http",
    "fc",
    pytest.param("pool in a box", marks=SLOW),
    pytest.param("functions-framework", marks=SLOW),
    pytest.param("lambda", marks=SLOW),
    pytest.param("ray_serve", marks=pytest.mark.ray),
]


@asynccontextmanager
async def nothing(ref: RewardRef) -> AsyncIterator[dict[str, Any]]:
    yield {}


@asynccontextmanager
async def served(ref: RewardRef) -> AsyncIterator[dict[str, Any]]:
    """Serve it as `rollart serve-reward` does."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    end = asyncio.Event()
    function = RewardFunction(ref.id, ref.options)
    listening = Listening(port=0, token=TOKEN)
    server = asyncio.create_task(serve(function, listening, began=url.set_result, until=end.wait))
    await asyncio.wait({server, url}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield {"url": await url, "token_env": "ROLLART_REWARD_TOKEN"}
    finally:
        end.set()
        await server


@asynccontextmanager
async def on_lambda(ref: RewardRef) -> AsyncIterator[dict[str, Any]]:
    pytest.importorskip("awslambdaric")
    settings = FunctionSettings(ref.id, ref.options, concurrency=2)
    async with LocalLambda(settings) as local:
        yield {"function": "reward", "endpoint_url": local.url, "max_concurrent": 2}


@asynccontextmanager
async def boxed(ref: RewardRef) -> AsyncIterator[dict[str, Any]]:
    if why := await asyncio.to_thread(no_bubblewrap):
        pytest.skip(why)
    yield {"sandbox": "bubblewrap", "num_workers": 1}


@asynccontextmanager
async def on_fc(ref: RewardRef) -> AsyncIterator[dict[str, Any]]:
    """Answer as Function Compute's endpoint does, with the function behind it."""
    pytest.importorskip("alibabacloud_fc20230330")
    function = RewardFunction(ref.id, ref.options)

    async def invoke(request: web.Request) -> web.Response:
        if request.match_info["name"] != "reward":
            error = {"Code": "FunctionNotFound", "Message": "no function 'none'"}
            return web.json_response(error, status=404)
        if "Credential=an-id" not in request.headers["Authorization"]:
            error = {"Code": "SignatureDoesNotMatch", "Message": "another key"}
            return web.json_response(error, status=403)
        body = await function.answer(await request.read())
        return web.Response(body=body, content_type="application/octet-stream")

    app = web.Application(client_max_size=32 << 20)
    app.router.add_post("/2023-03-30/functions/{name}/invocations", invoke)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        endpoint = f"127.0.0.1:{runner.addresses[0][1]}"
        yield {"function": "reward", "endpoint": endpoint, "protocol": "http"}
    finally:
        await runner.cleanup()
        await function.close()


@asynccontextmanager
async def framework(ref: RewardRef) -> AsyncIterator[dict[str, Any]]:
    """Serve it by the functions-framework that Google's platforms run."""
    pytest.importorskip("functions_framework")
    for _ in range(PORTS_TRIED):
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "functions_framework"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--source", google_function.__file__, "--target", "score"),
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "ROLLART_REWARD": ref.id,
                "ROLLART_REWARD_OPTIONS": json.dumps(dict(ref.options)),
            },
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            if await listening(port, process):
                yield {"url": f"http://127.0.0.1:{port}", "token_env": "ROLLART_REWARD_TOKEN"}
                return
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    pytest.fail(f"it ended {PORTS_TRIED} times before it listened, last with {process.returncode}")


async def listening(port: int, process: asyncio.subprocess.Process) -> bool:
    """Wait until a process listens; False if it ends, as when another one has taken the port."""
    async with asyncio.timeout(scaled(120)):
        while process.returncode is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                await writer.wait_closed()
                return process.returncode is None
    return False


@asynccontextmanager
async def on_ray(ref: RewardRef) -> AsyncIterator[dict[str, Any]]:
    pytest.importorskip("ray.serve")
    yield {"max_replicas": 1, "cpus": 0.5, "start_s": 240}


PLACES: Mapping[str, Callable[[RewardRef], Any]] = {
    "inline": nothing,
    "pool": nothing,
    "http": served,
    "fc": on_fc,
    "pool in a box": boxed,
    "functions-framework": framework,
    "lambda": on_lambda,
    "ray_serve": on_ray,
}
CLOSES = {"inline", "pool", "http", "fc", "ray_serve"}
"""Where the reward's ``close()`` is called; elsewhere its process is killed."""
ALIAS = {"pool in a box": "pool", "functions-framework": "http"}


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLART_REWARD_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "a-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")


@asynccontextmanager
async def backend(way: str, reward: type, **options: Any) -> AsyncIterator[RewardBackend]:
    """Open a backend with all it needs around it."""
    ref = RewardRef(f"{reward.__module__}:{reward.__qualname__}", options, reward is Rank)
    alias = ALIAS.get(way, way)
    spec = registry.spec("reward_backends", alias)
    assert isinstance(spec, RewardBackendSpec)
    async with AsyncExitStack() as stack:
        needs = await stack.enter_async_context(PLACES[way](ref))
        made = registry.build(
            "reward_backends",
            alias,
            needs,
            reward=reward(**options) if spec.in_process else ref,
            reward_range=(0.0, 1.0),
            timeout_s=30.0,
        )
        stack.push_async_callback(made.close)
        await made.open()
        yield made


def requests(num: int) -> list[RewardRequest]:
    return [
        replace(
            example_request(i / num, index=i),
            messages=({"role": "assistant", "content": f"{i} \u00fc \u2028 \ud800 {'x' * i}"},),
            context={"reference": f"{i} \u00fc \u2028 \ud800 "},
        )
        for i in range(num)
    ]


def call(given: list[RewardRequest], *, group: bool = False, deadline_s: float = 30) -> RewardCall:
    return RewardCall(tuple(given), f"key-{deadline_s}-{len(given)}", deadline_s, group)


def test_every_backend_is_tried() -> None:
    ways = [way if isinstance(way, str) else way.values[0] for way in WAYS]
    assert ways == list(PLACES)
    known = plugins().registered("reward_backends").values()
    built_in = {r.spec.alias for r in known if r.spec.id.startswith("rollart/")}
    assert built_in == {ALIAS.get(way, way) for way in ways}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_reward_runs_unchanged(way: str, tmp_path: Path) -> None:
    closed = tmp_path / "closed"

    async def main() -> None:
        async with backend(way, Marks, limit=12, closed=str(closed)) as made:
            given = requests(10)
            expected = [Marks(limit=12).score(request) for request in given]
            assert await made.score(given) == expected
            assert len({result.value for result in expected}) == 3
            assert await made.score([]) == []
            answer = await made.invoke(call(given))
            assert list(answer.results) == expected
            assert answer.cost.num_invocations >= 1
            await fails_alone(made, 0.3 if way in CLOSES else 1.5)
            assert await made.score(given) == expected
            await made.close()
            with pytest.raises(BackendFailure if way != "inline" else RewardFailure):
                await made.score(given)

    asyncio.run(main())
    assert closed.exists() == (way in CLOSES)


async def fails_alone(made: RewardBackend, first_s: float) -> None:
    """Ask for all kinds of trouble, among requests that are well.

    Args:
        made: What is asked.
        first_s: The deadline to begin with: on a busy machine more is late than what hangs.
    """
    how = [*MISBEHAVE, None]
    given = [replace(example_request(), context={"how": h} if h else {}) for h in how]
    kinds: list[type] = []
    for deadline_s in (first_s, 4.0, 15.0):  # what hangs does so for 20 s
        with suppress(DeadlineFailure):
            answer = await made.invoke(call(given, deadline_s=deadline_s))
            kinds = [type(result) for result in answer.results]
        if kinds.count(DeadlineFailure) == 1:
            break
    assert kinds.pop(how.index("hang")) is DeadlineFailure
    assert kinds == [RewardFailure] * (len(MISBEHAVE) - 1) + [RewardResult]
    said = " ".join(map(str, answer.results))
    for words in ("LookupError: no such task: 0", "the value nan", "outside its range 0 to 1"):
        assert words in said
    assert "not a RewardResult" in said


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS[:3])
def test_a_group_reward_sees_the_whole_group(way: str) -> None:
    async def main() -> None:
        async with backend(way, Rank) as made:
            given = [example_request(r) for r in (0.2, 0.9, 0.5, 0.9, 0.1)]
            answer = await made.invoke(call(given, group=True))
            values = [r.value for r in answer.results if isinstance(r, RewardResult)]
            assert values == [0.2, 0.6, 0.4, 0.6, 0.0]

    asyncio.run(main())
