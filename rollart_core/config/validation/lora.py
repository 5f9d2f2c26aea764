"""What must hold between ``lora`` and the rest of a run config.

Takes: a RunConfig, and what the engine says of itself. Gives: problems. Never: imports torch or
peft; of a model it reads the heads of its files alone, and the trainer looks again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rollart_core.config.model import ModelPath, NewModel
from rollart_core.config.problems import Problem
from rollart_core.config.run import RunConfig
from rollart_core.contracts.inference import InferenceEngineSpec

NEW_MODEL_MATRICES = frozenset(
    f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
)
"""What the matrices of a new model's layers are called."""
_OF_A_LAYER = re.compile(r"\.layers\.\d+\.(?:.+\.)?(\w+)\.weight$")
_MOST_HEAD_BYTES = 100 * 2**20
"""A longer head is none; that is found when the file is loaded."""


def lora_problems(config: RunConfig, engine: InferenceEngineSpec) -> Iterator[Problem]:
    """Yield what stands in the way of training adapters."""
    lora = config.lora
    if lora is None:
        return
    if find_spec("peft") is None:
        yield Problem(("lora",), "peft is missing: pip install 'rollart[lora]'")
    if isinstance(config.model, NewModel) and config.warm_start is None:
        message = (
            "a model that is made for this run has learned nothing that adapters could be put on: "
            "add warm_start, which trains it whole before RL, or name a trained one as model.path"
        )
        yield Problem(("lora",), message)
    if config.critic and config.critic.backbone == "own":
        message = (
            "own: a second model that is trained whole takes all that lora saves; set it to "
            "shared or detached"
        )
        yield Problem(("critic", "backbone"), message)
    if lora.sync == "adapter" and not engine.merges_adapters:
        message = f"adapter: {engine.id} takes whole weights only; use sync: merged"
        yield Problem(("lora", "sync"), message)
    name, there = _adaptable(config)
    unknown = sorted(set(lora.target_modules or ()) - there)
    if there and unknown:
        message = f"{name} has no {', '.join(unknown)}; it has {', '.join(sorted(there))}"
        yield Problem(("lora", "target_modules"), message)


def _adaptable(config: RunConfig) -> tuple[str, frozenset[str]]:
    """Return what to call the model, and what its matrices are called; nothing where unknown."""
    if isinstance(config.model, NewModel):
        return "a new model", NEW_MODEL_MATRICES
    if isinstance(config.model, ModelPath):
        folder = Path(config.model.path).expanduser()
        return config.model.path, frozenset(layer_matrices(folder))
    return "", frozenset()


def layer_matrices(folder: Path) -> set[str]:
    """Return what the matrices of a model's layers are called, such as ``q_proj``.

    Nothing of a model that is no folder here, or has other files than safetensors.
    """
    found = set()
    for file in folder.glob("*.safetensors"):
        for name, shape in _shapes(file).items():
            match = _OF_A_LAYER.search(name)
            if match and len(shape) == 2:
                found.add(match[1])
    return found


def _shapes(file: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor, from the head of a safetensors file; none of another."""
    try:
        with file.open("rb") as content:
            num_bytes = int.from_bytes(content.read(8), "little")
            head = json.loads(content.read(min(num_bytes, _MOST_HEAD_BYTES)))
        return {name: row["shape"] for name, row in head.items() if name != "__metadata__"}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}
