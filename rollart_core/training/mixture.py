"""One algorithm with different options for some environments of a run.

    groups of A --> algorithm with the options of A --> rows --+
    groups of B --> algorithm with the options of B --> rows --+--> one batch, one loss, one update

Takes: one instance of the algorithm for each environment. Gives: an :class:`Algorithm` over all of
them; each instance receives only the groups, signals and tokens of its environment. Never: mixes
their statistics, or weights an environment by more than its share of tokens or samples: every part
of the loss is divided by the totals of the whole minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from rollart_core.contracts.algorithm import Algorithm, LossBatch, Signals
from rollart_core.errors import BatchRefused, ConfigError
from rollart_core.types import FloatArray, Group


class AlgorithmMix(Algorithm):
    """The algorithm of a run with options by environment.

    Args:
        algorithms: The algorithms by name of the environment; one object may occur several times.

    Raises:
        ConfigError: If their options cannot be combined: they require different modules, or drop
            different samples.
    """

    def __init__(self, algorithms: Mapping[str, Algorithm]) -> None:
        self._names = sorted(algorithms)
        self._algorithms = [algorithms[name] for name in self._names]
        self._of_trajectory = np.zeros(0, dtype=np.int64)
        self.requires = frozenset().union(*(a.requires for a in self._algorithms))
        kinds = {a.zero_advantage for a in self._algorithms}
        if "drop" in kinds and len(kinds) > 1:
            raise ConfigError(
                "env.run.algorithm: zero_advantage drops samples for one environment and keeps "
                "them for another, but environments share batches: set the same value for all"
            )
        self.zero_advantage = kinds.pop() if len(kinds) == 1 else "train"
        self.wants_entropy = any(a.wants_entropy for a in self._algorithms)
        least = {a.min_effective_groups for a in self._algorithms}
        if len(least) > 1:
            raise ConfigError(
                "env.run.algorithm: min_effective_groups counts the groups of the whole batch, of "
                "all environments: set it only in algorithm"
            )
        self.min_effective_groups = least.pop()

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return the advantages of each environment's algorithm; see :class:`Algorithm`."""
        which = [self._index(g.task.env_id) for g in groups]
        self._of_trajectory = np.array(
            [k for g, k in zip(groups, which, strict=True) for _ in g.trajectories], dtype=np.int64
        )
        found = self._each(groups, signals, lambda a, some, own: {"": a.advantages(some, own)})
        return found[""]

    def targets(self, groups: Sequence[Group], signals: Signals) -> dict[str, list[FloatArray]]:
        """Return each environment's targets, 0 if it has none; see :class:`Algorithm`."""
        return self._each(groups, signals, lambda a, some, own: a.targets(some, own))

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum of the losses of all algorithms; see :class:`Algorithm`.

        Each algorithm is called even if a microbatch has no tokens of its environment, so that all
        ranks report the same metrics.
        """
        of_token = torch.from_numpy(self._of_trajectory).to(batch.trajectory_ids.device)
        of_token = of_token[batch.trajectory_ids]
        total = trainer_logprobs.new_zeros(())
        sums: dict[str, torch.Tensor] = {}
        for k, algorithm in enumerate(self._algorithms):
            mask = batch.loss_mask & (of_token == k)
            loss, metrics = algorithm.loss(
                torch.where(mask, trainer_logprobs, 0.0), _only(batch, mask)
            )
            total = total + loss
            for name, value in metrics.items():
                before = sums.get(name)
                if before is not None:
                    is_max = name.endswith("_max")
                    value = torch.maximum(before, value) if is_max else before + value
                sums[name] = value
        return total, sums

    def extra_modules(self, hidden_size: int) -> dict[str, torch.nn.Module]:
        """Return the modules that all algorithms share; see :class:`Algorithm`."""
        each = [a.extra_modules(hidden_size) for a in self._algorithms]
        if len({frozenset(modules) for modules in each}) > 1:
            raise ConfigError(
                "env.run.algorithm: the algorithm has extra modules for one environment but not "
                "for another: set the options that require modules for all environments"
            )
        return each[0]

    def _index(self, env: str) -> int:
        if env not in self._names:
            raise BatchRefused(f"no algorithm for {env!r}; known are {', '.join(self._names)}")
        return self._names.index(env)

    def _each(
        self,
        groups: Sequence[Group],
        signals: Signals,
        ask: Callable[[Algorithm, Sequence[Group], Signals], _Named],
    ) -> _Named:
        """Call each algorithm with its groups; return rows by name, in the order of all samples."""
        samples = [s for g in groups for s in g.samples]
        owner = [self._index(g.task.env_id) for g in groups for _ in g.samples]
        found: _Named = {}
        for k, algorithm in enumerate(self._algorithms):
            some = [g for g in groups if self._index(g.task.env_id) == k]
            if not some:
                continue
            places = [i for i, who in enumerate(owner) if who == k]
            for name, rows in ask(algorithm, some, _Part(signals, places)).items():
                if len(rows) != len(places):
                    raise BatchRefused(f"{len(rows)} rows for {len(places)} samples")
                every = found.setdefault(
                    name, [np.zeros(s.num_tokens, dtype=np.float32) for s in samples]
                )
                for place, row in zip(places, rows, strict=True):
                    every[place] = row
        return found


_Named = dict[str, list[FloatArray]]


class _Part(Mapping[str, list[FloatArray]]):
    """The signals of some samples, computed (for all samples) at their first use."""

    def __init__(self, signals: Signals, places: Sequence[int]) -> None:
        self._signals = signals
        self._places = places

    def __getitem__(self, name: str) -> list[FloatArray]:
        rows = self._signals[name]
        return [rows[i] for i in self._places]

    def __iter__(self) -> Iterator[str]:
        return iter(self._signals)

    def __len__(self) -> int:
        return len(self._signals)


def _only(batch: LossBatch, mask: torch.Tensor) -> LossBatch:
    """Return the batch with all tokens outside ``mask`` ``[N]`` masked."""

    def kept(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values, torch.zeros_like(values))

    return replace(
        batch,
        loss_mask=mask,
        advantages=kept(batch.advantages),
        inference_logprobs=kept(batch.inference_logprobs),
        staleness=kept(batch.staleness),
        signals={name: kept(values) for name, values in batch.signals.items()},
        outputs={name: kept(values) for name, values in batch.outputs.items()},
        turn_ids=torch.where(mask, batch.turn_ids, -1),
    )
