"""The cases of several ranks: NCCL on two or more GPUs, gloo on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cases import (
    GB,
    QWEN3_06B,
    SMALL,
    Case,
    Figure,
    Machine,
    Skipped,
    in_ranks,
    new_model,
    new_optimizer,
    new_samples,
    relative_error,
)

from rollart_core.training import checkpoint, distributed, process_group
from rollart_core.training.policy import ForwardSettings, PackedPolicy

VOCABULARY = 97


def sharded_update(machine: Machine) -> Iterator[Figure]:
    """FSDP2 over all ranks has the gradients, norms and weights of one rank."""
    num = _num_ranks(machine)
    (alone,) = in_ranks(_train, 1, machine, 1)
    ranks = in_ranks(_train, num, machine, num)
    yield Figure("ranks", num)
    error = relative_error(_tensors(ranks[0]["gradients"]), _tensors(alone["gradients"]))
    yield Figure("gradient error", error, at_most=1e-4)
    off = max(abs(a / b - 1) for a, b in zip(ranks[0]["norms"], alone["norms"], strict=True))
    yield Figure("largest relative difference of gradient norms", off, at_most=1e-3)
    yield Figure("an update of all ranks", max(r["update_s"] for r in ranks), "s")
    yield Figure("an update of one rank", alone["update_s"], "s")
    (loaded,) = in_ranks(_load, 1, machine)
    pairs = zip(loaded, ranks[0]["weights"], strict=True)
    differ = sum(not np.array_equal(a, b) for a, b in pairs)
    yield Figure("tensors that differ in their checkpoint", differ, at_most=0)


def _num_ranks(machine: Machine) -> int:
    if machine.is_cuda and machine.num_devices < 2:
        raise Skipped(f"it needs two or more GPUs; this machine has {machine.num_devices}")
    return min(machine.num_devices, 8) if machine.is_cuda else 2


def _train(rank: int, machine: Machine, num: int) -> dict[str, Any]:
    """Train on this rank's rows; return whole tensors on the first rank."""
    device = _join(rank, machine, num)
    model = distributed.shard(_model(machine), device)
    policy = PackedPolicy(model, ForwardSettings())
    optimizer = new_optimizer(model)
    rows = new_samples(machine.size(cuda=(300, 900, 1200, 450) * 4, cpu=(9, 40, 17, 5)), VOCABULARY)
    mine, num_tokens = rows[rank::num], sum(s.num_loss_tokens for s in rows)
    norms, gradients = [], []
    for i in range(3):
        machine.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        # FSDP2 averages gradients over ranks.
        (-policy.logprobs(mine)[0].sum() * num / num_tokens).backward()
        if i == 0:
            gradients = _whole(p.grad for p in model.parameters())
        norms.append(optimizer.update(1.0).grad_norm)
        machine.synchronize()
        seconds = time.perf_counter() - start
    named = checkpoint.named_tensors(model)
    if num > 1:
        checkpoint.save(str(machine.folder / "checkpoint"), {"model": named})
    weights = _whole(named.values())
    process_group.leave()
    return {"norms": norms, "gradients": gradients, "weights": weights, "update_s": seconds}


def _load(rank: int, machine: Machine) -> list[np.ndarray]:
    named = checkpoint.named_tensors(_model(machine))
    checkpoint.load(str(machine.folder / "checkpoint"), {"model": named})
    return _whole(named.values())


def _model(machine: Machine) -> torch.nn.Module:
    """Return the same model on every rank, on the CPU."""
    shape = machine.size(cuda=QWEN3_06B, cpu=SMALL)
    layers = machine.size(cuda=4, cpu=2)
    on_cpu = Machine("cpu", machine.folder)
    return new_model(on_cpu, vocab_size=VOCABULARY, num_hidden_layers=layers, **shape)


def _join(rank: int, machine: Machine, num: int) -> torch.device:
    """Join the process group of `num` ranks, and return this rank's device."""
    if num > 1:
        address = machine.folder / "address"
        if rank == 0:
            (new := machine.folder / "new").write_text(process_group.open_store("127.0.0.1"))
            new.rename(address)
        while not address.exists():
            time.sleep(0.01)
        process_group.join(address.read_text(), rank, num, device=machine.device)
    return torch.device(machine.device, rank) if machine.is_cuda else torch.device("cpu")


def _whole(tensors: Any) -> list[np.ndarray]:
    """Return whole tensors as arrays on the first rank, and nothing on others."""
    found = [distributed.whole(t) for t in tensors]
    return [t.float().cpu().numpy().copy() for t in found] if distributed.rank() == 0 else []


def _tensors(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(a) for a in arrays]


def weight_broadcast(machine: Machine) -> Iterator[Figure]:
    """Flat buckets of weights from the first rank to all others: NCCL, or gloo on the CPU."""
    num = _num_ranks(machine)
    numel = machine.size(cuda=GB // 2, cpu=10**5)  # bfloat16: buckets of 1 GB
    ranks = in_ranks(_broadcast, num, machine, num, numel)
    yield Figure("ranks", num)
    seconds = max(r["seconds"] for r in ranks)
    yield Figure("broadcast", 2 * numel / seconds / GB, "GB/s")
    differ = sum(r["checksum"] != ranks[0]["checksum"] for r in ranks)
    yield Figure("ranks that differ", differ, at_most=0)


def _broadcast(rank: int, machine: Machine, num: int, numel: int) -> dict[str, Any]:
    device = _join(rank, machine, num)
    bucket = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    if rank == 0:
        bucket.normal_()
    seconds = machine.seconds(partial(dist.broadcast, bucket, src=0), repeats=5, warmups=2)
    total = int(bucket.view(torch.int16).sum(dtype=torch.int64))
    process_group.leave()
    return {"seconds": seconds, "checksum": total}


CASES: dict[Case, float] = {
    sharded_update: 180,
    weight_broadcast: 120,
}
"""Case -> its time limit in seconds."""
