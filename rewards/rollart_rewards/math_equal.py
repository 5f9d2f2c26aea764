"""Is the answer mathematically the right one?

math-verify compares, in processes of its own that are started when first needed and kept for the
next comparison: an answer may bring one down.

Takes: one episode's request. Gives: 1 or 0. Never: takes a busy machine for a wrong answer, takes a
process that could not be started for an answer, or leaves one behind.
"""

from __future__ import annotations

import asyncio
import signal
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_core.errors import ConfigError, WorkerDied, described
from rollart_core.rollout import loop
from rollart_core.runtime.process import WorkerProcess
from rollart_rewards.answer import answer_part, references
from rollart_rewards.config_answers import MathConfig
from rollart_rewards.examples import example

_START_S: Final = 120.0
_SPENT: Final = frozenset({-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT})
"""How a process ends that an answer has brought down: time, stack or memory."""
_PREPARE: Final = "rollart_rewards.math_child:prepare"
_COMPARE: Final = "rollart_rewards.math_child:limited"
_KNOWN: Final = {"wanted": ["1/2"], "said": "$0.5$"}
_MAX_CHARS: Final = 20_000
"""Of an answer; the end counts."""
_MIB: Final = 1 << 20


class Math(Reward):
    """Compares mathematics; see the module.

    Args:
        options: The fields of :class:`MathConfig`.

    Raises:
        ConfigError: When math-verify is not installed.
    """

    def __init__(self, **options: object) -> None:
        self.config = MathConfig.model_validate(options)
        if find_spec("math_verify") is None:
            raise ConfigError("math-verify is not installed: pip install 'rollart[math]'")
        self.processes = MathProcesses(self.config.num_processes)
        """What compares."""

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode.

        Raises:
            ValueError: When the environment gives no right answer, or one that is no mathematics.
            RuntimeError: When comparing does not work here.
        """
        config = self.config
        wanted = references(request, config.reference)
        said = answer_part(request.answer, config.answer)
        if not said or not said.strip():
            return RewardResult(0.0, {"found": 0.0, "undecided": 0.0})
        comparison = {
            "wanted": wanted,
            "said": said[-_MAX_CHARS:],
            "is_bare": config.answer != "message",
            "decimals": config.decimals,
            "strict": config.strict,
            "cpu_s": config.cpu_s,
            "memory_bytes": config.memory_mib * _MIB,
        }
        answer = self.processes.compare(comparison, wall_s=60 + 20 * config.cpu_s)
        if "refused" in answer:
            raise ValueError(answer["refused"])
        found = float(answer.get("found", True))
        undecided = float("undecided" in answer)
        return RewardResult(
            float(answer.get("right", False)), {"found": found, "undecided": undecided}
        )

    def close(self) -> None:
        """End the processes; may be called twice."""
        self.processes.close()

    def examples(self) -> Sequence[RewardExample]:
        """Return what it should answer, where the whole message is the answer."""
        if self.config.answer != "message":
            return (example("nothing of the kind", "1/2", 0.0),)
        return (
            example("so it is $\\frac{x}{2} + 1$", "(x + 2)/2", 1.0),
            example("that makes 0.5", "1/2", 1.0),
            example("3", "x + 3", 0.0),
        )


class MathProcesses:
    """A few processes that compare; they live on this process's background loop.

    Args:
        num_processes: Most at once; further callers wait.
    """

    def __init__(self, num_processes: int) -> None:
        self._free = asyncio.Semaphore(num_processes)
        self._is_closed = False
        self.idle: list[WorkerProcess] = []
        """Those that wait for the next comparison."""
        self._let_go = weakref.finalize(self, _let_go, self.idle)

    def compare(self, comparison: Mapping[str, Any], *, wall_s: float) -> dict[str, Any]:
        """Return the answer to a comparison; from any thread.

        Args:
            comparison: What the process is asked; see :mod:`rollart_rewards.math_child`.
            wall_s: Seconds by the clock after which the machine, not the answer, is to blame.

        Raises:
            RuntimeError: When no process comes up, or it was killed from outside.
            TimeoutError: After ``wall_s``.
        """
        return loop.run(self._compare(comparison, wall_s))

    def close(self) -> None:
        """End the processes; may be called twice."""
        self._is_closed = True
        if self._let_go.detach() and self.idle:
            loop.run(_end(self.idle))

    async def _compare(self, comparison: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
        async with self._free:
            try:
                return await self._ask(comparison, wall_s)
            except _BroughtDown:
                # Was it the answer? A new process that can compare says so.
                known = await self._ask({**comparison, **_KNOWN}, wall_s)
                if not known.get("right"):
                    raise RuntimeError(f"1/2 is not 0.5 here: {known}") from None
                return {"undecided": "it brought the process down"}

    async def _ask(self, comparison: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
        process = self.idle.pop() if self.idle else await _started()
        kept = False
        try:
            async with asyncio.timeout(wall_s):
                answer: dict[str, Any] = await process.call(_COMPARE, dict(comparison))
            kept = not self._is_closed and answer.get("undecided") != "memory"
        except TimeoutError as e:
            message = f"a comparison was not done within {wall_s:g} s by the clock"
            raise TimeoutError(message) from e
        except WorkerDied as e:
            if e.exit_code in _SPENT:
                raise _BroughtDown from e
            raise RuntimeError(str(e)) from e
        finally:
            if kept:
                self.idle.append(process)
            else:
                await _end([process])
        return answer


class _BroughtDown(Exception):
    """The process ended as one does that an answer was too much for."""


async def _started() -> WorkerProcess:
    process = WorkerProcess("math", keep_output=True, environment={"PYTHONSAFEPATH": "1"})
    try:
        async with asyncio.timeout(_START_S):
            await process.start()
            await process.call(_PREPARE)
    except BaseException as e:
        await _end([process])
        if isinstance(e, Exception):
            raise RuntimeError(f"mathematics cannot be compared here: {described(e)}") from e
        raise
    return process


async def _end(processes: list[WorkerProcess]) -> None:
    """Kill processes, and empty the list."""
    while processes:
        process = processes.pop()
        process.kill()
        await process.close()


def _let_go(idle: list[WorkerProcess]) -> None:
    """End the processes of one who has forgotten to close them: anywhere, so it takes no lock."""
    while idle:
        idle.pop().kill()
