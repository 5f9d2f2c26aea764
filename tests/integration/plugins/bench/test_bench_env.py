"""The benchmark of environments: the same episodes on all sides, and only whole ones count."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from rollart_bench import echo, env
from rollart_bench.env import ENVS, GYMNASIUM
from rollart_core.errors import RollartError
from rollart_core.models.new import new_model
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    corpus = [echo.FIRST, echo.SAYS] * 20
    return load_tokenizer(str(new_model(tmp_path / "model", env.MODEL, corpus, seed=0)))


def test_the_sides_in_gymnasium_play_the_echo() -> None:
    assert echo.stepped(echo.made())(3) == pytest.approx(1)
    assert echo.stepped(echo.EchoEnv())(3) == pytest.approx(1)


@pytest.mark.parametrize("name", ENVS)
def test_our_rollouts_are_whole_in_the_journal(name: str, tokenizer: ChatTokenizer) -> None:
    rate = asyncio.run(env._recorded(ENVS[name], 64, tokenizer))
    assert rate.per_s > 0
    assert rate.per_cpu_s > 0


def test_a_rollout_that_is_not_whole_does_not_count(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(echo.AsyncEchoEnv):
        """Gives no reward."""

        async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
            said, _, *ends, info = await super().astep(action)
            return said, 0.0, ends[0], ends[1], info

    monkeypatch.setattr(echo, "AsyncEchoEnv", Silent)
    with pytest.raises(RollartError, match=r"of \d+ rollouts, 0 are complete in the journal"):
        asyncio.run(env._recorded(ENVS["astep"], 64, tokenizer))


def test_a_peer_that_plays_something_else_is_refused() -> None:
    with pytest.raises(RollartError, match=r"^gem: the return of the echo is 0.5, not 1"):
        env._looped("gem", lambda seed: 0.5, 1)


def test_a_peer_that_is_not_installed_is_a_skipped_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> echo.Player:
        raise ModuleNotFoundError("No module named 'gem'", name="gem")

    peers = {GYMNASIUM: env.PEERS[GYMNASIUM], "gem": missing}
    monkeypatch.setattr(env, "PEERS", peers)
    players, skipped = env._players()
    assert list(players) == [GYMNASIUM]
    assert skipped == {
        "gem": "gem-llm is not installed: pip install gem-llm (No module named 'gem')"
    }


def test_the_cost_of_a_step_has_every_case() -> None:
    costs: Mapping[str, float] = asyncio.run(env.step_costs(20))
    assert {GYMNASIUM, *ENVS} < set(costs)
