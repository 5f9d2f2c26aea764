"""Contract checks of algorithms: the shape of what they compute, and that their loss teaches.

Takes: an algorithm. Gives: check results. Never: imports torch before a check needs a tensor (those
checks are skipped where torch is missing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rollart_core.contracts.algorithm import Algorithm, LossBatch
from rollart_core.testing.results import CheckResult, expect, run_checks, torch_or_skip
from rollart_core.types import FloatArray, Group, Sample, Task, Ticket, Trajectory, Turn

if TYPE_CHECKING:
    import torch

_HIDDEN_SIZE = 8


def example_group(rewards: Sequence[float] = (1.0, 0.0, 0.5), *, num_tokens: int = 6) -> Group:
    """Return a group with one trajectory of one sample for each reward.

    Each has a turn for every three tokens, of which the policy sampled the last two; all began in
    one state and were told apart after it, and the last turn earned the reward.
    """
    task = Task("unregistered/Env-v0", "train", 0, 0)
    members = tuple(_trajectory(task, i, reward, num_tokens) for i, reward in enumerate(rewards))
    return Group("group-0", task, members, len(members))


def check_algorithm(
    algorithm: Algorithm, *, groups: Sequence[Group] | None = None
) -> list[CheckResult]:
    """Check an algorithm: the shape of its advantages, and that its loss has a gradient.

    Args:
        algorithm: The algorithm.
        groups: What to train on; None: a made-up one.
    """
    given = groups or [example_group()]
    return run_checks(
        {
            "advantages": partial(_check_advantages, algorithm, given),
            "alike_members": partial(_check_alike, algorithm),
            "loss": partial(_check_loss, algorithm, given),
            "targets": partial(_check_targets, algorithm, given),
            "extra_modules": partial(_check_extra_modules, algorithm),
        }
    )


def _trajectory(task: Task, index: int, reward: float, num_tokens: int) -> Trajectory:
    mask = np.arange(num_tokens) % 3 != 0
    sample = Sample(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        turn_ids=np.where(mask, np.arange(num_tokens) // 3, -1).astype(np.int32),
    )
    num_turns = -(-num_tokens // 3)
    turns = tuple(_turn(k, index, reward if k == num_turns - 1 else 0.0) for k in range(num_turns))
    ticket = Ticket(f"group-0.{index}", task, "group-0", index)
    return Trajectory(ticket, "finished", (sample,), turns, reward=reward, score=reward)


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
    # Not what the policy itself said: a teacher that agrees with it teaches nothing.
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
        expect(np.isfinite(row).all(), "members with equal rewards give advantages not finite")


def _check_loss(algorithm: Algorithm, groups: Sequence[Group]) -> None:
    torch = torch_or_skip()
    batch = _loss_batch(algorithm, groups)
    batch.outputs = {
        name: torch.where(batch.loss_mask, batch.signals[name] + 0.1, 0.0).requires_grad_()
        for name in sorted(algorithm.extra_modules(_HIDDEN_SIZE))
    }
    if algorithm.wants_entropy:
        entropy = torch.where(batch.loss_mask, 0.5, 0.0).requires_grad_()
        batch.outputs = {**batch.outputs, "entropy": entropy}
    trainer_logprobs = torch.where(batch.loss_mask, -0.9, 0.0).requires_grad_()
    loss, metrics = algorithm.loss(trainer_logprobs, batch)
    expect(loss.ndim == 0, f"the loss has shape {tuple(loss.shape)}, not a scalar")
    expect(bool(torch.isfinite(loss)), f"the loss is {loss.item()}")
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = trainer_logprobs.grad
    expect(gradient is not None, "the loss has no gradient")
    expect(bool(torch.isfinite(gradient).all()), "the gradient is not finite")
    expect(bool(gradient[batch.loss_mask].any()), "the gradient is 0 everywhere")
    expect(not bool(gradient[~batch.loss_mask].any()), "tokens outside loss_mask have a gradient")
    for name, said in batch.outputs.items():
        learns = said.grad is not None and bool(said.grad[batch.loss_mask].any())
        expect(learns, f"the loss teaches the module {name!r} nothing")
        outside = said.grad is not None and bool(said.grad[~batch.loss_mask].any())
        expect(not outside, f"{name!r}: a gradient outside")
    for name, value in metrics.items():
        expect(value.ndim == 0 and not value.requires_grad, f"metric {name!r} is no plain scalar")


def _loss_batch(algorithm: Algorithm, groups: Sequence[Group]) -> LossBatch:
    module = torch_or_skip()
    samples = [sample for group in groups for sample in group.samples]
    signals = _signals(algorithm, groups)
    rows = algorithm.advantages(groups, signals)

    def packed(arrays: Sequence[Any], dtype: Any) -> torch.Tensor:
        tensor: torch.Tensor = module.as_tensor(np.concatenate(arrays), dtype=dtype)
        return tensor

    return LossBatch(
        loss_mask=packed([s.loss_mask for s in samples], module.bool),
        advantages=packed(rows, module.float32),
        inference_logprobs=packed([s.inference_logprobs for s in samples], module.float32),
        sample_ids=packed([[i] * s.num_tokens for i, s in enumerate(samples)], module.int64),
        staleness=packed([[0] * s.num_tokens for s in samples], module.int64),
        total_loss_tokens=sum(s.num_loss_tokens for s in samples),
        total_samples=len(samples),
        signals={
            name: packed(given, module.float32)
            for name, given in {**signals, **algorithm.targets(groups, signals)}.items()
        },
        turn_ids=packed([s.turn_ids for s in samples], module.int64),
        trajectory_ids=packed([[i] * s.num_tokens for i, s in enumerate(samples)], module.int64),
        total_trajectories=len(samples),
    )


def _check_targets(algorithm: Algorithm, groups: Sequence[Group]) -> None:
    samples = [sample for group in groups for sample in group.samples]
    signals = _signals(algorithm, groups)
    algorithm.advantages(groups, signals)
    for name, rows in algorithm.targets(groups, signals).items():
        expect(name not in algorithm.requires, f"a target is named like the signal {name!r}")
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
        expect(tuple(answer.shape) == (5,), f"{name!r} answers {tuple(answer.shape)}, not [5]")
        expect(name in algorithm.requires, f"there is a module {name!r}, which nothing requires")
