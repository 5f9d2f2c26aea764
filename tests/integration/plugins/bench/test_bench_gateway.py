"""The benchmark of the gateway: that it asks what it says, and counts nothing that was not kept."""

from __future__ import annotations

import pytest

from rollart_bench import gateway
from rollart_bench.gateway import TURNS, GatewayLoad
from rollart_core.errors import RollartError


def test_a_run_that_was_not_recorded_whole_does_not_count(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody_asks(load: GatewayLoad, endpoints: object) -> dict[str, float]:
        return {}

    monkeypatch.setattr(gateway, "_asked", nobody_asks)
    path = str(gateway.new_model(f"{tmp_path}/m", gateway.MODEL, [gateway.PAGE] * 9, seed=0))
    load = {"rate": 10.0, "conversations": 2, "seconds": 1.0, "engine_s": 0.0}
    with pytest.raises(RollartError, match=f"an episode of {TURNS} requests has 0 turns"):
        gateway.measure({"side": "gateway", "model": path, "load": load})


def test_conversations_are_whole() -> None:
    load = GatewayLoad(rate=200, conversations=128, seconds=30)
    assert load.num_requests % (128 * TURNS) == 0
    assert load.num_episodes * TURNS == load.num_requests
    assert GatewayLoad(rate=1, conversations=3, seconds=1).num_requests == 3 * TURNS
