"""Contract checks of algorithms: shapes of their outputs, and the effect of their loss.

Takes: an algorithm. Gives: check results. Never: imports torch before a check needs a tensor (those
checks are skipped if torch is missing).

The default groups have trajectories of one, two and three samples of different lengths, as in a run
with cut contexts, so that samples, trajectories and members differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rollart_core.contracts.algorithm import Algorithm, LossBatch
from rollart_core.types import FloatArray, Group, Sample, Task, Ticket, Trajectory, Turn
from rollart_testing.results import CheckResult, expect, run_checks, torch_or_skip

if TYPE_CHECKING:
    import torch

_HIDDEN_SIZE: Final = 8
_CLOSE: Final = 1e-4
"""Relative tolerance for the loss of a microbatch."""
_NEEDS: Final = {
    "loss": ("advantages",),
    "microbatches": ("advantages", "loss"),
    "direction": ("advantages", "loss"),
}


def example_group(
    rewards: Sequence[float] = (1.0, 0.0, 0.5),
    *,
    num_tokens: int = 6,
    num_samples: Sequence[int] = (1,),
    index: int = 0,
) -> Group:
    """Return a group with one trajectory for each reward.

    Each has one turn per three tokens, of which the policy sampled the last two. All start in one
    state and differ after it; the last turn has the reward.

    Args:
        rewards: Rewards of the members.
        num_tokens: Length of a trajectory's first sample; each further sample has three more
            tokens.
        num_samples: Number of samples per trajectory; the sequence repeats.
        index: Index of the task.
    """
    task = Task("unregistered/Env-v0", "train", index, 0)
    members = tuple(
        _trajectory(Ticket(f"group-{index}.{i}", task, f"group-{index}", i), reward, lengths)
        for i, reward in enumerate(rewards)
        for lengths in [[num_tokens + 3 * k for k in range(num_samples[i % len(num_samples)])]]
    )
    return Group(f"group-{index}", task, members, len(members))


def check_algorithm(
    algorithm: Algorithm, *, groups: Sequence[Group] | None = None
) -> list[CheckResult]:
    """Check an algorithm: the shape of its advantages, and the effect of its loss.

    Args:
        algorithm: The algorithm.
        groups: Groups to train on; None means generated ones.
    """
    given = groups or [
        example_group(num_samples=(2, 1, 3)),
        example_group((0.0, 0.25, 1.0), num_tokens=9, num_samples=(1, 3, 2), index=1),
    ]
    return run_checks(
        {
            "advantages": partial(_check_advantages, algorithm, given),
            "alike_members": partial(_check_alike, algorithm),
            "loss": partial(_check_loss, algorithm, given),
            "microbatches": partial(_check_microbatches, algorithm, given),
            "direction": partial(_check_direction, algorithm),
            "targets": partial(_check_targets, algorithm, given),
            "extra_modules": partial(_check_extra_modules, algorithm),
        },
        _NEEDS,
    )


def _trajectory(ticket: Ticket, reward: float, lengths: Sequence[int]) -> Trajectory:
    samples, num_turns = [], 0
    for num_tokens in lengths:
        samples.append(_sample(num_tokens, num_turns))
        num_turns += -(-num_tokens // 3)
    turns = tuple(
        _turn(k, ticket.index, reward if k == num_turns - 1 else 0.0) for k in range(num_turns)
    )
    return Trajectory(ticket, "finished", tuple(samples), turns, reward=reward, score=reward)


def _sample(num_tokens: int, first_turn: int) -> Sample:
    mask = np.arange(num_tokens) % 3 != 0
    return Sample(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        turn_ids=np.where(mask, first_turn + np.arange(num_tokens) // 3, -1).astype(np.int32),
    )


def _turn(turn: int, index: int, reward: float) -> Turn:
    return Turn(
        observation=f"state {turn} of {index if turn else 'all'}",
        action="act",
        num_prompt_tokens=3 * turn + 1,
        num_new_tokens=2,
        finish_reason="stop",
        reward=reward,
        generate_s=0.0,
        step_s=0.0,
    )


def _signals(algorithm: Algorithm, groups: Sequence[Group]) -> dict[str, list[FloatArray]]:
    samples = [sample for group in groups for sample in group.samples]
    # Differs from the policy: a teacher that agrees with it gives no gradient.
    falling = [-1.0 - 0.05 * np.arange(sample.num_tokens) for sample in samples]
    pairs = zip(samples, falling, strict=True)
    rows = [np.where(s.loss_mask, row, 0.0).astype(np.float32) for s, row in pairs]
    return dict.fromkeys(sorted(algorithm.requires), rows)


def _check_advantages(algorithm: Algorithm, groups: Sequence[Group]) -> None:
    samples = [sample for group in groups for sample in group.samples]
    rows = algorithm.advantages(groups, _signals(algorithm, groups))
    expect(len(rows) == len(samples), f"{len(rows)} rows for {len(samples)} samples")
    for row, sample in zip(rows, samples, strict=True):
        expect(len(row) == sample.num_tokens, f"a row of {len(row)} for {sample.num_tokens} tokens")
        expect(np.isfinite(row).all(), "an advantage is not finite")
        expect(not row[~sample.loss_mask].any(), "an advantage outside loss_mask is not 0")
    expect(any(row.any() for row in rows), "all advantages are 0 for rewards that differ")


def _check_alike(algorithm: Algorithm) -> None:
    size = max(algorithm.min_group_size, 2)
    group = example_group([1.0] * size)
    for row in algorithm.advantages([group], _signals(algorithm, [group])):
        expect(np.isfinite(row).all(), "equal rewards give advantages that are not finite")


def _check_loss(algorithm: Algorithm, groups: Sequence[Group]) -> None:
    torch = torch_or_skip()
    whole = _minibatch(algorithm, groups)
    mask = whole.batch.loss_mask
    learned = _Learned.at(algorithm, whole, torch.where(mask, -0.9, 0.0))
    loss, metrics = algorithm.loss(learned.logprobs, learned.batch(whole))
    expect(loss.ndim == 0, f"the loss has shape {tuple(loss.shape)}, not a scalar")
    expect(bool(torch.isfinite(loss)), f"the loss is {loss.item()}")
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = learned.logprobs.grad
    expect(gradient is not None, "the loss has no gradient")
    assert gradient is not None
    expect(bool(torch.isfinite(gradient).all()), "the gradient is not finite")
    expect(bool(gradient[mask].any()), "the gradient is 0 everywhere")
    expect(not bool(gradient[~mask].any()), "tokens outside loss_mask have a gradient")
    for name, said in learned.outputs.items():
        learns = said.grad is not None and bool(said.grad[mask].any())
        expect(learns, f"the loss gives no gradient to the module {name!r}")
        outside = said.grad is not None and bool(said.grad[~mask].any())
        expect(not outside, f"{name!r}: a gradient outside")
    for name, value in metrics.items():
        expect(value.ndim == 0 and not value.requires_grad, f"metric {name!r} is no plain scalar")


def _check_microbatches(algorithm: Algorithm, groups: Sequence[Group]) -> None:
    """The losses of microbatches add up to the loss of the minibatch for any split."""
    torch = torch_or_skip()
    whole = _minibatch(algorithm, groups)
    at = torch.arange(whole.num_tokens)
    logprobs = torch.where(whole.batch.loss_mask, -0.95 + 0.03 * torch.sin(at), 0.0)
    every = list(range(len(whole.samples)))
    expected = _taught(algorithm, whole, logprobs, [every])
    cuts = {"a sample each": [[i] for i in every], "two halves": [every[::2], every[1::2]]}
    for how, parts in cuts.items():
        got = _taught(algorithm, whole, logprobs, parts)
        for name, one in expected.items():
            other = got[name]
            slack = _CLOSE * float(one.abs().max()) + 1e-7
            off = float((one - other).abs().max())
            what = f"{one.item():g} at once, {other.item():g}" if one.ndim == 0 else "otherwise"
            expect(
                off <= slack,
                f"the {name} is {what} in {len(parts)} microbatches ({how}): divide by "
                "total_loss_tokens, total_samples or total_trajectories, never by the size of a "
                "microbatch; samples of one trajectory may be in different ones",
            )


def _check_direction(algorithm: Algorithm) -> str | None:
    """A gradient step raises the probability of better members' tokens over worse ones."""
    torch = torch_or_skip()
    size = max(algorithm.min_group_size, 3)
    rewards = [1.0, 0.0, *[0.5] * (size - 2)]
    group = example_group(rewards)
    whole = _minibatch(algorithm, [group], on_policy=True)
    logprobs = whole.batch.inference_logprobs
    taught = _taught(algorithm, whole, logprobs, [list(range(size))])
    steps = -taught["gradient"]
    other = _minibatch(algorithm, [example_group([0.0, 1.0, *rewards[2:]])], on_policy=True)
    if torch.equal(whole.batch.advantages, other.batch.advantages):
        gain = float((steps * whole.batch.advantages).sum())
        expect(gain > 0, "tokens with a positive advantage become less likely: check the sign")
        return "rewards do not change its advantages; the advantages were checked instead"
    best, worst = (float(steps[whole.batch.sample_ids == i].sum()) for i in (0, 1))
    expect(
        best > worst,
        f"a step moves the logprobs of the member with reward 1 by {best:g}, of the one with "
        f"reward 0 by {worst:g}: it learns the worse one; check the sign of loss and advantages",
    )
    return None


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """A packed minibatch."""

    samples: Sequence[Sample]
    batch: LossBatch

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    def part(self, members: Iterable[int]) -> tuple[torch.Tensor, LossBatch]:
        """Return the positions of some samples, and their microbatch."""
        module = torch_or_skip()
        ids = self.batch.sample_ids
        at = module.cat([(ids == i).nonzero().squeeze(1) for i in members])
        return at, LossBatch(
            loss_mask=self.batch.loss_mask[at],
            advantages=self.batch.advantages[at],
            inference_logprobs=self.batch.inference_logprobs[at],
            sample_ids=ids[at],
            staleness=self.batch.staleness[at],
            total_loss_tokens=self.batch.total_loss_tokens,
            total_samples=self.batch.total_samples,
            signals={name: rows[at] for name, rows in self.batch.signals.items()},
            turn_ids=self.batch.turn_ids[at],
            trajectory_ids=self.batch.trajectory_ids[at],
            total_trajectories=self.batch.total_trajectories,
        )


