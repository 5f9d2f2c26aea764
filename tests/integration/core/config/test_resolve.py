from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel, ConfigDict

from rollart_core.config.load import load_config
from rollart_core.config.resolve import ResolvedRun, resolve_run
from rollart_core.config.sandbox_options import SandboxedOptions
from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.contracts.env import EnvSpec, Timeouts
from rollart_core.contracts.sandbox import SandboxSpec
from rollart_core.errors import ConfigError
from rollart_core.plugins import manager as plugins
from rollart_core.plugins.hookspecs import hookimpl

BASE = """
env: maze
model: {kind: new}
stop: {batches: 2}
algorithm: alone
engine: parts:Part
weights: parts:Part
mapper: parts:Part
trackers: []
"""


class Part:
    def __init__(self, colour: str = "red") -> None:
        self.colour = colour


class Isolation(BaseModel):
    model_config = ConfigDict(extra="forbid")
    ttl_s: float = 60.0
    trusted: bool = True


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A maze, a boxed maze, their sandbox, and two algorithms."""
    monkeypatch.setitem(sys.modules, "parts", SimpleNamespace(Part=Part))
    models = SimpleNamespace(Boxed=SandboxedOptions, Isolation=Isolation)
    monkeypatch.setitem(sys.modules, "models_of_resolve", models)
    spec = {"entry_point": "tests_of_resolve:Part", "config": None}
    monkeypatch.setitem(sys.modules, "tests_of_resolve", SimpleNamespace(Part=Part))

    @hookimpl
    def rollart_environments() -> list[EnvSpec]:
        slow = Timeouts(reset_s=40, step_s=700)
        return [
            EnvSpec(id="acme/Maze-v1", alias="maze", max_turns=7, **spec),
            EnvSpec(id="acme/SlowMaze-v1", alias="slow", timeouts=slow, **spec),
            EnvSpec(id="acme/BoxedMaze-v1", alias="boxed", sandbox="box", **spec),
            EnvSpec(id="acme/GoneMaze-v1", alias="gone", entry_point="acme_gone.env:Maze"),
            EnvSpec(id="acme/LostMaze-v1", alias="lost", sandbox="bax", **spec),
            EnvSpec(
                id="acme/Walled-v1",
                alias="walled",
                entry_point="tests_of_resolve:Part",
                config="models_of_resolve:Boxed",
                sandbox="wall",
            ),
        ]

    @hookimpl
    def rollart_sandboxes() -> list[SandboxSpec]:
        isolation = {**spec, "config": "models_of_resolve:Isolation"}
        return [
            SandboxSpec(id="acme/Box-v1", alias="box", **spec),
            SandboxSpec(id="acme/Wall-v1", alias="wall", **isolation),
        ]

    @hookimpl
    def rollart_algorithms() -> list[AlgorithmSpec]:
        return [
            AlgorithmSpec(id="acme/Alone-v1", alias="alone", needs_groups=False, **spec),
            AlgorithmSpec(id="acme/Grouped-v1", alias="grouped", **spec),
        ]

    acme = SimpleNamespace(
        rollart_environments=rollart_environments,
        rollart_sandboxes=rollart_sandboxes,
        rollart_algorithms=rollart_algorithms,
    )
    with plugins.using({"acme": acme}):
        yield


@pytest.fixture
def resolve(tmp_path: Path):
    """Resolve BASE with overrides."""
    path = tmp_path / "x.yaml"
    path.write_text(BASE)

    def inner(*overrides: str) -> ResolvedRun:
        return resolve_run(load_config(path, overrides), source="x.yaml")

    return inner


def refused(resolve, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(*overrides)
    return str(caught.value).splitlines()


def test_a_resolved_run_knows_what_the_environment_says(resolve) -> None:
    run = resolve()
    assert (run.max_turns, run.deadlines.step_s) == (7, 30.0)
    assert run.env.distribution == "extra:acme"
    assert resolve("rollout.max_turns=3", "deadlines.step_s=5").max_turns == 3


def test_a_resolved_plugin_builds_its_object_and_travels(resolve) -> None:
    run = pickle.loads(pickle.dumps(resolve("engine={id: 'parts:Part', colour: blue}")))
    assert run.engine.build().colour == "blue"
    assert run.weights.build(colour="green").colour == "green"


def test_every_problem_of_every_plugin_is_told_at_once(resolve) -> None:
    lines = refused(
        resolve, "env=mase", "algorithm=alane", "engine.color=red", "trackers=[tensorbord]"
    )
    assert len(lines) == 4
    assert all(line.startswith("x.yaml: ") for line in lines)
    assert "x.yaml: engine.color: unknown key. Did you mean 'colour'?" in lines
    assert any(line.startswith("x.yaml: trackers.0: no tracker 'tensorbord'") for line in lines)


def test_a_module_that_does_not_exist_stops_the_run_before_it_starts(resolve) -> None:
    (line,) = refused(resolve, "weights=no_such_module:Channel")
    assert "No module named 'no_such_module'" in line
    (line,) = refused(resolve, "env=gone")
    assert "acme/GoneMaze-v1: cannot import 'acme_gone.env'" in line


@pytest.mark.parametrize(
    ("key", "split"),
    [("rollout.split", "trian"), ("evaluation.split", "tets"), ("warm_start.check_split", "warm")],
)
def test_a_split_that_the_environment_does_not_have(resolve, key: str, split: str) -> None:
    (line,) = refused(resolve, f"{key}={split}")
    assert f"{key}: acme/Maze-v1 has no split '{split}'" in line


def test_a_split_with_all_tasks_is_not_used_together_with_another(resolve) -> None:
    env = "env={id: swe/FunctionRepair-v1, sandbox: bubblewrap}"
    (line,) = refused(resolve, env, "evaluation.split=all")
    assert "evaluation.split: 'all' has the tasks of every split, also of rollout.split" in line


def test_the_environments_own_timeouts_must_nest_too(resolve) -> None:
    (line,) = refused(resolve, "env=slow")
    assert "deadlines.step_s: 700 s, from the environment's spec: must be shorter" in line
    assert resolve("env=slow", "deadlines.step_s=10").deadlines.reset_s == 40


def test_the_life_of_a_sandbox_counts_where_there_is_one(resolve) -> None:
    assert resolve("deadlines.ticket_s=9000").deadlines.ticket_s == 9000
    (line,) = refused(resolve, "env=boxed", "deadlines.ticket_s=9000")
    assert "must be shorter than deadlines.sandbox_ttl_s" in line
    (line,) = refused(resolve, "deadlines.sandbox_ttl_s=9000")
    assert "has no effect with acme/Maze-v1, which needs no sandbox" in line


def test_a_sandbox_lives_as_long_as_the_deadlines_say(resolve, tmp_path) -> None:
    run = resolve("env=walled", "env.sandbox=wall", "deadlines.sandbox_ttl_s=4000")
    assert run.env.options["sandbox"] == {"id": "wall", "ttl_s": 4000.0}
    assert run.env.options["pool"]["wait_s"] == 24.0  # of 30 s for a reset
    again = tmp_path / "again.yaml"
    again.write_text(run.to_yaml())
    assert resolve_run(load_config(again, ())).env.options == run.env.options
    longer = resolve("env=walled", "env.sandbox={id: wall, ttl_s: 5000}")
    assert longer.env.options["sandbox"]["ttl_s"] == 5000
    plain = resolve("env=walled", "env.sandbox=box").env.options["sandbox"]
    assert plain == {"id": "box"}  # a wall without a ttl_s is given none


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("env.sandbox=wal", "env.sandbox: no sandbox 'wal' is installed. Did you mean 'wall'?"),
        ("env.sandbox={id: wall, tll_s: 1}", "env.sandbox.tll_s: unknown key. Did you mean"),
        ("env.sandbox={id: wall, ttl_s: 59}", "env.sandbox.ttl_s: 59 s: must not be shorter than"),
        ("env.sandbox={id: wall, ttl_s: x}", "env.sandbox.ttl_s: must be a valid number"),
        ("env.sandbox={id: wall, trusted: false}", "env.sandbox: wall has no isolation: set its"),
        ("env.pool.wait_s=30", "env.pool.wait_s: 30 s: must be shorter than deadlines.reset_s"),
        ("env.pool.worm=1", "env.pool.worm: unknown key. Did you mean 'warm'?"),
    ],
)
def test_what_is_wrong_with_a_sandbox_is_told_before_a_run(resolve, override, complaint) -> None:
    (line,) = refused(resolve, "env=walled", "env.sandbox=wall", override)
    assert line.startswith(f"x.yaml: {complaint}")


def test_a_sandbox_that_is_not_installed(resolve) -> None:
    (line,) = refused(resolve, "env=lost")
    assert "acme/LostMaze-v1 runs in a sandbox: no sandbox 'bax'" in line


def test_an_algorithm_that_compares_members_needs_two(resolve) -> None:
    one = ("rollout.group_size=1", "rollout.min_group_size=1")
    assert resolve(*one).config.rollout.group_size == 1
    lines = refused(resolve, *one, "algorithm=grouped")
    assert [line.split(": ")[1] for line in lines] == [
        "rollout.group_size",
        "rollout.min_group_size",
    ]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("env", ["maze", "boxed"])
def test_the_resolved_config_reads_back_as_the_same_run(
    resolve, tmp_path: Path, mode: str, env: str
) -> None:
    run = resolve(f"mode={mode}", f"env={env}", "engine={id: 'parts:Part', colour: blue}")
    path = tmp_path / "config.yaml"
    path.write_text(run.to_yaml())
    again = resolve_run(load_config(path))
    assert again.as_dict() == run.as_dict()
    assert again.as_dict()["resolved_with"]["extra:acme"] == "0"
    assert again.deadlines.step_s == 30.0
