"""Plain functions as rewards: what they get, and what they may return."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

import numpy as np
import pytest

from rollart_core.errors import UserError
from rollart_core.plugins import registry
from rollart_rewards.examples import asked

ROW = {"reference": "42", "answer": "#### 42", "level": 3}


@pytest.fixture
def functions(monkeypatch):
    module = ModuleType("their_rewards")
    monkeypatch.setitem(sys.modules, "their_rewards", module)
    return module


def scored(name, said="It is 42.", context=ROW, **options):
    return registry.build("rewards", f"their_rewards:{name}", options).score(
        asked(said, context=context)
    )


def test_columns_and_options_are_keyword_arguments(functions):
    def accuracy(completion, answer, *, reference, prompt, scale=1.0, **columns):
        assert (completion, answer, reference, prompt) == ("It is 42.", "#### 42", "42", "?")
        assert columns["level"] == 3
        return scale * (reference in completion)

    functions.accuracy = accuracy
    assert scored("accuracy").value == 1.0
    assert scored("accuracy", scale=0.5).value == 0.5


def test_a_coroutine_function_is_awaited(functions):
    async def waits(completion):
        await asyncio.sleep(0)
        return len(completion)

    functions.waits = waits
    assert scored("waits").value == 9.0


def test_functions_of_trl_and_verl_work_unchanged(functions):
    def trl(prompts, completions, level, **kwargs):
        return [float("42" in said) + level[0] for said in completions]

    def chat(completions, **kwargs):
        return [float(said[0]["content"] == "It is 42.") for said in completions]

    def verl(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(ground_truth in solution_str), "level": extra_info["level"]}

    functions.trl, functions.verl, functions.chat = trl, verl, chat
    assert scored("trl").value == 4.0
    prompt = [{"role": "user", "content": "?"}]
    assert scored("chat", context={**ROW, "prompt": prompt}).value == 1.0
    result = scored("verl", context={"reference": "42", "level": 3})
    assert (result.value, result.components) == (1.0, {"level": 3.0})


@pytest.mark.parametrize(
    ("returned", "value", "components"),
    [
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        ({"right": True, "short": 0.25}, 1.25, {"right": 1.0, "short": 0.25}),
    ],
)
def test_numbers_bools_and_dicts_are_rewards(functions, returned, value, components):
    functions.returns = lambda completion: returned
    result = scored("returns")
    assert (result.value, result.components) == (value, components)


@pytest.mark.parametrize("returned", ["1", None, float("nan"), float("inf"), {"a": "x"}, [1.0]])
def test_nothing_else_is_a_reward(functions, returned):
    functions.returns = lambda completion: returned
    with pytest.raises(ValueError, match=r"rewards:returns returned .*return a finite number"):
        scored("returns")


def test_a_missing_column_is_named_with_those_that_exist(functions):
    functions.needs = lambda completion, tests: 1.0
    with pytest.raises(ValueError, match=r"needs 'tests', .* its rows give .*completion.*level"):
        scored("needs")


def test_an_option_that_the_function_does_not_take_is_refused(functions):
    functions.accuracy = lambda completion, scale=1.0: scale
    (problem,) = registry.option_problems("rewards", "their_rewards:accuracy", {"scael": 2})
    assert "Did you mean 'scale'" in problem.message
    with pytest.raises(UserError, match="has no parameter 'other'"):
        registry.build("rewards", "function", {"function": "their_rewards:accuracy", "other": 1})


def test_what_is_not_a_function_is_refused(functions):
    functions.number = 3
    with pytest.raises(UserError, match="is a int, not a function"):
        registry.build("rewards", "function", {"function": "their_rewards:number"})
    with pytest.raises(UserError, match="has no 'accuracy'"):
        registry.spec("rewards", "their_rewards:accuracy")


def test_a_file_of_the_current_folder_is_importable(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_this_folder.py").write_text("def one(completion):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    reward = registry.build("rewards", "rewards_of_this_folder:one")
    assert reward.score(asked("x")).value == 1.0
    monkeypatch.delitem(sys.modules, "rewards_of_this_folder")


def test_functions_are_parts_of_a_weighted_sum(functions):
    functions.right = lambda completion, reference: reference in completion
    functions.long = lambda completion: 10.0
    parts = {
        "right": {"reward": "their_rewards:right"},
        "long": {"reward": "their_rewards:long", "weight": -0.1},
    }
    result = registry.build("rewards", "weighted", {"parts": parts}).score(
        asked("It is 42.", context=ROW)
    )
    assert (result.value, result.components) == (0.0, {"right": 1.0, "long": 10.0})


def test_it_has_an_example_with_the_columns_that_it_needs(functions):
    functions.needs = lambda completion, level, answer: float(
        answer in completion and level == "42"
    )
    reward = registry.build("rewards", "their_rewards:needs")
    (example,) = reward.examples()
    assert reward.score(example.requests[0]).value == 1.0