@dataclass(frozen=True, slots=True)
class _Learned:
    """Tensors with a gradient: ``[N]`` each."""

    logprobs: torch.Tensor
    outputs: Mapping[str, torch.Tensor]

    @classmethod
    def at(cls, algorithm: Algorithm, whole: _Minibatch, logprobs: torch.Tensor) -> _Learned:
        """Return leaves with these logprobs, and with module outputs near the earlier ones."""
        where, mask, signals = torch_or_skip().where, whole.batch.loss_mask, whole.batch.signals
        outputs = {
            name: where(mask, signals[name] + 0.1, 0.0).requires_grad_()
            for name in sorted(algorithm.extra_modules(_HIDDEN_SIZE))
        }
        if algorithm.wants_entropy:
            outputs["entropy"] = where(mask, 0.5, 0.0).requires_grad_()
        return cls(logprobs.clone().requires_grad_(), outputs)

    def batch(self, whole: _Minibatch) -> LossBatch:
        """Return the minibatch as one microbatch."""
        whole.batch.outputs = self.outputs
        return whole.batch


def _taught(
    algorithm: Algorithm,
    whole: _Minibatch,
    logprobs: torch.Tensor,
    parts: Sequence[Sequence[int]],
) -> dict[str, torch.Tensor]:
    """Return loss and gradients of a minibatch that is split into microbatches."""
    learned = _Learned.at(algorithm, whole, logprobs)
    total = torch_or_skip().zeros(())
    for members in parts:
        at, batch = whole.part(members)
        batch.outputs = {name: said[at] for name, said in learned.outputs.items()}
        loss, _ = algorithm.loss(learned.logprobs[at], batch)
        loss.backward()  # type: ignore[no-untyped-call]
        total = total + loss.detach()
    leaves = {"gradient": learned.logprobs}
    leaves |= {f"gradient of {name}": said for name, said in learned.outputs.items()}
    gradients = {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}
    return {"loss": total, **gradients}


