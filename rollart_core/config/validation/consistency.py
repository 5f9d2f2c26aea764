"""Checks between the keys of a run config, beyond the limits of each key.

Takes: a RunConfig, and the timeouts and specs of its environments if known. Gives: problems, each
with its fix, and the ``trainer`` section with the end of its schedule. Never: imports a plugin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollart_core.config.envs import EnvEntry, EnvRun
from rollart_core.config.model import ModelPath, RemoteModel
from rollart_core.config.problems import Problem
from rollart_core.config.run import Deadlines, RunConfig, SyncRun, Trainer
from rollart_core.config.runtime import RayRuntime
from rollart_core.config.scoring import scoring_problems
from rollart_core.contracts.env import EnvSpec
from rollart_core.errors import did_you_mean

INLINE_POOLS = ("local", "engine")
"""Names of the pool of one machine. With several classes of engines, the pools of ``engine``."""

_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of classes that generate text."""
_TEXT_PART = ("llama4", "qwen3_5", "qwen3_5_moe")
"""Types of image models whose text part transformers loads as a causal LM."""
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")

_SET = "set evaluation.every_batches, such as 50"
_SUCCESS, _SCORE = "validation/success", "validation/score"
_ONLY = ("validation_tasks", "validation_split")
_SCHEDULE = ("trainer", "schedule")

_NESTS = (
    ("step_s", "episode_s"),
    ("reset_s", "episode_s"),
    ("generate_s", "episode_s"),
    ("reward_s", "ticket_s"),
    ("episode_s", "ticket_s"),
    ("ticket_s", "sandbox_ttl_s"),
)
"""In each pair, the first must be shorter than the second."""

OWN_KEYS: Mapping[str, tuple[str, str]] = {
    "split": ("rollout", "split"),
    "max_turns": ("rollout", "max_turns"),
    "evaluation_split": ("evaluation", "split"),
    "check_split": ("warm_start", "check_split"),
    "validation_split": ("evaluation", "validation_split"),
    "reset_s": ("deadlines", "reset_s"),
    "step_s": ("deadlines", "step_s"),
}
"""Key of ``EnvRun`` -> the section and key of the run that it replaces."""


def consistency_problems(config: RunConfig) -> list[Problem]:
    """Return the contradictions in the config, and the keys that have no effect."""
    ttl_counts = "sandbox_ttl_s" in config.deadlines.model_fields_set
    return [
        *deadline_problems(config.deadlines, {}, sandboxed=ttl_counts),
        *_group_problems(config),
        *_length_problems(config),
        *_model_problems(config),
        *_mix_problems(config),
        *_engine_class_problems(config),
        *_scaling_problems(config),
        *_colocation_problems(config),
        *_ray_problems(config),
        *scoring_problems(config),
        *validation_problems(config),
        *schedule_problems(config),
        *without_effect(config),
    ]


def deadline_problems(
    deadlines: Deadlines, defaults: Mapping[str, float], *, sandboxed: bool
) -> Iterator[Problem]:
    """Yield deadlines that do not nest.

    Args:
        deadlines: The deadlines of the config.
        defaults: Seconds of the environment's spec, for deadlines that are None.
        sandboxed: Whether the lifetime of a sandbox counts.
    """
    for inner, outer in _NESTS if sandboxed else _NESTS[:-1]:
        given, limit = getattr(deadlines, inner), getattr(deadlines, outer)
        seconds = defaults.get(inner) if given is None else given
        if seconds is not None and seconds >= limit:
            whose = "" if given is not None else ", from the environment's spec"
            message = f"{seconds:g} s{whose}: must be shorter than deadlines.{outer} ({limit:g} s)"
            yield Problem(("deadlines", inner), message)


