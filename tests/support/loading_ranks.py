"""Several ranks that load models, and say what they held meanwhile; run as a program.

    python loading_ranks.py FOLDER NUM_RANKS PATH...

Writes ``FOLDER/<loader><n>-<rank>.pt`` for each path and loader: the whole tensors, made of the
shards of all ranks, the bytes of this rank's, and the most bytes torch had given out meanwhile.
Ranks are forked once everything is imported, for importing it takes most of their time.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401 - before ranks are forked
from torch import nn
from torch.profiler import ProfilerActivity, profile

from rollart_core.runtime.child import die_with_parent
from rollart_core.training import distributed
from rollart_core.training.loading import load_model, load_on_device, recompute_activations

CPU = torch.device("cpu")


def shards(path: str) -> nn.Module:
    return load_on_device(path, CPU, prepare=recompute_activations)


def whole_first(path: str) -> nn.Module:
    """As every rank did before it read its own shards."""
    return distributed.shard(load_model(path), CPU)


def peak(load: Callable[[], nn.Module], folder: Path) -> tuple[nn.Module, int]:
    """Return a model, and the most bytes that lived at once while it was loaded.

    A file of its folder that is mapped counts as given out, whole, but is no memory that is held.
    """
    mapped = {file.stat().st_size for file in folder.iterdir()}
    gc.collect()  # an earlier model that went meanwhile would be taken from this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = load()
    results = seen.profiler.kineto_results
    given = [e for e in results.events() if e.name() == "[memory]"]
    memory = [e for e in given if abs(e.nbytes()) not in mapped]
    held = most = 0
    for event in sorted(memory, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return model, most


def main(folder: Path, rank: int, num_ranks: int, paths: list[str]) -> None:
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # other threads' bytes would not be seen
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    for load in (shards, whole_first):
        load(paths[0])  # what is made once for all is not counted
        for n, path in enumerate(paths):
            model, most = peak(lambda load=load, path=path: load(path), Path(path))
            state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            # FSDP2 gives the last rank as many rows as the others, if only to gather them.
            rows = [-(-len(p) // num_ranks) for p in model.parameters()]
            each = zip(rows, model.parameters(), strict=True)
            own = sum(4 * num * p.numel() // len(p) for num, p in each)
            found = {
                "whole": {k: distributed.whole(v.detach()).clone() for k, v in state.items()},
                "peak_bytes": most,
                "shard_bytes": own,
                "is_tied": model.lm_head.weight is model.get_input_embeddings().weight,
            }
            torch.save(found, folder / f"{load.__name__}{n}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def forked(folder: Path, rank: int, num_ranks: int, paths: list[str]) -> int:
    """Start one rank and return its process id."""
    parent_pid = os.getpid()
    if pid := os.fork():
        return pid
    try:
        die_with_parent(parent_pid)
        main(folder, rank, num_ranks, paths)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    count = int(sys.argv[2])
    ranks = {forked(Path(sys.argv[1]), rank, count, sys.argv[3:]) for rank in range(count)}
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status:
            for other in ranks:  # they would wait for it
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
