"""What must hold between an algorithm and the rest of a run config.

Takes: a RunConfig, and what the algorithm says of itself. Gives: problems. Never: imports an
algorithm; what hangs on its options the trainer checks, before anything is trained
(:mod:`rollart_core.config.auxiliary_models`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollart_core.config.model import ModelPath
from rollart_core.config.problems import Problem
from rollart_core.config.run import RunConfig
from rollart_core.config.validation.consistency import entries, model_path_fault
from rollart_core.config.validation.vocabulary import vocabulary_fault
from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.contracts.env import EnvSpec

_NEEDS = {
    "critic": "it learns values: add a critic section, such as critic: {backbone: own}",
    "teacher": "it learns from another model: add teacher: {path: ...}",
}


def learning_problems(
    config: RunConfig, algorithm: AlgorithmSpec, envs: Sequence[EnvSpec]
) -> Iterator[Problem]:
    """Yield what is missing for the algorithm, and what has no effect with it.

    Args:
        config: The config.
        algorithm: What it says of itself; of a class that nobody registered that is nothing.
        envs: Of all environments that were found.
    """
    is_known = ":" not in algorithm.id
    for section, needed in (
        ("critic", algorithm.needs_critic),
        ("teacher", algorithm.needs_teacher),
    ):
        given = getattr(config, section) is not None
        if needed and not given:
            yield Problem((section,), f"{algorithm.id} needs one, for {_NEEDS[section]}")
        elif given and is_known and not needed:
            yield Problem((section,), f"has no effect with {algorithm.id}; remove it")
    if config.teacher and config.runtime.kind != "inline":
        message = "a teacher runs beside the engines of one machine: it needs runtime: inline"
        yield Problem(("teacher",), message)
    yield from _other_model_problems(config)
    yield from _equal_group_problems(config, algorithm)
    yield from _shaping_problems(config)
    yield from _curriculum_problems(config)
    if algorithm.learns_from == "demonstrations":
        yield from _demonstration_problems(config, algorithm, envs)


def _other_model_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield why reference or teacher are no models, or not of the policy's vocabulary."""
    own = config.model.path if isinstance(config.model, ModelPath) else None
    for section in ("reference", "teacher"):
        given = getattr(config, section)
        if given is None:
            continue
        fault = model_path_fault(given.path)
        if fault is None and own is None:
            fault = "a model that is made for this run has a vocabulary of its own: name model.path"
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
            "replace: the rewards of a group of one are always equal, so that it would never be "
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
            "which tasks come hangs on which episodes have ended, which is a matter of time with "
            "max_staleness above 0: deterministic: true forbids that; use one of the two"
        )
        yield Problem(("curriculum",), message)


def _demonstration_problems(
    config: RunConfig, algorithm: AlgorithmSpec, envs: Sequence[EnvSpec]
) -> Iterator[Problem]:
    why = f"with {algorithm.id}, which learns from the environment's expert"
    if config.rollout.group_size > 1:
        message = f"{config.rollout.group_size}: the expert does the same each time; set it to 1"
        yield Problem(("rollout", "group_size"), message)
    for key in ("redundant", "in_flight", "kv_on_swap"):
        if key in config.rollout.model_fields_set:
            yield Problem(("rollout", key), f"has no effect {why}; remove it")
    for spec in envs:
        if spec.kind == "agent":
            message = f"{spec.id} is an agent, and has no oracle to learn from"
            yield Problem(("env",), message)
