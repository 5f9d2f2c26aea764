"""Defaults of the run config that environments raise."""

from __future__ import annotations

from typing import Any

import pytest

from rollart_core.config.load import validate
from rollart_core.config.resolve import ResolvedRun, resolve_run
from rollart_core.config.run import RunConfig

BASE = {"model": {"kind": "new"}, "stop": {"batches": 1}}


def config(**keys: Any) -> RunConfig:
    made, problems = validate({**BASE, **keys})
    assert made is not None
    assert problems == []
    return made


def resolved(env: object, **keys: Any) -> ResolvedRun:
    return resolve_run(config(env=env, **keys))


def limits(made: RunConfig) -> tuple[float, ...]:
    rollout, deadlines = made.rollout, made.deadlines
    return rollout.max_new_tokens, rollout.max_context_tokens, deadlines.episode_s


def test_an_environment_raises_defaults_and_the_run_resolves_without_further_settings() -> None:
    run = resolved({"id": "repair", "sandbox": "bubblewrap"})
    assert limits(run.config) == (4096, 32768, 7200)
    assert run.deadlines.ticket_s > run.deadlines.episode_s
    assert run.as_dict()["rollout"]["max_new_tokens"] == 4096


def test_an_environment_without_such_defaults_changes_nothing() -> None:
    assert limits(config(env="webshop")) == (64, 2048, 600)
    assert limits(config(env="no-such-environment")) == (64, 2048, 600)


def test_a_value_of_the_config_is_kept() -> None:
    given = config(env="repair", rollout={"max_new_tokens": 32}, deadlines={"episode_s": 3000})
    assert limits(given) == (32, 32768, 3000)


def test_the_largest_default_of_a_mix_counts() -> None:
    mixed = config(env=[{"id": "webshop"}, {"id": "repair"}])
    assert limits(mixed) == (4096, 32768, 7200)


def test_they_are_still_defaults() -> None:
    made, problems = validate({**BASE, "env": "repair", "model": {"kind": "remote"}})
    assert made is not None
    assert problems == []  # max_context_tokens has no effect on a server, which only counts if set
    assert "max_context_tokens" not in made.rollout.model_fields_set


def test_a_value_that_is_too_small_for_the_environment_is_refused() -> None:
    with pytest.raises(Exception, match="step_s: 2400 s, from the environment's spec"):
        resolved({"id": "repair", "sandbox": "bubblewrap"}, deadlines={"episode_s": 1200})


@pytest.mark.parametrize("given", [True, False])
def test_the_option_tools_decides_whether_an_environment_has_tools(given: bool) -> None:
    run = resolved({"id": "repair", "sandbox": "bubblewrap", "tools": given})
    assert run.envs[0].spec.tools is given
