"""All errors that RollArt raises intentionally.

    RollartError
    ├── UserError                 a user can fix it: shown as one line, without a traceback
    │   ├── ConfigError           an invalid run config (also a ValueError)
    │   ├── UnknownIdError        no plugin has that id (also a KeyError)
    │   ├── PluginError           a broken plugin, or two plugins in conflict
    │   ├── RegistryError         a rejected community registry or package
    │   └── BatchRefused          a batch that the algorithm rejects (also a ValueError)
    ├── EpisodeError              one episode failed; becomes the typed Failure of its trajectory
    │   ├── EnvironmentFailure    env.reset / env.step / env.close raised or broke the contract
    │   ├── SandboxFailure        the sandbox of an environment failed
    │   ├── InferenceFailure      the engine could not answer the request
    │   │   ├── EngineDied        the engine's process is gone, without an answer
    │   │   └── ContextOverflow   the conversation exceeds the context: the episode is truncated
    │   ├── RewardFailure         the reward could not be computed
    │   │   └── BackendFailure    its backend is unreachable or its answer is invalid
    │   ├── WorkerLost            the env worker's process or its node is gone
    │   ├── CollateralFailure     each further episode that was on the lost worker
    │   ├── DeadlineFailure       a deadline passed
    │   └── CancelledFailure      stopped intentionally (shutdown, redundancy, too stale)
    ├── EndpointError             an OpenAI-compatible server refused or is unreachable
    ├── TooManyFailures           the run stopped itself; has the rate and kind of failures
    ├── TrainingDiverged          loss or gradient were not finite in several updates in a row
    ├── LogprobMismatch           trainer and engine disagree before the first update
    ├── OutOfMemory               a microbatch does not fit in the memory of a trainer's device
    ├── EnginesLost               no inference engine is left, and none will restart
    ├── ClusterLost               the cluster of the run is gone
    ├── JournalError              the run's journal cannot be written or read
    └── WorkerDied                a process of the run (engine, trainer, env worker) is gone
        └── TrainerLost           a trainer rank is gone, with its group; it can be restarted

Plugins raise plain Python errors. The core converts them with :class:`boundary`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import traceback
from difflib import get_close_matches
from types import TracebackType
from typing import ClassVar, Final, Literal

from rollart_core.types import Failure, FailureKind


class RollartError(Exception):
    """Root of all errors that RollArt raises intentionally."""


class UserError(RollartError):
    """A user's mistake. The message says what was given, what is allowed, and how to fix it."""


class ConfigError(UserError, ValueError):
    """An invalid run config."""


class UnknownIdError(UserError, KeyError):
    """No plugin registers that id."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class PluginError(UserError):
    """A broken plugin, or two plugins in conflict."""


class RegistryError(UserError):
    """A rejected community registry or package, with the reason."""


class BatchRefused(UserError, ValueError):
    """A batch of groups that the algorithm cannot learn from, with the reason."""


class EpisodeError(RollartError):
    """One episode failed."""

    kind: ClassVar[FailureKind]
    retryable = True

    def __init__(self, message: str, *, boundary: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.boundary = boundary
        self.detail = detail

    def failure(self) -> Failure:
        """Return the failure as data."""
        return Failure(self.kind, self.boundary, str(self), self.retryable, self.detail)


class EnvironmentFailure(EpisodeError):
    """The environment raised, or broke its contract."""

    kind = FailureKind.ENVIRONMENT


class SandboxFailure(EpisodeError):
    """The sandbox of an environment failed."""

    kind = FailureKind.SANDBOX


class InferenceFailure(EpisodeError):
    """The inference engine could not answer the request."""

    kind = FailureKind.INFERENCE


class EngineDied(InferenceFailure):
    """The engine's process is gone, without an answer."""

    kind = FailureKind.COLLATERAL  # the journal records the loss itself (``part_died``)


class ContextOverflow(InferenceFailure):
    """The conversation exceeds the model's context. Its episode is truncated, not failed."""

    retryable = False


class RewardFailure(EpisodeError):
    """The reward could not be computed."""

    kind = FailureKind.REWARD


