"""The adapter of skyrl-gym on the real library, over rows in SkyRL's own form."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollart_core.errors import PluginError, UnknownIdError, UserError
from rollart_core.plugins import registry
from rollart_testing import assert_checks, check_env

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed: `make adapters` installs it")


def rows(answer: str, n: int = 4, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
            answer: {"method": "rule", "ground_truth": str(2 * i)},
            **more,
        }
        for i in range(n)
    ]


def split(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {"train": found[1:], "test": found[:1]}


TESTS = json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}])
CODE = [{"prompt": "Add.", "reward_spec": {"ground_truth": TESTS}}] * 2
TASKS = {
    "gsm8k": split(rows("reward_spec", env_class="gsm8k")),
    "gsm8k_multi_turn": split(rows("reward_spec", extra_info={"max_turns": 3})),
    "aime": split(rows("reward_model")),
    "lcb": split(CODE),
}


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_multi_turn", "aime"])
def test_an_environment_keeps_the_contract(name: str) -> None:
    env_id, options = f"skyrl-gym::{name}", {"tasks": TASKS[name]}
    spec = registry.env_spec(env_id, options)
    assert spec.splits == ("train", "test")
    make = partial(registry.make, env_id, **options)
    assert_checks(check_env(make, spec=spec, num_tasks=2))


def test_tasks_are_the_rows_of_their_split() -> None:
    env: Any = registry.make("skyrl-gym::gsm8k", tasks=TASKS["gsm8k"])
    assert (env.num_tasks("train"), env.num_tasks("test")) == (3, 1)
    observation, _ = env.reset(options={"split": "train", "task": 1})
    assert observation == [{"role": "user", "content": "What is 2 + 2?"}]
    assert env.step("It is #### 4")[1:4] == (1.0, True, False)
    assert env.reset(options={"split": "test", "task": 0})[0][0]["content"] == "What is 0 + 0?"
    env.close()


def test_turns_and_their_rewards_are_those_of_skyrl() -> None:
    env: Any = registry.make("skyrl-gym::gsm8k_multi_turn", tasks=TASKS["gsm8k_multi_turn"])
    env.reset(options={"split": "train", "task": 0})
    observation, reward, terminated, *_ = env.step("#### 3")
    assert reward == pytest.approx(0.2 / 3)
    assert not terminated
    assert "####" in observation[0]["content"]
    assert env.step("#### 2")[1:3] == (1.0, True)
    env.close()


def test_code_is_run_against_the_tests_that_stay_hidden() -> None:
    env: Any = registry.make("skyrl-gym::lcb", tasks=TASKS["lcb"])
    env.reset(options={"task": 0})
    assert env.secrets() == [TESTS]
    answer = "```python\nprint(sum(map(int, input().split())))\n```"
    assert env.step(answer)[1:3] == (1.0, True)
    env.reset(options={"task": 0})
    assert env.step("```python\nprint(4)\n```")[1:3] == (0.0, True)
    env.close()


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_rows_come_from_files(tmp_path: Path, ending: str) -> None:
    path, found = tmp_path / f"rows{ending}", rows("reward_spec", extra_info={"split": "train"})
    if ending == ".parquet":
        pandas = pytest.importorskip("pandas")
        pandas.DataFrame(found).to_parquet(path)
    else:
        lines = "\n".join(json.dumps(row) for row in found)
        path.write_text(lines if ending == ".jsonl" else json.dumps(found))
    env: Any = registry.make("skyrl-gym::gsm8k", tasks=str(path))
    assert env.num_tasks("train") == 4
    assert env.reset(options={"task": 3})[0] == [{"role": "user", "content": "What is 3 + 3?"}]
    assert env.step("#### 6")[1] == 1.0
    env.close()


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("gsm8k", {}, "has no questions"),
        ("gsm8k", {"tasks": rows("reward_spec")}, r"has no extra_info\.split"),
        ("gsm8k", {"tasks": {"train": rows("reward_model")}}, "row 0 has no reward_spec"),
        ("gsm8k", {"tasks": {"train": []}}, "has no rows"),
        ("gsm8k", {"tasks": {"train": "no-such.jsonl"}}, r"no-such\.jsonl"),
        ("gsm8k", {"tasks": {"train": [{"prompt": []}]}}, "prompt must be"),
        ("aime", {"tasks": {"train": rows("reward_model", env_class="gsm8k")}}, "is for the env"),
        ("gsm8k", {"tasks": TASKS["gsm8k"], "splits": {"train": (0, 2)}}, "remove the option"),
    ],
)
def test_tasks_that_do_not_fit(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PluginError, match=says):
        registry.env_spec(f"skyrl-gym::{name}", options)


def test_settings_and_ids_that_do_not_fit() -> None:
    with pytest.raises(PluginError, match="has no env_config"):
        registry.make("skyrl-gym::gsm8k", tasks=TASKS["gsm8k"], env_config={"a": 1})
    with pytest.raises(UnknownIdError, match="Did you mean 'gsm8k'"):
        registry.env_spec("skyrl-gym::gsm9k", {"tasks": TASKS["gsm8k"]})
    with pytest.raises(UserError, match="tasks"):
        registry.env_spec("skyrl-gym::gsm8k", {"tasks": 3})
