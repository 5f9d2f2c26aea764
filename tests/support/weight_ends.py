"""Every weight channel with its options, and ends of it in other processes, for their tests."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from rollart_core.contracts.weights import WeightChannel
from rollart_core.plugins.registry import build
from support import fork_server
from support.pace import scaled

LIMIT_S = scaled(60.0)
"""Ends a hang only."""
CHANNELS: dict[str, dict[str, Any]] = {
    "shared-memory": {"id": "shared-memory"},
    "disk": {"id": "disk"},
    "collective": {"id": "collective", "timeout_s": LIMIT_S, "gather_s": 0.05},
    "delta": {"id": "delta"},
    "delta-disk": {"id": "delta", "over": "disk"},
    "delta-collective": {
        "id": "delta",
        "over": {"id": "collective", "timeout_s": LIMIT_S, "gather_s": 0.05},
    },
}

TENSORS = {
    "z.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "a.half": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "scalar": torch.tensor(7.0),
    "none": torch.empty(0, 4),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "counts": torch.tensor([1, 2**40]),
    "flags": torch.tensor([True, False, True]),
}


def shifted(shift: int) -> dict[str, torch.Tensor]:
    """The tensors of a later version: bool ones as they are."""
    return {n: t if t.dtype == torch.bool else t + shift for n, t in TENSORS.items()}


def end(kind: str, location: Path | str, **options: Any) -> WeightChannel:
    """Open an end as a run does."""
    given = CHANNELS[kind] | options
    return build(
        "weight_channels",
        given["id"],
        {k: v for k, v in given.items() if k != "id"},
        location=str(location),
    )


def assert_holds(channel: WeightChannel, version: int, shift: int = 0) -> None:
    """It holds the tensors of a version, in order, bit for bit."""
    assert_equal(list(channel.fetch(version)), shift)


def assert_equal(got: list[tuple[str, torch.Tensor]], shift: int = 0) -> None:
    """These are the tensors, in order, bit for bit."""
    wanted = shifted(shift)
    assert [name for name, _ in got] == list(wanted)
    for name, tensor in got:
        assert tensor.dtype == wanted[name].dtype, name
        assert tensor.shape == wanted[name].shape, name
        assert torch.equal(tensor, wanted[name]), name


def elsewhere(work: str, *args: object) -> fork_server.Program:
    """Call ``"module:function"`` with plain data in a process of its own."""
    return fork_server.start_program(
        *(work, json.dumps(args)),
        target="support.weight_ends:program",
        environment={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=1,
        stderr=2,
    )


def program() -> None:
    """Be the other process."""
    module, _, name = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