def without_effect(config: RunConfig, envs: Sequence[EnvSpec] = ()) -> list[Problem]:
    """Return the keys that are set but have no effect in this run, each with the reason.

    Args:
        config: The config.
        envs: The specs of the environments, if they are known.
    """
    found: list[tuple[tuple[str | int, ...], str]] = []
    if isinstance(config, SyncRun) and "kv_on_swap" in config.rollout.model_fields_set:
        why = "with mode: sync, where weights are never swapped during an episode"
        found.append((("rollout", "kv_on_swap"), why))
    if config.staleness_bound == 0 and "in_flight" in config.rollout.model_fields_set:
        which = "mode: sync" if isinstance(config, SyncRun) else "max_staleness: 0"
        why = f"with {which}, where no turn is in flight when weights are swapped"
        found.append((("rollout", "in_flight"), why))
    if (
        envs
        and all(env.sandbox is None for env in envs)
        and "sandbox_ttl_s" in config.deadlines.model_fields_set
    ):
        which = ", ".join(env.id for env in envs)
        found.append((("deadlines", "sandbox_ttl_s"), f"with {which}, which needs no sandbox"))
    own_success = envs and not any(env.success_by_reward for env in envs)
    if own_success and "success_from" in config.scoring.model_fields_set:
        why = "because the environments decide success themselves"
        found.append((("scoring", "success_from"), why))
    if config.failures.hang_s is None and "heartbeat_s" in config.failures.model_fields_set:
        found.append((("failures", "heartbeat_s"), "with failures.hang_s: null"))
    if isinstance(config.model, RemoteModel) and "max_context_tokens" in (
        config.rollout.model_fields_set
    ):
        why = "with model.kind: remote, because only the server counts tokens"
        found.append((("rollout", "max_context_tokens"), why))
    if isinstance(config.model, RemoteModel) and config.rollout.max_thinking_tokens is not None:
        why = "with model.kind: remote, whose server ends a thought"
        found.append((("rollout", "max_thinking_tokens"), why))
    if config.rollout.workload is not None and len(entries(config)) > 1:
        found.append(
            (("rollout", "workload"), "with several environments, which declare their own")
        )
    found += _idle_trainer_keys(config)
    for key in replaced_everywhere(config):
        if key[1] in getattr(config, key[0]).model_fields_set:
            found.append((key, "because every environment of env sets its own in run"))
    if config.warm_start is None:
        found += [
            (("env", i, "run", "check_split"), "without warm_start")
            for i, entry in enumerate(entries(config))
            if entry.run.check_split is not None
        ]
    return [Problem(path, f"has no effect {why}; remove it") for path, why in found]


def entries(config: RunConfig) -> tuple[EnvEntry, ...]:
    """Return the listed environments; empty if ``env`` is not a list."""
    return config.env if isinstance(config.env, tuple) else ()


def replaced_everywhere(config: RunConfig) -> list[tuple[str, str]]:
    """Return the keys, as (section, key), that every listed environment replaces."""
    listed = entries(config)
    return [
        (section, key)
        for own, (section, key) in OWN_KEYS.items()
        if listed
        and all(getattr(entry.run, own) is not None for entry in listed)
        and getattr(config, section) is not None
    ]


def _scaling_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield initial numbers of workers that are outside of the limits of scaling."""
    if config.scaling is None:
        return
    runtime, scaling = config.runtime, config.scaling
    begins = {
        "engines": ("num_engines", num_engines(config)),
        "env_workers": (
            ("env_processes", runtime.env_processes)
            if runtime.kind == "inline"
            else ("num_env_workers", runtime.num_env_workers)
        ),
    }
    for name, (key, count) in begins.items():
        limits = getattr(scaling, name)
        if limits is None:
            continue
        if count == 0:
            message = "has no effect with runtime.env_processes: 0; remove it"
            yield Problem(("scaling", name), message)
        elif not limits.min <= count <= limits.max:
            message = f"the run starts with runtime.{key}: {count}, which is not between "
            message += f"{limits.min} and {limits.max}"
            yield Problem(("scaling", name), message)


def num_engines(config: RunConfig) -> int:
    """Return the initial number of engines, over all classes."""
    return config.runtime.num_engines + sum(one.count for one in config.engines)


def _engine_class_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield further classes of engines with a duplicate name or an unsuitable pool."""
    runtime = config.runtime
    pools = {pool.name: pool for pool in runtime.pools} if isinstance(runtime, RayRuntime) else None
    seen = set() if pools is not None else set(INLINE_POOLS)
    for i, one in enumerate(config.engines):
        key = ("engines", i, "name")
        if one.name in seen:
            yield Problem(key, f"{one.name!r} is already used: choose another name")
        seen.add(one.name)
        if pools is None:
            continue
        near = did_you_mean(one.name, list(pools))
        pool = pools.get(one.name)
        if pool is None:
            message = f"runtime.pools has no pool {one.name!r} for its engines.{near}"
            yield Problem(key, message)
        elif pool.roles and "engines" not in pool.roles:
            message = f"pool {one.name!r} may not run engines: add engines to its roles"
            yield Problem(key, message)
        elif pool.count < one.count:
            message = f"{one.count}: pool {one.name!r} has {pool.count} device(s), one per engine"
            yield Problem(("engines", i, "count"), message)
    if config.engines and config.deterministic:
        message = (
            "true: which class of engines answers depends on timing; remove engines, or use "
            "deterministic: false"
        )
        yield Problem(("deterministic",), message)


