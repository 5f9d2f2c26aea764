"""Groups of trainer ranks in processes of their own, for tests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollart_core.config.resolve import ResolvedPlugin
from rollart_core.config.run import Trainer as TrainerConfig
from rollart_core.config.training import ALONE, AuxiliaryModels
from rollart_core.plugins import registry
from rollart_core.runtime.factories import ChannelArgs, ModelArgs
from rollart_core.runtime.process import WorkerProcess
from rollart_core.runtime.remote import TrainerGroup

SETTINGS = {"temperature": 1.0, "deterministic": False, "seed": 0}


def resolved(kind: str, plugin_id: str, **options: object) -> ResolvedPlugin[Any]:
    spec = registry.spec(kind, plugin_id)
    return ResolvedPlugin(kind, spec, dict(options), "rollart", "0")


@asynccontextmanager
async def trainer_ranks(
    model: str,
    num_ranks: int,
    folder: Path,
    *,
    dtype: str = "float32",
    algorithm: Mapping[str, object] | None = None,
    host: str | None = "127.0.0.1",
    plugin: str = "grpo",
    beside: AuxiliaryModels = ALONE,
    **changes: object,
):
    """Start a group on ``model``, and end it."""
    config = {"max_tokens_per_microbatch": 256, "warmup_train_steps": 0, **changes}
    channel = ChannelArgs(
        resolved("weight_channels", "rollart/SharedMemory-v1"), str(folder / "weights")
    )
    group = TrainerGroup(
        lambda rank: WorkerProcess(f"trainer-{rank}", log_path=folder / f"rank{rank}.log"),
        num_ranks,
        {
            "config": TrainerConfig(**config),
            "algorithm": resolved("algorithms", plugin, **(algorithm or {})),
            "model": ModelArgs(model, dtype, "cpu"),
            "channel": channel,
            "settings": {**SETTINGS, "beside": beside},
        },
        host=host,
    )
    try:
        await group.start()
        yield group
    finally:
        pids = [p.pid for p in group._workers]
        await group.close()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def shrink_head_chunks(first_rank: int = 0) -> None:
    """Let the output heads of ranks compute five rows at a time; called in each rank."""
    from rollart_core.training import distributed, head

    if distributed.rank() >= first_rank:
        head.chunk_rows = lambda num_tokens: 5


def run_out_of_memory(on_rank: int, most_tokens: int) -> None:
    """Let a rank's forward pass raise if a microbatch has more tokens; called in each rank."""
    import torch

    from rollart_core.training import distributed
    from rollart_core.training.batch import model_input
    from rollart_core.training.policy import PackedPolicy, Policy

    plain = Policy.outputs

    def outputs(self, samples, **more):
        tokens = sum(len(model_input(s)) for s in samples)
        if distributed.rank() == on_rank and tokens > most_tokens:
            raise torch.OutOfMemoryError(f"{tokens} tokens do not fit")
        return plain(self, samples, **more)

    PackedPolicy.outputs = outputs
