"""Checks between the algorithm, the engines, ``lora`` and the rest of a run config.

Takes: a RunConfig, and the specs and options of its plugins. Gives: problems, and warnings about
settings that are allowed but often a mistake. Never: imports an algorithm, an engine, torch, peft
or tokenizers. Of a model it reads only files in local folders; the trainer checks again. Options of
an algorithm are checked by its config model (``run_problems`` and ``run_warnings``, see
:class:`rollart_core.contracts.algorithm.RunFacts`). The trainer checks what depends on such options
before training starts (:mod:`rollart_core.config.training`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollart_core.config.model import ModelPath, NewModel, RemoteModel
from rollart_core.config.problems import Problem
from rollart_core.config.resolve_plugin import ResolvedPlugin
from rollart_core.config.run import RunConfig
from rollart_core.config.runtime import RayRuntime
from rollart_core.config.validation.consistency import colocates, entries, model_path_fault
from rollart_core.contracts.algorithm import AlgorithmSpec, RunFacts
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.inference import InferenceEngineSpec
from rollart_core.contracts.weights import WeightChannelSpec
from rollart_core.plugins import registry

NEW_MODEL_MATRICES = frozenset(
    f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
)
"""Names of the matrices in a new model's layers."""
_OF_A_LAYER = re.compile(r"\.layers\.\d+\.(?:.+\.)?(\w+)\.weight$")
_MOST_HEAD_BYTES = 100 * 2**20
"""Maximum size of a header. A longer one is invalid, which the loader of the file reports."""

_NEEDS = {
    "critic": "it learns values: add a critic section, such as critic: {backbone: own}",
    "teacher": "it learns from another model: add teacher: {path: ...}",
}


def devices_of(engine: ResolvedPlugin[InferenceEngineSpec]) -> int:
    """Return the number of accelerators that one engine uses."""
    option = engine.spec.devices_option
    return int(engine.options.get(option, 1)) if option else 1


def engine_problems(
    config: RunConfig,
    engines: Sequence[ResolvedPlugin[InferenceEngineSpec] | None],
    trains: bool,
) -> Iterator[Problem]:
    """Yield settings that engines do not support, and missing model files.

    Args:
        config: The config.
        engines: The engine of ``engine``, then of each further class; None if it was not found.
        trains: False: the model is only evaluated.
    """
    further = (("engines", i, "engine") for i in range(len(config.engines)))
    for key, engine in zip((("engine",), *further), engines, strict=True):
        yield from _of_one(config, engine, trains, key)
        if engine and trains:
            yield from lora_problems(config, engine.spec)


def colocation_problems(
    config: RunConfig,
    engine: ResolvedPlugin[InferenceEngineSpec],
    weights: WeightChannelSpec,
) -> Iterator[Problem]:
    """Yield why engines cannot use the devices of the trainer in turns with it."""
    if not colocates(config):
        return
    if weights.reach == "network":
        message = (
            f"{weights.id} sends weights while trainer and engines both run, which "
            "runtime.colocate excludes; use shared-memory or disk"
        )
        yield Problem(("weights",), message)
    if not engine.spec.sleeps:
        message = (
            f"{engine.spec.id} cannot free the memory of its device, which runtime.colocate needs; "
            "use sglang, vllm or embedded"
        )
        yield Problem(("engine",), message)
    if config.lora and config.lora.sync == "adapter" and engine.spec.serves_adapters:
        message = (
            "adapter: a server that frees its memory in turns (runtime.colocate) discards the base "
            "weights, so each version must contain them; use merged"
        )
        yield Problem(("lora", "sync"), message)
    num, ranks = config.runtime.num_engines * devices_of(engine), config.runtime.num_trainer_ranks
    if num != ranks:
        message = (
            f"true: the engines use {num} device(s), but the trainer has {ranks} rank(s): set "
            f"runtime.num_trainer_ranks to {num}, so that each device has one"
        )
        yield Problem(("runtime", "colocate"), message)
    option = engine.spec.first_device_option
    if option and engine.options.get(option):
        message = "has no effect with runtime.colocate, whose first device is the trainer's"
        yield Problem(("engine", option), f"{message}; remove it")


