"""What an algorithm needs of a run, and what has no effect with it: said when a config loads."""

import json
import sys
from types import SimpleNamespace

import pytest
from pydantic import BaseModel, ConfigDict

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.config.validation.plugins import vocabulary_fault
from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.inference import InferenceEngineSpec
from rollart_core.errors import ConfigError
from rollart_core.plugins import manager as plugins
from rollart_core.plugins.hookspecs import hookimpl

BASE = """
env: maze
model: {kind: new}
stop: {batches: 2}
algorithm: plain
engine: parts:Part
weights: parts:Part
mapper: parts:Part
trackers: []
"""
TWO = "env=[{id: maze, name: a}, {id: maze, name: b, run: {max_turns: 3}}]"
ONE = ("rollout.group_size=1", "rollout.min_group_size=1")


class Part:
    def __init__(self, colour="red"):
        pass


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    colour: str = "blue"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(sys.modules, "parts", SimpleNamespace(Part=Part, Options=Options))
    spec = {"entry_point": "parts:Part", "config": None}

    @hookimpl
    def rollart_environments():
        own = {**spec, "splits": ("train", "warm", "test")}
        return [
            EnvSpec(id="acme/Maze-v1", alias="maze", max_turns=7, **own),
            EnvSpec(id="acme/Mutters-v1", alias="mutters", reports_success=False, **own),
            EnvSpec(id="acme/Draws-v1", alias="draws", reports_success=False, **own),
        ]

    @hookimpl
    def rollart_inference_engines():
        return [
            InferenceEngineSpec(id="acme/Judge-v1", alias="judge", scores=True, **spec),
            InferenceEngineSpec(id="acme/Mute-v1", alias="mute", **spec),
        ]

    @hookimpl
    def rollart_algorithms():
        own = {**spec, "needs_groups": False}
        return [
            AlgorithmSpec(id="acme/Plain-v1", alias="plain", **{**own, "config": "parts:Options"}),
            AlgorithmSpec(id="acme/Valued-v1", alias="valued", needs_critic=True, **own),
            AlgorithmSpec(id="acme/Taught-v1", alias="taught", needs_teacher=True, **own),
            AlgorithmSpec(id="acme/Shown-v1", alias="shown", learns_from="demonstrations", **own),
        ]

    hooks = {
        f.__name__: f for f in (rollart_environments, rollart_inference_engines, rollart_algorithms)
    }
    with plugins.using({"acme": SimpleNamespace(**hooks)}):
        yield