def _mix_problems(config: RunConfig) -> Iterator[Problem]:
    listed = entries(config)
    if len(listed) == 1 and listed[0].weight != 1:
        message = "has no effect with one environment; remove it"
        yield Problem(("env", 0, "weight"), message)
    asked = {("evaluation", "tasks"): config.evaluation.tasks}
    if config.warm_start:
        asked["warm_start", "check_tasks"] = config.warm_start.check_tasks
    if config.evaluation.every_batches:
        asked["evaluation", "validation_tasks"] = config.evaluation.validation_tasks
    for key, num_tasks in asked.items():
        if num_tasks < len(listed):
            yield Problem(key, f"{num_tasks} is too few for {len(listed)} environments")
    if config.reward and listed and all(entry.run.reward for entry in listed):
        message = "has no effect because every environment of env sets its own in run; remove it"
        yield Problem(("reward",), message)


def _idle_trainer_keys(config: RunConfig) -> list[tuple[tuple[str | int, ...], str]]:
    """Return the keys of the trainer that have no effect with its number of ranks."""
    trainer, num_ranks = config.trainer, config.runtime.num_trainer_ranks
    found: list[tuple[tuple[str | int, ...], str]] = []
    if num_ranks == 1 and trainer.collective_timeout_s is not None:
        why = "with one trainer rank, which makes no collective calls"
        found.append((("trainer", "collective_timeout_s"), why))
    if trainer.kernels == "native" and (num_ranks > 1 or trainer.activation_checkpointing):
        why = "with several trainer ranks or activation_checkpointing, which use torch's own"
        found.append((("trainer", "kernels"), why))
    return found


def colocates(config: RunConfig) -> bool:
    """Return whether trainer and engines use the same devices in turns."""
    return getattr(config.runtime, "colocate", False)


def _colocation_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield settings for which trainer and engines need devices at the same time."""
    if not colocates(config):
        return
    key = ("runtime", "colocate")
    if not isinstance(config, SyncRun):
        message = (
            "true: nothing is generated during training, so older samples would save no time; "
            "set mode: sync"
        )
        yield Problem(key, message)
    for section, given in (
        ("engines", config.engines),
        ("teacher", config.teacher),
        ("scaling.engines", config.scaling and config.scaling.engines),
    ):
        if given:
            message = f"true: there is no device for {section}; remove it, or use colocate: false"
            yield Problem(key, message)


def _ray_problems(config: RunConfig) -> Iterator[Problem]:
    runtime = config.runtime
    if not isinstance(runtime, RayRuntime):
        return
    if find_spec("ray") is None:
        yield Problem(("runtime", "kind"), "ray is missing: pip install 'rollart[ray]'")
    if runtime.address is not None and runtime.health_check_s is not None:
        message = (
            "has no effect on an existing cluster (`ray start --head` sets it there): remove "
            "it, or remove runtime.address"
        )
        yield Problem(("runtime", "health_check_s"), message)
    names = [pool.name for pool in runtime.pools]
    for i, name in enumerate(names):
        if name in names[:i]:
            message = f"{name!r} is already the name of an earlier pool: choose another name"
            yield Problem(("runtime", "pools", i, "name"), message)


def _group_problems(config: RunConfig) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.min_group_size > rollout.group_size:
        least, size = rollout.min_group_size, rollout.group_size
        message = f"{least} is more than rollout.group_size ({size}): decrease it"
        yield Problem(("rollout", "min_group_size"), message)
    if rollout.redundant and config.deterministic:
        message = (
            f"with {rollout.redundant} redundant members, timing decides which members are "
            "trained, and deterministic: true forbids that; use one of the two"
        )
        yield Problem(("rollout", "redundant"), message)


def _length_problems(config: RunConfig) -> Iterator[Problem]:
    new, whole = config.rollout.max_new_tokens, config.rollout.max_context_tokens
    if not isinstance(config.model, RemoteModel) and new >= whole:
        message = (
            f"{whole} tokens must hold prompt and answer, and rollout.max_new_tokens is {new}: "
            "increase it, or decrease rollout.max_new_tokens"
        )
        yield Problem(("rollout", "max_context_tokens"), message)
    thought = config.rollout.max_thinking_tokens
    if thought is not None and thought >= new:
        message = f"{thought} must be below rollout.max_new_tokens ({new}), which holds both"
        yield Problem(("rollout", "max_thinking_tokens"), message)


def _model_problems(config: RunConfig) -> Iterator[Problem]:
    if isinstance(config.model, ModelPath) and (fault := model_path_fault(config.model.path)):
        yield Problem(("model", "path"), fault)


def model_path_fault(path: str) -> str | None:
    """Return why ``path`` is neither a model folder nor a possible hub id, or None."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return _architecture_fault(folder / "config.json")
        return (
            f"{path} is not a model: the folder has no config.json (`rollart model new` makes one)"
        )
    if folder.exists():
        return f"{path} is a file: a model is a folder with a config.json, or a hub id"
    cached = hub_cached(path) if _HUB_ID.match(path) else None
    if cached or (_HUB_ID.match(path) and "/" in path):
        return _architecture_fault(cached) if cached else None
    return f"there is no folder {path}, and a hub id is OWNER/NAME, such as Qwen/Qwen3-0.6B"


