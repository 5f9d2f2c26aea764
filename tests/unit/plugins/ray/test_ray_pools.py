"""Pools and slots on a Ray cluster, without Ray."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rollart_core.config.runtime import RayPool
from rollart_core.contracts.hardware import Placement
from rollart_core.errors import ConfigError
from rollart_ray import nodes as ray_nodes
from rollart_ray import pools as ray_pools
from rollart_ray.pools import Node


def node(name: str, labels: Mapping[str, str] | None = None, **resources: float) -> Node:
    plain = {"memory": 1e9, f"node:{name}": 1.0, **resources}
    named = {k.replace("__", ":"): v for k, v in plain.items()}
    return Node(name * 8, f"10.0.0.{len(name)}", name, named, labels or {})


def placement(engines: Mapping[str, float], env: str = "cpu", trainer: str = "cpu") -> Placement:
    return Placement(envs={"e": env}, engines={"e": engines}, trainer=trainer)


CLUSTER = [
    node("a", CPU=8, GPU=4, accelerator_type__H100=1),
    node("bb", CPU=8, GPU=2, accelerator_type__L4=1),
    node("ccc", CPU=16),
    node("dddd", CPU=2, sandbox_host=3),
]


def test_pools_are_found_out_whatever_the_order_of_the_nodes() -> None:
    found = ray_pools.found_out(CLUSTER)
    assert [(p.name, p.device, p.count) for p in found] == [
        ("H100", "H100", 4),
        ("L4", "L4", 2),
        ("sandbox_host", "cpu", 3),
        ("cpu", "cpu", 16),
    ]
    assert found == ray_pools.found_out(CLUSTER[::-1])
    assert found[0].resources == {"GPU": 1.0, "accelerator_type:H100": 0.001}


def test_a_cluster_of_one_machine_is_one_pool() -> None:
    assert [(p.name, p.count) for p in ray_pools.found_out([node("a", CPU=2)])] == [("cpu", 2)]


def test_a_pool_that_is_not_there_says_what_is() -> None:
    with pytest.raises(ConfigError) as e:
        ray_pools.checked(
            [RayPool(name="big", device="B200", count=1, resources={"b200": 1})], CLUSTER
        )
    assert "pool 'big': no node of the cluster has b200 1" in str(e.value)
    assert "a (10.0.0.1, aaaaaaaa): CPU 8, GPU 4" in str(e.value)


def test_more_devices_than_there_are() -> None:
    with pytest.raises(ConfigError, match="7 devices are requested, but the cluster has 6"):
        ray_pools.checked([RayPool(name="gpus", device="H100", count=7)], CLUSTER)


def test_labels_narrow_a_pool() -> None:
    nodes = [node("a", {"zone": "x"}, CPU=2), node("bb", {"zone": "y"}, CPU=4)]
    pool = RayPool(name="p", count=4, labels={"zone": "y"})
    assert ray_pools.checked([pool], nodes)[0].resources == {"CPU": 1.0}
    with pytest.raises(ConfigError, match="on nodes with"):
        ray_pools.checked([pool.model_copy(update={"labels": {"zone": "z"}})], nodes)


@pytest.mark.parametrize(
    ("shares", "num", "expected"),
    [
        ({"a": 1.0}, 3, ["a", "a", "a"]),
        ({"a": 0.7, "b": 0.3}, 3, ["a", "a", "b"]),
        ({"a": 0.99, "b": 0.01}, 4, ["a", "a", "a", "b"]),
        ({"a": 0.98, "b": 0.01, "c": 0.01}, 3, ["a", "b", "c"]),
        ({"a": 0.5, "b": 0.5, "c": 0.0}, 2, ["a", "b"]),
    ],
)
def test_engines_follow_the_shares(shares: dict[str, float], num: int, expected: list[str]) -> None:
    assert ray_pools.engine_pools(placement(shares), num) == expected


def test_too_few_engines_for_the_pools() -> None:
    with pytest.raises(ConfigError, match="raise it to 2 or more"):
        ray_pools.engine_pools(placement({"a": 0.5, "b": 0.5}), 1)


def test_a_mapper_may_count_engines_itself() -> None:
    said = Placement(
        envs={"e": "a"},
        engines={"e": {"a": 0.5, "b": 0.5}},
        trainer="a",
        num_engines={"a": 1, "b": 2},
    )
    assert ray_pools.engine_pools(said, 3) == ["a", "b", "b"]


def test_env_workers_leave_accelerators_alone() -> None:
    pools = ray_pools.found_out(CLUSTER)
    slots = ray_pools.slots_of(
        placement({"H100": 1.0}, env="H100", trainer="H100"),
        pools,
        {"engine": 2, "trainer": 2, "env": 5},
    )
    assert [s.role for s in slots] == ["engine"] * 2 + ["trainer"] * 2 + ["env"] * 5
    assert dict(slots[0].resources) == {"GPU": 1.0, "accelerator_type:H100": 0.001}
    assert dict(slots[-1].resources) == {"CPU": 1.0}


def test_more_parts_than_a_pool_has_devices() -> None:
    pools = ray_pools.found_out(CLUSTER)
    with pytest.raises(ConfigError, match=r"pool 'L4' has 2 device\(s\), but the run places 3"):
        ray_pools.slots_of(
            placement({"L4": 1.0}, trainer="L4"), pools, {"engine": 2, "trainer": 1, "env": 1}
        )


def test_a_pool_the_placement_makes_up() -> None:
    with pytest.raises(ConfigError, match=r"'cpus' that is not in the cluster. Did you mean 'cpu'"):
        ray_pools.slots_of(
            placement({"cpus": 1.0}),
            ray_pools.found_out(CLUSTER),
            {"engine": 1, "trainer": 1, "env": 1},
        )


def test_a_cluster_of_ones_own_has_a_core_for_every_part_and_the_marks_of_its_pools() -> None:
    pools = [
        RayPool(name="gen", count=2, resources={"gen_node": 1}),
        RayPool(name="gpu", device="H100", count=1),
    ]
    assert ray_pools.local_resources(pools, 7, 2) == {"gen_node": 2.0, "CPU": 7.0}


def test_versions_that_differ_are_named_with_their_node() -> None:
    here = {"Python": "3.11", "rollart": "0.1.0", "acme": "1.2"}
    nodes = {
        "a": dict(here),
        "b": {"Python": "3.12", "rollart": "0.1.0", "acme": ray_nodes.MISSING},
    }
    assert ray_nodes.differences(here, nodes) == [
        "node b has Python 3.12 (here 3.11), acme not installed (here 1.2): install the same there"
    ]
    assert ray_nodes.versions(["rollart", "no-such-package"])["no-such-package"] == "none"


CLASSES = {"gpu": 2}
THREE = [
    RayPool(name="cores", count=4, roles=("envs", "trainer")),
    RayPool(name="few", count=2),
    RayPool(name="gpu", count=3, device="H100"),
]
PARTS = {"engine": 1, "trainer": 1, "env": 1}


def test_a_further_class_of_engines_has_a_pool_of_its_own() -> None:
    found = ray_pools.contract(THREE[2], CLASSES)
    assert (found.count, found.roles) == (2, ("engines",))
    assert ray_pools.contract(THREE[1], CLASSES).roles == ()
    placed = placement({"few": 0.5, "gpu": 0.5}, env="cores", trainer="cores")
    slots = ray_pools.slots_of(placed, THREE, PARTS, CLASSES)
    assert [s.pool for s in slots if s.role == "engine"] == ["few", "gpu", "gpu"]


def test_engines_of_the_first_class_have_a_place_where_the_mapper_sends_nobody() -> None:
    placed = placement({"gpu": 1.0}, env="cores", trainer="cores")
    slots = ray_pools.slots_of(placed, THREE, PARTS, CLASSES)
    assert [s.pool for s in slots if s.role == "engine"] == ["few", "gpu", "gpu"]


def test_an_engine_over_several_devices_has_one_slot_of_one_node() -> None:
    pools = ray_pools.found_out(CLUSTER)
    parts = {"engine": 2, "trainer": 1, "env": 1}
    slots = ray_pools.slots_of(
        placement({"H100": 1.0}, trainer="L4"), pools, parts, engine_devices=2
    )
    assert [dict(slot.resources) for slot in slots] == [
        {"GPU": 2.0, "accelerator_type:H100": 0.002},
        {"GPU": 2.0, "accelerator_type:H100": 0.002},
        {"GPU": 1.0, "accelerator_type:L4": 0.001},
        {"CPU": 1.0},
    ]
    ray_pools.check_nodes(slots, pools, CLUSTER, 2)


def test_engines_of_more_devices_than_the_pool_or_a_node_has() -> None:
    pools = ray_pools.found_out(CLUSTER)
    parts = {"engine": 3, "trainer": 1, "env": 1}
    with pytest.raises(ConfigError, match=r"places 6 devices' worth .*3 engine of 2\)"):
        ray_pools.slots_of(placement({"H100": 1.0}), pools, parts, engine_devices=2)
    split = [node("a", CPU=8, GPU=2), node("bb", CPU=8, GPU=2)]
    pools = ray_pools.found_out(split)
    slots = ray_pools.slots_of(
        placement({"gpu": 1.0}), pools, parts | {"engine": 1}, engine_devices=4
    )
    with pytest.raises(ConfigError, match=r"slots for 0 \(a has 2, bb has 2\)"):
        ray_pools.check_nodes(slots, pools, split, 4)