def _minibatch(
    algorithm: Algorithm, groups: Sequence[Group], *, on_policy: bool = False
) -> _Minibatch:
    """Return packed groups with the algorithm's advantages, targets and signals.

    Args:
        algorithm: The algorithm that computes them.
        groups: Groups; all of their samples are packed.
        on_policy: Whether the logprobs of trainer and reference equal those of inference.
    """
    module = torch_or_skip()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    samples = [sample for trajectory in trajectories for sample in trajectory.samples]
    owners = [i for i, trajectory in enumerate(trajectories) for _ in trajectory.samples]
    signals = _signals(algorithm, groups)
    if on_policy:
        own = [sample.inference_logprobs for sample in samples]
        same = {"proximal_logprobs", "ref_logprobs"} & set(signals)
        signals |= dict.fromkeys(sorted(same), own)
    rows = algorithm.advantages(groups, signals)
    signals |= algorithm.targets(groups, signals)

    def packed(arrays: Sequence[Any], dtype: Any) -> torch.Tensor:
        tensor: torch.Tensor = module.as_tensor(np.concatenate(arrays), dtype=dtype)
        return tensor

    batch = LossBatch(
        loss_mask=packed([s.loss_mask for s in samples], module.bool),
        advantages=packed(rows, module.float32),
        inference_logprobs=packed([s.inference_logprobs for s in samples], module.float32),
        sample_ids=packed([[i] * s.num_tokens for i, s in enumerate(samples)], module.int64),
        staleness=packed([[0] * s.num_tokens for s in samples], module.int64),
        total_loss_tokens=sum(s.num_loss_tokens for s in samples),
        total_samples=len(samples),
        signals={name: packed(given, module.float32) for name, given in signals.items()},
        turn_ids=packed([s.turn_ids for s in samples], module.int64),
        trajectory_ids=packed(
            [[i] * s.num_tokens for i, s in zip(owners, samples, strict=True)], module.int64
        ),
        total_trajectories=len(trajectories),
    )
    return _Minibatch(samples, batch)