def _architecture_fault(file: Path) -> str | None:
    try:
        fault = model_config_fault(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError):
        return f"{file} is not a model's config: it must be a JSON object"
    return fault and f"{file.parent} {fault}"


def model_config_fault(config: Mapping[str, Any]) -> str | None:
    """Return why the model of a ``config.json`` is not a decoder of text, or None."""
    names = config.get("architectures") or []
    named = f"({', '.join(names) or config.get('model_type', 'unknown')})"
    if config.get("is_encoder_decoder"):
        return f"is an encoder-decoder model {named}: use a decoder-only model"
    media = [name for name in ("vision_config", "audio_config") if config.get(name)]
    if media and config.get("model_type") not in _TEXT_PART:
        kind = media[0].partition("_")[0]
        return f"is a {kind} model {named}: use a model for text, or its text-only variant"
    if names and not any(name.endswith(_CAUSAL) for name in names):
        return f"is not a causal language model {named}: use one that generates text"
    return None


def hub_cached(hub_id: str) -> Path | None:
    """Return the path of a model's ``config.json`` in the local hub cache, or None."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(hub_id, "config.json")
    except (ImportError, ValueError):  # a ValueError: not a hub id
        return None
    return Path(found) if isinstance(found, str) else None


def validation_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of the keys of validation."""
    yield from _value_problems(config)
    validates = config.evaluation.every_batches is not None
    yield from _overlaps(config) if validates else _without_validation(config)


def success_problems(config: RunConfig, envs: Sequence[EnvSpec]) -> Iterator[Problem]:
    """Yield keys that need success if no environment of the run reports it.

    If an environment's spec does not say that it reports none, the first validation finds out, or
    the guard at the first batch.

    Args:
        config: The config.
        envs: The specs of its environments.
    """
    if not envs or any(spec.reports_success for spec in envs):
        return
    names = ", ".join(dict.fromkeys(spec.id for spec in envs))
    verb = "reports" if len(envs) == 1 else "report"
    why = f'and {names} {verb} no success (info["success"])'
    watches = config.guard.watch if config.guard else None
    when = config.stop.when.metric if config.stop.when else None
    for path, given, instead in (
        (("guard", "watch"), watches == "success", "reward"),
        (("checkpoint", "keep_best"), config.checkpoint.keep_best == _SUCCESS, _SCORE),
        (("stop", "when", "metric"), when == _SUCCESS, _SCORE),
    ):
        if given:
            word = "success" if instead == "reward" else _SUCCESS
            yield Problem(path, f"{word} is required, {why}: set it to {instead}")
    warm = config.warm_start
    if warm is not None and "until_success" in warm.model_fields_set:
        message = f"{warm.until_success:g} is required, {why}: remove it, and the warm start ends "
        yield Problem(("warm_start", "until_success"), f"{message}after warm_start.max_train_steps")


