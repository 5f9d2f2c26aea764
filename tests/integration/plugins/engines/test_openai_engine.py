"""The `openai` engine against a real server of the protocol, with vLLM's additions and without."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.openai_server import OpenAIServer, failing
from support.pace import scaled

from rollart_core.config.model import NewModel
from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.errors import ConfigError, ContextOverflow, InferenceFailure
from rollart_core.models.new import new_model
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer
from rollart_core.plugins import registry
from rollart_core.types import TokenSpan
from rollart_plugins.engines.openai import OpenAIEngine
from rollart_testing.envs import FakeEnv

MESSAGES = [{"role": "user", "content": "say red"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    spec = NewModel(kind="new", num_layers=1, width=16, ffn_width=16, vocab_size=300)
    return str(new_model(tmp_path_factory.mktemp("model"), spec, FakeEnv().corpus(), seed=0))


@pytest.fixture(scope="module")
def tokenizer(model: str) -> ChatTokenizer:
    return load_tokenizer(model)


@pytest.fixture
def text_server() -> Iterator[OpenAIServer]:
    with OpenAIServer() as server:
        yield server


@pytest.fixture
def token_server(tokenizer: ChatTokenizer) -> Iterator[OpenAIServer]:
    with OpenAIServer(tokenizer=tokenizer) as server:
        yield server


def engine(server: OpenAIServer, model_path: str = "", **options: Any) -> OpenAIEngine:
    options = {"base_url": server.url, "num_retries": 2, **options}
    context = {name: options.pop(name) for name in ("channel", "deterministic") if name in options}
    return registry.build("inference_engines", "openai", options, model_path=model_path, **context)


def asked(messages: Any = MESSAGES, **changes: Any) -> GenerateRequest:
    fields = {"request_id": "r", "token_ids": [], "max_new_tokens": 8, "messages": messages}
    return GenerateRequest(**{**fields, **changes})


async def once(engine: OpenAIEngine, *requests: GenerateRequest) -> list[GenerateResult]:
    try:
        await engine.start()
        return list(await asyncio.gather(*(engine.generate(r) for r in requests)))
    finally:
        await engine.close()


def run(engine: OpenAIEngine, *requests: GenerateRequest) -> list[GenerateResult]:
    return asyncio.run(once(engine, *requests or (asked(),)))


def test_text_goes_out_as_messages_and_comes_back_as_text(text_server: OpenAIServer) -> None:
    [result] = run(engine(text_server), asked(temperature=0.5, sampling_key=2**62 + 7))
    assert result.text is not None
    assert (result.text.content, result.token_ids, result.spans) == ("red", [], ())
    assert (result.text.num_prompt_tokens, result.text.num_new_tokens) == (11, 3)
    [body] = text_server.bodies("/v1/chat/completions")
    assert body == {
        "model": "parrot",
        "messages": MESSAGES,
        "max_tokens": 8,
        "temperature": 0.5,
        "seed": 7,
    }


TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_tools_go_out_and_calls_come_back(text_server: OpenAIServer) -> None:
    calls: list[dict[str, Any]] = [
        {"id": "a1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1'}},
        {"id": "a2", "function": {"name": "look", "arguments": {"at": "é"}}},
    ]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    text_server.change = lambda answer: {
        **answer,
        "choices": [{"message": said, "finish_reason": "tool_calls"}],
    }
    [result] = run(engine(text_server), asked(tools=[TOOL]))
    assert text_server.bodies("/v1/chat/completions")[-1]["tools"] == [TOOL]
    assert result.text is not None
    assert (result.text.content, result.finish_reason) == ("", "stop")
    found = [(c["id"], c["function"]["arguments"]) for c in result.text.tool_calls]
    assert found == [("a1", '{"at": 1'), ("a2", '{"at": "é"}')]
    calls[0]["function"] = {"arguments": "{}"}
    with pytest.raises(InferenceFailure, match="a tool call without a name"):
        run(engine(text_server), asked(tools=[TOOL]))


def test_a_request_can_be_shaped_for_servers_with_other_habits(text_server: OpenAIServer) -> None:
    options = {"max_tokens_field": "max_completion_tokens", "omit": ["temperature", "seed"]}
    run(engine(text_server, extra={"reasoning_effort": "low"}, **options))
    [body] = text_server.bodies("/v1/chat/completions")
    assert body == {
        "model": "parrot",
        "messages": MESSAGES,
        "max_completion_tokens": 8,
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize("lacks", [(), ("tokenize",), ("token_ids",)])
def test_tokens_come_back_id_for_id_with_their_logprobs(
    tokenizer: ChatTokenizer, model: str, lacks: tuple[str, ...]
) -> None:
    prompt = tokenizer.encode("please say grün 🎉")
    stops = tokenizer.stop_token_ids
    request = asked(None, token_ids=prompt, max_new_tokens=64, stop_token_ids=stops)
    with OpenAIServer(tokenizer=tokenizer, lacks=lacks) as server:
        [result] = run(engine(server, model), request)
    wanted = [*tokenizer.encode("grün 🎉"), stops[0]]
    assert result.token_ids == wanted
    assert result.inference_logprobs == [-0.25 * (n + 1) for n in range(len(wanted))]
    assert result.spans == (TokenSpan(0, len(wanted), 0),)
    assert (result.num_cached_tokens, result.finish_reason, result.text) == (2, "stop", None)
    body = server.bodies("/v1/completions")[-1]
    assert body["prompt"] == prompt
    assert body["stop_token_ids"] == list(stops)
    assert (body["top_p"], body["top_k"], body["min_p"]) == (1.0, -1, 0.0)


def test_a_server_that_gives_no_tokens_is_refused_before_it_is_used(
    tokenizer: ChatTokenizer, model: str
) -> None:
    with (
        OpenAIServer(tokenizer=tokenizer, lacks=("tokenize", "token_ids")) as server,
        pytest.raises(ConfigError, match=r"does not return token ids .*kind: remote"),
    ):
        run(engine(server, model))


def test_another_tokenizer_behind_the_url_is_refused(
    tmp_path: Path, token_server: OpenAIServer
) -> None:
    spec = NewModel(kind="new", num_layers=1, width=16, ffn_width=16, vocab_size=310)
    other = new_model(tmp_path, spec, ["quite other words zzz qqq"] * 50, seed=1)
    with pytest.raises(ConfigError, match=r"has other tokens than model.path: of '.*they part at"):
        run(engine(token_server, str(other)))


def test_a_context_shorter_than_the_run_wants_is_refused(
    tokenizer: ChatTokenizer, model: str
) -> None:
    with (
        OpenAIServer(tokenizer=tokenizer, max_model_len=512) as server,
        pytest.raises(ConfigError, match=r"max_context_tokens: 2048 is greater than 512"),
    ):
        run(engine(server, model))


def test_nobody_at_the_url_is_a_mistake_that_says_so() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    server = OpenAIServer()
    server.url = url
    with pytest.raises(ConfigError, match=r"no server is reachable at .*: start the server"):
        run(engine(server))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://me:pw@h/v1", ""])
def test_what_is_no_url_is_refused_and_a_password_never_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url") as told:
        registry.build("inference_engines", "openai", {"base_url": url}, model_path="")
    assert "pw" not in str(told.value)


def test_a_bad_key_is_a_mistake_and_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-wrong")
    with OpenAIServer(key="sk-right") as server:
        with pytest.raises(ConfigError, match=r"401: Incorrect API key .*engine.api_key_env") as e:
            run(engine(server, api_key_env="MY_KEY"))
        assert "sk-wrong" not in str(e.value)
        monkeypatch.setenv("MY_KEY", "sk-right")
        run(engine(server, api_key_env="MY_KEY"))
        monkeypatch.delenv("MY_KEY")
        with pytest.raises(ConfigError, match="variable MY_KEY is not set"):
            run(engine(server, api_key_env="MY_KEY"))


def test_models_are_chosen_by_name_and_the_nearest_is_named(text_server: OpenAIServer) -> None:
    text_server.models = ("parrot", "raven")
    with pytest.raises(ConfigError, match="select one of the server's models: parrot, raven"):
        run(engine(text_server))
    with pytest.raises(ConfigError, match=r"no 'ravn'. Did you mean 'raven'\?"):
        run(engine(text_server, model="ravn"))
    run(engine(text_server, model="raven"))


def test_a_server_without_a_list_is_asked_for_the_named_model(text_server: OpenAIServer) -> None:
    text_server.models = ()
    run(engine(text_server, model="anything"))
    with pytest.raises(ConfigError, match=r"set engine\.model"):
        run(engine(text_server))
    with pytest.raises(InferenceFailure, match="does not exist") as told:
        run(engine(text_server, model="nothing"))
    assert not told.value.retryable


@pytest.mark.parametrize(
    ("scripted", "error", "retryable", "says"),
    [
        (failing(400, "too long", "context_length_exceeded"), ContextOverflow, False, "too long"),
        (failing(400, "maximum context length is 512"), ContextOverflow, False, "512"),
        (failing(400, "bad temperature"), InferenceFailure, False, "bad temperature"),
        (failing(429, "pay first", "insufficient_quota"), InferenceFailure, False, "pay first"),
        (failing(429, "slow", Retry_After="999"), InferenceFailure, True, "429: slow"),
        (failing(307, "", Location="http://x"), InferenceFailure, False, "a redirect to http://x"),
        ((200, b"<html>hello</html>", {}), InferenceFailure, True, "not JSON"),
        ((200, [], {}), InferenceFailure, True, "not an object"),
        ((200, {"choices": []}, {}), InferenceFailure, True, "no choice"),
        ((200, {"choices": [{"message": {"content": 3}}]}, {}), InferenceFailure, True, "int"),
    ],
)
def test_what_a_server_may_answer_is_a_typed_failure(
    text_server: OpenAIServer, scripted: Any, error: Any, retryable: bool, says: str
) -> None:
    text_server.script.append(scripted)
    with pytest.raises(error, match=says) as told:
        run(engine(text_server))
    assert type(told.value) is error
    assert told.value.retryable is retryable
    assert len(text_server.bodies("/v1/chat/completions")) == 1


def _without(*names: str) -> Any:
    def change(answer: dict[str, Any]) -> dict[str, Any]:
        choice = json.loads(json.dumps(answer["choices"][0]))
        for name in names:
            choice.pop(name)
        return {**answer, "choices": [choice]}

    return change


def _other_prompt(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["prompt_token_ids"] = [1]
    return answer


def _one_logprob_less(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["logprobs"]["token_logprobs"].pop()
    return answer


def _no_number(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["logprobs"]["token_logprobs"][0] = None
    return answer


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without("logprobs"), "no logprobs"),
        (_one_logprob_less, "2 logprobs for 3 tokens"),
        (_no_number, "a logprob that is not a finite number"),
        (_other_prompt, "another prompt: 2 tokens were sent, and it read 1"),
    ],
)
def test_tokens_that_cannot_be_trusted_are_no_answer(
    token_server: OpenAIServer, model: str, change: Any, says: str
) -> None:
    token_server.change = change
    with pytest.raises(InferenceFailure, match=says):
        run(engine(token_server, model), asked(None, token_ids=[5, 6], max_new_tokens=3))


def test_a_limit_of_requests_is_waited_out_by_all(text_server: OpenAIServer) -> None:
    text_server.script += [failing(429, "slow down", retry_after_ms="300", Retry_After="1")]

    async def go() -> tuple[float, float]:
        it, loop = engine(text_server), asyncio.get_running_loop()
        await it.start()
        try:
            began = loop.time()
            first = asyncio.ensure_future(it.generate(asked(request_id="a")))
            while not text_server.bodies("/v1/chat/completions"):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            await asyncio.gather(first, it.generate(asked(request_id="b")))
            return loop.time() - began, (await it.stats()).extra["retried"]
        finally:
            await it.close()

    took_s, num_retried = asyncio.run(go())
    assert took_s >= 0.3
    assert num_retried == 1


def test_a_server_error_passes_unless_it_stays(text_server: OpenAIServer) -> None:
    busy = failing(503, "busy", retry_after_ms="1")
    text_server.script += [busy, busy]
    [result] = run(engine(text_server))
    assert result.text is not None
    text_server.script += [busy] * 3
    with pytest.raises(InferenceFailure, match="503: busy") as told:
        run(engine(text_server))
    assert told.value.retryable


def test_abort_hangs_up_and_a_second_request_of_one_id_is_refused(
    text_server: OpenAIServer,
) -> None:
    text_server.delay_s = 3600

    async def go() -> GenerateResult:
        it = engine(text_server)
        await it.start()
        try:
            first = asyncio.ensure_future(it.generate(asked()))
            while not text_server.bodies("/v1/chat/completions"):
                await asyncio.sleep(0.01)
            with pytest.raises(InferenceFailure, match="already in flight"):
                await it.generate(asked())
            await it.abort(["r", "unknown"])
            result = await first
            while not text_server.num_hung_up:
                await asyncio.sleep(0.01)
            return result
        finally:
            await it.close()

    assert asyncio.run(asyncio.wait_for(go(), scaled(60))).finish_reason == "abort"


def test_training_and_determinism_are_refused(text_server: OpenAIServer) -> None:
    class Channel:
        closed = False

        def close(self) -> None:
            self.closed = True

    channel = Channel()
    with pytest.raises(ConfigError, match="cannot follow training"):
        engine(text_server, channel=channel)
    assert channel.closed
    with pytest.raises(ConfigError, match="deterministic"):
        engine(text_server, deterministic=True)
