"""Is the answer mathematically the right one?

Takes: one episode's request. Gives: 1 or 0. Never: takes a busy machine for a wrong answer.

math-verify compares, in processes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_core.errors import ConfigError
from rollart_rewards.answer import answer_part, references
from rollart_rewards.config_answers import MathConfig
from rollart_rewards.examples import example
from rollart_rewards.math_processes import MathProcesses

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
