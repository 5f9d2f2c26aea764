"""Classes written in the interface of ROLL's agentic environments (which is not on PyPI)."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rollart_core
from rollart_core.errors import ConfigError, PluginError, UnknownIdError
from rollart_core.plugins import registry
from rollart_testing import assert_checks, check_env

OPTIONS: dict[str, Any] = {"path": str(Path(__file__).parent)}
CORRIDOR, SUM = "roll-gem::roll_classes:Corridor", "roll-gem::roll_classes:Sum"
RANGES = {CORRIDOR: [-0.8, 1.0], SUM: [0.0, 1.0]}


@pytest.mark.adapters
@pytest.mark.parametrize("env_id", [CORRIDOR, SUM])
@pytest.mark.parametrize("python", [None, sys.executable], ids=["here", "elsewhere"])
def test_the_class_keeps_the_contract(env_id: str, python: str | None) -> None:
    options = {**OPTIONS, "python": python, "reward_range": RANGES[env_id]}
    spec = registry.env_spec(env_id, options)
    results = check_env(partial(rollart_core.make, env_id, **options), spec=spec, num_tasks=1)
    assert_checks(results)


def test_the_page_is_instruction_observation_and_suffix() -> None:
    env: Any = rollart_core.make(CORRIDOR, **OPTIONS, kwargs={"length": 2})
    page, info = env.reset(options={"task": 0})
    assert page == "Say left or right.\nReach G.\nP G"
    assert info == {"available_actions": ["left", "right"]}
    page, reward, terminated, truncated, info = env.step("nonsense")
    assert (page, reward, terminated, truncated) == ("You moved.\nP G", -0.1, False, False)
    assert info["invalid_action"]
    page, reward, terminated, truncated, info = env.step(env.oracle())
    assert (page, reward, terminated, truncated) == ("You moved.\n_ P", 1.0, True, False)
    assert info["success"]
    assert info["reward_components"]["success"] == 1.0
    env.close()


def test_an_answer_is_kept_back_and_both_ends_are_one() -> None:
    env: Any = rollart_core.make(SUM, **OPTIONS)
    page, info = env.reset(options={"task": 0})
    assert info == {}
    assert page.startswith("What is")
    assert env.step(env.secrets()[0])[1:4] == (1.0, True, False)
    env.close()


def test_the_turns_are_those_of_the_class() -> None:
    assert registry.env_spec(CORRIDOR, OPTIONS).max_turns == 8
    assert registry.env_spec(CORRIDOR, {**OPTIONS, "kwargs": {"max_steps": 3}}).max_turns == 3


@pytest.mark.parametrize(
    ("env_id", "options", "error", "words"),
    [
        ("roll-gem::roll_classes:Nothing", OPTIONS, UnknownIdError, "has no 'Nothing'"),
        ("roll-gem::no_such_module:X", OPTIONS, UnknownIdError, "the option path"),
        ("roll-gem::roll_classes", OPTIONS, UnknownIdError, "module:Class"),
        ("roll-gem::json:JSONDecoder", OPTIONS, UnknownIdError, "has no reset and no step"),
        (CORRIDOR, {**OPTIONS, "kwargs": {"lenght": 3}}, PluginError, "lenght"),
        (CORRIDOR, {"path": "/no/such/folder"}, ConfigError, "does not exist"),
    ],
)
def test_what_is_wrong_is_told(
    env_id: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        rollart_core.make(env_id, **options)
