"""One rank or several: FSDP2 where torch.distributed has more than one rank, nothing where not.

Takes: a model, or numbers of this rank. Gives: the sharded model, or sums and maxima over ranks.
Never: starts a process group; whoever starts the ranks does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this rank; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def shard(model: nn.Module) -> None:
    """Shard the parameters over the ranks, layer by layer; nothing on one rank."""
    if world_size() == 1:
        return
    from torch.distributed.fsdp import fully_shard

    decoder: Any = model.get_decoder()  # type: ignore[operator]
    for layer in decoder.layers:
        fully_shard(layer)
    fully_shard(model)


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward left gathered, so that parameters are shards."""
    if world_size() > 1:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def all_sum(values: Tensor) -> Tensor:
    """Return the sum over ranks, element by element."""
    if world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.SUM)
    return values


def all_max(values: Tensor) -> Tensor:
    """Return the maximum over ranks, element by element."""
    if world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor whole (a collective call); a plain one as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their norm (over all ranks) is at most this; return the norm."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
    return whole(norm)
