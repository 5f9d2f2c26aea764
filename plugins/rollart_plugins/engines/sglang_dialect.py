"""The formats of SGLang's HTTP API. All differences between its releases are in this file.

Takes: requests of the engine, responses of the server. Gives: request bodies, flags, and answers.
Never: opens a connection.

Tested with SGLang 0.5.23. Responses without ``weight_versions`` (older releases) are rejected,
because the weights that sampled each token are then unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rollart_core.contracts.inference import FinishReason, GenerateRequest
from rollart_plugins.engines.server_answers import Answer, Json, WeightSpan, odd_answer
from rollart_plugins.engines.server_process import command_flags

SERVER: Final = "SGLang"

GENERATE, ABORT = "/generate", "/abort_request"
MODEL_INFO, SERVER_INFO, LOADS = "/model_info", "/server_info", "/v1/loads?include=core"
PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
RELEASE_MEMORY, RESUME_MEMORY = "/release_memory_occupation", "/resume_memory_occupation"
BEGIN_UPDATE, END_UPDATE = "/begin_weight_update", "/end_weight_update"
UPDATE_FROM_DISK = "/update_weights_from_disk"
UPDATE_FROM_TENSOR = "/update_weights_from_tensor"
UPDATE_FROM_DISTRIBUTED = "/update_weights_from_distributed"
JOIN_GROUP, LEAVE_GROUP = "/init_weights_update_group", "/destroy_weights_update_group"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/load_lora_adapter", "/unload_lora_adapter"
TOKENIZE = "/v1/tokenize"

CONTEXT_MARGIN = 8
"""The number of tokens of the context that the server needs itself, with some reserve."""

_LAUNCH = ("--skip-tokenizer-init", "--skip-server-warmup")
_CPU: Json = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "sleep_on_idle": True,
}
_CPU_ADAPTERS: Json = {"lora_backend": "torch_native"}
_ENVIRONMENT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
"""With the margin, the context can be longer than the model's maximum; no token uses the margin."""
_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}


def flags(options: Mapping[str, Any], *, on_cpu: bool) -> list[str]:
    """Return the command line flags of a server; ``options`` override the defaults for a CPU."""
    cpu = _CPU if on_cpu else {}
    if on_cpu and options.get("enable_lora"):
        cpu = {**cpu, **_CPU_ADAPTERS}
    return [*_LAUNCH, *command_flags({**cpu, **options})]


def environment(more: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
    """Return the server's environment variables, without the Python paths of the run."""
    cpu = _CPU_ENVIRONMENT if on_cpu else {}
    return {"PYTHONPATH": "", **_ENVIRONMENT, **cpu, **more}


def generate_body(request: GenerateRequest, rid: str, max_new_tokens: int) -> Json:
    """Return the body of one generation.

    It contains every sampling parameter, so that no default of the server or model applies.
    """
    return {
        "rid": rid,
        "input_ids": list(map(int, request.token_ids)),
        "return_logprob": True,
        "stream": False,
        "sampling_params": {
            "temperature": request.temperature,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": list(request.stop_token_ids),
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "skip_special_tokens": False,
        },
    }


def read_answer(answer: Any) -> Answer:
    """Return a response in the form that all servers share.

    A request that was aborted while it waited has no counts.

    Raises:
        InferenceFailure: If the response lacks required data.
    """
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise odd_answer(SERVER, "it has no meta_info")
    try:
        pairs = meta.get("output_token_logprobs") or []
        token_ids = [int(pair[1]) for pair in pairs]
        reason = _reason(meta["finish_reason"])
        if reason != "abort" and token_ids != answer["output_ids"]:
            raise odd_answer(SERVER, "its output_ids differ from the tokens of its logprobs")
        cached = int(meta.get("cached_tokens") or 0)
        return Answer(
            SERVER,
            token_ids,
            [float(pair[0]) for pair in pairs],
            reason,
            _weights(meta.get("weight_versions"), len(token_ids)),
            int(meta.get("prompt_tokens") or cached),
            cached,
        )
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise odd_answer(SERVER, f"{type(e).__name__}: {e}") from e


def load_of(said: Any) -> tuple[int, int, float]:
    """Return the numbers of running and waiting requests, and the share of the KV cache in use."""
    loads = said["loads"]
    running = sum(int(one["num_running_reqs"]) for one in loads)
    waiting = sum(int(one["num_waiting_reqs"]) for one in loads)
    return running, waiting, max((float(one["token_usage"]) for one in loads), default=0.0)


def _reason(said: Any) -> FinishReason:
    kind = said["type"]
    if kind == "abort" and said.get("status_code") not in (None, 200, 499, 503):
        raise odd_answer(SERVER, str(said.get("message")))
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    return reasons[kind]


def _weights(said: Any, num_tokens: int) -> list[WeightSpan]:
    if not num_tokens:
        return []
    if not said:
        raise odd_answer(
            SERVER,
            "it does not contain the weights that sampled the tokens "
            "(meta_info.weight_versions); use SGLang 0.5.23",
        )
    return [
        (str(part["version"]), int(part["start"]), min(int(part["end"]), num_tokens))
        for part in said
    ]
