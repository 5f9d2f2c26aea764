import asyncio

import pytest
from pydantic import ValidationError

from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.errors import ConfigError, InferenceFailure
from rollart_core.types import TokenSpan
from rollart_plugins.engines import sglang_dialect as dialect
from rollart_plugins.engines.config import SGLangConfig
from rollart_plugins.engines.server_answers import generate_result
from rollart_plugins.engines.server_checks import ModelFacts
from rollart_plugins.engines.sglang import SGLangEngine

TAGS = {"0/a": 0, "1/b": 1, "1/c": 1}


def answer(*spans: tuple[str, int, int], num: int = 4, **meta):
    said = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return {
        "output_ids": list(range(num)),
        "meta_info": {
            "finish_reason": {"type": "length"},
            "prompt_tokens": 9,
            "cached_tokens": 8,
            "output_token_logprobs": [[-0.5 * i, i, None] for i in range(num)],
            "weight_versions": said,
            **meta,
        },
    }


def result(said):
    return generate_result(dialect.read_answer(said), TAGS, ("fresh", "recomputed"))


def test_an_answer_becomes_tokens_logprobs_and_a_span_for_each_set_of_weights():
    found = result(answer(("0/a", 0, 1), ("1/b", 1, 3), ("1/c", 3, 4)))
    assert found.token_ids == [0, 1, 2, 3]
    assert found.inference_logprobs == [0.0, -0.5, -1.0, -1.5]
    assert found.spans == (
        TokenSpan(0, 1, 0),
        TokenSpan(1, 3, 1, "recomputed"),
        TokenSpan(3, 4, 1, "recomputed"),
    )
    assert (found.finish_reason, found.num_cached_tokens) == ("length", 8)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (answer(("9/z", 0, 4)), "are not of this run"),
        (answer(("0/a", 0, 3)), "do not cover its 4 tokens"),
        (answer(("0/a", 0, 2), ("1/b", 3, 4)), "do not cover"),
        (answer(weight_versions=None), "does not contain the weights"),
        (answer(("0/a", 0, 4)) | {"output_ids": [7, 1, 2, 3]}, "output_ids differ"),
        (answer(("0/a", 0, 4), output_token_logprobs=[[float("nan"), 0]] * 4), "output_ids differ"),
        (answer(("0/a", 0, 1), num=1, output_token_logprobs=[[float("nan"), 0]]), "not finite"),
        (answer(("0/a", 0, 4), finish_reason={"type": "new"}), "KeyError"),
        ({"output_ids": []}, "it has no meta_info"),
    ],
)
def test_an_answer_that_does_not_say_what_it_must_is_a_failure_and_never_a_wrong_token(said, why):
    with pytest.raises(InferenceFailure, match=why):
        result(said)


def test_an_aborted_answer_has_what_there_was():
    gone = {"type": "abort", "message": "Abort in waiting queue", "status_code": 503}
    empty = result(answer(num=0, finish_reason=gone, output_token_logprobs=None))
    assert (empty.token_ids, empty.spans, empty.finish_reason) == ([], (), "abort")
    some = result(answer(("0/a", 0, 2), num=2, finish_reason={"type": "abort"}))
    assert (len(some.token_ids), some.finish_reason) == (2, "abort")
    refused = {"type": "abort", "message": "input too long", "status_code": 400}
    with pytest.raises(InferenceFailure, match="input too long"):
        result(answer(num=0, finish_reason=refused))


class ScriptedServer:
    """Answers every generation with ``said``."""

    def __init__(self, said: object) -> None:
        self._said = said

    async def post(self, path: str, body: object, *, limit_s: float | None = None) -> object:
        assert path == dialect.GENERATE
        return self._said


def generated_by(said: object) -> tuple[GenerateResult, SGLangEngine]:
    """Let an engine generate on a server that answers so."""

    async def main() -> tuple[GenerateResult, SGLangEngine]:
        engine = SGLangEngine(model_path="none", url=["http://a:1"])
        engine._facts, engine._versions = ModelFacts(vocab_size=100), dict(TAGS)
        engine._client, engine._transport = ScriptedServer(said), object()
        engine._death = asyncio.get_running_loop().create_future()
        engine._open = asyncio.Event()
        engine._open.set()
        return await engine.generate(GenerateRequest("t0#0/0", [1] * 9, 4)), engine

    return asyncio.run(main())


def test_a_request_that_was_aborted_while_it_waited_has_read_nothing():
    gone = {"type": "abort", "message": "Abort in waiting queue", "status_code": 503}
    # The whole of what a server says of a request that it never scheduled.
    meta = {"id": "t0#0/0~0", "finish_reason": gone, "weight_version": "0/a", "e2e_latency": 0.1}
    result, engine = generated_by({"text": "", "output_ids": [], "meta_info": meta})
    assert (result.token_ids, result.spans, result.finish_reason) == ([], (), "abort")
    assert (engine._prefill_tokens, engine._cached_tokens, engine._decode_tokens) == (0, 0, 0)


def test_what_a_server_computed_and_had_cached_is_counted():
    result, engine = generated_by(answer(("0/a", 0, 4)))
    assert result.finish_reason == "length"
    assert (engine._prefill_tokens, engine._cached_tokens, engine._decode_tokens) == (1, 8, 4)


