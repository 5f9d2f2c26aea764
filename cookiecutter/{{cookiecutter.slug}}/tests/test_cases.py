"""Plays the episodes of cases.jsonl and holds them to what they must return.

A line is one episode: its kind, task, split, actions, and the sum of rewards to expect. Kinds:
`full` (top marks), `zero` (nothing), `malformed` (actions that mean nothing are survived), and
`determinism` (played twice, each on a fresh environment, it is the same to the letter).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from {{ cookiecutter.module }}.env import {{ cookiecutter.class_name }}

LINES = Path(__file__).with_name("cases.jsonl").read_text(encoding="utf-8").splitlines()
CASES = [json.loads(line) for line in LINES if line]


def played(case: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Play a case on a fresh environment and return everything it showed."""
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
        assert shown[-1][2], "an episode of top marks is over"
        assert shown[-1][4]["success"]
    if case["kind"] == "determinism":
        assert shown == played(case)


def test_every_kind_has_a_case() -> None:
    assert {c["kind"] for c in CASES} == {"full", "zero", "malformed", "determinism"}
