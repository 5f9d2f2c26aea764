"""What must hold of the keys of a run config that have to do with validation.

Takes: a RunConfig, and what its environments say of themselves. Gives: problems, each with its fix.
Never: imports a plugin. An environment whose spec does not say that it reports no success is found
out at the first validation, or by the guard at the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rollart_core.config.envs import EnvEntry, EnvRun
from rollart_core.config.problems import Problem
from rollart_core.config.run import RunConfig
from rollart_core.contracts.env import EnvSpec

_SET = "set evaluation.every_batches, such as 50"
_SUCCESS, _SCORE = "validation/success", "validation/score"
_ONLY = ("validation_tasks", "validation_split")


def validation_problems(config: RunConfig) -> list[Problem]:
    """Return what is wrong with the keys of validation."""
    problems = [*_value_problems(config)]
    if config.evaluation.every_batches is None:
        problems += _without_validation(config)
    else:
        problems += _overlaps(config)
    return problems


def success_problems(config: RunConfig, envs: Sequence[EnvSpec]) -> Iterator[Problem]:
    """Yield the keys that need success, where no environment of the run reports it.

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
    for entry, run in _entries(config):
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
    splits = {
        "split": ("rollout.split", config.rollout.split),
        "evaluation_split": ("evaluation.split", config.evaluation.split),
    }
    if config.warm_start is not None:
        splits["check_split"] = ("warm_start.check_split", config.warm_start.check_split)
    asked = config.evaluation.validation_split
    entries = _entries(config)
    if not entries and (key := _taken(asked, splits, EnvRun())):
        yield Problem(("evaluation", "validation_split"), _overlap(asked, key))
    for path, run in entries:
        if key := _taken(run.validation_split or asked, splits, run):
            where = path if run.validation_split else ("evaluation",)
            message = _overlap(run.validation_split or asked, f"{key} of env.{path[1]}")
            yield Problem((*where, "validation_split"), message)


def _taken(asked: str | None, splits: Mapping[str, tuple[str, str]], run: EnvRun) -> str:
    """Return the key that names the split already; empty when none does."""
    for own, (key, split) in splits.items():
        if asked is not None and (getattr(run, own) or split) == asked:
            return key
    return ""


def _overlap(split: str | None, key: str) -> str:
    return (
        f"{split!r} is {key} too, and validation tasks must be of no other use: name a split of "
        "their own, or remove it, and tasks are taken out of rollout.split"
    )


def _entries(config: RunConfig) -> list[tuple[tuple[str | int, ...], EnvRun]]:
    listed: tuple[EnvEntry, ...] = config.env if isinstance(config.env, tuple) else ()
    return [(("env", i, "run"), entry.run) for i, entry in enumerate(listed)]
