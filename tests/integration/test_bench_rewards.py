from __future__ import annotations

from statistics import fmean

import pytest

from rollart_core.bench import rewards
from rollart_core.bench.waiting_reward import wait_of
from rollart_core.errors import UserError


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_short_form_measures_what_it_says() -> None:
    got = rewards.run({"short": True, "ways": ["inline", "pool", "http"]})
    rows = got["rows"]
    assert isinstance(rows, list)
    by_case = {row["case"]: row for row in rows}
    warm = by_case["pool, 1 ms: warm, 2 workers"]
    assert warm["ours"] > 0
    assert warm["peer"] > 0
    assert isinstance(warm["meets_mark"], bool)
    idle = by_case["pool, 1 ms: idle until no worker is left (longest)"]
    assert idle["meets_mark"]
    for way in ("inline", "pool", "http"):
        p50, p95 = (by_case[f"{way}, 1 ms: warm, four callers, p{n}"]["ours"] for n in (50, 95))
        assert 0 < p50 <= p95
        assert by_case[f"{way}, 1 ms: cold, first score"]["ours"] > 0


def test_the_waits_have_the_mean_they_are_said_to_have() -> None:
    waits = [wait_of(index, 2.0) for index in range(1000)]
    assert fmean(waits) == pytest.approx(2.0, rel=0.02)
    assert max(waits) <= 12.0
    assert sorted(waits)[950] > 5.5


def test_a_way_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="inline, pool, http, lambda, ray_serve"):
        rewards.run({"ways": ["pol"]})
