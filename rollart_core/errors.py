"""Every error RollArt raises on purpose.

    RollartError
    ├── UserError                 a person can mend it: shown as one line, without a traceback
    │   ├── ConfigError           a run config that cannot be run (also a ValueError)
    │   ├── UnknownIdError        no plugin has that id (also a KeyError)
    │   ├── PluginError           a plugin that is broken, or two that collide
    │   ├── RegistryError         a community registry, or a package for one, that is refused
    │   └── BatchRefused          a batch that no algorithm could learn from (also a ValueError)
    ├── EpisodeError              one episode failed; becomes a typed Failure of its trajectory
    │   ├── EnvironmentFailure    env.reset / env.step / env.close raised or answered nonsense
    │   ├── SandboxFailure        the box around an environment failed
    │   ├── InferenceFailure      the engine could not answer
    │   │   ├── EngineDied        its process is gone; nothing of the answer came back
    │   │   └── ContextOverflow   the conversation has outgrown the model: the episode is truncated
    │   ├── RewardFailure         the reward could not be computed
    │   │   └── BackendFailure    its backend could not be asked, or answered garbage
    │   ├── WorkerLost            the env worker's process or its node is gone
    │   ├── CollateralFailure     the same loss, of each further episode that it took with it
    │   ├── DeadlineFailure       a deadline passed
    │   └── CancelledFailure      stopped on purpose (shutdown, redundancy, too stale)
    ├── EndpointError             an OpenAI-compatible server refused, or could not be asked
    ├── TooManyFailures           the run stopped itself; says at what rate and of which kind
    ├── TrainingDiverged          loss or gradient were not finite several updates in a row
    ├── EnginesLost               no inference engine is left, and none comes back
    ├── ClusterLost               the cluster that the run is on is gone
    ├── JournalError              the run's record can no longer be written or read
    └── PartDied                  a process of the run (engine, trainer, env worker) is gone
        └── TrainerLost           a trainer rank is gone and its group with it; it can be restarted

Plugins raise plain Python errors; the core attributes them with :func:`boundary`.
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
    """Root of all errors raised on purpose."""


class UserError(RollartError):
    """A mistake a person can mend; the message says what was given, what is allowed, and how."""


class ConfigError(UserError, ValueError):
    """A run config that cannot be run."""


class UnknownIdError(UserError, KeyError):
    """No plugin registers that id."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class PluginError(UserError):
    """A plugin that is broken, or two that collide."""


class RegistryError(UserError):
    """A community registry, or a package for one, that is refused, and why."""


class BatchRefused(UserError, ValueError):
    """A batch of groups that the algorithm cannot learn from, and why."""


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
    """The environment raised, or answered outside its contract."""

    kind = FailureKind.ENVIRONMENT


class SandboxFailure(EpisodeError):
    """The box around an environment failed."""

    kind = FailureKind.SANDBOX


class InferenceFailure(EpisodeError):
    """The inference engine could not answer."""

    kind = FailureKind.INFERENCE


class EngineDied(InferenceFailure):
    """The engine's process is gone; nothing of the answer came back."""

    kind = FailureKind.COLLATERAL  # the journal counts the loss itself (``part_died``)


class ContextOverflow(InferenceFailure):
    """The conversation has outgrown the model's context; its episode is truncated, not failed."""

    retryable = False


class RewardFailure(EpisodeError):
    """The reward could not be computed."""

    kind = FailureKind.REWARD


class BackendFailure(RewardFailure):
    """A reward's backend could not be asked, or answered garbage: the reward has said nothing yet.

    Args:
        message: What happened; the scoring room adds which reward and which backend.
        again: Whether the same backend may do when it is asked again; False for what will not mend
            by itself, such as wrong credentials or a payload that is too large.
        wait_s: How long it asks to be left alone; None when it does not say.
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
    """The env worker's process or its node is gone; raised for one episode of each loss."""

    kind = FailureKind.INFRASTRUCTURE


class CollateralFailure(EpisodeError):
    """The env worker was lost; raised for each further episode that was on it."""

    kind = FailureKind.COLLATERAL


class DeadlineFailure(EpisodeError):
    """A deadline passed."""

    kind = FailureKind.TIMEOUT


class CancelledFailure(EpisodeError):
    """Stopped on purpose; never retried by itself."""

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
"""What stood between a client and a server's answer."""


class EndpointError(RollartError):
    """An OpenAI-compatible server refused, answered nonsense, or could not be asked at all."""

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
        """Whether the same may go well when it is asked again."""
        self.wait_s: float | None = None
        """How long the server asks to be left alone; None when it does not say."""


class TooManyFailures(RollartError):
    """The run stopped itself because too many episodes failed."""


class TrainingDiverged(RollartError):
    """Loss or gradient were not finite several updates in a row."""


class EnginesLost(RollartError):
    """No inference engine is left, and none comes back."""


class ClusterLost(RollartError):
    """The cluster that the run is on is gone; what was done so far is kept."""


class JournalError(RollartError):
    """The run's record can no longer be written (disk full, locked), or cannot be read."""


class WorkerDied(RollartError):
    """A process of the run is gone."""

    exit_code: int | None = None
    """Of its process, negative for a signal; None if it is not known."""


class TrainerLost(WorkerDied):
    """The trainer is gone, with all its ranks; ``restart()`` brings up a fresh one."""


class boundary:
    """Turn any error of a plugin raised inside into ``error``, naming the call that was crossed.

    This includes what is no ``Exception``, such as ``SystemExit`` or a ``CancelledError`` that the
    plugin raises itself. A class, not a generator: several are crossed in every turn.

    Args:
        error: The class to raise.
        what: The call, such as ``"env.step"``.

    Raises:
        EpisodeError: ``error``, from the original; an ``EpisodeError`` passes unchanged.
        BaseException: A real cancellation, and the KeyboardInterrupt of a SIGINT.
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
    """Return whether no plugin raised an error: its task is cancelled, or the user pressed Ctrl-C.

    Of a coroutine that is closed without a running loop, ``GeneratorExit`` is from outside too.
    """
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs
            return isinstance(error, GeneratorExit)
        if isinstance(error, GeneratorExit):
            return task is None
        return task is not None and task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):  # elsewhere nobody but the plugin can have raised it
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    return False


def contained(error: BaseException) -> Exception:
    """Return an error that a future, a thread or a task can carry and that ends none of them.

    asyncio ends its loop with ``SystemExit`` and ``KeyboardInterrupt``, takes a ``CancelledError``
    for a cancellation, and refuses ``StopIteration``.
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
"""From this on names are alike: one wrong letter of three is, half of another word is not."""


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return `` Did you mean 'x'?`` with the nearest known word, or an empty string."""
    near = get_close_matches(word, known, n=1, cutoff=NEAR)
    return f" Did you mean {near[0]!r}?" if near else ""
