"""Sleep of a real vLLM server, and a run whose trainer and server use one device in turns.

The CPU build frees nothing: these tests hold the order of calls, and that a server accepts them.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from cpu_vllm import SERVER_ARGS, command
from support.device_order import DeviceOrder
from support.engine_servers import (
    EXACT,
    MAX_TOKENS,
    Versions,
    begun,
    channel_of,
    make_model,
    recorded,
    request,
)
from support.pace import scaled
from support.whole_runs import run

from rollart_core.errors import EngineDied
from rollart_plugins.engines import vllm
from rollart_plugins.engines.vllm import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


def test_a_server_sleeps_wakes_with_the_new_weights_and_may_die_in_its_sleep(tmp_path, monkeypatch):
    model = make_model(tmp_path / "m")
    versions = Versions(model, 3, same_kv=False)

    async def main():
        async with channel_of(tmp_path, versions) as channel:
            engine = VllmEngine(
                model_path=model,
                device="cpu",
                max_context_tokens=MAX_TOKENS,
                command=command(),
                server_args=SERVER_ARGS,
                channel=channel,
                sleeps=True,
            )
            try:
                await engine.start()
                asked = recorded(monkeypatch, engine)
                turns = await begun(engine, 1, 2)  # a run has none, but their aborts may be late
                await engine.sleep()
                assert [path for path, _ in asked][-2:] == [vllm.PAUSE + "true", vllm.SLEEP]
                await engine.stats()
                del asked[:]
                assert (await engine.wake(1)).policy_version == 1
                assert [path for path, _ in asked] == [
                    vllm.WAKE + "weights",
                    vllm.RPC,
                    vllm.NAME_WEIGHTS,
                    vllm.WAKE + "kv_cache",
                    vllm.RESUME,
                ]
                new = [await turn for turn in turns] + [await engine.generate(request(3))]
                for i, result in enumerate(new, 1):
                    assert result.spans[-1].policy_version == 1
                    assert versions.off(list(request(i).token_ids), result, 0.8) < EXACT
                await engine.sleep()
                os.kill(engine._process.pid, signal.SIGKILL)
                with pytest.raises(EngineDied):
                    await engine.wake(2)
            finally:
                await engine.close()

    asyncio.run(main())


@pytest.mark.nightly
def test_a_run_gives_the_device_to_server_and_trainer_in_turns(tmp_path, monkeypatch):
    order = DeviceOrder(monkeypatch)
    report = run(
        tmp_path,
        mode="sync",
        max_staleness=None,
        runtime={"colocate": True},
        engine={
            "id": "vllm",
            "command": list(command()),
            "server_args": SERVER_ARGS,
            "start_s": scaled(900),
            "update_s": scaled(600),
            "silent_s": scaled(600),
        },
        failures={"load_weights_s": scaled(600), "hang_s": scaled(600)},
    )
    assert report.ok
    assert order.wrong == []
    assert order.num_batches() == 3
