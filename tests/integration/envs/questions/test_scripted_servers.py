"""A server that answers everything right scores 100%, and one that is always wrong 0%."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.openai_server import OpenAIServer
from support.sandbox_types import no_bubblewrap

from rollart_core.cli import main
from rollart_core.errors import ConfigError
from rollart_core.runtime.prepare import prepare_mapping

ROWS = [
    {
        "question": f"Tom has {n} apples and buys {n + 3} more. How many has he now?",
        "answer": f"He has {n} + {n + 3} = {2 * n + 3} apples.\n#### {2 * n + 3:,}",
        "level": n % 3,
    }
    for n in range(600, 700)
]
PLAIN = [{**row, "answer": row["answer"].rpartition(" ")[2].replace(",", "")} for row in ROWS]
CHOICES = [
    {"question": row["question"], "choices": ["none", row["answer"], "all"], "answer": 1}
    for row in PLAIN
]
MATH = [{"problem": row["question"], "solution": f"so \\boxed{{{row['answer']}}}"} for row in PLAIN]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
    }
    for row in PLAIN
]
FUNCTION = """
async def last_word(completion, reference, **columns):
    said = completion.split()[-1].strip(".*$}").rpartition("{")[2].replace(",", "")
    return {"right": said == str(reference), "short": 0.001 * (len(completion) < 1000)}
