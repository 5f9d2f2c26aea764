"""Whether the options of an algorithm fit the rest of a run config.

Takes: a RunConfig, and the algorithm that it names. Gives: problems, and warnings of what is
allowed and often regretted. Never: knows an option; the algorithm's config model is asked
(``run_problems`` and ``run_warnings``, see :class:`rollart_core.contracts.algorithm.RunFacts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollart_core.config.problems import Problem
from rollart_core.config.run import RunConfig
from rollart_core.contracts.algorithm import RunFacts
from rollart_core.plugins import registry


def algorithm_problems(config: RunConfig, plugin_id: str) -> Iterator[Problem]:
    """Yield options of the run's algorithm, or of an environment's, that do not fit the run.

    Args:
        config: The config; the options in it are valid by themselves.
        plugin_id: The id of the algorithm.
    """
    for path, options, own in _options(config):
        for name, message in _said("run_problems", config, plugin_id, options):
            if name in own:
                yield Problem((*path, name), message)


def algorithm_warnings(config: RunConfig, plugin_id: str) -> list[str]:
    """Return a line for each option of the algorithm that is allowed and often regretted."""
    lines = [
        Problem((*path, name), message).within()
        for path, options, own in _options(config)
        for name, message in _said("run_warnings", config, plugin_id, options)
        if name in own
    ]
    return list(dict.fromkeys(lines))


def _options(
    config: RunConfig,
) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any], Mapping[str, Any]]]:
    """Yield where options stand, all of them, and those that are given there."""
    yield ("algorithm",), config.algorithm.options, config.algorithm.options
    for i, entry in enumerate(config.env if isinstance(config.env, tuple) else ()):
        if own := entry.run.algorithm:
            yield ("env", i, "run", "algorithm"), {**config.algorithm.options, **own}, own


def _said(
    method: str, config: RunConfig, plugin_id: str, options: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield what the config model of the algorithm says; nothing where it says nothing."""
    model = registry.config_model("algorithms", plugin_id)
    if model is None or not hasattr(model, method):
        return
    if registry.option_problems("algorithms", plugin_id, options):
        return  # which is another problem, told of where options are checked
    facts = RunFacts(
        updates_per_batch=config.trainer.updates_per_batch,
        groups_per_batch=config.rollout.groups_per_batch,
        replaces_equal_groups=config.rollout.equal_groups == "replace",
    )
    yield from getattr(model(**options), method)(facts)