def teacher_problems(
    teacher: ResolvedPlugin[InferenceEngineSpec] | None,
) -> Iterator[Problem]:
    """Yield why an engine, if it was found, cannot run the teacher."""
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
            f"{engine.spec.id} serves its server's initial weights and cannot follow "
            "training; score with `rollart eval`, or train with another engine"
        )
        yield Problem(key, message)
    if config.deterministic and not engine.spec.keeps_deterministic:
        message = (
            f"true: sampling of {engine.spec.id} has no seed; use engine: embedded, or "
            "deterministic: false"
        )
        yield Problem(("deterministic",), message)
    if isinstance(config.runtime, RayRuntime):
        option = engine.spec.first_device_option
        if option and engine.options.get(option):
            message = "has no effect with runtime: ray, which gives each engine its own devices"
            yield Problem((*key, option), f"{message}; remove it")
    if config.engines and devices_of(engine) > 1:
        message = (
            f"its engines use {devices_of(engine)} devices each, which several classes of engines "
            f"do not support yet: set {engine.spec.devices_option} to 1, or use one class"
        )
        yield Problem(key, message)
    if is_remote and not engine.spec.takes_text:
        message = f"{engine.spec.id} needs a model's files: set model.path, or use engine: openai"
        yield Problem(key, message)


def lora_problems(config: RunConfig, engine: InferenceEngineSpec) -> Iterator[Problem]:
    """Yield settings that prevent training adapters."""
    lora = config.lora
    if lora is None:
        return
    if find_spec("peft") is None:
        yield Problem(("lora",), "peft is missing: pip install 'rollart[lora]'")
    if isinstance(config.model, NewModel) and config.warm_start is None:
        message = (
            "a new model is untrained, and adapters need a trained model: "
            "add warm_start, which trains it whole before RL, or set model.path to a trained one"
        )
        yield Problem(("lora",), message)
    if config.critic and config.critic.backbone == "own":
        message = (
            "own: training a whole second model needs all the memory that lora saves; set it to "
            "shared or detached"
        )
        yield Problem(("critic", "backbone"), message)
    if lora.sync == "adapter":
        yield from _adapter_problems(config, engine)
    name, there = _adaptable(config)
    unknown = sorted(set(lora.target_modules or ()) - there)
    if there and unknown:
        message = f"{name} has no {', '.join(unknown)}; it has {', '.join(sorted(there))}"
        yield Problem(("lora", "target_modules"), message)


def _adapter_problems(config: RunConfig, engine: InferenceEngineSpec) -> Iterator[Problem]:
    """Yield settings that prevent engines from receiving adapters."""
    if not (engine.merges_adapters or engine.serves_adapters):
        message = f"adapter: {engine.id} supports only whole weights; use sync: merged"
        yield Problem(("lora", "sync"), message)
    if not engine.serves_adapters:
        return
    if isinstance(config.model, NewModel):
        message = (
            f"adapter: {engine.id} loads adapters beside a model that never changes, but the warm "
            "start of a new model trains all its weights; set model.path, or use sync: merged"
        )
        yield Problem(("lora", "sync"), message)
    if config.rollout.kv_on_swap == "keep":
        message = (
            f"keep has no effect with lora.sync: adapter on {engine.id}, where a turn ends with "
            "the adapter that it began with; remove it"
        )
        yield Problem(("rollout", "kv_on_swap"), message)


def _adaptable(config: RunConfig) -> tuple[str, frozenset[str]]:
    """Return the model's name and the names of its matrices; empty if unknown."""
    if isinstance(config.model, NewModel):
        return "a new model", NEW_MODEL_MATRICES
    if isinstance(config.model, ModelPath):
        folder = Path(config.model.path).expanduser()
        return config.model.path, frozenset(layer_matrices(folder))
    return "", frozenset()


def layer_matrices(folder: Path) -> set[str]:
    """Return the names of the matrices in a model's layers, such as ``q_proj``.

    Empty if the model is not a local folder or has other files than safetensors.
    """
    found = set()
    for file in folder.glob("*.safetensors"):
        for name, shape in _tensor_shapes(file).items():
            match = _OF_A_LAYER.search(name)
            if match and len(shape) == 2:
                found.add(match[1])
    return found


