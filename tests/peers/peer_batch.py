"""One random batch, as ours and as the padded matrices that other libraries take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from support.algorithm_cases import Case, Flat, flat_advantages, group, trajectory

from rollart_core.contracts.algorithm import Algorithm
from rollart_core.types import Group

NUM_GROUPS, GROUP_SIZE, MAX_TOKENS = 3, 4, 7
TOLERANCE = 1e-5


class PeerBatch:
    """Groups with random rewards, lengths and logprobs.

    Args:
        seed: Of the random numbers.
    """

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.lengths = random.integers(1, MAX_TOKENS + 1, size=NUM_GROUPS * GROUP_SIZE)
        self.rewards = random.normal(size=len(self.lengths)).round(3)
        num_tokens = int(self.lengths.sum())
        self.inference = -random.random(num_tokens)
        self.proximal = self.inference + random.normal(scale=0.5, size=num_tokens)
        self.now = self.proximal + random.normal(scale=0.4, size=num_tokens)
        self.ref = self.now + random.normal(scale=0.3, size=num_tokens)
        self.values = random.normal(size=num_tokens)
        self.values_now = self.values + random.normal(scale=0.5, size=num_tokens)
        self.groups = self._groups()
        self.index = np.repeat(np.arange(NUM_GROUPS), GROUP_SIZE)

    @property
    def mask(self) -> torch.Tensor:
        """``[B, T]`` float64, 1 at tokens."""
        return torch.tensor(
            [[float(t < n) for t in range(MAX_TOKENS)] for n in self.lengths], dtype=torch.float64
        )

    def padded(self, flat: Flat | torch.Tensor) -> torch.Tensor:
        """Return ``[B, T]`` of the numbers of tokens."""
        values = torch.as_tensor(flat, dtype=torch.float64)
        made = torch.zeros(self.mask.shape, dtype=torch.float64)
        return made.masked_scatter(self.mask.bool(), values)

    def flat(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return ``[K]`` of ``[B, T]``."""
        return matrix[self.mask.bool()]

    def token_rewards(self) -> torch.Tensor:
        """Return ``[B, T]``: the reward at each last token."""
        made = torch.zeros(self.mask.shape, dtype=torch.float64)
        for row, n, reward in zip(made, self.lengths, self.rewards, strict=True):
            row[n - 1] = reward
        return made

    def signals(self, algorithm: Algorithm) -> dict[str, Flat]:
        """Return the signals that the algorithm needs."""
        known = {
            "proximal_logprobs": self.proximal,
            "ref_logprobs": self.ref,
            "values": self.values,
        }
        return {name: known[name].tolist() for name in algorithm.requires}

    def advantages(self, algorithm: Algorithm) -> torch.Tensor:
        """Return ``[B, T]`` as the algorithm has them."""
        return self.padded(flat_advantages(algorithm, self.groups, self.signals(algorithm)))

    def loss(self, algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
        """Return our loss, and its gradient ``[K]`` of the current logprobs."""
        case = Case(algorithm, self.groups, self.signals(algorithm))
        now = torch.tensor(self.now).requires_grad_()
        loss, _ = case.loss(now, {"values": torch.tensor(self.values_now)})
        (slope,) = torch.autograd.grad(loss, now)
        return loss.detach(), slope

    def _groups(self) -> list[Group]:
        stops = np.cumsum(self.lengths)
        members = [
            trajectory(float(r), (int(n),), inference=self.inference[stop - n : stop].tolist())
            for r, n, stop in zip(self.rewards, self.lengths, stops, strict=True)
        ]
        cuts: Sequence[int] = range(0, len(members), GROUP_SIZE)
        return [group(members[i : i + GROUP_SIZE], f"g{i:02d}") for i in cuts]


def assert_same(
    ours: tuple[torch.Tensor, torch.Tensor],
    theirs: torch.Tensor,
    now: torch.Tensor,
    batch: PeerBatch,
) -> None:
    """Assert that loss and gradient are equal; ``now`` is their ``[B, T]`` leaf."""
    (slope,) = torch.autograd.grad(theirs, now)
    torch.testing.assert_close(
        ours[0], theirs.detach().to(ours[0].dtype), atol=TOLERANCE, rtol=TOLERANCE
    )
    torch.testing.assert_close(ours[1], batch.flat(slope), atol=TOLERANCE, rtol=TOLERANCE)
    assert float(ours[1].abs().max()) > 1e-3  # there is something to compare


def options_of(pairs: Mapping[str, object]) -> dict[str, object]:
    """Return options for a comparison: nothing is dropped, so that all count the same."""
    return {"zero_advantage": "keep", **pairs}