class BackendFailure(RewardFailure):
    """A reward's backend is unreachable or its answer is invalid. There is no result yet.

    Args:
        message: The problem. The reward service adds the names of the reward and the backend.
        again: Whether a retry on the same backend may succeed. False for permanent problems, such
            as wrong credentials or a payload that is too large.
        wait_s: Requested wait before the next call, in seconds. None if the backend does not set
            it.
    """

    def __init__(
        self,
        message: str,
        *,
        boundary: str = "reward.score",
        detail: str = "",
        again: bool = True,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(message, boundary=boundary, detail=detail)
        self.again = again
        self.wait_s = wait_s


class WorkerLost(EpisodeError):
    """The env worker's process or its node is gone. Raised for one episode per loss."""

    kind = FailureKind.INFRASTRUCTURE


class CollateralFailure(EpisodeError):
    """The env worker was lost. Raised for each further episode on it."""

    kind = FailureKind.COLLATERAL


class DeadlineFailure(EpisodeError):
    """A deadline passed."""

    kind = FailureKind.TIMEOUT


class CancelledFailure(EpisodeError):
    """Stopped intentionally. Never retried automatically."""

    kind = FailureKind.CANCELLED
    retryable = False


FaultKind = Literal[
    "unreachable",
    "slow",
    "rate",
    "server",
    "key",
    "quota",
    "missing",
    "overflow",
    "refused",
    "malformed",
]
"""Why a client got no answer from a server."""


class EndpointError(RollartError):
    """An OpenAI-compatible server refused, is unreachable, or its answer is invalid."""

    def __init__(
        self,
        message: str,
        *,
        kind: FaultKind = "server",
        status: int | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.retryable = retryable
        """Whether a retry of the same request may succeed."""
        self.wait_s: float | None = None
        """Wait that the server requests, in seconds. None if it does not set one."""


class TooManyFailures(RollartError):
    """The run stopped itself because too many episodes failed."""


class TrainingDiverged(RollartError):
    """Loss or gradient were not finite in several updates in a row."""


class LogprobMismatch(RollartError):
    """Trainer and engine disagree on logprobs before the first update; says what to inspect."""


class OutOfMemory(RollartError):
    """A microbatch does not fit in the memory of a trainer's device."""

    can_be_split = True
    """Whether a smaller microbatch can fit. False if it is a single row."""


class EnginesLost(RollartError):
    """No inference engine is left, and none will restart."""


class ClusterLost(RollartError):
    """The cluster of the run is gone. The results so far are kept."""


class JournalError(RollartError):
    """The run's journal cannot be written (disk full, locked) or read."""


class WorkerDied(RollartError):
    """A process of the run is gone."""

    exit_code: int | None = None
    """Exit code of its process, negative for a signal. None if unknown."""


class TrainerLost(WorkerDied):
    """The trainer is gone, with all its ranks. ``restart()`` starts a new one."""


class boundary:
    """Convert any error that a plugin raises inside into ``error``, with the name of the call.

    This includes errors that are not an ``Exception``, such as ``SystemExit`` or a
    ``CancelledError`` that the plugin raises itself. It is a class and not a generator for speed:
    each turn uses several.

    Args:
        error: The error class to raise.
        what: The call, such as ``"env.step"``.

    Raises:
        EpisodeError: ``error``, from the original error. An ``EpisodeError`` passes unchanged.
        BaseException: A real cancellation, or the KeyboardInterrupt of a SIGINT.
    """

    __slots__ = ("_error", "_what")

    def __init__(self, error: type[EpisodeError], what: str) -> None:
        self._error = error
        self._what = what

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, EpisodeError) or is_from_outside(error):
            return
        message = f"{self._what}: {described(error)}"
        raise self._error(message, boundary=self._what, detail=traced(error)) from error


def is_from_outside(error: BaseException) -> bool:
    """Return whether an error is not from a plugin: a cancellation, or the user's Ctrl-C.

    ``GeneratorExit`` of a coroutine that is closed without a running loop is also from outside.
    """
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs
            return isinstance(error, GeneratorExit)
        if isinstance(error, GeneratorExit):
            return task is None
        return task is not None and task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):  # in other threads, only the plugin can raise it
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    return False


def contained(error: BaseException) -> Exception:
    """Return an error that futures, threads and tasks can store without ending.

    asyncio ends its loop with ``SystemExit`` and ``KeyboardInterrupt``, treats a ``CancelledError``
    as a cancellation, and rejects ``StopIteration``.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    found = RuntimeError(f"it raised {described(error)}")
    found.__cause__ = error
    return found


def described(error: BaseException) -> str:
    """Return the class of an error and the first line of its text, even if that raises."""
    return f"{type(error).__name__}: {first_line(text_of(error))}"


def text_of(error: BaseException) -> str:
    """Return the text of an error as plain ``str`` without lone surrogates; never raises."""
    try:
        return str.encode(str(error), "utf-8", "replace").decode()
    except BaseException as e:
        return f"(its text cannot be shown: __str__ raised {type(e).__name__})"


def traced(error: BaseException, limit: int = 4000) -> str:
    """Return the end of the traceback of an error; never raises."""
    try:
        text = "".join(traceback.format_exception(error))
        return text.encode("utf-8", "replace").decode()[-limit:]
    except BaseException as e:
        return f"(its traceback cannot be shown: {type(e).__name__})"


def first_line(text: str, limit: int = 300) -> str:
    """Return the first line of ``text``, cut at ``limit`` characters."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= limit else line[: limit - 1] + "…"


NEAR: Final = 0.65
"""Minimum similarity of a suggestion. One wrong letter of three passes, half of another word does
not."""


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return `` Did you mean 'x'?`` with the nearest known word, or an empty string."""
    near = get_close_matches(word, known, n=1, cutoff=NEAR)
    return f" Did you mean {near[0]!r}?" if near else ""
