"""Sleep of real SGLang servers, and a run whose trainer and server use one device in turns.

The CPU build frees nothing: these tests hold the order of calls, and that a server accepts them.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from cpu_servers import SERVER_ARGS, command
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
from support.whole_runs import merged, run

from rollart_core.errors import EngineDied
from rollart_plugins.engines import sglang_dialect as dialect
from rollart_plugins.engines.sglang import SGLangEngine
from rollart_plugins.weights.delta import DeltaChannel
from rollart_plugins.weights.shared_memory import SharedMemoryChannel

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

SLEEP = [
    (dialect.PAUSE, {"mode": "retract"}),
    (dialect.RELEASE_MEMORY, {"tags": ["weights", "kv_cache"]}),
]
WAKE = [
    (dialect.RESUME_MEMORY, {"tags": ["weights"]}),
    (dialect.RESUME_MEMORY, {"tags": ["kv_cache"]}),
    (dialect.CONTINUE, None),
]
ENGINE = {
    "id": "sglang",
    "server_args": SERVER_ARGS,
    "start_s": scaled(900),
    "update_s": scaled(600),
    "silent_s": scaled(600),
}


@pytest.mark.parametrize("kind", [SharedMemoryChannel, DeltaChannel])  # by files, in requests
def test_a_server_sleeps_wakes_with_the_new_weights_and_may_die_in_its_sleep(
    tmp_path, monkeypatch, kind
):
    model = make_model(tmp_path / "m")
    versions = Versions(model, 3, same_kv=False)

    async def main():
        async with channel_of(tmp_path / "w", versions, kind) as channel:
            engine = SGLangEngine(
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
                assert asked[-2:] == SLEEP
                await engine.stats()
                del asked[:]
                assert (await engine.wake(1)).policy_version == 1
                assert [asked[0], *asked[-2:]] == WAKE
                assert len(asked) > len(WAKE)  # the weights came in between
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
        engine=merged(ENGINE, {"command": list(command())}),
        failures={"load_weights_s": scaled(600), "hang_s": scaled(600)},
    )
    assert report.ok
    assert order.wrong == []
    assert order.num_batches() == 3