def _check_targets(algorithm: Algorithm, groups: Sequence[Group]) -> None:
    samples = [sample for group in groups for sample in group.samples]
    signals = _signals(algorithm, groups)
    algorithm.advantages(groups, signals)
    for name, rows in algorithm.targets(groups, signals).items():
        expect(name not in algorithm.requires, f"a target has the name of the signal {name!r}")
        expect(len(rows) == len(samples), f"{name}: {len(rows)} rows for {len(samples)} samples")
        for row, sample in zip(rows, samples, strict=True):
            fits = len(row) == sample.num_tokens
            expect(fits, f"{name}: a row of {len(row)} for {sample.num_tokens} tokens")
            expect(np.isfinite(row[sample.loss_mask]).all(), f"{name}: a target is not finite")


def _check_extra_modules(algorithm: Algorithm) -> None:
    modules = algorithm.extra_modules(_HIDDEN_SIZE)
    expect(isinstance(modules, Mapping), f"extra_modules() is {modules!r}, not a dict")
    for name, module in modules.items():
        answer = module(torch_or_skip().zeros(5, _HIDDEN_SIZE))
        expect(tuple(answer.shape) == (5,), f"{name!r} has shape {tuple(answer.shape)}, not [5]")
        expect(name in algorithm.requires, f"there is a module {name!r} that no signal requires")
