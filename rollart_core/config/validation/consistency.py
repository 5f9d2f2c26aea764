"""What must hold between the keys of a run config, beyond what each key allows by itself.

Takes: a RunConfig, and of its environments the timeouts and specs where they are known. Gives:
problems, each with its fix; and the ``trainer`` section with the end of its schedule filled in.
Never: imports a plugin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rollart_core.config.envs import EnvEntry, EnvRun
from rollart_core.config.model import ModelPath, RemoteModel
from rollart_core.config.problems import Problem
from rollart_core.config.run import Deadlines, RunConfig, SyncRun, Trainer
from rollart_core.config.runtime import RayRuntime
from rollart_core.config.scoring import scoring_problems
from rollart_core.contracts.env import EnvSpec
from rollart_core.errors import did_you_mean

INLINE_POOLS = ("local", "engine")
"""What one machine is called as a pool, and where there are several classes of engines, those of
``engine``."""

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
"""Each pair: the first must be shorter than the second."""

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
    """Return what contradicts what, and what has no effect, in the config by itself."""
    ttl_counts = "sandbox_ttl_s" in config.deadlines.model_fields_set
    return [
        *deadline_problems(config.deadlines, {}, sandboxed=ttl_counts),
        *_group_problems(config),
        *_length_problems(config),
        *_model_problems(config),
        *_mix_problems(config),
        *_engine_class_problems(config),
        *_scaling_problems(config),
        *_ray_problems(config),
        *scoring_problems(config),
        *validation_problems(config),
        *schedule_problems(config),
        *without_effect(config),
    ]


def deadline_problems(
    deadlines: Deadlines, defaults: Mapping[str, float], *, sandboxed: bool
) -> Iterator[Problem]:
    """Yield where deadlines do not nest.

    Args:
        deadlines: As configured.
        defaults: The environment's own seconds, for those that are None.
        sandboxed: Whether the time a sandbox lives counts.
    """
    for inner, outer in _NESTS if sandboxed else _NESTS[:-1]:
        given, limit = getattr(deadlines, inner), getattr(deadlines, outer)
        seconds = defaults.get(inner) if given is None else given
        if seconds is not None and seconds >= limit:
            whose = "" if given is not None else ", from the environment's spec"
            message = f"{seconds:g} s{whose}: must be shorter than deadlines.{outer} ({limit:g} s)"
            yield Problem(("deadlines", inner), message)


def without_effect(config: RunConfig, envs: Sequence[EnvSpec] = ()) -> list[Problem]:
    """Return the keys that are set but do nothing in this run, each with the reason.

    Args:
        config: The config.
        envs: The environments' specs, where they are known.
    """
    found: list[tuple[tuple[str | int, ...], str]] = []
    if isinstance(config, SyncRun) and "kv_on_swap" in config.rollout.model_fields_set:
        why = "with mode: sync, where weights are never swapped under an episode"
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
    if config.failures.hang_s is None and "heartbeat_s" in config.failures.model_fields_set:
        found.append((("failures", "heartbeat_s"), "with failures.hang_s: none"))
    if isinstance(config.model, RemoteModel) and "max_context_tokens" in (
        config.rollout.model_fields_set
    ):
        why = "with model.kind: remote, whose server alone counts its tokens"
        found.append((("rollout", "max_context_tokens"), why))
    if config.rollout.workload is not None and len(entries(config)) > 1:
        found.append(
            (("rollout", "workload"), "with several environments, which declare their own")
        )
    found += _idle_trainer_keys(config)
    for key in replaced_everywhere(config):
        if key[1] in getattr(config, key[0]).model_fields_set:
            found.append((key, "where every environment of env has its own in run"))
    if config.warm_start is None:
        found += [
            (("env", i, "run", "check_split"), "without warm_start")
            for i, entry in enumerate(entries(config))
            if entry.run.check_split is not None
        ]
    return [Problem(path, f"has no effect {why}; remove it") for path, why in found]


def entries(config: RunConfig) -> tuple[EnvEntry, ...]:
    """Return the listed environments; none where there is one that is not in a list."""
    return config.env if isinstance(config.env, tuple) else ()


def replaced_everywhere(config: RunConfig) -> list[tuple[str, str]]:
    """Return the keys, as (section, key), for which every listed environment has its own."""
    listed = entries(config)
    return [
        (section, key)
        for own, (section, key) in OWN_KEYS.items()
        if listed
        and all(getattr(entry.run, own) is not None for entry in listed)
        and getattr(config, section) is not None
    ]


def _scaling_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield where a run would begin outside of what its scaling allows."""
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
            message = f"the run begins with runtime.{key}: {count}, which is not from "
            message += f"{limits.min} to {limits.max}"
            yield Problem(("scaling", name), message)


