"""LoRA adapters on a real vLLM server: each turn is of one adapter, and only adapters are sent."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from cpu_vllm import SERVER_ARGS, command
from support.engine_servers import MAX_TOKENS, make_model
from support.served_adapters import ADAPTERS, train_under

from rollart_core.errors import ConfigError
from rollart_plugins.engines.server_process import ServerProcess, free_port
from rollart_plugins.engines.vllm import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def url(model) -> str:
    """A server for adapters that somebody else has started."""
    launched = {"command": command(), "server_args": SERVER_ARGS}
    engine = VllmEngine(model_path=model, max_context_tokens=MAX_TOKENS, lora=ADAPTERS, **launched)
    port = free_port()
    server = ServerProcess(*engine._command_line(port, None))
    server.start()
    yield f"http://127.0.0.1:{port}"
    asyncio.run(server.close())


def test_adapters_come_during_turns_and_each_turn_is_of_the_version_its_span_says(
    url, model, tmp_path
):
    @asynccontextmanager
    async def open_engine(**settings):
        engine = VllmEngine(
            model_path=model, device="cpu", url=[url], max_context_tokens=MAX_TOKENS, **settings
        )
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()

    train_under(open_engine, model, tmp_path)


def test_an_adapter_that_the_server_cannot_load_is_refused_in_one_line(url, model):
    lora = ADAPTERS.model_copy(update={"rank": 9})
    engine = VllmEngine(
        model_path=model, device="cpu", url=[url], max_context_tokens=MAX_TOKENS, lora=lora
    )
    with pytest.raises(ConfigError, match=r"rank 9 for down_proj, .*--max-lora-rank 9") as caught:
        asyncio.run(engine.start())
    assert "\n" not in str(caught.value)
