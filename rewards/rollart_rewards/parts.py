"""A reward inside another one, built and checked against its contract.

Takes: a reward's reference. Gives: its results for one episode or a group. Never: passes on a value
that is not finite or is outside the range of that reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollart_core.config.base import PluginRef
from rollart_core.contracts.reward import GroupReward, Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample, result_problem, results_problem
from rollart_core.plugins import registry
from rollart_rewards.config_parts import Part, spec_of


class InnerReward:
    """A reward inside another one.

    Args:
        ref: The reward, by id or alias, with its options.
        name: Its name in messages.

    Raises:
        UserError: If it cannot be built.
    """

    def __init__(self, ref: PluginRef, name: str) -> None:
        self.name = name
        self.range = spec_of(ref).reward_range
        self._reward: Reward | GroupReward = registry.build("rewards", ref.id, ref.options)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode.

        Raises:
            ValueError: If its result violates its contract. Its own errors are passed on.
        """
        assert isinstance(self._reward, Reward)
        result = self._reward.score(request)
        self._expect(result_problem(result, self.range))
        return result

    def score_all(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score a group, as a whole or one by one."""
        if isinstance(self._reward, Reward):
            return [self.score(request) for request in requests]
        results = self._reward.score_group(requests)
        self._expect(results_problem(results, len(requests), self.range))
        return results

    def _expect(self, problem: str) -> None:
        if problem:
            raise ValueError(f"{self.name} answered {problem}")

    def examples(self) -> Sequence[RewardExample]:
        """Return the reward's own examples."""
        examples = getattr(self._reward, "examples", None)
        return tuple(examples()) if callable(examples) else ()

    def as_groups(self) -> Sequence[RewardExample]:
        """Return the requests of the reward's examples as one group that it can score."""
        requests = tuple(request for one in self.examples() for request in one.requests)
        return (RewardExample(requests),) if requests else ()

    def close(self) -> None:
        """Close the reward if it has a ``close`` method."""
        close = getattr(self._reward, "close", None)
        if callable(close):
            close()


class WeightedParts:
    """Several rewards and their weights.

    Args:
        parts: Name -> reward and weight.
        most: Largest allowed absolute value of the sum.

    Raises:
        ValueError: If the sum can be larger.
    """

    def __init__(self, parts: Mapping[str, Part], most: float) -> None:
        self._parts = [
            (InnerReward(part.reward, name), part.weight) for name, part in parts.items()
        ]
        reach = sum(abs(w) * max(map(abs, part.range)) for part, w in self._parts)
        if reach > most:
            raise ValueError(f"the weighted sum can reach {reach:g}; the maximum is {most:g}")

    def score(self, request: RewardRequest) -> RewardResult:
        """Return the weighted sum of one episode."""
        return self._sum([part.score(request) for part, _ in self._parts])

    def examples(self) -> Sequence[RewardExample]:
        """Return the examples of parts, as far as all parts can score them."""
        found = [e for part, _ in self._parts for e in part.examples()]
        return [RewardExample(e.requests) for e in found if self._can_score(e.requests)]

    def score_all(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Return the weighted sum of each member of a group."""
        columns = [part.score_all(requests) for part, _ in self._parts]
        return [self._sum(row) for row in zip(*columns, strict=True)]

    def close(self) -> None:
        """Close the parts."""
        for part, _ in self._parts:
            part.close()

    def _can_score(self, requests: Sequence[RewardRequest]) -> bool:
        try:
            self.score_all(requests)
        except Exception:
            return False
        return True

    def _sum(self, results: Sequence[RewardResult]) -> RewardResult:
        components: dict[str, float] = {}
        total = 0.0
        for (part, weight), result in zip(self._parts, results, strict=True):
            total += weight * result.value
            components[part.name] = result.value
            components |= {f"{part.name}.{k}": v for k, v in result.components.items()}
        return RewardResult(total, components)
