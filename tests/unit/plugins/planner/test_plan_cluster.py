"""Cluster files: what they say, and what is wrong with them."""

import pytest

from rollart_core.contracts.hardware import Pool
from rollart_core.errors import ConfigError
from rollart_planner.cluster import filled, load_cluster


def write(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_figures_come_from_the_table_with_the_efficiency_worked_in(tmp_path):
    path = write(
        tmp_path,
        """
pools:
  - {name: a, device: H20, count: 8, resources: {GPU: 1}, roles: [engines]}
  - {name: b, device: h20, count: 1, bytes_per_s: 1.0e+12, memory_gb: 10, price_per_hour: 0}
  - {name: c, device: MyChip, count: 2}
  - {name: f, device: serverless, count: 100}
efficiency: {compute: 0.5, bandwidth: 1, training: 0.25, moe_training: 0.125}
devices:
  MyChip: {flops_per_s: 1.0e+14, bytes_per_s: 2.0e+12, memory_gb: 16}
""",
    )
    a, b, c, f = load_cluster(path).to_pools()
    assert a == Pool(
        "a",
        "H20",
        8,
        74e12,
        4e12,
        96 * 10**9,
        1.5,
        {"GPU": 1.0},
        ("engines",),
        0.001,
        training_flops_per_s=148e12 * 0.25,
        moe_training_flops_per_s=148e12 * 0.125,
        link_bytes_per_s=450e9,
        host_bytes_per_s=64e9,
        network_bytes_per_s=25e9,
    )
    assert (b.flops_per_s, b.bytes_per_s, b.memory_bytes, b.price_per_hour) == (
        74e12,
        1e12,
        1e10,
        0,
    )
    assert (c.flops_per_s, c.bytes_per_s, c.memory_bytes) == (5e13, 2e12, 16 * 10**9)
    assert f.flops_per_s == 0


def test_figures_of_a_machine(tmp_path):
    path = write(
        tmp_path,
        """
pools:
  - {name: a, device: H100, count: 8, per_node: 8, host_memory_gb: 100}
  - {name: b, device: H100, count: 8, host_memory_gb: 100, shm_gb: 20, network_bytes_per_s: 1.0e+9}
  - {name: c, device: H100, count: 8, flops_per_s: 1.0e+14}
""",
    )
    a, b, c = load_cluster(path).to_pools()
    assert (a.shm_bytes, b.shm_bytes, c.shm_bytes) == (50 * 10**9, 20 * 10**9, 0)
    assert (b.network_bytes_per_s, a.host_bytes_per_s) == (1e9, pytest.approx(64e9 * 0.7))
    # what is set on a pool is used in full, for training too
    assert c.training_flops_per_s == c.moe_training_flops_per_s == c.flops_per_s == 1e14


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("pools: []\n", 1, "pools: a cluster needs a pool"),
        ("pools:\n  - {name: a, device: H100}\n", 2, "pools.0.count: is missing"),
        ("pools:\n  - name: a\n    device: L4\n    count: 0\n", 4, "must be above 0 and at most"),
        ("pools:\n  - {name: a, device: H1000, count: 1}\n", 2, "Did you mean 'H100'?"),
        ("pools:\n  - {name: a, device: TPU, count: 1}\n", 2, "unknown device 'TPU'"),
        ("pools:\n  - {name: a, device: L4, count: 1, colour: red}\n", 2, "unknown key"),
        ("pools:\n  - {name: a, device: L4, count: 1}\n  - {name: a, device: L4, count: 1}\n",
         3, "is already the name of an earlier pool"),
        ("pools:\n  - {name: a, device: L4, count: 1}\ndevices:\n  B7: {}\n", 4, "has no effect"),
        ("pools:\n  - {name: a, device: L4, count: 1, roles: [boss]}\n", 2, "'envs'"),
        ("pool:\n  - {}\n", 1, "Did you mean 'pools'?"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(tmp_path, text, line, says):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as e:
        load_cluster(path)
    assert any(said.startswith(f"{path}:{line}: ") for said in str(e.value).splitlines())
    assert says in str(e.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        load_cluster(tmp_path / "none.yaml")


def test_pools_without_figures_get_those_of_their_device():
    known, own = filled([Pool("a", "L4", 1), Pool("b", "abacus", 1, 5.0, 6.0)])
    assert known.flops_per_s == pytest.approx(121e12 * 0.6)
    assert known.training_flops_per_s == pytest.approx(121e12 * 0.35)
    assert known.network_bytes_per_s == pytest.approx(25e9 * 0.7)
    assert own == Pool("b", "abacus", 1, 5.0, 6.0)
    with pytest.raises(ValueError, match="pool c: unknown device 'abacus'"):
        filled([Pool("c", "abacus", 1)])


def test_the_examples_can_be_read(repo_root):
    examples = sorted((repo_root / "examples/clusters").glob("*.yaml"))
    assert len(examples) == 9
    for path in examples:
        assert all(pool.count and pool.price_per_hour for pool in load_cluster(path).to_pools())
