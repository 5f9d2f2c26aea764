"""The benchmark of HTTP: both sides play the same episodes, and only whole ones count."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollart_bench import http
from rollart_bench.echo import TURNS
from rollart_core.errors import RollartError, UserError


def test_the_peer_plays_whole_episodes() -> None:
    with http.server() as url:
        rate, num_episodes = asyncio.run(http.bare(url, 4, 1e-9))
    assert num_episodes == 4
    assert rate > 0


@pytest.mark.parametrize("value", ["0", "1,many", "1025", "1.5"])
def test_a_number_of_episodes_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"^bench http: concurrent=.*1 to 1024, such as") as e:
        http.run({"concurrent": value})
    assert "\n" not in str(e.value)


def test_an_evaluation_with_an_incomplete_episode_does_not_count() -> None:
    def episode(num_turns: int, score: float | None, why: str = "") -> Any:
        return SimpleNamespace(num_turns=num_turns, score=score, why=why)

    whole = episode(TURNS, 1.0)
    http.check_episodes([whole, whole], 2)
    for wrong in (episode(TURNS - 1, 1.0), episode(TURNS, 0.8), episode(TURNS, None, "lost")):
        with pytest.raises(RollartError, match="1 of 2 episodes are complete"):
            http.check_episodes([whole, wrong], 2)
    with pytest.raises(RollartError, match=r"0 of 1 episodes are complete: lost$"):
        http.check_episodes([episode(0, None, "lost")], 1)
