"""What must hold between inference engines, ``lora`` and the rest of a run config.

Takes: a RunConfig, and the engines that were found for it. Gives: problems. Never: imports an
engine, torch or peft, or looks for an engine; of a model it reads the heads of its files alone, and
the trainer looks again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from rollart_core.config.model import ModelPath, NewModel, RemoteModel
from rollart_core.config.problems import Problem
from rollart_core.config.resolve_plugin import ResolvedPlugin
from rollart_core.config.run import RunConfig
from rollart_core.config.runtime import RayRuntime
from rollart_core.contracts.inference import InferenceEngineSpec

NEW_MODEL_MATRICES = frozenset(
    f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
)
"""What the matrices of a new model's layers are called."""
_OF_A_LAYER = re.compile(r"\.layers\.\d+\.(?:.+\.)?(\w+)\.weight$")
_MOST_HEAD_BYTES = 100 * 2**20
"""A longer head is none; that is found when the file is loaded."""


def devices_of(engine: ResolvedPlugin[InferenceEngineSpec]) -> int:
    """Return the accelerators that one engine takes."""
    option = engine.spec.devices_option
    return int(engine.options.get(option, 1)) if option else 1


def engine_problems(
    config: RunConfig,
    engines: Sequence[ResolvedPlugin[InferenceEngineSpec] | None],
    trains: bool,
) -> Iterator[Problem]:
    """Yield what engines cannot do, or have no files of the model for.

    Args:
        config: The config.
        engines: That of ``engine``, then each further class; None for what was not found.
        trains: False: the model is only evaluated.
    """
    further = (("engines", i, "engine") for i in range(len(config.engines)))
    for key, engine in zip((("engine",), *further), engines, strict=True):
        yield from _of_one(config, engine, trains, key)
        if engine and trains:
            yield from lora_problems(config, engine.spec)


def teacher_problems(
    teacher: ResolvedPlugin[InferenceEngineSpec] | None,
) -> Iterator[Problem]:
    """Yield why an engine, as far as it was found, cannot run the teacher."""
    if teacher and not teacher.spec.scores:
        message = f"{teacher.spec.id} cannot score given tokens, as a teacher must; use embedded"
        yield Problem(("teacher", "engine"), message)


def _of_one(
    config: RunConfig,
    engine: ResolvedPlugin[InferenceEngineSpec] | None,
    trains: bool,
    key: tuple[str | int, ...],
) -> Iterator[Problem]:
    if engine is None:
        return
    is_remote = isinstance(config.model, RemoteModel)
    if trains and not is_remote and not engine.spec.follows_training:
        message = (
            f"{engine.spec.id} serves the weights its server began with and cannot follow "
            "training; score with `rollart eval`, or train with another engine"
        )
        yield Problem(key, message)
    if config.deterministic and not engine.spec.keeps_deterministic:
        message = (
            f"true: no seed decides what {engine.spec.id} samples; use engine: embedded, or "
            "deterministic: false"
        )
        yield Problem(("deterministic",), message)
    if isinstance(config.runtime, RayRuntime):
        option = engine.spec.first_device_option
        if option and engine.options.get(option):
            message = "has no effect with runtime: ray, which gives each engine devices of its own"
            yield Problem((*key, option), f"{message}; remove it")
    if config.engines and devices_of(engine) > 1:
        message = (
            f"its engines take {devices_of(engine)} devices each, which several classes of engines "
            f"cannot yet: set {engine.spec.devices_option} to 1, or have one class"
        )
        yield Problem(key, message)
    if is_remote and not engine.spec.takes_text:
        message = f"{engine.spec.id} needs a model's files: give model.path, or engine: openai"
        yield Problem(key, message)


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
        for name, shape in _tensor_shapes(file).items():
            match = _OF_A_LAYER.search(name)
            if match and len(shape) == 2:
                found.add(match[1])
    return found


def _tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor, from the head of a safetensors file; none of another."""
    try:
        with file.open("rb") as content:
            num_bytes = int.from_bytes(content.read(8), "little")
            head = json.loads(content.read(min(num_bytes, _MOST_HEAD_BYTES)))
        return {name: row["shape"] for name, row in head.items() if name != "__metadata__"}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}
