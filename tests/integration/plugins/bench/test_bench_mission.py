"""The mission: its config holds together, and its benchmark makes the runs that it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollart_bench import mission
from rollart_bench.chaos_run import Kill
from rollart_bench.skip import BenchSkipped
from rollart_core.config.load import dump_yaml, load_config, load_mapping, read_yaml
from rollart_core.config.resolve import resolve_run
from rollart_core.contracts.env import EnvSpec
from rollart_core.errors import UserError
from rollart_core.plugins import manager as plugins
from rollart_core.plugins import registry
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.runtime.placement import demand_of, place
from rollart_plugins.engines.server_process import free_port
from rollart_ray import pools as ray_pools

HOOK = "rollart_environments"
CONFIG = Path(__file__).resolve().parents[4] / "examples/mission.yaml"
MODEL = {"kind": "new"}
"""Instead of the one that `examples/mission/setup` makes."""


@pytest.fixture(autouse=True)
def third_party() -> Iterator[None]:
    """The package that `examples/mission/setup` makes, publishes and installs."""

    @hookimpl
    def rollart_environments() -> list[EnvSpec]:
        return [EnvSpec(id="acme/Maze-v1", entry_point="rollart_testing:FakeEnv")]

    installed = "acme/Maze-v1" in registry.names("environments")
    package = {} if installed else {"acme": SimpleNamespace(**{HOOK: rollart_environments})}
    with plugins.using(package):
        yield


def test_the_config_holds_together_and_every_class_has_an_engine() -> None:
    run = resolve_run(load_mapping(read_yaml(CONFIG) | {"model": MODEL}, CONFIG))
    assert [env.name for env in run.envs] == [
        "webshop/WebShop-v1",
        "swe/FunctionRepair-v1",
        "toy/FrozenLake-v1",
        "acme/Maze-v1",
    ]
    assert run.config.runtime.kind == "ray"
    classes = {one.name: one.count for one in run.engines}
    pools = [ray_pools.contract(pool, classes) for pool in run.config.runtime.pools]
    placement = place(run, pools, demand_of(run))
    engine_states = ray_pools.slots_of(
        placement, run.config.runtime.pools, {"engine": 1, "trainer": 1, "env": 2}, classes
    )
    assert [(state.role, state.pool) for state in engine_states] == [
        ("engine", "embedded"),
        ("engine", "served"),
        ("trainer", "trainers"),
        ("env", "boxes"),
        ("env", "boxes"),
    ]
    assert sum(state.resources["slot"] for state in engine_states) <= 2 * mission.SLOTS["slot"]


def test_an_environment_alone_gets_as_many_trajectories_as_beside_others(tmp_path: Path) -> None:
    config = read_yaml(CONFIG) | {"model": MODEL}
    rollout = config["rollout"]
    batch = rollout["groups_per_batch"] * rollout["group_size"]
    for entry in config["env"]:
        name = mission.name_of(entry)
        alone = mission._alone(config, name, 2 * batch + 1)
        assert alone["stop"] == {"batches": 3}
        path = tmp_path / "alone.yaml"
        path.write_text(dump_yaml(alone))
        assert [env.name for env in resolve_run(load_config(path)).envs] == [name]


def test_what_the_warm_start_and_the_mission_play_is_the_same() -> None:
    def played(path: Path) -> list[object]:
        run = resolve_run(load_mapping(read_yaml(path) | {"model": MODEL}, path))
        return [(env.name, env.plugin.options.get("sandbox") is not None) for env in run.envs]

    assert played(CONFIG) == played(CONFIG.parent / "mission/warm.yaml")


def test_no_less_than_alone_is_what_the_mark_asks() -> None:
    def rows(beside: tuple[float, float], alone: tuple[float, float]) -> list[object]:
        def interval(low: float, high: float) -> dict[str, float]:
            return {"mean": (low + high) / 2, "low": low, "high": high}

        keys = ("success_after", "score_after")
        mixed = {"trained": 480, **dict.fromkeys(keys, interval(*beside))}
        report = dict.fromkeys(keys, interval(*alone))
        outcome = SimpleNamespace(report=report)
        return [row["meets_mark"] for row in mission._alone_rows("env", mixed, outcome)]

    assert rows((0.5, 0.7), (0.6, 0.8)) == [True, True]
    assert rows((0.9, 1.0), (0.1, 0.2)) == [True, True]
    assert rows((0.1, 0.2), (0.3, 0.4)) == [False, False]


def test_commands_and_the_model_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = mission._absolute(read_yaml(CONFIG), CONFIG)
    assert config["model"]["path"] == str(CONFIG.parents[1] / ".mission/model")
    engine = config["engines"][0]["engine"]
    assert engine["command"] == [
        str(CONFIG.parents[1] / ".venv-sglang/bin/python"),
        str(CONFIG.parents[1] / "tests/sglang_cpu/serve_cpu.py"),
    ]
    copied = mission._absolute(read_yaml(CONFIG), tmp_path / "mission.yaml")
    assert copied["model"]["path"] == str(tmp_path / ".mission/model")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"case": "war"}, "bench mission: case: 'war' is none of peace, attack, alone"),
        ({"cases": "peace, atack"}, "Did you mean 'attack'?"),
        ({"steps": "many"}, "steps='many': must be a whole number"),
        ({"limit_s": 0}, "limit_s=0: must be a number above 0"),
        ({"mixture": "nowhere", "case": "alone"}, "nowhere has no report of a finished run"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mission, "_lacking", lambda config, with_lambda: [])
    with pytest.raises(UserError) as e:
        mission.run(options)
    assert says in str(e.value)


def test_what_is_missing_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.setattr(mission, "executed", None)
    config = read_yaml(CONFIG)
    config["scoring"]["backend"]["endpoint_url"] = f"http://127.0.0.1:{free_port()}"
    path = tmp_path / "mission.yaml"
    path.write_text(dump_yaml(config))
    with plugins.using({}), pytest.raises(BenchSkipped) as e:
        mission.run({"config": str(path)})
    said = str(e.value)
    assert "\n" not in said
    for lacks in (
        "swe/FunctionRepair-v1: no Docker engine answers",
        f"there is no model {tmp_path}/",
        "the engine served needs ",
        "no Lambda answers at http://127.0.0.1:",
        "see examples/mission/README.md",
    ):
        assert lacks in said


def test_the_short_form_is_the_same_config_with_what_runs_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    config = read_yaml(CONFIG)
    short, skipped = mission._shortened(config)
    assert list(skipped) == ["swe/FunctionRepair-v1"]
    run = resolve_run(load_mapping(short, CONFIG))
    assert [env.name for env in run.envs] == [
        "webshop/WebShop-v1",
        "toy/FrozenLake-v1",
        "acme/Maze-v1",
    ]
    kept = ("mode", "runtime", "mapper", "weights", "reward", "scoring", "algorithm", "failures")
    assert {key: short[key] for key in kept} == {key: config[key] for key in kept}
    assert [one.name for one in run.engines] == ["served"]
    assert mission._lacking(short, with_lambda=False) == []


def test_an_attacked_run_may_go_on_and_another_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, object]] = []

    class Run:
        recoveries = ()

        def __init__(self, path: Path, *rest: object) -> None:
            self.run_dir, self.stop = path.parent, read_yaml(path)["stop"]

        def execute(self, kills: object, num_steps: int | None) -> float:
            asked.append((self.stop, num_steps))
            return 1.0

    monkeypatch.setattr(mission, "AttackedRun", Run)
    monkeypatch.setattr(mission, "LocalCluster", lambda *rest: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(mission, "_start", lambda cluster: setattr(cluster, "address", "here"))
    monkeypatch.setattr(mission, "_report", lambda run_dir: {"batches": 2})
    monkeypatch.setattr(mission, "audit", lambda run_dir: None)
    config = {"runtime": {}, "stop": {"batches": 2}}
    for kills in ([], [Kill("engine", 0)]):
        mission.executed(config, kills, 0, 1.0)
    (peace, alone), (attack, told) = asked
    assert (peace, alone) == ({"batches": 2}, None)
    assert told == 2
    assert attack["batches"] > 1000  # type: ignore[index]
