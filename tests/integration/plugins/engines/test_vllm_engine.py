"""The `vllm` engine against a scripted server of vLLM's protocol: swaps, refusals and deaths."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from pydantic import ValidationError
from safetensors.torch import load_file
from support.openai_server import Json, OpenAIServer
from support.pace import until

from rollart_core.config.model import NewModel
from rollart_core.config.training import LoRA
from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.errors import ConfigError, EngineDied, InferenceFailure
from rollart_core.models.new import new_model
from rollart_core.models.tokenizer import load_tokenizer
from rollart_core.types import TokenSpan
from rollart_plugins.engines import vllm
from rollart_plugins.engines.config import VllmConfig
from rollart_plugins.engines.vllm import VllmEngine
from rollart_testing import FakeWeightChannel

MAX_TOKENS = 256
FIRST, LAST = [11, 12], [13, 14, 15]
"""The tokens of every answer: those before the server may go on, and those after."""


class VllmServer(OpenAIServer):
    """Samples the same tokens in every turn, and says which weights it had at each of them."""

    def __init__(self, model: str) -> None:
        super().__init__(tokenizer=load_tokenizer(model), max_model_len=MAX_TOKENS)
        self.missing: set[str] = set()
        self.workers: list[str] = []
        """URLs of the servers for which it is a router."""
        self.model_config: Json = {
            "logprobs_mode": "processed_logprobs",
            "seed": 3,
            "tokenizer": "elsewhere",
        }
        self.num_replicas, self.device, self.root = 1, "cuda", model
        self.weights, self.has_details = "default", True
        self.refusal: tuple[int, str] | None = None
        """Status and message with which it refuses to generate."""
        self.reload: str = "loads"
        """What it does with new weights: ``loads``, ``rejects``, ``hangs`` or ``dies``."""
        self.loaded: dict[str, torch.Tensor] = {}
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.adapters: dict[str, Path] = {}
        self.named: list[str | None] = []
        """The adapters of the turns."""
        self.held = {"weights": True, "kv_cache": True}
        """The parts of its memory, and whether it holds them."""
        self.held_at_reload: dict[str, bool] = {}
        self.asked: list[str] = []
        """Paths of the requests that change something, in order."""

    def add_routes(self, app: web.Application) -> None:
        gets = {
            "/version": lambda: {"version": "0.32.0"},
            "/health": lambda: {},
            "/weight_info": lambda: {"weight_version": self.weights},
            "/server_info": self._info,
            "/metrics": lambda: 'vllm:num_requests_running{engine="0"} 2.0\n',
        }
        posts = {
            "/pause": self._note,
            "/resume": self._note,
            "/abort_requests": self._note,
            "/sleep": self._sleep,
            "/wake_up": self._wake,
            "/collective_rpc": self._reload,
            "/update_weight_version": self._name,
            vllm.GENERATE: self._generate,
            vllm.LOAD_ADAPTER: self._load_adapter,
            vllm.UNLOAD_ADAPTER: self._unload_adapter,
        }
        if self.workers:
            gets["/workers"] = lambda: {"workers": [{"url": url} for url in self.workers]}
        for path, say in gets.items():
            if path not in self.missing:
                app.router.add_get(path, self._said(say))
        for path, handler in posts.items():
            if path not in self.missing:
                app.router.add_post(path, handler)

    def _said(self, say: Any) -> Any:
        async def handler(request: web.Request) -> web.Response:
            found = say()
            if isinstance(found, str):
                return web.Response(text=found)
            return web.json_response(found)

        return handler

    def _info(self) -> Json:
        config = {
            "model_config": self.model_config,
            "parallel_config": {"data_parallel_size": self.num_replicas},
            "device_config": {"device": self.device},
        }
        return {"vllm_config": config}

    async def _list(self, request: web.Request) -> web.Response:
        row = {"id": "m", "root": self.root, "max_model_len": self.max_model_len}
        return web.json_response({"data": [row, *({"id": name} for name in self.adapters)]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.reload == "rejects":
            return web.json_response({"error": {"message": "no such layer"}}, status=500)
        body = await request.json()
        self.adapters[body["lora_name"]] = Path(body["lora_path"])
        return web.Response(text="Success")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        del self.adapters[(await request.json())["lora_name"]]
        return web.Response(text="Success")

    async def _note(self, request: web.Request) -> web.Response:
        self.asked.append(str(request.rel_url))
        return web.json_response({})

    async def _sleep(self, request: web.Request) -> web.Response:
        if self.reload == "stays":
            return web.json_response({"error": {"message": "no memory pool"}}, status=500)
        if request.query["level"] == "2":
            self.held = dict.fromkeys(self.held, False)
        return await self._note(request)

    async def _wake(self, request: web.Request) -> web.Response:
        self.held[request.query["tags"]] = True
        return await self._note(request)

    async def _name(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        self.weights = (await request.json())["new_version"]
        return web.json_response({})

    async def _reload(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        self.held_at_reload = dict(self.held)
        if self.reload == "rejects":
            return web.json_response({"error": {"message": "no such layer"}}, status=500)
        if self.reload == "hangs":
            await asyncio.sleep(3600)
        if self.reload == "dies":
            assert request.transport is not None
            request.transport.abort()
        folder = Path((await request.json())["kwargs"]["weights_path"])
        self.loaded = {}
        for file in folder.glob("*.safetensors"):
            self.loaded |= load_file(file)
        return web.json_response({"results": [None]})

    async def _generate(self, request: web.Request) -> web.Response:
        if self.refusal is not None:
            status, message = self.refusal
            return web.json_response({"error": {"message": message}}, status=status)
        body = await request.json()
        self.named.append(body.get("model"))
        before = self.weights
        await until(self.goes_on.is_set, "it may go on")
        token_ids = (FIRST + LAST)[: body["sampling_params"]["max_tokens"]]
        spans = [(before, 0, min(2, len(token_ids))), (self.weights, 2, len(token_ids))]
        if before == self.weights or len(token_ids) < 3:
            spans = [(before, 0, len(token_ids))]
        choice = {
            "index": 0,
            "finish_reason": "length",
            "token_ids": token_ids,
            "logprobs": {"content": [{"token_id": i, "logprob": -i / 8} for i in token_ids]},
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans],
        }
        usage: Json = {"prompt_tokens": len(body["token_ids"])}
        if self.has_details:
            usage["prompt_tokens_details"] = {"cached_tokens": 1}
        return web.json_response(self.change({"choices": [choice], "usage": usage}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    spec = NewModel(kind="new", num_layers=1, width=32, ffn_width=48, vocab_size=320)
    return str(new_model(tmp_path_factory.mktemp("model") / "m", spec, ["a red shoe"] * 9, seed=0))


@pytest.fixture
def server(model: str) -> VllmServer:
    return VllmServer(model)


@pytest.fixture
def channel(model: str, tmp_path: Path) -> Iterator[FakeWeightChannel]:
    """Hold the versions 7 and 8."""
    held = FakeWeightChannel(str(tmp_path))
    tensors = load_file(Path(model) / "model.safetensors")
    for version in (7, 8):
        held.publish(version, [(name, tensor + version) for name, tensor in tensors.items()])
    yield held
    held.close()


@asynccontextmanager
async def engine_at(
    server: VllmServer, model: str, channel: FakeWeightChannel | None = None, **options: Any
) -> AsyncIterator[VllmEngine]:
    with server:
        root = server.url.removesuffix("/v1")
        settings = {"url": [root], "start_s": 0.1, "max_context_tokens": MAX_TOKENS, **options}
        engine = VllmEngine(model_path=model, channel=channel, **settings)
        try:
            await engine.start()
            server.asked.clear()
            yield engine
        finally:
            server.goes_on.set()
            await engine.close()


def asked(name: str) -> GenerateRequest:
    return GenerateRequest(name, [5, 6, 7, 8], 24, temperature=0.7, stop_token_ids=(3,))


LORA = LoRA(rank=2, sync="adapter")
SWAP = ["/pause?mode=keep&clear_cache=true", "/collective_rpc", "/update_weight_version", "/resume"]


def test_a_turn_in_flight_goes_on_with_new_weights_and_its_spans_say_which(
    server: VllmServer, model: str, channel: FakeWeightChannel, tmp_path: Path
) -> None:
    async def main() -> tuple[GenerateResult, GenerateResult]:
        folder = str(tmp_path / "w")
        async with engine_at(server, model, channel, weights_folder=folder) as engine:
            server.goes_on.clear()
            turn = asyncio.ensure_future(engine.generate(asked("a")))
            await until(lambda: len(server.bodies(vllm.GENERATE)) == 2, "it generates")
            swap = await engine.load_weights(7)
            assert (swap.policy_version, swap.num_recomputed_tokens) == (7, 4)
            assert server.asked == SWAP
            assert not turn.done()
            server.goes_on.set()
            return await turn, await engine.generate(asked("b"))

    first, late = asyncio.run(main())
    assert first.spans == (TokenSpan(0, 2, 0), TokenSpan(2, 5, 7, "recomputed"))
    assert late.spans == (TokenSpan(0, 5, 7),)
    assert first.token_ids == [*FIRST, *LAST]
    assert first.inference_logprobs == [-i / 8 for i in first.token_ids]
    base = load_file(Path(model) / "model.safetensors")
    assert set(server.loaded) == set(base)
    assert all(torch.equal(server.loaded[name], base[name] + 7) for name in base)
    assert list((tmp_path / "w").iterdir()) == []


def test_a_kept_cache_is_cleared_by_the_first_swap_only(
    server: VllmServer, model: str, channel: FakeWeightChannel
) -> None:
    async def main() -> GenerateResult:
        async with engine_at(server, model, channel, kv_on_swap="keep") as engine:
            await engine.load_weights(7)
            await engine.load_weights(8)
            return await engine.generate(asked("a"))

    result = asyncio.run(main())
    kept = ["/pause?mode=keep&clear_cache=false", *SWAP[1:]]
    assert server.asked == [*SWAP, *kept]
    assert result.spans == (TokenSpan(0, 5, 8, "kept"),)  # of its prompt, a token was cached


def test_a_sleeping_server_frees_its_memory_and_gets_it_back_around_the_new_weights(
    server: VllmServer, model: str, channel: FakeWeightChannel
) -> None:
    server.model_config["enable_sleep_mode"] = True

    async def main() -> GenerateResult:
        async with engine_at(server, model, channel, sleeps=True) as engine:
            await engine.load_weights(7)
            await engine.sleep()
            assert server.held == {"weights": False, "kv_cache": False}
            late = asyncio.ensure_future(engine.generate(asked("a")))
            await engine.wake(8)
            assert server.held_at_reload == {"weights": True, "kv_cache": False}
            assert server.held == {"weights": True, "kv_cache": True}
            return await late

    assert asyncio.run(main()).spans == (TokenSpan(0, 5, 8),)
    sleep = ["/pause?mode=keep&clear_cache=true", "/sleep?level=2&mode=keep"]
    load = ["/collective_rpc", "/update_weight_version"]
    wake = ["/wake_up?tags=weights", *load, "/wake_up?tags=kv_cache", "/resume"]
    assert server.asked == [*SWAP, *sleep, *wake]


def test_a_server_that_does_not_free_its_memory_is_dead(
    server: VllmServer, model: str, channel: FakeWeightChannel
) -> None:
    server.model_config["enable_sleep_mode"] = True
    server.reload = "stays"

    async def main() -> None:
        async with engine_at(server, model, channel, sleeps=True) as engine:
            with pytest.raises(EngineDied, match=r"did not release its memory: .*no memory pool"):
                await engine.sleep()
            with pytest.raises(EngineDied):
                await engine.generate(asked("a"))

    asyncio.run(main())


def test_a_server_that_cannot_sleep_is_refused(server: VllmServer, model: str) -> None:
    async def main() -> None:
        async with engine_at(server, model, sleeps=True):
            pass

    with pytest.raises(ConfigError, match=r"runtime.colocate needs: start it with --enable-sleep"):
        asyncio.run(main())
    server.missing = {"/sleep"}
    with pytest.raises(ConfigError, match=r"\(version 0.32.0\) lacks /sleep, which the run needs"):
        asyncio.run(main())


def test_a_server_on_a_cpu_gets_a_tied_head_too(
    server: VllmServer, model: str, channel: FakeWeightChannel
) -> None:
    server.device = "cpu"

    async def main() -> None:
        async with engine_at(server, model, channel) as engine:
            await engine.load_weights(8)

    asyncio.run(main())
    head, embedding = server.loaded["lm_head.weight"], server.loaded["model.embed_tokens.weight"]
    assert torch.equal(head, embedding)


@pytest.mark.parametrize(
    ("reload", "why"),
    [
        ("rejects", "new weights failed: .*no such layer"),
        ("hangs", r"did not load them within 0\.2 s"),
        ("dies", "is not reachable"),
    ],
)
def test_a_server_that_does_not_take_new_weights_is_dead_for_every_turn(
    server: VllmServer, model: str, channel: FakeWeightChannel, reload: str, why: str
) -> None:
    server.reload = reload

    async def main() -> None:
        options = {"update_s": 0.2} if reload == "hangs" else {}
        async with engine_at(server, model, channel, **options) as engine:
            server.goes_on.clear()
            turn = asyncio.ensure_future(engine.generate(asked("a")))
            await until(lambda: len(server.bodies(vllm.GENERATE)) == 2, "it generates")
            with pytest.raises(EngineDied, match=why):
                await engine.load_weights(7)
            with pytest.raises(EngineDied):
                await turn
            with pytest.raises(EngineDied):
                await engine.generate(asked("b"))

    asyncio.run(main())


def test_weights_that_do_not_fit_never_reach_the_server(
    server: VllmServer, model: str, channel: FakeWeightChannel, tmp_path: Path
) -> None:
    channel.publish(9, [("model.norm.weight", torch.ones(3))])

    async def main() -> GenerateResult:
        async with engine_at(server, model, channel, weights_folder=str(tmp_path / "w")) as engine:
            with pytest.raises(ValueError, match="the model's is"):
                await engine.load_weights(9)
            assert server.asked == []
            (home,) = (tmp_path / "w").iterdir()
            assert list(home.iterdir()) == []
            return await engine.generate(asked("a"))

    assert asyncio.run(main()).spans == (TokenSpan(0, 5, 0),)


def test_weights_that_cannot_be_written_cost_the_engine(
    server: VllmServer, model: str, channel: FakeWeightChannel, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")

    async def main() -> None:
        folder = f"{tmp_path}/file/w"
        async with engine_at(server, model, channel, weights_folder=folder) as engine:
            with pytest.raises(EngineDied, match="new weights cannot be written to"):
                await engine.load_weights(7)
            with pytest.raises(EngineDied, match="cannot be written"):
                await engine.generate(asked("a"))

    asyncio.run(main())


def test_a_server_with_other_weights_than_it_was_given_is_dead(
    server: VllmServer, model: str
) -> None:
    async def main() -> None:
        async with engine_at(server, model, look_every_s=0.01) as engine:
            await engine.generate(asked("a"))
            server.weights = "default"
            with pytest.raises(InferenceFailure, match="are not of this run"):
                await engine.generate(asked("b"))
            await until(engine._death.done, "it is found dead")
            with pytest.raises(EngineDied, match="it was restarted, or another run uses it"):
                await engine.generate(asked("c"))

    asyncio.run(main())


def adapters(version: int) -> list[tuple[str, torch.Tensor]]:
    module = "model.layers.0.mlp.up_proj"
    shapes = {".lora_A.weight": (2, 32), ".lora_B.weight": (48, 2)}
    return [(module + end, torch.full(shape, float(version))) for end, shape in shapes.items()]


def test_a_turn_ends_with_the_adapter_it_began_with_which_is_then_unloaded(
    server: VllmServer, model: str, tmp_path: Path
) -> None:
    channel = FakeWeightChannel(str(tmp_path))
    for version in (7, 8):
        channel.publish(version, adapters(version))
    server.adapters["rollart-3/1.2"] = tmp_path  # of an engine that was killed
    server.adapters["somebody's"] = tmp_path

    async def main() -> None:
        async with engine_at(server, model, channel, lora=LORA) as engine:
            assert list(server.adapters) == ["somebody's"]
            assert (await engine.generate(asked("base"))).spans == (TokenSpan(0, 5, 0),)
            swap = await engine.load_weights(7)
            assert (swap.num_bytes, swap.num_recomputed_tokens) == (4 * 2 * (32 + 48), 0)
            server.goes_on.clear()
            turn = asyncio.create_task(engine.generate(asked("a")))
            await until(lambda: len(server.named) == 3, "the turn has begun")
            await engine.load_weights(8)
            assert len(server.adapters) == 3  # that of the turn, too
            server.goes_on.set()
            assert (await turn).spans == (TokenSpan(0, 5, 7),)
            assert (await engine.generate(asked("b"))).spans == (TokenSpan(0, 5, 8),)
            channel.publish(9, adapters(9))
            await engine.load_weights(9)
            assert not any("pause" in path for path in server.asked)
            (name,) = server.adapters.keys() - {"somebody's"}
            folder = server.adapters[name]
            saved = load_file(folder / "adapter_model.safetensors")
            assert {key: tensor.unique().tolist() for key, tensor in saved.items()} == {
                f"base_model.model.{key}": [9.0] for key, _ in adapters(9)
            }
            config = json.loads((folder / "adapter_config.json").read_text())
            assert (config["r"], config["lora_alpha"]) == (2, 2)  # its B is scaled already
            assert config["target_modules"] == ["up_proj"]
            assert server.named[0] is server.named[1] is None
            assert len(set(server.named[2:])) == 2
        assert list(server.adapters) == ["somebody's"]
        assert not folder.exists()

    asyncio.run(main())


def test_an_adapter_over_other_weights_than_those_of_the_run_is_a_failure(
    server: VllmServer, model: str, tmp_path: Path
) -> None:
    channel = FakeWeightChannel(str(tmp_path))
    channel.publish(7, adapters(7))

    async def main() -> None:
        async with engine_at(server, model, channel, lora=LORA) as engine:
            await engine.load_weights(7)
            server.weights = "4/7.7"
            with pytest.raises(InferenceFailure, match=r"below its adapter are '4/7.7', not those"):
                await engine.generate(asked("a"))
        with pytest.raises(ConfigError, match=r"has the weights '4/7.7' of an earlier run"):
            async with engine_at(server, model, channel, lora=LORA):
                pass

    asyncio.run(main())


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ([("model.norm.weight", torch.zeros(32))], "is not of a LoRA adapter, but lora.sync is"),
        (adapters(1)[:1], "lacks a tensor"),
        ([(n, t.T.contiguous()) for n, t in adapters(1)], r"has shape \[2, 2\], but the weight"),
    ],
)
def test_adapters_that_do_not_fit_never_reach_the_server(
    server: VllmServer, model: str, tmp_path: Path, tensors: Any, why: str
) -> None:
    channel = FakeWeightChannel(str(tmp_path))
    channel.publish(7, tensors)

    async def main() -> None:
        async with engine_at(server, model, channel, lora=LORA) as engine:
            with pytest.raises(ValueError, match=why):
                await engine.load_weights(7)
            assert server.asked == []
            await engine.generate(asked("a"))

    asyncio.run(main())


def test_a_server_that_does_not_load_adapters_is_refused_or_dead(
    server: VllmServer, model: str, tmp_path: Path
) -> None:
    channel = FakeWeightChannel(str(tmp_path))
    channel.publish(7, adapters(7))

    async def main() -> None:
        async with engine_at(server, model, channel, lora=LORA) as engine:
            server.reload = "rejects"
            with pytest.raises(EngineDied, match="no such layer"):
                await engine.load_weights(7)
        with pytest.raises(
            ConfigError, match=r"rank 2 for .*, v_proj: .*no such layer; start"
        ) as told:
            async with engine_at(server, model, channel, lora=LORA):
                pass
        assert "\n" not in str(told.value)

    asyncio.run(main())


def test_a_launched_server_has_room_for_the_adapters_of_the_run(model: str) -> None:
    def flags(rank: int) -> tuple[list[str], dict[str, str]]:
        lora = LORA.model_copy(update={"rank": rank})
        return VllmEngine(model_path=model, lora=lora, command=["vllm"])._command_line(1, 0)

    argv, environment = flags(20)
    assert argv[argv.index("--max-lora-rank") + 1] == "32"
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    with pytest.raises(ConfigError, match=r"lora\.rank: .* up to rank 512, not 513"):
        flags(513)


def lacking(*paths: str) -> dict[str, Any]:
    return {"missing": set(paths)}


def model_config(**changes: object) -> dict[str, Any]:
    right = {"logprobs_mode": "processed_logprobs", "seed": 3, "tokenizer": "elsewhere"}
    return {"model_config": {**right, **changes}}


def answering(**changes: object) -> dict[str, Any]:
    """Return a change of the only choice of every answer."""

    def change(said: Json) -> Json:
        said["choices"][0] |= changes
        return said

    return {"change": change}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (lacking("/pause", "/weight_info"), {}, r"0\.32\.0\) lacks /pause, /weight_info.*DEV_MODE=1"),
    (
        {"workers": ["http://b:1", "http://a:1"]},
        {},
        r"is a router of 2 servers.*engine.url: \[http://a:1, http://b:1\] and "
        r"runtime.num_engines: 2",
    ),
    (lacking(vllm.GENERATE), {}, "use vLLM 0.32 or newer"),
    (lacking("/version"), {}, "does not return vLLM's version"),
    ({"refusal": (403, "disabled")}, {}, "start it with --enable-scale-out"),
    ({"refusal": (401, "Unauthorized")}, {}, "Unauthorized; set engine.api_key_variable"),
    (answering(weight_versions=None), {}, "weights that sampled the tokens"),
    (answering(logprobs=None), {}, "differ from the tokens of its logprobs"),
    (model_config(logprobs_mode="raw_logprobs"), {}, "--logprobs-mode processed_logprobs"),
    (model_config(skip_tokenizer_init=True), {}, "has no tokenizer"),
    (model_config(seed=0), {"url": "two"}, "start each server with its own --seed"),
    ({"max_model_len": 100}, {}, "--max-model-len 256"),
    ({"num_replicas": 2}, {}, "use more engines instead"),
    ({"has_details": False}, {"kv_on_swap": "keep"}, "--enable-prompt-tokens-details"),
]


@pytest.mark.parametrize(("changes", "options", "why"), REFUSED)
def test_a_server_that_cannot_serve_a_run_is_refused_in_one_line(
    server: VllmServer, model: str, changes: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    for name, value in changes.items():
        setattr(server, name, value)

    async def main() -> None:
        with server:
            root = server.url.removesuffix("/v1")
            urls = [root, "http://127.0.0.1:9"] if "url" in options else [root]
            settings = {**options, "url": urls, "start_s": 0.1}
            engine = VllmEngine(model_path=model, max_context_tokens=MAX_TOKENS, **settings)
            with pytest.raises(ConfigError, match=why) as told:
                await engine.start()
            assert "\n" not in str(told.value)

    asyncio.run(main())


def test_another_model_or_tokenizer_is_refused(
    server: VllmServer, model: str, tmp_path: Path
) -> None:
    spec = NewModel(kind="new", num_layers=1, width=32, ffn_width=48, vocab_size=320)
    odd = str(new_model(tmp_path / "odd", spec, ["zebras quarrel " * 9] * 9, seed=0))
    server.root = str(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')

    async def refused(match: str, path: str) -> None:
        with pytest.raises(ConfigError, match=match):
            async with engine_at(server, path):
                pass

    async def main() -> None:
        await refused("has the model OtherForCausalLM, but the run's model is", model)
        server.root = "elsewhere"
        await refused("has another tokenizer than the run's model", odd)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"logprobs": {"content": [{"token_id": 1, "logprob": -1.0}]}}, "differ from the tokens"),
        (
            {"token_ids": [1], "logprobs": {"content": [{"token_id": 1, "logprob": -9999.0}]}},
            "not finite",
        ),
        ({"weight_versions": [{"version": "7/1.1", "start": 0, "end": 5}]}, "not of this run"),
        ({"weight_versions": [{"version": "default"}]}, "KeyError"),
        ({"finish_reason": "repetition"}, "KeyError"),
    ],
)
def test_an_answer_that_lacks_what_training_needs_is_a_failure(
    server: VllmServer, model: str, changes: Json, why: str
) -> None:
    async def main() -> None:
        async with engine_at(server, model) as engine:
            server.change = answering(**changes)["change"]
            with pytest.raises(InferenceFailure, match=why):
                await engine.generate(asked("a"))
            server.change = lambda said: {"choices": []}
            with pytest.raises(InferenceFailure, match="the vLLM server's answer"):
                await engine.generate(asked("b"))

    asyncio.run(main())


def test_a_request_is_aborted_by_its_id_on_the_server(server: VllmServer, model: str) -> None:
    async def main() -> None:
        async with engine_at(server, model) as engine:
            server.goes_on.clear()
            turn = asyncio.ensure_future(engine.generate(asked("a")))
            await until(lambda: len(server.bodies(vllm.GENERATE)) == 2, "it generates")
            assert (await engine.stats()).num_running == 2
            ending = asyncio.ensure_future(engine.abort(["a", "unknown"]))
            await until(lambda: vllm.ABORT in server.asked, "its abort")
            rid = server.bodies(vllm.GENERATE)[1]["request_id"]
            assert server.bodies(vllm.ABORT)[-1] == {"request_ids": [vllm.ID_PREFIX + rid]}
            server.goes_on.set()
            await turn
            await ending

    asyncio.run(main())


def test_every_sampling_parameter_is_given_so_that_no_default_has_a_say() -> None:
    params = vllm.generate_body(asked("a"), "a~1", 9)["sampling_params"]
    assert (params["temperature"], params["max_tokens"], params["stop_token_ids"]) == (0.7, 9, [3])
    assert (params["top_p"], params["top_k"], params["min_p"]) == (1.0, -1, 0.0)
    assert (params["repetition_penalty"], params["ignore_eos"]) == (1.0, True)


def test_each_launched_server_has_gpus_and_a_seed_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    options = {"command": "vllm", "tp_size": 2, "server_args": {"host": "::", "seed": None}}
    seeds = set()
    for index, gpus in enumerate(["4,5", "6,7"]):
        engine = VllmEngine(model_path="/m", engine_index=index, **options)
        argv, environment = engine._command_line(7, engine._first_gpu)
        assert environment["CUDA_VISIBLE_DEVICES"] == gpus
        assert environment["VLLM_SERVER_DEV_MODE"] == "1"
        line = " ".join(argv)
        assert line.startswith("vllm /m --dtype")
        for flag in ("--enable-scale-out", "--logprobs-mode processed_logprobs", "--port 7"):
            assert flag in line
        assert "--host 127.0.0.1" in line
        assert "--tensor-parallel-size 2" in line
        plain = VllmEngine(model_path="/m", command="vllm")._command_line(7, None)[0]
        assert "--enforce-eager" in plain
        seeds.add(plain[plain.index("--seed") + 1])
    assert len(seeds) == 2
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES has 4"):
        VllmEngine(model_path="/m", engine_index=2, **options)._command_line(7, 4)
    with pytest.raises(ConfigError, match=r"engine\.command"):
        VllmEngine(model_path="/m")._command_line(7, None)


def test_keys_of_earlier_releases_are_understood_and_senseless_ones_refused() -> None:
    old = {"base_url": "http://a:1/v1", "weights_dir": "/w", "api_key_env": "KEY"}
    with pytest.warns(FutureWarning) as warned:
        config = VllmConfig.model_validate(old)
    assert len(warned) == 3
    assert (config.url, config.weights_folder) == (("http://a:1",), "/w")
    assert config.api_key_variable == "KEY"
    assert VllmConfig.model_validate(config.model_dump()) == config
    for options, why in (
        ({"server_args": {"logprobs-mode": "raw"}}, "is always processed_logprobs"),
        ({"server_args": {"data_parallel_size": 2}}, "use more engines instead"),
        ({"url": "http://a:1", "tp_size": 2}, "tp_size has no effect with url"),
    ):
        with pytest.raises(ValidationError, match=why):
            VllmConfig.model_validate(options)
    with pytest.raises(ConfigError, match="this is engine 2"):
        VllmEngine(model_path="m", url=["http://a:1"], engine_index=1)
