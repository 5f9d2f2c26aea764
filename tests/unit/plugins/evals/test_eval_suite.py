"""Suites: what a file says, and what is refused."""

from pathlib import Path

import pytest

from rollart_core.config.load import is_suite, load_mapping, read_yaml
from rollart_core.errors import ConfigError
from rollart_evals.plan import columns_of, plan_of_suite, read_suite

HERE = Path("suite.yaml")


def suite_of(settings=(), **more):
    envs = [
        {"id": "frozenlake", "options": {"size": 5}},
        {"id": "bandit", "tasks": 7, "split": "x"},
    ]
    return read_suite({"suite": "s", "tasks": 5, "envs": envs, **more}, HERE, list(settings))


def test_a_suite_becomes_a_run_config():
    suite, others = suite_of(["attempts=3", "rollout.temperature=0.5"])
    assert others == ["rollout.temperature=0.5"]
    mapping = {**suite.run_mapping(), "model": {"path": "some/model"}, "stop": {"batches": 1}}
    config = load_mapping(mapping, HERE)
    assert [(e.id, e.options, e.run.evaluation_split) for e in config.env] == [
        ("frozenlake", {"size": 5}, "test"),
        ("bandit", {}, "x"),
    ]
    plan = plan_of_suite(suite, columns_of(["random"], has_model=True, greedy=True), {})
    assert plan.columns == ("random", "model", "greedy")
    assert [(q.tasks, q.attempts) for q in plan.quotas.values()] == [(5, 3), (7, 3)]
    assert [plan.attempts(c, "bandit") for c in plan.columns] == [3, 3, 1]


def test_settings_of_a_suite_reach_into_its_environments():
    suite, _ = suite_of(["envs.0.tasks=2", "tasks=9"])
    assert [env.tasks for env in suite.envs] == [2, 7]
    assert suite.tasks == 9


@pytest.mark.parametrize(
    ("more", "settings", "says"),
    [
        ({"taks": 3}, [], "taks: unknown key. Did you mean 'tasks'?"),
        ({"envs": []}, [], "envs: "),
        ({"envs": [{"id": "a"}, {"id": "a"}]}, [], "two have the name 'a'"),
        ({"envs": [{"id": "a", "size": 3}]}, [], r"envs\.0\.size: unknown key"),
        ({"run": {"seed": 1}}, [], r"run\.seed: has no effect in a suite"),
        ({}, ["evaluation.tasks=3"], "has no effect with a suite; use tasks="),
        ({}, ["tasks=0"], "tasks: "),
        ({}, ["task=2"], "command line: task: unknown key. Did you mean 'tasks'?"),
        ({}, ["zork=2"], "command line: zork: unknown key. Keys of a suite: suite, seed, "),
    ],
)
def test_what_a_suite_cannot_mean_is_refused(more, settings, says):
    with pytest.raises(ConfigError, match=says):
        suite_of(settings, **more)


def test_the_example_is_a_suite_of_every_environment_that_needs_no_official_data(repo_root):
    mapping = read_yaml(repo_root / "examples/suite.yaml")
    assert is_suite(mapping)
    suite, _ = read_suite(mapping, HERE, [])
    manifest = read_yaml(repo_root / "envs/rollart_envs/rollart.yaml")
    known = {env["id"] for env in manifest["environments"]}
    assert {env.id for env in suite.envs} == known


def test_an_unknown_baseline_is_named():
    with pytest.raises(ConfigError, match="--baseline best: must be one of oracle, noop, random"):
        columns_of(["best"], has_model=False, greedy=False)