@pytest.mark.parametrize("said", [None, "busy", {}, {"meta_info": None}, [answer()]])
def test_an_answer_of_another_shape_is_a_failure_of_inference(said):
    with pytest.raises(InferenceFailure, match="it has no meta_info"):
        generated_by(said)


def test_counts_that_are_no_numbers_are_a_failure_of_inference():
    with pytest.raises(InferenceFailure, match="the SGLang server's answer: "):
        generated_by(answer(("0/a", 0, 4), prompt_tokens=["9"]))


def test_every_sampling_parameter_is_given_so_that_no_default_has_a_say():
    request = GenerateRequest("t.0#1/2", (5, 6), 7, temperature=0.5, stop_token_ids=(3,))
    body = dialect.generate_body(request, "t.0#1/2~4", 7)
    assert (body["rid"], body["input_ids"], body["stream"]) == ("t.0#1/2~4", [5, 6], False)
    assert body["return_logprob"] is True
    given = body["sampling_params"]
    assert (given["temperature"], given["max_new_tokens"]) == (0.5, 7)
    assert given["stop_token_ids"] == [3]
    assert (given["top_p"], given["top_k"], given["min_p"]) == (1.0, -1, 0.0)
    assert given["repetition_penalty"] == 1.0


def test_flags_of_the_config_win_over_those_of_a_cpu():
    given = {"attention_backend": "own", "tp_size": 2, "enable_metrics": True, "off": False}
    flags = dialect.flags({**given, "some": [1, 2]}, on_cpu=True)
    line = " ".join(flags)
    assert "--device cpu" in line
    assert "--attention-backend own" in line
    assert line.count("--attention-backend") == 1
    assert "--tp-size 2" in line
    assert "--enable-metrics --some 1 2" in line
    assert "--off" not in line
    assert "--device" not in dialect.flags({}, on_cpu=False)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"url": "10.0.0.5:30000"}, "is not a server URL"),
        ({"url": ["http://a:1", "http://a:1"]}, "given twice"),
        ({"url": "http://a:1", "tp_size": 2}, "tp_size has no effect with url"),
        ({"url": "http://a:1", "command": "sglang"}, "command has no effect with url"),
        ({"api_key_variable": "KEY"}, "api_key_variable has no effect"),
        ({"tp": 2}, "Extra inputs"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, why):
    with pytest.raises(ValidationError, match=why):
        SGLangConfig.model_validate(options)


def test_one_url_or_command_is_a_list_of_one():
    assert SGLangConfig(url="http://a:1/").url == ("http://a:1",)
    assert SGLangConfig(command="sglang").command == ("sglang",)


def engine_of(**options: object) -> SGLangEngine:
    return SGLangEngine(model_path="/m", **options)


def test_each_server_of_a_run_has_gpus_of_its_own_and_listens_on_this_machine_only():
    engine = engine_of(command="serve", tp_size=4, first_gpu=2, server_args={"host": "::"})
    argv, _ = engine._command_line(7, 6)
    line = " ".join(argv)
    assert line.startswith("serve ")
    for flag in ("--tp-size 4", "--base-gpu-id 6", "--model-path /m", "--port 7"):
        assert flag in line
    assert "--host 127.0.0.1" in line
    assert "::" not in argv


def test_a_python_without_sglang_is_told_how_to_name_one_that_has_it():
    with pytest.raises(ConfigError, match=r"engine\.command"):
        engine_of()._command_line(7, None)


@pytest.mark.parametrize("given", [{}, {"url": "http://a:1"}, {"weights_folder": "w"}])
def test_options_with_every_default_filled_in_are_the_same_options(given):
    config = SGLangConfig.model_validate(given)
    assert SGLangConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("tp_size", "args", "says"),
    [
        (4, {"ep_size": 3}, "ep_size: 3, which does not divide the 4 GPUs .* one of 1, 2, 4"),
        (4, {"moe-dp-size": 8}, "moe_dp_size: 8, which does not divide the 4 GPUs"),
        (2, {"attn_dp_size": 0}, "attn_dp_size: 0, which does not divide the 2 GPUs"),
        (2, {"dp_size": 2}, "would use 2 x 2 GPUs, but the run reserves 2"),
        (2, {"dp_size": 4, "enable_dp_attention": True}, "does not divide the 2 GPUs"),
    ],
)
def test_a_mesh_that_does_not_multiply_to_the_gpus_is_refused(tp_size, args, says) -> None:
    with pytest.raises(ValidationError, match=says):
        SGLangConfig(tp_size=tp_size, server_args=args)


def test_a_mesh_that_divides_the_gpus_is_accepted() -> None:
    args = {"ep_size": 4, "attn_dp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    assert SGLangConfig(tp_size=4, server_args=args).server_args == args


@pytest.mark.parametrize("key", ["tp_size", "base_gpu_id", "pp-size", "nnodes"])
def test_flags_that_take_gpus_nobody_counts_are_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="would use GPUs that the run does not reserve"):
        SGLangConfig(server_args={key: 2})