def model(folder, words, size=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": size or len(words)}))
    if words:
        vocab = {word: i for i, word in enumerate(words)}
        content = {"model": {"vocab": vocab}, "added_tokens": [{"id": 9, "content": "<end>"}]}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


@pytest.fixture
def resolve(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(BASE)
    return lambda *overrides: resolve_run(load_config(path, overrides), source="x.yaml")


def refused(resolve, *overrides):
    with pytest.raises(ConfigError) as caught:
        resolve(*overrides)
    return str(caught.value).splitlines()


def test_a_missing_critic_or_teacher_is_refused_and_one_too_many_too(resolve):
    (line,) = refused(resolve, "algorithm=valued")
    assert line.startswith("x.yaml: critic: acme/Valued-v1 needs one, because it learns")
    (line,) = refused(resolve, "algorithm=taught")
    assert line.startswith("x.yaml: teacher: acme/Taught-v1 needs one")
    (line,) = refused(resolve, "critic.backbone=shared")
    assert line == "x.yaml: critic: has no effect with acme/Plain-v1; remove it"
    run = resolve("algorithm=valued", "critic.backbone=shared")
    assert run.beside.critic.backbone == "shared"
    assert resolve("critic.lr=1e-4", "algorithm=parts:Part").beside.critic.lr == 1e-4


def test_another_vocabulary_is_known_by_its_files(tmp_path):
    ours = model(tmp_path / "ours", ["a", "b", "c"])
    same = model(tmp_path / "same", ["a", "b", "c"])
    other = model(tmp_path / "other", ["a", "c", "b"])
    longer = model(tmp_path / "longer", [], size=12)
    assert vocabulary_fault(ours, same) is None
    assert "token 1 ('b') differs" in vocabulary_fault(ours, other)
    assert "12 tokens and 3" in vocabulary_fault(ours, longer)
    assert vocabulary_fault(ours, "some/hub-id") is None


def test_a_reference_or_teacher_of_another_vocabulary_ends_the_load(resolve, tmp_path):
    ours = model(tmp_path / "ours", ["a", "b"])
    other = model(tmp_path / "other", ["b", "a"])
    (line,) = refused(resolve, f"model={ours}", f"reference.path={other}")
    assert line.startswith(f"x.yaml: reference.path: {other} and {ours} have different voc")
    teacher = ("algorithm=taught", "teacher.engine=judge")
    (line,) = refused(resolve, f"model={ours}", *teacher, f"teacher.path={other}")
    assert line.startswith("x.yaml: teacher.path")
    (line,) = refused(resolve, *teacher, f"teacher.path={other}")
    assert "its own vocabulary: set model.path" in line
    (line,) = refused(resolve, f"model={ours}", f"reference.path={tmp_path / 'none'}")
    assert "there is no folder" in line
    assert resolve(f"model={ours}", *teacher, f"teacher.path={ours}").beside.has_teacher


def test_a_teacher_needs_an_engine_that_scores(resolve, tmp_path):
    ours = model(tmp_path / "ours", ["a", "b"])
    taught = (f"model={ours}", "algorithm=taught", f"teacher.path={ours}")
    (line,) = refused(resolve, *taught, "teacher.engine=mute")
    assert line.startswith("x.yaml: teacher.engine: acme/Mute-v1 cannot score given tokens")


def test_groups_that_could_never_be_trained_are_refused(resolve):
    (line,) = refused(resolve, "rollout.max_equal_groups=5")
    assert "rollout.max_equal_groups: has no effect with rollout.equal_groups: train" in line
    (line,) = refused(resolve, "rollout.equal_groups=replace", *ONE)
    assert "a group of one are always equal" in line
    run = resolve("rollout.equal_groups=replace", "rollout.max_equal_groups=5")
    assert load_back(run)["rollout"]["max_equal_groups"] == 5
    assert "max_equal_groups" not in resolve().as_dict()["rollout"]


def load_back(run):
    import yaml

    return yaml.safe_load(run.to_yaml())


def test_demonstrations_are_not_sampled(resolve):
    assert resolve("algorithm=shown", *ONE).demonstrates
    lines = refused(resolve, "algorithm=shown", "rollout.in_flight=restart", "max_staleness=1")
    assert [line.split(": ")[1] for line in lines] == ["rollout.group_size", "rollout.in_flight"]
    run = resolve("algorithm=shown", "rollout.temperature=0.7", *ONE)
    assert run.trained_temperature == 1


def test_a_curriculum_needs_something_to_choose_from(resolve):
    (line,) = refused(resolve, "curriculum.window=10")
    assert "has no effect with one environment" in line
    assert resolve("curriculum.retire_above=0.9").config.curriculum.window == 256
    (line,) = refused(resolve, TWO, "curriculum.window=10", "deterministic=true")
    assert "the next tasks depend on timing" in line
    resolve(TWO, "curriculum.window=10", "deterministic=true", "max_staleness=0")


def test_environments_may_have_rewards_and_algorithm_of_their_own(resolve):
    own = "{max_turns: 3, shaping: {scale: 2}, algorithm: {colour: red}}"
    run = resolve(
        f"env=[{{id: maze, name: a}}, {{id: maze, name: b, run: {own}}}]", "shaping.clip=[-1, 1]"
    )
    assert {n: s.scale for n, s in run.beside.shapings.items()} == {"a": 1, "b": 2}
    assert [e.algorithm.options for e in run.envs] == [{"colour": "blue"}, {"colour": "red"}]
    run_of_b = "{algorithm: {colur: red}}"
    (line,) = refused(resolve, f"env=[{{id: maze}}, {{id: maze, run: {run_of_b}}}]")
    assert line.startswith("x.yaml: env.1.run.algorithm.colur: unknown key. Did you mean")
    assert load_back(run)["env"][1]["run"]["shaping"]["scale"] == 2
    assert [e.algorithm for e in resolve(TWO).envs] == [None, None]
    every = "env=[{id: maze, name: a, run: {shaping: {scale: 2}}}]"
    (line,) = refused(resolve, every, "shaping.scale=3")
    assert "shaping: has no effect where every environment" in line


VALIDATES = ("evaluation.every_batches=5",)


@pytest.mark.parametrize(
    ("key", "given", "instead"),
    [
        ("guard.watch", ["guard={watch: success}"], "reward"),
        ("checkpoint.keep_best", ["checkpoint.keep_best=validation/success"], "validation/score"),
        (
            "stop.when.metric",
            ["stop.when={metric: validation/success, value: 0.9}"],
            "validation/score",
        ),
        ("warm_start.until_success", ["warm_start={until_success: 0.5}"], None),
    ],
)
def test_success_that_no_environment_reports_is_refused(resolve, key, given, instead):
    given = [*VALIDATES, *given]
    (line,) = refused(resolve, "env=mutters", *given)
    assert line.startswith(f"x.yaml: {key}: ")
    assert 'acme/Mutters-v1 reports no success (info["success"])' in line
    assert line.endswith(f"set it to {instead}" if instead else "warm_start.max_train_steps")
    (line,) = refused(resolve, "env=[mutters, draws]", *given)
    assert "acme/Mutters-v1, acme/Draws-v1 report no success" in line
    assert resolve("env=[mutters, maze]", *given)
    assert resolve("env=maze", *given)
    if instead:
        others = [one.replace("validation/success", "validation/score") for one in given]
        assert resolve("env=mutters", *(one.replace("success", "reward") for one in others))


def test_defaults_need_no_success(resolve):
    assert resolve("env=mutters", "guard=on", "warm_start={}", *VALIDATES)
