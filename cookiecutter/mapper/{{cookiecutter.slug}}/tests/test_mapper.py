"""Check that the mapper satisfies RollArt's contract and places as documented."""

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import Pool
from rollart_testing import assert_checks, check_mapper

from {{ cookiecutter.module }}.mapper import {{ cookiecutter.class_name }}


def test_the_mapper_keeps_the_contract() -> None:
    assert_checks(check_mapper({{ cookiecutter.class_name }}()))


def test_each_part_is_where_its_need_is_met() -> None:
    pools = [
        Pool("hosts", "cpu", 8, flops_per_s=1e12, bytes_per_s=1e11),
        Pool("readers", "H20", 4, flops_per_s=1.5e14, bytes_per_s=4e12),
        Pool("counters", "H800", 4, flops_per_s=9.9e14, bytes_per_s=3.3e12),
    ]
    placement = {{ cookiecutter.class_name }}().place({"acme/Maze-v1": Workload()}, pools)
    assert placement.envs == {"acme/Maze-v1": "hosts"}
    assert placement.engines == {"acme/Maze-v1": {"readers": 1.0}}
    assert placement.trainer == "counters"
