"""Work on one or several ranks: FSDP2 if torch.distributed has more than one rank.

Takes: a model, or numbers of this rank. Gives: the sharded model, this rank's share of the work,
sums and maxima over ranks. Never: starts a process group; the code that starts the ranks does.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

WHOLE_GRADIENT_BYTES = 2 * 2**30
"""A model whose float32 gradient is not larger than this reduces it once per update."""


class Share(NamedTuple):
    """One microbatch of this rank."""

    members: list[int]
    is_real: bool
    """False for a microbatch that only keeps this rank synchronised with the others."""


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this rank; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def shard(model: nn.Module, device: torch.device, *, bfloat16: bool = False) -> nn.Module:
    """Move a model to its device, and shard its parameters over the ranks, layer by layer.

    On one rank nothing is sharded. With ``bfloat16``, layers are gathered and computed in bfloat16,
    gradients are reduced in float32, and the shards stay float32.
    """
    if world_size() == 1:
        return model.to(device)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (world_size(),))
    # Each layer moves to the device separately, so that the device never holds the whole model.
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate uninitialised shards on the device for parameters without content.

    Tensors with content, such as buffers, are unchanged.
    """
    from torch.distributed.tensor import DTensor

    def with_capacity(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if not isinstance(tensor, DTensor):
            return torch.empty_like(tensor, device=device)
        capacity: Tensor = DTensor.from_local(
            torch.empty_like(tensor.to_local(), device=device),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        return capacity

    apply: Any = model._apply  # like to_empty, which would also empty buffers
    apply(with_capacity)


def own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's writable shard of a tensor, and the index of its first row."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    assert tensor.placements == (Shard(0),)
    rows = -(-len(tensor) // world_size())  # FSDP2 cuts as torch.chunk does
    first = min(rank() * rows, len(tensor))
    held: Any = tensor.detach()
    own: Tensor = held.to_local()
    assert len(own) == min(rows, len(tensor) - first)
    return own, first


def shard_head(head: nn.Module, device: torch.device) -> nn.Module:
    """Move a small module to the device, and shard its float32 parameters over the ranks."""
    head = head.to(device)
    if world_size() > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(head, mesh=init_device_mesh(device.type, (world_size(),)))
    return head


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """Return the layers of a transformers causal LM: the first list of modules in its decoder."""
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    return next((list(m) for m in decoder.children() if isinstance(m, nn.ModuleList)), [])


def reduce_gradients(model: nn.Module, *, is_last: bool) -> None:
    """Set whether the next backward pass is the last before an update.

    If a whole gradient is small enough for every rank, gradients are summed over ranks only after
    the last pass. Otherwise they are summed after each pass, which keeps only shards of them.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        num_bytes = 4 * sum(p.numel() for p in model.parameters())
        model.set_requires_gradient_sync(is_last or num_bytes > WHOLE_GRADIENT_BYTES)


def reshard(model: nn.Module) -> None:
    """Free the parameters that a forward pass without a backward pass has gathered."""
    if world_size() > 1:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def share(bins: Sequence[list[int]]) -> list[Share]:
    """Return this rank's microbatches; all ranks get the same number and process them in step."""
    size = world_size()
    mine = [start + rank() for start in range(0, len(bins), size)]
    return [Share(bins[i], True) if i < len(bins) else Share(bins[0], False) for i in mine]


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


def gather(value: object) -> list[Any]:
    """Return the values of all ranks, by rank; the values must be picklable."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raise an exception of one rank on all ranks, so that no rank continues alone.

    Use it for work without collective calls, such as writing a file on one rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as e:
        if world_size() == 1:
            raise
        error = e
    for found in gather(_portable(error)):
        if found is not None:
            raise found from error


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor (a collective call); a plain tensor unchanged."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients over all ranks; it may be sharded (see :func:`whole`)."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients, foreach=True)


def scale_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients with the norm ``norm`` so that their norm is at most ``max_norm``."""
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)


def _portable(error: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
