import pytest

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import Pool
from rollart_planner.mappers.colocate import ColocateMapper


def test_everything_goes_to_the_first_pool_with_a_device():
    pools = [Pool("none", "cpu", 0), Pool("local", "cpu", 1), Pool("big", "H100", 8)]
    placement = ColocateMapper().place({"a/A-v1": Workload(), "b/B-v1": Workload()}, pools)
    assert placement.envs == {"a/A-v1": "local", "b/B-v1": "local"}
    assert placement.engines == {"a/A-v1": {"local": 1.0}, "b/B-v1": {"local": 1.0}}
    assert placement.trainer == "local"
    assert "local" in placement.reasons[0]


def test_a_serverless_pool_is_passed_over():
    pools = [Pool("functions", "serverless", 100), Pool("big", "H100", 8)]
    placement = ColocateMapper().place({"a/A-v1": Workload()}, pools)
    assert (placement.envs, placement.trainer) == ({"a/A-v1": "big"}, "big")
    assert placement.engines == {"a/A-v1": {"big": 1.0}}


@pytest.mark.parametrize(
    ("pools", "given"),
    [
        ((), "no pools at all"),
        ((Pool("x", "cpu", 0),), r"x \(count 0\)"),
        ((Pool("f", "serverless", 9), Pool("x", "cpu", 0)), r"only rewards, .*f: serverless\)"),
    ],
)
def test_pools_without_devices_are_refused(pools, given):
    with pytest.raises(ValueError, match=given):
        ColocateMapper().place({}, pools)