def _tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor from a safetensors header; empty for other files."""
    try:
        with file.open("rb") as content:
            num_bytes = int.from_bytes(content.read(8), "little")
            head = json.loads(content.read(min(num_bytes, _MOST_HEAD_BYTES)))
        return {name: row["shape"] for name, row in head.items() if name != "__metadata__"}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}


def algorithm_problems(config: RunConfig, plugin_id: str) -> Iterator[Problem]:
    """Yield algorithm options, of the run or of an environment, that do not fit the run.

    Args:
        config: The config. Its options are valid by themselves.
        plugin_id: The id of the algorithm.
    """
    for path, options, own in _options(config):
        for name, message in _said("run_problems", config, plugin_id, options):
            if name in own:
                yield Problem((*path, name), message)


def config_warnings(config: RunConfig, plugin_id: str) -> list[str]:
    """Return a line for each setting that is allowed but often a mistake."""
    lines = [
        Problem((*path, name), message).within()
        for path, options, own in _options(config)
        for name, message in _said("run_warnings", config, plugin_id, options)
        if name in own
    ]
    if isinstance(config.model, NewModel) and not (config.warm_start or config.teacher):
        algorithm = registry.spec("algorithms", plugin_id)
        if getattr(algorithm, "learns_from", "") != "demonstrations":
            message = "a new model writes random text, which rarely earns a reward; add warm_start"
            lines.append(Problem(("model",), message).within())
    return list(dict.fromkeys(lines))


def _options(
    config: RunConfig,
) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the path of options, all options, and those that are set there."""
    yield ("algorithm",), config.algorithm.options, config.algorithm.options
    for i, entry in enumerate(config.env if isinstance(config.env, tuple) else ()):
        if own := entry.run.algorithm:
            yield ("env", i, "run", "algorithm"), {**config.algorithm.options, **own}, own


