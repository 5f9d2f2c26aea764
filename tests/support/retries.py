"""Which failures of a test may run once more, in the lanes with real components.

Takes: the exception that failed a test. Gives: whether the failure is one of time or availability:
a timeout, a refused connection, a server or cluster that was not ready. Never: allows a second run
after a crash, a leak or a wrong result. An AssertionError is a wrong result, whatever it says, and
so is one in the chain of exceptions: what is raised while a test cleans up may hide it.

Exceptions of packages are known by their names, so that no package is imported here.
"""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import re
import subprocess
from collections.abc import Iterator
from typing import Final, Literal

import pytest

Verdict = Literal["availability", "result", "crash", "unknown"]

OF_TIME: Final = (
    TimeoutError,  # asyncio's, Ray's GetTimeoutError and those of sockets are this one too
    ConnectionError,
    multiprocessing.TimeoutError,
    subprocess.TimeoutExpired,
)
OF_NETWORK: Final = (errno.EADDRINUSE, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
OF_AVAILABILITY: Final = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectionError",
        "httpcore.NetworkError",
        "httpcore.TimeoutException",
        "httpx.NetworkError",
        "httpx.TimeoutException",
        "openai.APIConnectionError",
        "ray.exceptions.ActorUnavailableError",
        "ray.exceptions.LocalRayletDiedError",
        "ray.exceptions.NodeDiedError",
        "ray.exceptions.ObjectFetchTimedOutError",
        "ray.exceptions.RpcError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "rollart_core.errors.ClusterLost",
        "rollart_core.errors.DeadlineFailure",
        "torch.distributed.DistNetworkError",
        "torch.distributed.DistStoreError",
    }
)
"""Errors by which a part of the machine was too slow or gone, with those derived from them."""
CRASHES: Final = frozenset(
    {
        "ray.exceptions.ActorDiedError",
        "ray.exceptions.WorkerCrashedError",
        "rollart_core.errors.EngineDied",
        "rollart_core.errors.WorkerDied",
    }
)
SAYS_SO: Final = re.compile(
    "|".join(
        (
            # Ray
            r"GCS has become overloaded",
            r"Failed to (start|connect to) GCS",
            r"raylet may not have started",
            r"The actor died because its node has died",
            r"The actor never ran",
            r"node \S+ does not answer$",
            r"no process within [\d.]+ s",
            # Docker
            r"no Docker engine answers",
            r"Cannot connect to the Docker daemon",
            r"dial unix",
            # SGLang
            r"no SGLang server answers",
            r"the SGLang server at \S+ does not answer any more",
            r"answers \S+ with 50[234]\b",
            # any of them
            r"did not answer within [\d.]+ s",
            r"failed to connect to all addresses",
            r"Deadline Exceeded|DEADLINE_EXCEEDED|status = StatusCode\.UNAVAILABLE",
        )
    )
)
"""What messages of availability say, where the type of the exception says nothing or too much."""
_OF_PYTEST_TIMEOUT: Final = "Timeout (>"
_DOCKER_REFUSES: Final = "rollart_sandboxes.engine.EngineError"


def may_retry(error: BaseException) -> bool:
    """Return whether a failure is of time or availability, and nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(may_retry, error.exceptions))
    if any(_verdict(one) == "result" for one in _chain(error)):
        return False
    # A node that did not come up in time, say: whatever its state was then, it may be in time now.
    verdicts = [_verdict(one) for one in _causes(error)]
    return "availability" in verdicts and "crash" not in verdicts


def _verdict(error: BaseException) -> Verdict:
    """Say what an exception stands for, regardless of its causes."""
    if isinstance(error, BaseExceptionGroup):
        verdicts = set(map(_verdict, error.exceptions))
        order: tuple[Verdict, ...] = ("result", "crash", "unknown", "availability")
        return next(verdict for verdict in order if verdict in verdicts)
    if isinstance(error, pytest.fail.Exception):
        return "availability" if str(error.msg).startswith(_OF_PYTEST_TIMEOUT) else "result"
    if isinstance(error, AssertionError | Warning):  # a leak is a ResourceWarning
        return "result"
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    if isinstance(error, OF_TIME) or not names.isdisjoint(OF_AVAILABILITY):
        return "availability"
    if isinstance(error, OSError) and (error.errno in OF_NETWORK or _is_of_time(error)):
        return "availability"
    if _DOCKER_REFUSES in names and getattr(error, "status", 0) >= 500:
        return "availability"
    if isinstance(error, Exception) and SAYS_SO.search(str(error)):
        return "availability"
    return "unknown" if names.isdisjoint(CRASHES) else "crash"


def _is_of_time(error: OSError) -> bool:
    """Return whether an ``urllib.error.URLError`` is of time or availability."""
    reason = getattr(error, "reason", None)
    return isinstance(reason, BaseException) and _verdict(reason) == "availability"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from.

    ``asyncio.timeout`` raises from the CancelledError by which it ended the work: that is no cause.
    """
    while True:
        yield error
        cause = error.__cause__
        if cause is None or isinstance(cause, asyncio.CancelledError):
            return
        error = cause


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and all in whose wake it was raised."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting.append(one.__cause__)
        if not one.__suppress_context__:
            waiting.append(one.__context__)
