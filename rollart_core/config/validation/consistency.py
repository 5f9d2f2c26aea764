"""What must hold between the keys of a run config, beyond what each key allows by itself.

Takes: a RunConfig, and the environment's timeouts where they are known. Gives: problems.
Never: imports a plugin.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rollart_core.config.envs import EnvEntry
from rollart_core.config.model import ModelPath, RemoteModel
from rollart_core.config.problems import Problem
from rollart_core.config.run import Deadlines, RunConfig, SyncRun
from rollart_core.config.runtime import RayRuntime
from rollart_core.config.scoring import scoring_problems
from rollart_core.config.validation.evaluation import validation_problems
from rollart_core.config.validation.schedule import schedule_problems
from rollart_core.contracts.env import EnvSpec
from rollart_core.errors import did_you_mean

INLINE_POOLS = ("local", "engine")
"""What one machine is called as a pool, and where there are several classes of engines, those of
``engine``."""

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")

_NESTS = (
    ("step_s", "episode_s"),
    ("reset_s", "episode_s"),
    ("generate_s", "episode_s"),
    ("reward_s", "ticket_s"),
    ("episode_s", "ticket_s"),
    ("ticket_s", "sandbox_ttl_s"),
)
"""Each pair: the first must be shorter than the second."""

_OWN = (
    ("split", "rollout", "split"),
    ("max_turns", "rollout", "max_turns"),
    ("evaluation_split", "evaluation", "split"),
    ("check_split", "warm_start", "check_split"),
    ("validation_split", "evaluation", "validation_split"),
    ("reset_s", "deadlines", "reset_s"),
    ("step_s", "deadlines", "step_s"),
)
"""Each key of ``EnvRun``, and the section and key of the run that it replaces."""


def consistency_problems(config: RunConfig) -> list[Problem]:
    """Return what contradicts what, and what has no effect, in the config by itself."""
    ttl_counts = "sandbox_ttl_s" in config.deadlines.model_fields_set
    problems = deadline_problems(config.deadlines, {}, sandboxed=ttl_counts)
    problems += _group_problems(config)
    problems += _length_problems(config)
    problems += _model_problems(config)
    problems += _mix_problems(config)
    problems += _engine_class_problems(config)
    problems += _scaling_problems(config)
    problems += _ray_problems(config)
    problems += scoring_problems(config)
    problems += validation_problems(config)
    problems += schedule_problems(config)
    return problems + without_effect(config)


def deadline_problems(
    deadlines: Deadlines, defaults: Mapping[str, float], *, sandboxed: bool
) -> list[Problem]:
    """Return where deadlines do not nest.

    Args:
        deadlines: As configured.
        defaults: The environment's own seconds, for those that are None.
        sandboxed: Whether the time a sandbox lives counts.
    """
    problems = []
    for inner, outer in _NESTS if sandboxed else _NESTS[:-1]:
        given, limit = getattr(deadlines, inner), getattr(deadlines, outer)
        seconds = defaults.get(inner) if given is None else given
        if seconds is not None and seconds >= limit:
            whose = "" if given is not None else ", from the environment's spec"
            message = f"{seconds:g} s{whose}: must be shorter than deadlines.{outer} ({limit:g} s)"
            problems.append(Problem(("deadlines", inner), message))
    return problems


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
        for own, section, key in _OWN
        if listed
        and all(getattr(entry.run, own) is not None for entry in listed)
        and getattr(config, section) is not None
    ]


def _scaling_problems(config: RunConfig) -> list[Problem]:
    """Return where a run would begin outside of what its scaling allows."""
    if config.scaling is None:
        return []
    runtime, scaling, problems = config.runtime, config.scaling, []
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
            problems.append(Problem(("scaling", name), message))
        elif not limits.min <= count <= limits.max:
            message = f"the run begins with runtime.{key}: {count}, which is not from "
            message += f"{limits.min} to {limits.max}"
            problems.append(Problem(("scaling", name), message))
    return problems


def num_engines(config: RunConfig) -> int:
    """Return how many engines a run begins with, of all classes."""
    return config.runtime.num_engines + sum(one.count for one in config.engines)


def _engine_class_problems(config: RunConfig) -> list[Problem]:
    """Return where further classes of engines cannot be told apart, or have no place."""
    runtime, problems = config.runtime, []
    pools = {pool.name: pool for pool in runtime.pools} if isinstance(runtime, RayRuntime) else None
    seen = set() if pools is not None else set(INLINE_POOLS)
    for i, one in enumerate(config.engines):
        key = ("engines", i, "name")
        if one.name in seen:
            problems.append(Problem(key, f"{one.name!r} is taken: give it a name of its own"))
        seen.add(one.name)
        if pools is None:
            continue
        near = did_you_mean(one.name, list(pools))
        pool = pools.get(one.name)
        if pool is None:
            message = (
                f"there is no pool {one.name!r} in runtime.pools to have its engines on.{near}"
            )
            problems.append(Problem(key, message))
        elif pool.roles and "engines" not in pool.roles:
            message = f"pool {one.name!r} may not run engines: add engines to its roles"
            problems.append(Problem(key, message))
        elif pool.count < one.count:
            message = (
                f"{one.count}: pool {one.name!r} has {pool.count} device(s), and each takes one"
            )
            problems.append(Problem(("engines", i, "count"), message))
    if config.engines and config.deterministic:
        message = (
            "true: which class of engines answers is a matter of time; remove engines, or use "
            "deterministic: false"
        )
        problems.append(Problem(("deterministic",), message))
    return problems


def _mix_problems(config: RunConfig) -> list[Problem]:
    listed, problems = entries(config), []
    if len(listed) == 1 and listed[0].weight != 1:
        message = "has no effect with one environment; remove it"
        problems.append(Problem(("env", 0, "weight"), message))
    asked = {("evaluation", "tasks"): config.evaluation.tasks}
    if config.warm_start:
        asked["warm_start", "check_tasks"] = config.warm_start.check_tasks
    if config.evaluation.every_batches:
        asked["evaluation", "validation_tasks"] = config.evaluation.validation_tasks
    for key, num_tasks in asked.items():
        if num_tasks < len(listed):
            problems.append(Problem(key, f"{num_tasks} is too few for {len(listed)} environments"))
    if config.reward and listed and all(entry.run.reward for entry in listed):
        message = "has no effect where every environment of env has its own in run; remove it"
        problems.append(Problem(("reward",), message))
    return problems


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


def _ray_problems(config: RunConfig) -> list[Problem]:
    runtime = config.runtime
    if not isinstance(runtime, RayRuntime):
        return []
    problems = []
    if find_spec("ray") is None:
        problems.append(Problem(("runtime", "kind"), "ray is missing: pip install 'rollart[ray]'"))
    if runtime.address is not None and runtime.health_check_s is not None:
        message = (
            "has no effect on a cluster that is joined (`ray start --head` decides there): remove "
            "it, or remove runtime.address"
        )
        problems.append(Problem(("runtime", "health_check_s"), message))
    names = [pool.name for pool in runtime.pools]
    for i, name in enumerate(names):
        if name in names[:i]:
            message = f"{name!r} names an earlier pool already: give each a name of its own"
            problems.append(Problem(("runtime", "pools", i, "name"), message))
    return problems


def _group_problems(config: RunConfig) -> list[Problem]:
    rollout, problems = config.rollout, []
    if rollout.min_group_size > rollout.group_size:
        least, size = rollout.min_group_size, rollout.group_size
        message = f"{least} members can never be left of rollout.group_size ({size}): lower it"
        problems.append(Problem(("rollout", "min_group_size"), message))
    if rollout.redundant and config.deterministic:
        message = (
            f"{rollout.redundant} members more than needed make it a matter of time which are "
            "trained, and deterministic: true forbids that; use one of the two"
        )
        problems.append(Problem(("rollout", "redundant"), message))
    return problems


def _length_problems(config: RunConfig) -> list[Problem]:
    rollout = config.rollout
    if isinstance(config.model, RemoteModel) or (
        rollout.max_new_tokens < rollout.max_context_tokens
    ):
        return []
    message = (
        f"{rollout.max_context_tokens} tokens hold prompt and answer, and rollout.max_new_tokens "
        f"is {rollout.max_new_tokens}: make it longer, or answers shorter"
    )
    return [Problem(("rollout", "max_context_tokens"), message)]


def _model_problems(config: RunConfig) -> list[Problem]:
    if not isinstance(config.model, ModelPath):
        return []
    reason = model_path_fault(config.model.path)
    return [Problem(("model", "path"), reason)] if reason else []


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
    if _HUB_ID.match(path) and ("/" in path or _in_hub_cache(path)):
        return None
    return f"there is no folder {path}, and a hub id is OWNER/NAME, such as Qwen/Qwen3-0.6B"


def _in_hub_cache(name: str) -> bool:
    """Return whether a model of the hub's first days, such as gpt2, lies in the cache here."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    return isinstance(try_to_load_from_cache(name, "config.json"), str)
