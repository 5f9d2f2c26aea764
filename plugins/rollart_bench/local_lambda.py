"""AWS Lambda on this machine, for tests and benchmarks: Lambda's two APIs around real runtimes.

    boto3 --POST .../functions/NAME/invocations--> LocalLambda <--next, response-- awslambdaric

Takes: a reward. Gives: an endpoint for boto3, and one process of ``awslambdaric`` per concurrent
call, started on demand, kept warm, and ended when idle. Never: emulates all of AWS. There is no
IAM, instances are not frozen between calls, and the memory size only affects the bill.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from rollart_plugins.serverless.blocking import OPTIONS, REWARD
from rollart_plugins.serverless.config import LAMBDA_BYTES

HANDLER: Final = "rollart_plugins.serverless.lambda_handler.handler"
_RUNTIME: Final = "/2018-06-01/runtime"


@dataclass(frozen=True, slots=True)
class FunctionSettings:
    """One function, as a user configures it on AWS."""

    reward: str
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = "reward"
    handler: str = HANDLER
    concurrency: int = 4
    """The limit of concurrent calls. A call above it is throttled."""
    timeout_s: float = 60.0
    memory_mb: int = 1024
    idle_s: float = 1.5
    """Idle seconds after which an instance is ended."""


@dataclass(slots=True, eq=False)
class _Call:
    """One invocation."""

    body: bytes
    done: asyncio.Future[tuple[bytes, bool]]
    """The payload, and whether the function failed."""
    call_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    began_s: float = 0.0
    init_s: float | None = None


@dataclass(slots=True, eq=False)
class _Instance:
    """One process of the runtime, with its own endpoint."""

    site: web.TCPSite
    port: int
    started_s: float
    process: asyncio.subprocess.Process | None = None
    call: _Call | None = None
    num_calls: int = 0
    idle_since_s: float | None = None


class LocalLambda:
    """One function of a local Lambda; an asynchronous context manager.

    Args:
        settings: The function.
        port: The port to listen on; 0 for any free port.
    """

    def __init__(self, settings: FunctionSettings, *, port: int = 0) -> None:
        self.settings = settings
        self._port = port
        self.url = ""
        """For boto3's ``endpoint_url``."""
        self.num_started = 0
        self._instances: dict[int, _Instance] = {}
        self._calls: deque[_Call] = deque()
        self._news = asyncio.Condition()
        self._num_open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_instances(self) -> int:
        """The living processes."""
        return len(self._instances)

    async def __aenter__(self) -> LocalLambda:
        """Listen on the loopback address."""
        app = web.Application(client_max_size=2 * LAMBDA_BYTES)
        app.router.add_post("/2015-03-31/functions/{name}/invocations", self._invoke)
        app.router.add_get(f"{_RUNTIME}/invocation/next", self._next)
        app.router.add_post(_RUNTIME + "/invocation/{id}/response", self._response)
        app.router.add_post(_RUNTIME + "/invocation/{id}/error", self._failed)
        app.router.add_post(f"{_RUNTIME}/init/error", self._init_failed)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        _, port = await self._listen(self._port)
        self.url = f"http://127.0.0.1:{port}"
        self._spawn(self._reap())
        return self

    async def __aexit__(self, *exc: object) -> None:
        """End all instances, then the server."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end(*self._instances.values())
        await self._runner.cleanup()

    # Lambda's API

    async def _invoke(self, request: web.Request) -> web.Response:
        settings = self.settings
        name = request.match_info["name"]
        if name != settings.name:
            return _refused(404, "ResourceNotFoundException", f"Function not found: {name}")
        body = await request.read()
        if len(body) > LAMBDA_BYTES:
            message = f"Request must be smaller than {LAMBDA_BYTES} bytes"
            return _refused(413, "RequestTooLargeException", message)
        if self._num_open >= settings.concurrency:
            return _refused(429, "TooManyRequestsException", "Rate Exceeded.")
        self._num_open += 1
        call = _Call(body, asyncio.get_running_loop().create_future())
        try:
            return await self._run(call)
        finally:
            self._num_open -= 1
            with contextlib.suppress(ValueError):
                self._calls.remove(call)

    async def _run(self, call: _Call) -> web.Response:
        await self._offer(call)
        try:
            payload, failed = await asyncio.wait_for(call.done, self.settings.timeout_s)
        except TimeoutError:
            await self._kill_holder(call)
            said = f"{call.call_id} Task timed out after {self.settings.timeout_s:.2f} seconds"
            payload, failed = json.dumps({"errorMessage": said}).encode(), True
        headers = {"X-Amz-Executed-Version": "$LATEST", "X-Amz-Log-Result": self._log(call)}
        if failed:
            headers["X-Amz-Function-Error"] = "Unhandled"
        return web.Response(body=payload, headers=headers, content_type="application/json")

    async def _offer(self, call: _Call) -> None:
        """Queue a call for the instances, and start one if none is free."""
        async with self._news:
            self._calls.append(call)
            busy = sum(1 for i in self._instances.values() if i.call is not None)
            if busy + len(self._calls) > len(self._instances):
                self._spawn(self._start())
            self._news.notify_all()

    def _log(self, call: _Call) -> str:
        """Return the end of the function's log in Lambda's format."""
        ms = 1000 * (time.monotonic() - call.began_s) if call.began_s else 0.0
        text = (
            f"REPORT RequestId: {call.call_id}\tDuration: {ms:.2f} ms\t"
            f"Billed Duration: {int(ms) + 1} ms\tMemory Size: {self.settings.memory_mb} MB\t"
            f"Max Memory Used: 0 MB\t"
        )
        if call.init_s is not None:
            text += f"Init Duration: {1000 * call.init_s:.2f} ms\t"
        return base64.b64encode(text.encode()).decode()

    # The Runtime API, one endpoint per instance

    async def _next(self, request: web.Request) -> web.Response:
        instance = self._instance_of(request)
        async with self._news:
            instance.call, instance.idle_since_s = None, time.monotonic()
            await self._news.wait_for(lambda: self._calls or not self._incarnations(instance))
            if not self._incarnations(instance):
                raise web.HTTPGone
            call = instance.call = self._calls.popleft()
        call.began_s = time.monotonic()
        if not instance.num_calls:
            call.init_s = call.began_s - instance.started_s
        instance.num_calls += 1
        deadline_ms = int(1000 * (time.time() + self.settings.timeout_s))
        headers = {
            "Lambda-Runtime-Aws-Request-Id": call.call_id,
            "Lambda-Runtime-Deadline-Ms": str(deadline_ms),
            "Lambda-Runtime-Invoked-Function-Arn": f"arn:local:{self.settings.name}",
        }
        return web.Response(body=call.body, headers=headers, content_type="application/json")

    async def _response(self, request: web.Request) -> web.Response:
        return await self._settle(request, failed=False)

    async def _failed(self, request: web.Request) -> web.Response:
        return await self._settle(request, failed=True)

    async def _settle(self, request: web.Request, *, failed: bool) -> web.Response:
        body = await request.read()
        call = self._instance_of(request).call
        if call is not None and call.call_id == request.match_info["id"] and not call.done.done():
            call.done.set_result((body, failed))
        return web.json_response({"status": "OK"}, status=202)

    async def _init_failed(self, request: web.Request) -> web.Response:
        body = await request.read()
        async with self._news:
            if self._calls and not self._calls[0].done.done():
                self._calls.popleft().done.set_result((body, True))
        return web.json_response({"status": "OK"}, status=202)

    def _instance_of(self, request: web.Request) -> _Instance:
        assert request.transport is not None
        port = request.transport.get_extra_info("sockname")[1]
        try:
            return self._instances[port]
        except KeyError:
            raise web.HTTPForbidden from None

    # Instances

    async def _listen(self, port: int = 0) -> tuple[web.TCPSite, int]:
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        return site, self._runner.addresses[-1][1]

    async def _start(self) -> None:
        site, port = await self._listen()
        instance = self._instances[port] = _Instance(site, port, time.monotonic())
        self.num_started += 1
        instance.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "awslambdaric", self.settings.handler),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=self._environment(port),
        )
        code = await instance.process.wait()
        call, instance.call = instance.call, None
        if call is not None and not call.done.done():
            said = f"RequestId: {call.call_id} Error: Runtime exited with error: exit status {code}"
            error = {"errorType": "Runtime.ExitError", "errorMessage": said}
            call.done.set_result((json.dumps(error).encode(), True))
        await self._end(instance)

    def _incarnations(self, instance: _Instance) -> bool:
        return self._instances.get(instance.port) is instance

    async def _end(self, *instances: _Instance) -> None:
        """Remove instances, so that they get no more calls, then end them."""
        async with self._news:
            for instance in instances:
                self._instances.pop(instance.port, None)
            self._news.notify_all()
        for instance in instances:
            await self._stop(instance)

    async def _stop(self, instance: _Instance) -> None:
        process = instance.process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        with contextlib.suppress(RuntimeError):  # already stopped
            await instance.site.stop()

    async def _kill_holder(self, call: _Call) -> None:
        for instance in list(self._instances.values()):
            if instance.call is call:
                await self._end(instance)

    async def _reap(self) -> None:
        """End idle instances."""
        while True:
            await asyncio.sleep(min(0.2, self.settings.idle_s / 2))
            async with self._news:
                idle = [one for one in self._instances.values() if self._is_idle(one)]
                for one in idle:
                    del self._instances[one.port]
                self._news.notify_all()
            for one in idle:
                await self._stop(one)

    def _is_idle(self, instance: _Instance) -> bool:
        since_s = instance.idle_since_s
        if instance.call is not None or since_s is None:
            return False
        return time.monotonic() - since_s > self.settings.idle_s

    def _environment(self, port: int) -> dict[str, str]:
        settings = self.settings
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{port}",
            "AWS_LAMBDA_FUNCTION_NAME": settings.name,
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(settings.memory_mb),
            "LAMBDA_TASK_ROOT": os.getcwd(),
            REWARD: settings.reward,
            OPTIONS: json.dumps(dict(settings.options)),
        }

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _refused(status: int, code: str, message: str) -> web.Response:
    headers = {"X-Amzn-ErrorType": code}
    return web.json_response({"Type": "User", "Message": message}, status=status, headers=headers)
