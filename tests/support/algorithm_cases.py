"""Groups and batches made by hand, for the tests of algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from rollart_core.contracts.algorithm import Algorithm, LossBatch
from rollart_core.training import batch as batches
from rollart_core.training.loss import loss_batch, spread
from rollart_core.types import FloatArray, Group, Sample, Task, Ticket, Trajectory, Turn

TASK = Task("test/Env-v1", "train", 0, 0)
Flat = Sequence[float]
"""A number for each sampled token, all samples in a row."""


def sample(turns: Sequence[int], inference: Sequence[float] | None = None) -> Sample:
    """Return a sample of turns with so many sampled tokens, one token of prompt before each."""
    mask = np.concatenate([[False] + [True] * n for n in turns] or [np.zeros(1)]).astype(bool)
    ids = np.concatenate([[-1] + [k] * n for k, n in enumerate(turns)] or [[-1]]).astype(np.int32)
    logprobs = np.zeros(len(mask), dtype=np.float32)
    logprobs[mask] = -1.0 if inference is None else inference
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Sample(np.zeros(len(mask), dtype=np.int32), mask, logprobs, versions, ids)


def trajectory(
    reward: float,
    turns: Sequence[int] = (1,),
    *,
    earned: Sequence[float] | None = None,
    states: Sequence[str] | None = None,
    inference: Sequence[float] | None = None,
) -> Trajectory:
    """Return a trajectory of one sample.

    Args:
        reward: In all.
        turns: Sampled tokens of each turn.
        earned: By each turn; None: all by the last.
        states: Before each turn; None: each its own.
        inference: Logprobs of the sampled tokens; None: -1 each.
    """
    earned = earned or [0.0] * (len(turns) - 1) + [reward]
    records = tuple(
        Turn(states[k] if states else f"state {k}", "act", 1, n, "stop", earned[k], 0.0, 0.0)
        for k, n in enumerate(turns)
    )
    ticket = Ticket("g.0", TASK, "g", 0)
    samples = (sample(turns, inference),)
    return Trajectory(ticket, "finished", samples, records, reward=reward, score=reward)


def group(members: Sequence[Trajectory], name: str = "g") -> Group:
    """Return a group of these members."""
    from dataclasses import replace

    named = [replace(t, ticket=Ticket(f"{name}.{i}", TASK, name, i)) for i, t in enumerate(members)]
    return Group(name, TASK, tuple(named), len(named))


def plain_group(rewards: Sequence[float], name: str = "g") -> Group:
    """Return a group whose members have one sampled token each."""
    return group([trajectory(r) for r in rewards], name)


def rows(groups: Sequence[Group], flat: Flat) -> list[FloatArray]:
    """Return one ``[T]`` a sample from the numbers of sampled tokens."""
    given, made = iter(flat), []
    for s in [s for g in groups for s in g.samples]:
        row = np.zeros(s.num_tokens, dtype=np.float32)
        row[s.loss_mask] = [next(given) for _ in range(s.num_loss_tokens)]
        made.append(row)
    return made


def flat_advantages(
    algorithm: Algorithm, groups: Sequence[Group], signals: Mapping[str, Flat] | None = None
) -> list[float]:
    """Return the advantages of the sampled tokens, having seen that all others are 0."""
    given = {name: rows(groups, flat) for name, flat in (signals or {}).items()}
    made = algorithm.advantages(groups, given)
    samples = [s for g in groups for s in g.samples]
    assert all(not row[~s.loss_mask].any() for row, s in zip(made, samples, strict=True))
    return np.concatenate([r[s.loss_mask] for r, s in zip(made, samples, strict=True)]).tolist()


class Case:
    """An algorithm with a batch, packed as the trainer packs it.

    Args:
        algorithm: The algorithm.
        groups: The batch; in canonical order.
        signals: Signal name -> a number for each sampled token.
        policy_version: The trainer's now; what sampled is version 0.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        groups: Sequence[Group],
        signals: Mapping[str, Flat] | None = None,
        policy_version: int = 0,
    ) -> None:
        self.algorithm = algorithm
        given = {name: rows(groups, flat) for name, flat in (signals or {}).items()}
        samples = [s for g in groups for s in g.samples]
        made = batches.make_rows(groups, algorithm.advantages(groups, given), policy_version)
        live = [i for i, s in enumerate(samples) if s.num_loss_tokens]
        for name, of_samples in {**given, **algorithm.targets(groups, given)}.items():
            for row, i in zip(made, live, strict=True):
                row.signals[name] = of_samples[i]
        self.minibatch = batches.split(made, 1, algorithm.zero_advantage)[0]
        self._version = policy_version
        self.batch = self.part(range(len(self.minibatch.rows)))

    def part(self, members: Sequence[int]) -> LossBatch:
        """Return some rows as a microbatch, in float64."""
        part = loss_batch(self.minibatch, list(members), self._version, torch.device("cpu"))
        part.advantages = part.advantages.double()
        part.inference_logprobs = part.inference_logprobs.double()
        part.signals = {name: tensor.double() for name, tensor in part.signals.items()}
        return part

    def loss(
        self,
        trainer_logprobs: torch.Tensor,
        outputs: Mapping[str, torch.Tensor] | None = None,
        part: LossBatch | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return loss and metrics.

        Args:
            trainer_logprobs: ``[K]`` of the sampled tokens that are kept.
            outputs: ``[K]`` each.
            part: Of which microbatch; None: of all.
        """
        part = part or self.batch
        part.outputs = {n: spread(v, part.loss_mask) for n, v in (outputs or {}).items()}
        return self.algorithm.loss(spread(trainer_logprobs, part.loss_mask), part)


def logs(probabilities: Flat) -> torch.Tensor:
    """Return ``[K]`` logprobs in float64."""
    return torch.tensor(list(probabilities), dtype=torch.float64).log()


def gradient(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a scalar function as autograd has it."""
    at = at.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(at), at)
    return slope


def slopes(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a scalar function by central differences, in float64."""
    found = torch.zeros_like(at)
    with torch.no_grad():
        for i in range(at.numel()):
            move = torch.zeros_like(at).view(-1)
            move[i] = 1e-6
            move = move.view_as(at)
            found.view(-1)[i] = (function(at + move) - function(at - move)) / 2e-6
    return found
