"""Mixture-of-experts weights under the names of the published files, which engines read.

    transformers, in memory    ...experts.gate_up_proj [E, 2 I, H], ...experts.down_proj [E, H, I]
    files, and servers         ...experts.7.gate_proj.weight [I, H], up_proj, down_proj [H, I]

Takes: named tensors as a trainer publishes them. Gives: views of them, one per expert.
Never: copies a tensor, or changes the names of an unknown model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SPLIT = frozenset({"Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"})
"""Architectures whose files have one tensor per expert. In other files, all experts are in one
tensor."""
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def as_in_files(
    tensors: Iterable[tuple[str, torch.Tensor]], architectures: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors under the names in the files of the model.

    Args:
        tensors: Tensors with the names of transformers.
        architectures: The architectures in the model's ``config.json``.
    """
    is_split = not SPLIT.isdisjoint(architectures)
    for name, tensor in tensors:
        if is_split:
            yield from _split(name, tensor)
        else:
            yield name, tensor


def model_config(path: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model, given its folder or hub id."""
    file = Path(path) / "config.json"
    if file.is_file():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    from transformers import AutoConfig

    given: dict[str, Any] = AutoConfig.from_pretrained(path).to_dict()
    return given


def _split(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if tensor.dim() != 3 or not name.endswith((_GATE_UP, _DOWN)):
        yield name, tensor
        return
    experts = name[: name.rindex(".")]
    for n, of_expert in enumerate(tensor.unbind()):
        if name.endswith(_DOWN):
            yield f"{experts}.{n}.down_proj.weight", of_expert
            continue
        gate, up = of_expert.chunk(2)
        yield f"{experts}.{n}.gate_proj.weight", gate
        yield f"{experts}.{n}.up_proj.weight", up