def num_engines(config: RunConfig) -> int:
    """Return how many engines a run begins with, of all classes."""
    return config.runtime.num_engines + sum(one.count for one in config.engines)


def _engine_class_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield where further classes of engines cannot be told apart, or have no place."""
    runtime = config.runtime
    pools = {pool.name: pool for pool in runtime.pools} if isinstance(runtime, RayRuntime) else None
    seen = set() if pools is not None else set(INLINE_POOLS)
    for i, one in enumerate(config.engines):
        key = ("engines", i, "name")
        if one.name in seen:
            yield Problem(key, f"{one.name!r} is taken: give it a name of its own")
        seen.add(one.name)
        if pools is None:
            continue
        near = did_you_mean(one.name, list(pools))
        pool = pools.get(one.name)
        if pool is None:
            message = (
                f"there is no pool {one.name!r} in runtime.pools to have its engines on.{near}"
            )
            yield Problem(key, message)
        elif pool.roles and "engines" not in pool.roles:
            message = f"pool {one.name!r} may not run engines: add engines to its roles"
            yield Problem(key, message)
        elif pool.count < one.count:
            message = (
                f"{one.count}: pool {one.name!r} has {pool.count} device(s), and each takes one"
            )
            yield Problem(("engines", i, "count"), message)
    if config.engines and config.deterministic:
        message = (
            "true: which class of engines answers is a matter of time; remove engines, or use "
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
        message = "has no effect where every environment of env has its own in run; remove it"
        yield Problem(("reward",), message)


def _idle_trainer_keys(config: RunConfig) -> list[tuple[tuple[str | int, ...], str]]:
    """Return the keys of the trainer that its ranks, or their number, leave nothing to do."""
    trainer, num_ranks = config.trainer, config.runtime.num_trainer_ranks
    found: list[tuple[tuple[str | int, ...], str]] = []
    if num_ranks == 1 and trainer.collective_timeout_s is not None:
        why = "with one trainer rank, which calls no other"
        found.append((("trainer", "collective_timeout_s"), why))
    if trainer.kernels == "native" and (num_ranks > 1 or trainer.activation_checkpointing):
        why = "with several trainer ranks or activation_checkpointing, which use torch's own"
        found.append((("trainer", "kernels"), why))
    return found


def _ray_problems(config: RunConfig) -> Iterator[Problem]:
    runtime = config.runtime
    if not isinstance(runtime, RayRuntime):
        return
    if find_spec("ray") is None:
        yield Problem(("runtime", "kind"), "ray is missing: pip install 'rollart[ray]'")
    if runtime.address is not None and runtime.health_check_s is not None:
        message = (
            "has no effect on a cluster that is joined (`ray start --head` decides there): remove "
            "it, or remove runtime.address"
        )
        yield Problem(("runtime", "health_check_s"), message)
    names = [pool.name for pool in runtime.pools]
    for i, name in enumerate(names):
        if name in names[:i]:
            message = f"{name!r} names an earlier pool already: give each a name of its own"
            yield Problem(("runtime", "pools", i, "name"), message)


def _group_problems(config: RunConfig) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.min_group_size > rollout.group_size:
        least, size = rollout.min_group_size, rollout.group_size
        message = f"{least} members can never be left of rollout.group_size ({size}): lower it"
        yield Problem(("rollout", "min_group_size"), message)
    if rollout.redundant and config.deterministic:
        message = (
            f"{rollout.redundant} members more than needed make it a matter of time which are "
            "trained, and deterministic: true forbids that; use one of the two"
        )
        yield Problem(("rollout", "redundant"), message)


def _length_problems(config: RunConfig) -> Iterator[Problem]:
    new, whole = config.rollout.max_new_tokens, config.rollout.max_context_tokens
    if not isinstance(config.model, RemoteModel) and new >= whole:
        message = (
            f"{whole} tokens hold prompt and answer, and rollout.max_new_tokens is {new}: make it "
            "longer, or answers shorter"
        )
        yield Problem(("rollout", "max_context_tokens"), message)


def _model_problems(config: RunConfig) -> Iterator[Problem]:
    if isinstance(config.model, ModelPath) and (fault := model_path_fault(config.model.path)):
        yield Problem(("model", "path"), fault)


def model_path_fault(path: str) -> str | None:
    """Say why ``path`` is neither a model folder nor a possible hub id; None when it may be one."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return None
        return (
            f"{path} is no model: the folder holds no config.json (`rollart model new` makes one)"
        )
    if folder.exists():
        return f"{path} is a file: a model is a folder with a config.json, or a hub id"
    if _HUB_ID.match(path) and ("/" in path or hub_cached(path)):
        return None
    return f"there is no folder {path}, and a hub id is OWNER/NAME, such as Qwen/Qwen3-0.6B"