def _without_validation(config: RunConfig) -> Iterator[Problem]:
    metrics: dict[tuple[str, str], str | None] = {
        ("checkpoint", "keep_best"): config.checkpoint.keep_best,
        ("stop", "when"): config.stop.when.metric if config.stop.when else None,
    }
    for path, metric in metrics.items():
        if metric is not None:
            message = f"{metric} needs validations, and there are none: {_SET}, or remove "
            yield Problem(path, f"{message}{'.'.join(path)}")
    message = f"has no effect without evaluation.every_batches: {_SET}, or remove it"
    for key in _ONLY:
        if key in config.evaluation.model_fields_set:
            yield Problem(("evaluation", key), message)
    for entry, run in _runs(config):
        if run.validation_split is not None:
            yield Problem((*entry, "validation_split"), message)


def _value_problems(config: RunConfig) -> Iterator[Problem]:
    when = config.stop.when
    if when is None or when.value is None or when.metric != "validation/success":
        return
    if not 0 < when.value <= 1:
        message = f"{when.value:g} is not a share of successes: it must be above 0 and at most 1"
        yield Problem(("stop", "when", "value"), message)


def _overlaps(config: RunConfig) -> Iterator[Problem]:
    asked = config.evaluation.validation_split
    listed = _runs(config)
    if not listed and (key := _taken(asked, config, EnvRun())):
        yield Problem(("evaluation", "validation_split"), _overlap(asked, key))
    for path, run in listed:
        if key := _taken(run.validation_split or asked, config, run):
            where = path if run.validation_split else ("evaluation",)
            message = _overlap(run.validation_split or asked, f"{key} of env.{path[1]}")
            yield Problem((*where, "validation_split"), message)


def _taken(asked: str | None, config: RunConfig, run: EnvRun) -> str:
    """Return the key that already uses the split; empty if none does."""
    for own in ("split", "evaluation_split", "check_split"):
        section, key = OWN_KEYS[own]
        of_run = getattr(config, section)
        if asked and of_run and (getattr(run, own) or getattr(of_run, key)) == asked:
            return f"{section}.{key}"
    return ""


def _overlap(split: str | None, key: str) -> str:
    return (
        f"{split!r} is also {key}, and validation tasks must have no other use: use another split, "
        "or remove it to hold tasks out of rollout.split"
    )


def _runs(config: RunConfig) -> list[tuple[tuple[str | int, ...], EnvRun]]:
    return [(("env", i, "run"), entry.run) for i, entry in enumerate(entries(config))]


def schedule_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield why a schedule cannot be used in this run."""
    trainer, schedule = config.trainer, config.trainer.schedule
    if schedule.kind == "constant":
        return
    if schedule.over == "stop":
        if config.deterministic and config.stop.wall_s is not None:
            message = (
                "stop: with stop.wall_s the learning rate depends on time, and deterministic: true "
                "forbids that; use only stop.batches, or over: train_steps"
            )
            yield Problem((*_SCHEDULE, "over"), message)
        return
    end = schedule.num_train_steps
    if end is None and config.stop.batches is None:
        message = (
            f"{schedule.kind} has no end: set num_train_steps, or stop.batches, or over: stop to "
            "spread it over the run"
        )
        yield Problem(_SCHEDULE, message)
    if end is not None and end <= trainer.warmup_train_steps:
        message = (
            f"{end}: must be more than trainer.warmup_train_steps ({trainer.warmup_train_steps}), "
            "after which the learning rate falls"
        )
        yield Problem((*_SCHEDULE, "num_train_steps"), message)


def trainer_section(config: RunConfig) -> Trainer:
    """Return the ``trainer`` section; a schedule over updates gets its end from ``stop``."""
    trainer, batches = config.trainer, config.stop.batches
    schedule = trainer.schedule
    if schedule.kind == "constant" or schedule.over == "stop" or schedule.num_train_steps:
        return trainer
    assert batches is not None, "schedule_problems rejects a schedule without an end"
    end = {"num_train_steps": batches * trainer.updates_per_batch}
    return trainer.model_copy(update={"schedule": schedule.model_copy(update=end)})
