"""Play the episodes of cases.jsonl and compare them with the expected results.

Each line is one episode: its kind, task, split, actions, and the expected sum of rewards. Kinds:
`full` (full reward), `zero` (no reward), `malformed` (invalid actions do not fail), and
`determinism` (two runs, each on a new environment, are identical).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from {{ cookiecutter.module }}.env import {{ cookiecutter.class_name }}

LINES = Path(__file__).with_name("cases.jsonl").read_text(encoding="utf-8").splitlines()
CASES = [json.loads(line) for line in LINES if line]


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