def hub_cached(hub_id: str) -> Path | None:
    """Return where the hub's cache on this machine has a model's ``config.json``, if it has."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(hub_id, "config.json")
    except (ImportError, ValueError):  # a ValueError: no id of the hub's
        return None
    return Path(found) if isinstance(found, str) else None


def validation_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what is wrong with the keys of validation."""
    yield from _value_problems(config)
    validates = config.evaluation.every_batches is not None
    yield from _overlaps(config) if validates else _without_validation(config)


def success_problems(config: RunConfig, envs: Sequence[EnvSpec]) -> Iterator[Problem]:
    """Yield the keys that need success, where no environment of the run reports it.

    An environment whose spec does not say that it reports none is found out at the first
    validation, or by the guard at the first batch.

    Args:
        config: The config.
        envs: What its environments say of themselves.
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
            yield Problem(path, f"{word} is asked for, {why}: set it to {instead}")
    warm = config.warm_start
    if warm is not None and "until_success" in warm.model_fields_set:
        message = f"{warm.until_success:g} is asked for, {why}: remove it, and the warm start ends "
        yield Problem(("warm_start", "until_success"), f"{message}after warm_start.max_train_steps")


def _without_validation(config: RunConfig) -> Iterator[Problem]:
    metrics: dict[tuple[str, str], str | None] = {
        ("checkpoint", "keep_best"): config.checkpoint.keep_best,
        ("stop", "when"): config.stop.when.metric if config.stop.when else None,
    }
    for path, metric in metrics.items():
        if metric is not None:
            message = f"{metric} is measured by validations, and there are none: {_SET}, or remove "
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
        message = f"{when.value:g} is no share of successes: it must be above 0 and at most 1"
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
    """Return the key that names the split already; empty when none does."""
    for own in ("split", "evaluation_split", "check_split"):
        section, key = OWN_KEYS[own]
        of_run = getattr(config, section)
        if asked and of_run and (getattr(run, own) or getattr(of_run, key)) == asked:
            return f"{section}.{key}"
    return ""


def _overlap(split: str | None, key: str) -> str:
    return (
        f"{split!r} is {key} too, and validation tasks must be of no other use: name a split of "
        "their own, or remove it, and tasks are taken out of rollout.split"
    )


def _runs(config: RunConfig) -> list[tuple[tuple[str | int, ...], EnvRun]]:
    return [(("env", i, "run"), entry.run) for i, entry in enumerate(entries(config))]


def schedule_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield why the schedule of a run cannot be followed."""
    trainer, schedule = config.trainer, config.trainer.schedule
    if schedule.kind == "constant":
        return
    if schedule.over == "stop":
        if config.deterministic and config.stop.wall_s is not None:
            message = (
                "stop: with stop.wall_s the learning rate depends on time, and deterministic: true "
                "forbids that; use stop.batches alone, or over: train_steps"
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
    assert batches is not None, "schedule_problems refuses a schedule without an end"
    end = {"num_train_steps": batches * trainer.updates_per_batch}
    return trainer.model_copy(update={"schedule": schedule.model_copy(update=end)})
