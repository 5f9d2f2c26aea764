"""Which failures may run once more: those of time and availability, and no others."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import urllib.error

import aiohttp
import pytest
from support.retries import may_retry

from rollart_core.errors import (
    ClusterLost,
    ConfigError,
    EngineDied,
    InferenceFailure,
    SandboxFailure,
    TrainerLost,
    WorkerDied,
)
from rollart_sandboxes.engine import EngineError

OVERLOADED = (
    "The current node timed out during startup. This could happen because some of the raylet "
    "failed to startup or the GCS has become overloaded."
)


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def in_the_wake_of(error: BaseException, first: BaseException) -> BaseException:
    error.__context__ = first
    return error


def named(name: str, message: str = "", *bases: type[Exception]) -> Exception:
    """Return an exception of a package that may not be installed."""
    module, _, kind = name.rpartition(".")
    made = type(kind, bases or (Exception,), {"__module__": module})
    error = made(message)
    assert isinstance(error, Exception)
    return error


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("late"),
        caused(TimeoutError("a node is not up within 240 s"), RuntimeError("not known yet")),
        caused(TimeoutError(), asyncio.CancelledError()),
        subprocess.TimeoutExpired("docker", 60),
        pytest.fail.Exception("Timeout (>120.0s) from pytest-timeout."),
        ConnectionRefusedError("nobody"),
        OSError(errno.EADDRINUSE, "address in use"),
        urllib.error.URLError(ConnectionRefusedError("nobody")),
        aiohttp.ServerDisconnectedError(),
        caused(named("httpx.ConnectError", "", type(named("httpx.NetworkError"))), OSError()),
        # Ray
        ClusterLost("gone"),
        Exception(OVERLOADED),
        caused(ConfigError("no cluster"), Exception(OVERLOADED)),
        RuntimeError("Failed to connect to GCS. Last connection error: None"),
        named("ray.exceptions.GetTimeoutError", "", TimeoutError),
        named("ray.exceptions.RpcError", "UNAVAILABLE"),
        named("ray.exceptions.ActorDiedError", "The actor died because its node has died."),
        ConfigError("runtime.address: node 10.0.0.7 does not answer"),
        WorkerDied("the trainer process is gone (no process within 60 s: its node may be gone)"),
        # Docker
        EngineError(503, "the engine is busy"),
        caused(SandboxFailure("the box did not answer"), TimeoutError()),
        caused(SandboxFailure("no Docker engine answers at unix:///x"), FileNotFoundError()),
        # SGLang
        ConfigError("engine: no SGLang server answers at http://127.0.0.1:9 after 600 s"),
        EngineDied("the SGLang server at http://127.0.0.1:9 does not answer any more"),
        InferenceFailure("the SGLang server at http://a:1 answers /generate with 503: busy"),
        ExceptionGroup("two", [TimeoutError(), ConnectionResetError()]),
    ],
)
def test_failures_of_time_and_availability_may_run_once_more(error: BaseException) -> None:
    assert may_retry(error)


@pytest.mark.parametrize(
    "error",
    [
        # wrong results
        AssertionError("1 != 2"),
        AssertionError(OVERLOADED),
        pytest.fail.Exception("it differs"),
        ValueError("it differs"),
        SystemExit(1),
        caused(TimeoutError("late"), AssertionError("1 != 2")),
        in_the_wake_of(TimeoutError("while closing"), AssertionError("1 != 2")),
        in_the_wake_of(
            TimeoutError("while closing"), in_the_wake_of(KeyError(), AssertionError("1 != 2"))
        ),
        in_the_wake_of(ConnectionError(), ExceptionGroup("", [AssertionError(), TimeoutError()])),
        in_the_wake_of(ValueError("wrong"), TimeoutError()),
        ExceptionGroup("two", [TimeoutError(), ValueError()]),
        # crashes
        WorkerDied("signal SIGSEGV"),
        TrainerLost("the trainer process is gone (exit code 1)"),
        EngineDied("the SGLang server ended (exit code -11)"),
        caused(EngineDied("it is gone"), ConnectionResetError()),
        caused(TimeoutError("its answer"), WorkerDied("signal SIGSEGV")),
        named("ray.exceptions.ActorDiedError", "Worker unexpectedly exits: SIGSEGV"),
        named("ray.exceptions.WorkerCrashedError"),
        SandboxFailure("the box is gone"),
        # leaks
        ResourceWarning("a socket was left open"),
        pytest.PytestUnraisableExceptionWarning("a socket was left open"),
        OSError(errno.EMFILE, "too many open files"),
        MemoryError(),
        # what is refused each time
        EngineError(404, "no such image"),
        InferenceFailure("the SGLang server at http://a:1 answers /generate with 400: no"),
    ],
)
def test_crashes_leaks_and_wrong_results_never_do(error: BaseException) -> None:
    assert not may_retry(error)


def test_what_asyncio_raises_at_the_end_of_a_limit_may() -> None:
    async def limited() -> None:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    async def waited_for() -> None:
        await asyncio.wait_for(asyncio.Event().wait(), 0.001)

    for work in (limited, waited_for):
        with pytest.raises(TimeoutError) as caught:
            asyncio.run(work())
        assert may_retry(caught.value)