def _said(
    method: str, config: RunConfig, plugin_id: str, options: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield what a method of the algorithm's config model returns; nothing without the method."""
    model = registry.config_model("algorithms", plugin_id)
    if model is None or not hasattr(model, method):
        return
    if registry.option_problems("algorithms", plugin_id, options):
        return  # another problem, reported by the check of the options
    facts = RunFacts(
        updates_per_batch=config.trainer.updates_per_batch,
        groups_per_batch=config.rollout.groups_per_batch,
        replaces_equal_groups=config.rollout.equal_groups == "replace",
    )
    yield from getattr(model(**options), method)(facts)


def learning_problems(
    config: RunConfig, algorithm: AlgorithmSpec, envs: Sequence[EnvSpec]
) -> Iterator[Problem]:
    """Yield sections that the algorithm needs, and sections that have no effect with it.

    Args:
        config: The config.
        algorithm: The spec of the algorithm; without details for an unregistered class.
        envs: The specs of all environments that were found.
    """
    is_known = ":" not in algorithm.id
    for section, needed in (
        ("critic", algorithm.needs_critic),
        ("teacher", algorithm.needs_teacher),
    ):
        given = getattr(config, section) is not None
        if needed and not given:
            yield Problem((section,), f"{algorithm.id} needs one, because {_NEEDS[section]}")
        elif given and is_known and not needed:
            yield Problem((section,), f"has no effect with {algorithm.id}; remove it")
    if config.teacher and config.runtime.kind != "inline":
        message = "a teacher runs on the machine of the engines: it needs runtime: inline"
        yield Problem(("teacher",), message)
    yield from _other_model_problems(config)
    yield from _equal_group_problems(config, algorithm)
    yield from _shaping_problems(config)
    yield from _curriculum_problems(config)
    if algorithm.learns_from == "demonstrations":
        yield from _demonstration_problems(config, algorithm, envs)


def _other_model_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield why reference or teacher is not a model, or has another vocabulary than the policy."""
    own = config.model.path if isinstance(config.model, ModelPath) else None
    for section in ("reference", "teacher"):
        given = getattr(config, section)
        if given is None:
            continue
        fault = model_path_fault(given.path)
        if fault is None and own is None:
            fault = "a new model has its own vocabulary: set model.path to an existing model"
        elif fault is None and own is not None:
            fault = vocabulary_fault(own, given.path)
        if fault:
            yield Problem((section, "path"), fault)


def _equal_group_problems(config: RunConfig, algorithm: AlgorithmSpec) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.equal_groups == "train":
        if "max_equal_groups" in rollout.model_fields_set:
            message = "has no effect with rollout.equal_groups: train; remove it"
            yield Problem(("rollout", "max_equal_groups"), message)
    elif rollout.min_group_size == 1 or algorithm.learns_from == "demonstrations":
        message = (
            "replace: the rewards of a group of one are always equal, so it would never be "
            "trained; set rollout.min_group_size to 2 or more, or equal_groups: train"
        )
        yield Problem(("rollout", "equal_groups"), message)


def _shaping_problems(config: RunConfig) -> Iterator[Problem]:
    listed = entries(config)
    if config.shaping and listed and all(entry.run.shaping for entry in listed):
        message = "has no effect where every environment of env has its own in run; remove it"
        yield Problem(("shaping",), message)


def _curriculum_problems(config: RunConfig) -> Iterator[Problem]:
    curriculum = config.curriculum
    if curriculum is None:
        return
    if len(entries(config)) < 2 and curriculum.retire_above is None:
        message = "has no effect with one environment, unless retire_above is set; remove it"
        yield Problem(("curriculum",), message)
    if config.deterministic and config.staleness_bound > 0:
        message = (
            "with max_staleness above 0 the next tasks depend on timing (which episodes have "
            "ended), and deterministic: true forbids that; use one of the two"
        )
        yield Problem(("curriculum",), message)


def _demonstration_problems(
    config: RunConfig, algorithm: AlgorithmSpec, envs: Sequence[EnvSpec]
) -> Iterator[Problem]:
    why = f"with {algorithm.id}, which learns from the environment's expert"
    if config.rollout.group_size > 1:
        message = f"{config.rollout.group_size}: the expert always acts the same; set it to 1"
        yield Problem(("rollout", "group_size"), message)
    for key in ("redundant", "in_flight", "kv_on_swap"):
        if key in config.rollout.model_fields_set:
            yield Problem(("rollout", key), f"has no effect {why}; remove it")
    for spec in envs:
        if spec.kind == "agent":
            message = f"{spec.id} is an agent, which has no oracle to learn from"
            yield Problem(("env",), message)


def vocabulary_fault(ours: str, other: str) -> str | None:
    """Return why token ids of one model mean something else to another, or None.

    Args:
        ours: Folder of the policy.
        other: Folder of the other model.
    """
    first, second = _vocabulary(Path(ours).expanduser()), _vocabulary(Path(other).expanduser())
    if first is not None and second is not None and first != second:
        differing = sorted(
            (i, token) for token, i in first.items() if second.get(token) != i
        ) or sorted((i, token) for token, i in second.items() if token not in first)
        at, token = differing[0]
        return (
            f"{other} and {ours} have different vocabularies: {len(second)} tokens and "
            f"{len(first)}, and token {at} ({token!r}) differs; use a model with the same "
            "tokenizer"
        )
    sizes = [_vocab_size(Path(p).expanduser()) for p in (ours, other)]
    if None not in sizes and sizes[0] != sizes[1] and (first is None or second is None):
        return (
            f"{other} and {ours} have different vocabularies: {sizes[1]} tokens and {sizes[0]}; "
            "use a model with the same tokenizer"
        )
    return None


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Return token -> id of a model folder; None if there is no ``tokenizer.json``."""
    content = _json_object(folder / "tokenizer.json")
    if content is None:
        return None
    known = content.get("model", {}).get("vocab", {})
    found = (
        {str(token): int(i) for token, i in known.items()}
        if isinstance(known, Mapping)
        else {str(row[0]): i for i, row in enumerate(known)}
    )
    added = content.get("added_tokens") or []
    return found | {str(token["content"]): int(token["id"]) for token in added}


def _vocab_size(folder: Path) -> int | None:
    content = _json_object(folder / "config.json") or {}
    size = content.get("vocab_size")
    return size if isinstance(size, int) else None


def _json_object(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
