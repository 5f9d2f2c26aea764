from __future__ import annotations

from statistics import fmean

import pytest

from rollart_bench import rewards
from rollart_bench.waiting_reward import wait_of
from rollart_core.errors import UserError


def test_the_waits_have_the_mean_they_are_said_to_have() -> None:
    waits = [wait_of(index, 2.0) for index in range(1000)]
    assert fmean(waits) == pytest.approx(2.0, rel=0.02)
    assert max(waits) <= 12.0
    assert sorted(waits)[950] > 5.5


def test_a_way_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="'pol' is none of inline, pool, http, lambda, ray_serve"):
        rewards.run({"ways": ["pol"]})


@pytest.mark.parametrize("way", ["pool", rewards.PEER])
def test_a_reward_that_computes_gives_the_same_scores(way: str) -> None:
    work = {"way": way, "wait_s": 0.0, "spread": False, "steps": 10, "num": 64}
    assert rewards.measure(work)["rate"] > 0  # it checks each score
