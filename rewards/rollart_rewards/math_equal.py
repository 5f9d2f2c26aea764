"""Check whether the answer is mathematically equal to the right one.

math-verify compares in separate processes, because an answer can crash one. They start when first
needed and are kept for later comparisons.

Takes: one episode's request. Gives: 1 or 0. Never: treats a busy machine as a wrong answer, treats
a process that could not start as an answer, or leaves a process running.
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
"""Exit codes of a process that an answer has crashed: CPU time, stack or memory."""
_PREPARE: Final = "rollart_rewards.math_child:prepare"
_COMPARE: Final = "rollart_rewards.math_child:limited"
_KNOWN: Final = {"wanted": ["1/2"], "said": "$0.5$"}
_MAX_CHARS: Final = 20_000
"""Maximum length of an answer; its end is kept."""
_MIB: Final = 1 << 20


class Math(Reward):
    """Compare mathematics; see the module.

    Args:
        options: The fields of :class:`MathConfig`.

    Raises:
        ConfigError: If math-verify is not installed.
    """

    def __init__(self, **options: object) -> None:
        self.config = MathConfig.model_validate(options)
        if find_spec("math_verify") is None:
            raise ConfigError("math-verify is not installed: pip install 'rollart[math]'")
        self.processes = MathProcesses(self.config.num_processes)
        """The processes that compare."""

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode.

        Raises:
            ValueError: If the environment provides no right answer, or one that is not mathematics.
            RuntimeError: If comparing does not work here.
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
        """End the processes; can be called twice."""
        self.processes.close()

    def examples(self) -> Sequence[RewardExample]:
        """Return examples with known values if the whole message is the answer."""
        if self.config.answer != "message":
            return (example("nothing of the kind", "1/2", 0.0),)
        return (
            example("so it is $\\frac{x}{2} + 1$", "(x + 2)/2", 1.0),
            example("that makes 0.5", "1/2", 1.0),
            example("3", "x + 3", 0.0),
        )


class MathProcesses:
    """A few processes that compare; they belong to the background event loop of this process.

    Args:
        num_processes: Maximum number of concurrent processes; further callers wait.
    """

    def __init__(self, num_processes: int) -> None:
        self._free = asyncio.Semaphore(num_processes)
        self._is_closed = False
        self.idle: list[WorkerProcess] = []
        """Processes that wait for the next comparison."""
        self._let_go = weakref.finalize(self, _let_go, self.idle)

    def compare(self, comparison: Mapping[str, Any], *, wall_s: float) -> dict[str, Any]:
        """Return the result of a comparison; can be called from any thread.

        Args:
            comparison: The request to the process; see :mod:`rollart_rewards.math_child`.
            wall_s: Wall-clock seconds after which the machine, not the answer, is the cause.

        Raises:
            RuntimeError: If no process starts, or it was killed from outside.
            TimeoutError: After ``wall_s``.
        """
        return loop.run(self._compare(comparison, wall_s))

    def close(self) -> None:
        """End the processes; can be called twice."""
        self._is_closed = True
        if self._let_go.detach() and self.idle:
            loop.run(_end(self.idle))

    async def _compare(self, comparison: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
        async with self._free:
            try:
                return await self._ask(comparison, wall_s)
            except _BroughtDown:
                # The answer is the cause if a new process can compare.
                known = await self._ask({**comparison, **_KNOWN}, wall_s)
                if not known.get("right"):
                    raise RuntimeError(f"1/2 is not equal to 0.5 here: {known}") from None
                return {"undecided": "it brought the process down"}

    async def _ask(self, comparison: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
        process = self.idle.pop() if self.idle else await _started()
        kept = False
        try:
            async with asyncio.timeout(wall_s):
                answer: dict[str, Any] = await process.call(_COMPARE, dict(comparison))
            kept = not self._is_closed and answer.get("undecided") != "memory"
        except TimeoutError as e:
            message = f"a comparison did not finish within {wall_s:g} s of wall-clock time"
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
    """The process ended with an exit code that an answer can cause."""


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
    """Kill the processes, and empty the list."""
    while processes:
        process = processes.pop()
        process.kill()
        await process.close()


def _let_go(idle: list[WorkerProcess]) -> None:
    """Kill the processes of an object that was not closed; takes no lock, so any thread can."""
    while idle:
        idle.pop().kill()
