"""Several environments in one run: what a config may say of them, and what it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart_core.config.load import load_config
from rollart_core.config.resolve import ResolvedRun, resolve_run
from rollart_core.errors import ConfigError

BASE: dict[str, Any] = {
    "model": {"kind": "new"},
    "stop": {"batches": 2},
    "trackers": [],
    "evaluation": {"tasks": 8},
}
LAKE = "toy/FrozenLake-v1"


@pytest.fixture
def resolve(tmp_path: Path):
    """Resolve a run with these environments."""

    def inner(env: object, *overrides: str, **changes: object) -> ResolvedRun:
        path = tmp_path / "x.yaml"
        path.write_text(yaml.safe_dump({**BASE, **changes, "env": env}))
        return resolve_run(load_config(path, overrides), source="x.yaml")

    return inner


def test_one_environment_is_written_as_before(resolve) -> None:
    alone = resolve({"id": "frozenlake", "size": 5})
    assert [env.name for env in alone.envs] == [LAKE]
    assert alone.as_dict()["env"]["size"] == 5
    assert alone.as_dict()["rollout"]["max_turns"] == alone.max_turns == 20
    assert alone.deadlines.step_s == alone.envs[0].step_s == 30


def test_each_has_its_own_and_the_rest_of_the_run(resolve) -> None:
    own = {"max_turns": 5, "split": "warm", "step_s": 7}
    mixed = resolve(
        [{"id": "frozenlake", "weight": 2, "size": 5}, {"id": "sokoban", "run": own}],
        rollout={"split": "train"},
    )
    lake, sokoban = mixed.envs
    assert (lake.weight, lake.max_turns, lake.split, lake.step_s) == (2, 20, "train", 30)
    assert (sokoban.weight, sokoban.max_turns, sokoban.split, sokoban.step_s) == (1, 5, "warm", 7)
    assert lake.plugin.options["size"] == 5
    assert mixed.max_turns == 20
    assert {p.spec.id for p in mixed.plugins} >= {LAKE, "toy/Sokoban-v1"}


def test_the_resolved_config_is_read_back_to_the_same_run(resolve, tmp_path: Path) -> None:
    own = {"max_turns": 5, "split": "train", "evaluation_split": "test"}
    mixed = resolve([{"id": "frozenlake", "weight": 2, "run": own}, {"id": "sokoban", "run": own}])
    (tmp_path / "again.yaml").write_text(mixed.to_yaml())
    assert resolve_run(load_config(tmp_path / "again.yaml", ())).as_dict() == mixed.as_dict()


def test_the_same_id_twice_has_two_names(resolve) -> None:
    twice = resolve([{"id": "frozenlake"}, {"id": "frozenlake", "size": 5}, "sokoban"])
    assert [env.name for env in twice.envs] == [f"{LAKE}#0", f"{LAKE}#1", "toy/Sokoban-v1"]
    named = resolve([{"id": "frozenlake", "name": "small"}, {"id": "frozenlake", "size": 5}])
    assert [env.name for env in named.envs] == ["small", f"{LAKE}#1"]


def test_an_override_reaches_one_of_the_list(resolve) -> None:
    assert resolve(["frozenlake", "sokoban"], "env.1.weight=3").envs[1].weight == 3


@pytest.mark.parametrize(
    ("env", "changes", "lines"),
    [
        (["frozenlake", "frozenlake"], {}, [f"x.yaml: env.1: {LAKE} with the same options is al"]),
        (["sokoban", {"id": "frozenlake", "weight": 0}], {}, ["env.1.weight: must be above 0"]),
        (
            ["sokoban", {"id": "frozenlake", "weight": -1}],
            {},
            ["env.1.weight: must be above 0"],
        ),
        (
            ["sokoban", {"id": "frozenlake", "weight": float("inf")}],
            {},
            ["env.1.weight: must be above 0"],
        ),
        (
            [{"id": "frozenlake", "weigth": 2}, {"id": "sokoban", "sise": 4}],
            {},
            [
                "x.yaml: env.0.weigth: unknown key. Did you mean 'weight'?",
                "x.yaml: env.1.sise: unknown key. Did you mean 'size'?",
            ],
        ),
        (
            ["frozenlake", {"id": "sokoban", "run": {"splt": "train"}}],
            {},
            ["env.1.run.splt: unknown key. Did you mean 'split'?"],
        ),
        (
            ["frozenlake", {"id": "sokoban", "run": {"split": "trian"}}],
            {},
            ["x.yaml: env.1.run.split: toy/Sokoban-v1 has no split 'trian'. Did you mean 'train'?"],
        ),
        (
            ["frozenlake", "sokoban"],
            {"rollout": {"split": "hard"}},
            [
                f"env.0.run.split: is rollout.split unless set, and {LAKE} has no split 'hard'",
                "env.1.run.split: is rollout.split unless set, and toy/Sokoban-v1 has no split",
            ],
        ),
        (["frozenlake", "sokobam"], {}, ["x.yaml: env.1: no environment 'sokobam'"]),
        (["frozenlake", {"adapter": "gymnasium"}], {}, ["env.1: adapter needs an id"]),
        ([], {}, ["env: a list of environments needs at least one"]),
        ([{"id": "frozenlake", "weight": 3}], {}, ["env.0.weight: has no effect with one"]),
        (
            [{"id": "frozenlake", "name": "a"}, {"id": "sokoban", "name": "a"}],
            {},
            ["env.1.name: 'a' is already the name of env.0"],
        ),
        (
            [{"id": e, "run": {"split": "train"}} for e in ("frozenlake", "sokoban")],
            {"rollout": {"split": "train"}},
            ["rollout.split: has no effect because every environment of env sets"],
        ),
        (
            ["frozenlake", {"id": "sokoban", "run": {"check_split": "warm"}}],
            {},
            ["env.1.run.check_split: has no effect without warm_start"],
        ),
        (
            ["frozenlake", {"id": "sokoban", "run": {"step_s": 1000}}],
            {},
            ["env.1.run.step_s: 1000 s: must be shorter than deadlines.episode_s"],
        ),
        (
            ["frozenlake", "sokoban"],
            {"deadlines": {"step_s": 1000}},
            ["deadlines.step_s: 1000 s: must be shorter than deadlines.episode_s"],
        ),
        (
            ["frozenlake", {"id": "sokoban", "run": {"reward": "nope"}}],
            {},
            ["x.yaml: env.1.run.reward: no reward 'nope' is installed"],
        ),
        (["frozenlake", "sokoban"], {"evaluation": {"tasks": 1}}, ["evaluation.tasks: 1 is too"]),
    ],
)
def test_what_is_wrong_is_named_with_its_place_in_the_list(
    resolve, env: object, changes: dict[str, Any], lines: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(env, **changes)
    said = str(caught.value).splitlines()
    assert len(said) == len(lines), said
    assert all(line in found for line, found in zip(lines, said, strict=True)), said
