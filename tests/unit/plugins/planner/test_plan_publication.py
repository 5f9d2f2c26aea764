"""The time of a new version and the limits of a batch, against cases worked out by hand."""

from dataclasses import replace

import pytest

from rollart_core.contracts.hardware import Demand, ModelShape, Pool, VersionTime
from rollart_planner.memory import shm_verdict
from rollart_planner.publication import BUCKET_BYTES, batch_rate, version_time

MODEL = ModelShape(10 * 10**9, 10, 10, 1, 100)
"""20 GB of weights."""
TRAIN = Pool(
    "train",
    "x",
    8,
    bytes_per_s=1e12,
    per_node=8,
    link_bytes_per_s=200e9,
    host_bytes_per_s=40e9,
    network_bytes_per_s=10e9,
    shm_bytes=50 * 10**9,
)
GEN = replace(TRAIN, name="gen", host_bytes_per_s=20e9)
DEMAND = Demand(num_trainer_ranks=4, engine_devices=2)
FIRST = BUCKET_BYTES / 20e9
"""The share of the weights in the first bucket."""


def time_of(engines=("gen",), trainer=TRAIN, **changes) -> VersionTime:
    pools = {"train": trainer, "gen": GEN}
    return version_time(MODEL, trainer, list(engines), pools, replace(DEMAND, **changes))


def test_weights_from_device_to_device():
    found = time_of()
    assert found.gather_s == pytest.approx(20 * 3 / 4 / 200)  # four ranks of one machine
    assert found.send_s == pytest.approx(20 / 10)  # another machine
    assert found.swap_s == pytest.approx(2 * 10 / 1000)  # half of the weights, read and written
    assert found.trainer_s == pytest.approx(2 + FIRST * 0.075)
    assert found.stall_s == pytest.approx(2.02)


def test_a_trainer_with_copies_on_the_host_waits_for_these_and_not_for_the_network():
    found = time_of(host_copies=2)
    assert found.trainer_s == pytest.approx(20 / 40 + FIRST * 0.075)
    assert (found.send_s, found.stall_s) == (pytest.approx(2), pytest.approx(2.02))


def test_weights_on_one_machine_take_no_network():
    found = time_of(engines=("train",))
    assert found.send_s == pytest.approx(20 / 200)
    two = replace(TRAIN, count=16)
    assert time_of(engines=("train",), trainer=two).send_s == pytest.approx(20 / 10)
    many = time_of(trainer=two, num_trainer_ranks=16)
    assert many.gather_s == pytest.approx(20 * 15 / 16 / 10)  # between machines
    assert many.trainer_s == pytest.approx(2 + FIRST * 1.875)


def test_weights_in_shared_memory():
    found = time_of(shm_copies=2)
    assert found.send_s == pytest.approx(20 / 10)  # the network is slower than the host's link
    assert found.swap_s == found.stall_s == pytest.approx(10 / 20)
    alone = time_of(engines=("train",), shm_copies=2)
    assert alone.send_s == pytest.approx(20 / 40)
    assert alone.stall_s == pytest.approx(10 / 40)


def test_a_machine_without_figures_takes_no_time():
    bare = Pool("train", "x", 8, bytes_per_s=1e12)
    assert time_of(engines=("train",), trainer=bare).trainer_s == 0


VERSION = VersionTime(gather_s=0, send_s=0, swap_s=5, trainer_s=10, stall_s=5)
BATCH = Demand(batch_trajectories=100, max_staleness=1)


def limited(*, each_s=0.1, training_s=0.1, engines=10.0, version=VERSION, **changes):
    """Return the rate if each episode takes ``each_s``, whatever else runs."""
    demand = replace(BATCH, **changes)
    return batch_rate(lambda rate: rate * each_s, engines, training_s, version, demand)


def test_the_trainer_trains_and_publishes_in_turn():
    assert limited() == (pytest.approx(100 / (100 * 0.1 + 10)), "trainer")


def test_engines_stop_for_each_version():
    rate, limit = limited(training_s=0.01)
    assert (rate, limit) == (pytest.approx(10 / (1 + 10 * 5 / 100)), "engines")
    # as worked out: in 100 / rate seconds, engines generate for all but the stall
    assert 10 * (100 / rate - 5) == pytest.approx(100)


def test_the_longest_trajectory_must_end_in_time():
    # in one period of the trainer and one more: (S + 1) B / r = longest x 30 s + 20 s
    rate, limit = limited(each_s=30.0, longest=2.0)
    assert (rate, limit) == (pytest.approx(200 / (2 * 30 + 20)), "batch")
    stale, _ = limited(each_s=30.0, longest=2.0, max_staleness=2)
    assert stale == pytest.approx(300 / 80)


def test_sync_alternates():
    # the longest takes 60 s, then 10 s of training, 10 s of publication and 5 s of loading
    rate, limit = limited(each_s=30.0, longest=2.0, max_staleness=0)
    assert (rate, limit) == (pytest.approx(100 / (60 + 10 + 10 + 5)), "batch")
    # engines are never faster than they are when always busy
    busy, _ = limited(each_s=0.1, max_staleness=0)
    assert busy == pytest.approx(100 / (100 / 10 + 25))


def test_two_versions_in_shared_memory_must_fit():
    demand = replace(DEMAND, shm_copies=2)
    found = shm_verdict(MODEL, TRAIN, 1, demand)
    assert found is not None
    assert (found.fits, found.needed_bytes, found.have_bytes) == (True, 40e9, 50e9)
    small = shm_verdict(MODEL, replace(TRAIN, shm_bytes=39 * 10**9), 3, demand)
    assert small is not None
    assert not small.fits
    assert small.says.startswith(
        "2 versions of the weights need 40.0 GB of /dev/shm of each machine of train, which has "
        "39.0 GB: enlarge it (mount -o remount,size=44G /dev/shm)"
    )
    assert shm_verdict(MODEL, TRAIN, 1, DEMAND) is None
    assert shm_verdict(MODEL, replace(TRAIN, shm_bytes=0), 1, demand) is None


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("longest_s", [5.0, 40.0, 100.0])
def test_batches_follow_one_another_as_the_scheduler_starts_them(staleness, longest_s):
    """Batch v starts with version v - S, and is trained when its longest trajectory has ended."""
    training_s, versions = 20.0, [0.0]
    for v in range(400):
        start_s = versions[max(0, v - staleness)]
        versions.append(max(versions[v], start_s + longest_s) + training_s)
    period_s = (versions[-1] - versions[200]) / 200
    free = VersionTime(gather_s=0, send_s=0, swap_s=0, trainer_s=0, stall_s=0)
    rate, _ = limited(
        each_s=longest_s,
        training_s=training_s / 100,
        engines=1e6,
        version=free,
        max_staleness=staleness,
    )
    assert 100 / rate == pytest.approx(period_s, rel=0.01)
