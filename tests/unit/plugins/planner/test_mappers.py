"""The mappers that need no solver."""

import pytest

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import Pool
from rollart_core.errors import ConfigError
from rollart_core.plugins.registry import build
from rollart_planner.mappers.affinity import AffinityMapper
from rollart_planner.mappers.colocate import ColocateMapper
from rollart_planner.mappers.cost import CostMapper
from rollart_planner.mappers.random import RandomMapper
from rollart_planner.mappers.static import StaticMapper

ENVS = {"a/A-v1": Workload(), "b/B-v1": Workload()}
POOLS = [Pool("big", "H100", 8), Pool("wide", "H20", 8), Pool("cpus", "cpu", 64)]


def test_on_one_pool_affinity_is_colocate():
    pools = [Pool("none", "H100", 0), Pool("local", "cpu", 2)]
    assert AffinityMapper().place(ENVS, pools) == ColocateMapper().place(ENVS, pools)


def test_static_does_as_it_is_told():
    mapper = StaticMapper(
        envs={"*": "cpus"}, engines={"a/A-v1": "big", "*": {"big": 1, "wide": 3}}, trainer="big"
    )
    placement = mapper.place(ENVS, POOLS)
    assert placement.envs == dict.fromkeys(ENVS, "cpus")
    assert placement.engines == {"a/A-v1": {"big": 1.0}, "b/B-v1": {"big": 0.25, "wide": 0.75}}
    assert placement.trainer == "big"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"trainer": "bigg"},
            r"trainer: there is no pool 'bigg' with a device. Did you mean 'big'",
        ),
        ({"engines": {"*": "big", "a/A-v2": "big"}}, r"no environment 'a/A-v2'. Did you mean"),
        ({"engines": {"*": {"mars": 1.0}}}, r"engines: there is no pool 'mars'"),
        ({"rewards": "lambda"}, r"rewards: there is no pool 'lambda'"),
    ],
)
def test_static_says_what_it_was_told_wrong(changed, says):
    told = {"envs": {"*": "cpus"}, "engines": {"*": "big"}, "trainer": "big"}
    with pytest.raises(ValueError, match=says):
        StaticMapper(**{**told, **changed}).place(ENVS, POOLS)


def test_static_colocates_what_it_is_not_told_of():
    told = StaticMapper(envs={"b/B-v1": "cpus"}).place(ENVS, POOLS)
    assert told.envs == {"a/A-v1": "big", "b/B-v1": "cpus"}
    assert told.engines == {env_id: {"big": 1.0} for env_id in ENVS}
    assert told.trainer == "big"
    with pytest.raises(ConfigError, match="greater than 0"):
        build("hardware_mappers", "static", {"engines": {"*": {"big": 0}}})


def test_static_leaves_a_serverless_pool_to_rewards():
    functions = Pool("functions", "serverless", 100)
    placed = StaticMapper(rewards="functions").place(ENVS, [functions, *POOLS])
    assert placed.envs == dict.fromkeys(ENVS, "big")
    assert placed.engines == {env_id: {"big": 1.0} for env_id in ENVS}
    assert (placed.trainer, placed.rewards) == ("big", "functions")
    told = Pool("told", "cpu", 8, roles=("engines",))
    placed = StaticMapper().place(ENVS, [functions, told])
    assert (set(placed.envs.values()), placed.trainer) == ({"told"}, "told")


@pytest.mark.parametrize(
    "mapper", [StaticMapper(), ColocateMapper(), AffinityMapper(), CostMapper(), RandomMapper()]
)
def test_a_serverless_pool_alone_carries_no_run(mapper):
    with pytest.raises(ValueError, match="serverless pools run only rewards") as caught:
        mapper.place(ENVS, [Pool("functions", "serverless", 100)])
    assert "\n" not in str(caught.value)


def test_random_follows_from_its_seed():
    drawn = [RandomMapper(seed=seed).place(ENVS, POOLS) for seed in range(20)]
    assert drawn[3] == RandomMapper(seed=3).place(dict(reversed(ENVS.items())), POOLS[::-1])
    assert {tuple(p.engines["a/A-v1"]) for p in drawn} == {("big",), ("wide",)}
    assert {p.envs["a/A-v1"] for p in drawn} == {"cpus"}
