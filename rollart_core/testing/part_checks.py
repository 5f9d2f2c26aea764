"""Small contract checks of the synchronous kinds: reward, algorithm, channel, tracker, mapper.

Takes: a plugin object or a function that makes one. Gives: check results. Never: imports torch
before a check needs a tensor (those checks are skipped where torch is missing).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollart_core.contracts.algorithm import Algorithm, LossBatch
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, Pool
from rollart_core.contracts.reward import GroupReward, Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample, results_problem
from rollart_core.contracts.tracker import Tracker
from rollart_core.contracts.weights import WeightChannel
from rollart_core.testing.results import CheckResult, SkipCheck, expect, run_checks
from rollart_core.types import FloatArray, Group, Sample, Task, Ticket, Trajectory, Turn

if TYPE_CHECKING:
    import torch


_HIDDEN_SIZE = 8


def example_request(env_return: float = 0.5, *, index: int = 0) -> RewardRequest:
    """Return a reward request as an episode of two turns would make it."""
    return RewardRequest(
        ticket_id=f"group-0.{index}",
        env_id="unregistered/Env-v0",
        split="train",
        task_index=0,
        messages=(
            {"role": "user", "content": "say red"},
            {"role": "assistant", "content": "red"},
        ),
        env_return=env_return,
        success=env_return == 1.0,
        components={"right": env_return},
        num_turns=1,
        num_loss_tokens=2,
    )


def example_group(rewards: Sequence[float] = (1.0, 0.0, 0.5), *, num_tokens: int = 6) -> Group:
    """Return a group with one trajectory of one sample for each reward.

    Each has a turn for every three tokens, of which the policy sampled the last two; all began in
    one state and were told apart after it, and the last turn earned the reward.
    """
    task = Task("unregistered/Env-v0", "train", 0, 0)
    members = tuple(_trajectory(task, i, reward, num_tokens) for i, reward in enumerate(rewards))
    return Group("group-0", task, members, len(members))


def check_reward(
    reward: Reward | GroupReward,
    *,
    reward_range: tuple[float, float] = (0.0, 1.0),
    requests: Sequence[RewardRequest] | None = None,
) -> list[CheckResult]:
    """Check a reward function.

    Args:
        reward: The reward function.
        reward_range: What its spec declares.
        requests: What to score; None: the reward's own examples, or a few made-up requests of
            returns 0, 0.5 and 1.
    """
    examples = examples_of(reward)
    asked = requests or [request for one in examples for request in one.requests]
    asked = asked or [example_request(r, index=i) for i, r in enumerate((0.0, 0.5, 1.0))]
    checks = {
        "score": partial(_check_score, reward, asked, reward_range),
        "same_request_same_score": partial(_check_same_score, reward, asked),
        "group_size": partial(_check_group_sizes, reward, asked),
    }
    if examples:
        checks["examples"] = partial(_check_examples, reward, examples)
    return run_checks(checks)


def examples_of(reward: Reward | GroupReward) -> Sequence[RewardExample]:
    """Return what a reward says that it should answer; nothing where it says nothing."""
    examples = getattr(reward, "examples", None)
    return tuple(examples()) if callable(examples) else ()


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


def check_weight_channel(
    open_end: Callable[[], WeightChannel], *, keep: int = 2
) -> list[CheckResult]:
    """Check a weight channel.

    Args:
        open_end: Opens an end; all ends it opens must be of one and the same channel.
        keep: How many versions the channel is set to keep.
    """
    return run_checks(
        {
            "what_is_published_is_fetched": partial(_check_round_trip, open_end),
            "unknown_version": partial(_check_unknown_version, open_end),
            "keeps_the_newest": partial(_check_keep, open_end, keep),
            "failed_publication": partial(_check_failed_publication, open_end),
            "going_back": partial(_check_going_back, open_end),
            "close_twice": partial(_check_channel_close, open_end),
        }
    )


def check_tracker(make: Callable[[], Tracker], run_dir: Path) -> list[CheckResult]:
    """Check a tracker.

    Args:
        make: Makes a fresh tracker.
        run_dir: An empty folder it may write to.
    """
    return run_checks(
        {
            "logs": partial(_check_tracker_logs, make, run_dir),
            "close_before_start": lambda: make().close(),
        }
    )


def check_mapper(mapper: HardwareMapper) -> list[CheckResult]:
    """Check a hardware mapper."""
    return run_checks(
        {
            "places_everything": partial(_check_places, mapper),
            "same_input_same_placement": partial(_check_same_placement, mapper),
            "refuses_no_pools": partial(_check_no_pools, mapper),
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


def _score(reward: Reward | GroupReward, requests: Sequence[RewardRequest]) -> list[RewardResult]:
    if isinstance(reward, GroupReward):
        return reward.score_group(requests)
    return [reward.score(request) for request in requests]


def _check_score(
    reward: Reward | GroupReward,
    requests: Sequence[RewardRequest],
    reward_range: tuple[float, float],
) -> None:
    results = _score(reward, requests)
    problem = results_problem(results, len(requests), reward_range)
    expect(not problem, f"it answered {problem}")


def _check_same_score(reward: Reward | GroupReward, requests: Sequence[RewardRequest]) -> None:
    if not reward.stateless:
        raise SkipCheck("it is not stateless")
    first, second = _score(reward, requests), _score(reward, requests)
    expect(first == second, f"{first} and then {second} for the same requests")


def _check_group_sizes(reward: Reward | GroupReward, requests: Sequence[RewardRequest]) -> None:
    if not isinstance(reward, GroupReward):
        raise SkipCheck("it scores one episode at a time")
    for size in range(1, len(requests) + 1):
        results = reward.score_group(requests[:size])
        expect(len(results) == size, f"{len(results)} results for {size} requests")


def _check_examples(reward: Reward | GroupReward, examples: Sequence[RewardExample]) -> None:
    for example in examples:
        values = [result.value for result in _score(reward, example.requests)]
        for value, wanted in zip(values, example.values or values, strict=True):
            said = example.requests[0].answer[:60] if len(example.requests) == 1 else "a group"
            expect(
                math.isclose(value, wanted, abs_tol=1e-6), f"{value:g}, not {wanted:g}: {said!r}"
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
    torch = _torch()
    batch = _loss_batch(algorithm, groups)
    batch.outputs = {
        name: torch.where(batch.loss_mask, batch.signals[name] + 0.1, 0.0).requires_grad_()
        for name in sorted(algorithm.extra_modules(_HIDDEN_SIZE))
    }
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
    module = _torch()
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
        answer = module(_torch().zeros(5, _HIDDEN_SIZE))
        expect(tuple(answer.shape) == (5,), f"{name!r} answers {tuple(answer.shape)}, not [5]")
        expect(name in algorithm.requires, f"there is a module {name!r}, which nothing requires")


def _check_round_trip(open_end: Callable[[], WeightChannel]) -> None:
    torch = _torch()
    sent = {
        "z.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "a.bias": torch.tensor([0.5, -0.5], dtype=torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }
    trainer, engine = open_end(), open_end()
    try:
        publication = trainer.publish(1, sent.items())
        num_bytes = sum(tensor.nbytes for tensor in sent.values())
        expect(publication.policy_version == 1, f"it says version {publication.policy_version}")
        expect(publication.num_bytes == num_bytes, f"{publication.num_bytes} of {num_bytes} bytes")
        for tensor in sent.values():
            tensor.zero_()  # what was published must not change with the trainer's memory
        got = dict(engine.fetch(1))
        expect(list(got) == list(sent), f"the order is {list(got)}, not {list(sent)}")
        for name, tensor in got.items():
            same = (tensor.dtype, tensor.shape) == (sent[name].dtype, sent[name].shape)
            expect(same, f"{name} came as {tensor.dtype} {tuple(tensor.shape)}")
        expect(got["z.weight"].tolist() == [[0, 1, 2], [3, 4, 5]], "z.weight has other values")
        expect(got["a.bias"].tolist() == [0.5, -0.5], "a.bias has other values")
    finally:
        engine.close()
        trainer.close()


def _check_unknown_version(open_end: Callable[[], WeightChannel]) -> None:
    end = open_end()
    try:
        list(end.fetch(987_654))
    except LookupError:
        return
    finally:
        end.close()
    expect(False, "fetching a version that was never published raises no LookupError")


def _check_keep(open_end: Callable[[], WeightChannel], keep: int) -> None:
    torch = _torch()
    trainer, engine = open_end(), open_end()
    try:
        for version in range(1, keep + 2):
            trainer.publish(version, [("w", torch.full((2,), float(version)))])
        for version in range(2, keep + 2):
            got = dict(engine.fetch(version))["w"].tolist()
            expect(got == [version, version], f"version {version} holds {got}")
    finally:
        engine.close()
        trainer.close()


def _check_failed_publication(open_end: Callable[[], WeightChannel]) -> None:
    torch = _torch()
    trainer, engine = open_end(), open_end()

    def breaks() -> Iterator[tuple[str, Any]]:
        yield "w", torch.ones(2)
        raise RuntimeError("no more tensors")

    try:
        trainer.publish(1, [("w", torch.zeros(2)), ("v", torch.zeros(1))])
        try:
            trainer.publish(2, breaks())
        except RuntimeError:
            expect(not _holds(engine, 2), "half a version can be fetched")
        else:
            expect(False, "an error of the tensors to publish is swallowed")
        expect(dict(engine.fetch(1))["w"].tolist() == [0, 0], "the version before is damaged")
        trainer.publish(2, [("w", torch.ones(2)), ("v", torch.ones(1))])
        expect(dict(engine.fetch(2))["w"].tolist() == [1, 1], "the next publication is damaged")
    finally:
        engine.close()
        trainer.close()


def _check_going_back(open_end: Callable[[], WeightChannel]) -> None:
    torch = _torch()
    trainer, engine = open_end(), open_end()
    try:
        for version, value in ((5, 5.0), (6, 6.0), (5, 7.0)):
            trainer.publish(version, [("w", torch.full((2,), value))])
        newest = engine.newest()
        expect(newest in (None, 5), f"newest() is {newest}, and version 5 was published last")
        expect(dict(engine.fetch(5))["w"].tolist() == [7, 7], "version 5 is not the later one")
        expect(not _holds(engine, 6), "version 6, which was undone, can still be fetched")
    finally:
        engine.close()
        trainer.close()


def _holds(channel: WeightChannel, policy_version: int) -> bool:
    try:
        list(channel.fetch(policy_version))
    except LookupError:
        return False
    return True


def _check_channel_close(open_end: Callable[[], WeightChannel]) -> None:
    end = open_end()
    end.close()
    end.close()


def _check_tracker_logs(make: Callable[[], Tracker], run_dir: Path) -> None:
    tracker = make()
    tracker.start(run_dir, {"name": "check", "trainer": {"lr": 1e-3}, "stop": None})
    for train_step in range(3):
        metrics = {"train/loss": 1.0 / (train_step + 1), "rollout/reward": math.nan}
        tracker.log(metrics, train_step=train_step, policy_version=train_step)
    tracker.close()
    tracker.close()


_POOLS = (Pool("first", "cpu", 2, memory_bytes=2**34), Pool("second", "H100", 8))
_WORKLOADS = {"a/A-v1": Workload(), "b/B-v1": Workload(turns=50.0)}


def _check_places(mapper: HardwareMapper) -> None:
    placement = mapper.place(_WORKLOADS, _POOLS)
    names = {pool.name for pool in _POOLS}
    expect(set(placement.envs) == set(_WORKLOADS), f"envs placed: {sorted(placement.envs)}")
    expect(set(placement.engines) == set(_WORKLOADS), f"engines for: {sorted(placement.engines)}")
    expect(set(placement.envs.values()) <= names, f"unknown pools in {dict(placement.envs)}")
    expect(placement.trainer in names, f"the trainer is on unknown pool {placement.trainer!r}")
    for env_id, shares in placement.engines.items():
        expect(set(shares) <= names, f"{env_id}: unknown pools in {dict(shares)}")
        total = sum(shares.values())
        expect(math.isclose(total, 1.0), f"{env_id}: the shares add up to {total:g}, not 1")
    expect(placement.reasons, "it gives no reasons")


def _check_same_placement(mapper: HardwareMapper) -> None:
    expect(mapper.place(_WORKLOADS, _POOLS) == mapper.place(_WORKLOADS, _POOLS), "it wavers")


def _check_no_pools(mapper: HardwareMapper) -> None:
    for pools in ((), (Pool("none", "cpu", 0),)):
        try:
            mapper.place(_WORKLOADS, pools)
        except ValueError as e:
            expect(str(e), "it refuses without a reason")
        else:
            expect(False, f"it places work on {len(pools)} pools without any device")


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError:
        raise SkipCheck("torch is not installed") from None