"""
RECIPES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "numeric": (PLAIN, {"reward": "numeric"}),
    "exact": (PLAIN, {"reward": {"id": "exact-match", "answer": "last_line"}}),
    "function": (PLAIN, {"reward": "rewards_of_a_user:last_word"}),
    "messages": (CHATS, {"reward": "numeric"}),
    "weighted": (
        PLAIN,
        {
            "reward": {
                "id": "weighted",
                "parts": {
                    "success": {"reward": "numeric"},
                    "short": {"reward": {"id": "length-penalty", "free": 1, "limit": 9}},
                },
            }
        },
    ),
    "gsm8k": (ROWS, {"env": {"preset": "gsm8k"}}),
    "gsm8k with a function": (
        ROWS,
        {"env": {"preset": "gsm8k"}, "reward": "rewards_of_a_user:last_word"},
    ),
    "math": (MATH, {"env": {"preset": "math"}}),
    "multiple-choice": (CHOICES, {"env": {"preset": "multiple-choice"}}),
}
SAYS: Mapping[str, Callable[[str], str]] = {
    "numeric": lambda right: f"The answer is {right}.",
    "exact": lambda right: f"I think:\n{right}",
    "math": lambda right: f"So it is \\boxed{{{right}}}.",
    "multiple-choice": lambda right: "The right one is B." if right else "It is A.",
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user, with a reward function."""
    (tmp_path / "rewards_of_a_user.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_server_that_is_always_right_has_full_success_and_one_that_is_wrong_none(
    recipe: str,
    right: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows, settings = RECIPES[recipe]
    known = {row["question"]: row["answer"] for row in PLAIN}
    says = SAYS.get(recipe, SAYS["numeric"])

    def say(text: str) -> str:
        (number,) = (answer for question, answer in known.items() if question in text)
        if recipe == "multiple-choice":
            return says("x" if right else "")
        return says(number if right else f"{int(number) + 1}")

    env = {"id": "questions", "file": write(folder / "rows.jsonl", rows), **settings.get("env", {})}
    given = [f"env={json.dumps(env)}"]
    given += [f"{key}={json.dumps(value)}" for key, value in settings.items() if key != "env"]
    with OpenAIServer(say) as server:
        words = ["--env", "questions", "--model", server.url, "--json", f"runs_dir={folder}"]
        monkeypatch.setattr(
            sys, "argv", ["rollart", "eval", *words, "runtime.env_processes=0", *given]
        )
        with pytest.raises(SystemExit) as left:
            main()
    out, err = capsys.readouterr()
    assert not left.value.code, err
    report = json.loads(out)
    assert report["success"]["n"] >= 5
    assert report["success"]["mean"] == float(right)
    rewards = report["cells"][0]["rewards"]
    assert (rewards["reward"]["mean"] >= 0.5) == right
    assert recipe != "function" or rewards["right"]["mean"] == float(right)
    assert report["failures"] == {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("right", [True, False])
def test_programs_of_a_server_are_run_in_sandboxes(
    right: bool,
    folder: Path,
    repo_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if why := no_bubblewrap():
        pytest.skip(why)
    file = repo_root / "examples/multi_domain/code.jsonl"
    solutions = {
        row["prompt"]: row["solution"] for row in map(json.loads, file.read_text().splitlines())
    }

    def say(text: str) -> str:
        (solution,) = (one for prompt, one in solutions.items() if prompt in text)
        return f"Here it is:\n```python\n{solution if right else 'def f(): pass'}\n```"

    env = {"id": "questions", "file": str(file), "preset": "code"}
    given = [f"env={json.dumps(env)}", "reward={id: unit-tests, sandbox: bubblewrap}"]
    given += ["evaluation.tasks=5", "evaluation.greedy=false", "runtime.env_processes=0"]
    with OpenAIServer(say) as server:
        words = ["--env", "questions", "--model", server.url, "--json", f"runs_dir={folder}"]
        monkeypatch.setattr(sys, "argv", ["rollart", "eval", *words, *given])
        with pytest.raises(SystemExit) as left:
            main()
    out, err = capsys.readouterr()
    assert not left.value.code, err
    assert json.loads(out)["success"]["mean"] == float(right)


def run_config(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"kind": "new"},
        "env": "questions",
        "runs_dir": str(folder),
        "stop": {"batches": 1},
        **changes,
    }


def test_data_is_the_file_of_an_environment_that_reads_one(folder: Path) -> None:
    file = write(folder / "rows.jsonl", PLAIN)
    run = prepare_mapping(run_config(folder, data=file, reward="rewards_of_a_user:last_word"), "x")
    assert run.env.options["file"] == file
    again = prepare_mapping(run.as_dict(), "x", makes_folder=False)
    assert again.as_dict() == run.as_dict()
    for env, reason in (
        ("toy/FrozenLake-v1", "data: toy/FrozenLake-v1 reads no file"),
        ({"id": "questions", "file": file}, "data: sets env.file, which is set too"),
        ([{"id": "questions"}], "data: has no effect with a list"),
    ):
        with pytest.raises(ConfigError, match=reason):
            prepare_mapping(run_config(folder, data=file, env=env), "x")


def test_a_preset_brings_the_reward_that_fits_unless_the_run_has_one(folder: Path) -> None:
    env = {"id": "questions", "file": write(folder / "rows.jsonl", ROWS), "preset": "gsm8k"}
    run = prepare_mapping(run_config(folder, env=env), "x")
    (one,) = run.envs
    assert one.reward is not None
    assert one.reward.spec.alias == "numeric"
    assert run.as_dict()["reward"]["id"] == "rollart/Numeric-v1"
    assert prepare_mapping(run.as_dict(), "x", makes_folder=False).as_dict() == run.as_dict()
    run = prepare_mapping(run_config(folder, env=env, reward="exact-match"), "x")
    assert run.envs[0].reward is run.reward


def test_success_from_has_no_effect_where_the_environment_decides(folder: Path) -> None:
    changes = {"reward": "env-return", "scoring": {"success_from": 0.5}}
    with pytest.raises(ConfigError, match=r"scoring\.success_from: has no effect because the env"):
        prepare_mapping(run_config(folder, env="toy/FrozenLake-v1", **changes), "x")


def dry_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *settings: str, config: Any = None
) -> int:
    (folder / "run.yaml").write_text(json.dumps(config or run_config(folder)))
    words = ["rollart", "run", "run.yaml", "--dry-run", *settings]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_the_dry_run_counts_tasks_and_shows_the_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "rows.jsonl", PLAIN)
    assert dry_run(folder, monkeypatch, "data=rows.jsonl") == 0
    out = capsys.readouterr().out
    assert "Tasks of text/Questions-v1: train " in out
    assert "  Tom has " in out


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("evaluation.tasks=1000",), r"evaluation\.tasks: 1000: split 'test' .* has \d+ tasks"),
        (("env.question=problem",), r"rows\.jsonl, row 1: field 'problem': is missing"),
        (("reward=rewards_of_a_user:acuracy",), "has no 'acuracy'"),
        (("reward=no_such_file:accuracy",), "cannot import 'no_such_file'"),
    ],
)
def test_the_dry_run_refuses_in_one_line_what_would_fail(
    settings: tuple[str, ...],
    reason: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(folder / "rows.jsonl", PLAIN)
    assert dry_run(folder, monkeypatch, "data=rows.jsonl", *settings) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(reason, line), line
