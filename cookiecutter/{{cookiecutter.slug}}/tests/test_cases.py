"""Play the episodes of cases.jsonl and compare them with the expected results.

Each line is one episode: its kind, task, split, actions, and the expected sum of rewards. Kinds:
`full` (full reward), `zero` (no reward), `malformed` (invalid actions do not fail), and
`determinism` (two runs, each on a new environment, are identical).

`python tests/test_cases.py` records new cases of the environment as it is now.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from {{ cookiecutter.module }}.env import {{ cookiecutter.class_name }}

FILE = Path(__file__).with_name("cases.jsonl")
CASES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines() if line]
# What `python tests/test_cases.py` records.
TASKS = ((0, "train"), (7, "test"))
FIRST = {
    "full": [],
    "zero": [""] * 10,
    "malformed": ["", "\x00\x1b[31m", "no such action"],
    "determinism": ["no such action"],
}
MAX_ACTIONS = 50


def played(case: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Play a case on a new environment and return all its results."""
    env = {{ cookiecutter.class_name }}()
    page, info = env.reset(seed=0, options={"task": case["task"], "split": case["split"]})
    shown: list[tuple[Any, ...]] = [(page, 0.0, False, False, info)]
    for action in case["actions"]:
        shown.append(env.step(action))
    env.close()
    return shown


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{c['kind']}" for n, c in enumerate(CASES, 1)])
def test_case(case: dict[str, Any]) -> None:
    shown = played(case)
    assert sum(step[1] for step in shown) == pytest.approx(case["return"])
    if case["kind"] == "full":
        assert shown[-1][2], "an episode with full reward must end"
        assert shown[-1][4]["success"]
    if case["kind"] == "determinism":
        assert shown == played(case)


def test_every_kind_has_a_case() -> None:
    assert {c["kind"] for c in CASES} == {"full", "zero", "malformed", "determinism"}


def record(kind: str, task: int, split: str) -> dict[str, Any]:
    """Play an episode: the actions of `FIRST`, then those of the expert; none after `zero`."""
    env = {{ cookiecutter.class_name }}()
    env.reset(seed=0, options={"task": task, "split": split})
    first, actions, total = list(FIRST[kind]), list[str](), 0.0
    while len(actions) < MAX_ACTIONS:
        action = first.pop(0) if first else env.oracle() if kind != "zero" else None
        if action is None:
            break
        actions.append(action)
        _, reward, terminated, truncated, _ = env.step(action)
        total += reward
        if terminated or truncated:
            break
    env.close()
    return {"kind": kind, "task": task, "split": split, "actions": actions, "return": total}


if __name__ == "__main__":
    made = [json.dumps(record(kind, *task)) for kind in FIRST for task in TASKS]
    FILE.write_text("\n".join([*made, ""]), encoding="utf-8")
    print(f"Recorded {FILE}: check the returns in it.")
