"""The formats of SGLang's HTTP API. All differences between its releases are in this file.

Takes: requests of the engine, responses of the server. Gives: request bodies, flags, and results.
Never: opens a connection.

Tested with SGLang 0.5.23. Responses without ``weight_versions`` (older releases) are rejected,
because the weights that sampled each token are then unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from rollart_core.contracts.inference import FinishReason, GenerateRequest, GenerateResult
from rollart_core.errors import InferenceFailure
from rollart_core.types import TokenSpan

Json: TypeAlias = dict[str, Any]
KvOrigin: TypeAlias = Literal["fresh", "kept", "recomputed"]

GENERATE, ABORT = "/generate", "/abort_request"
MODEL_INFO, SERVER_INFO, LOADS = "/model_info", "/server_info", "/v1/loads?include=core"
PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
BEGIN_UPDATE, END_UPDATE = "/begin_weight_update", "/end_weight_update"
UPDATE_FROM_DISK = "/update_weights_from_disk"
UPDATE_FROM_TENSOR = "/update_weights_from_tensor"
UPDATE_FROM_DISTRIBUTED = "/update_weights_from_distributed"
JOIN_GROUP, LEAVE_GROUP = "/init_weights_update_group", "/destroy_weights_update_group"
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
ENVIRONMENT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
"""With the margin, the context can be longer than the model's maximum; no token uses the margin."""
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}


def flags(options: Mapping[str, Any], *, on_cpu: bool) -> list[str]:
    """Return the command line flags of a server; ``options`` override the defaults for a CPU."""
    merged = {**(_CPU if on_cpu else {}), **options}
    found = list(_LAUNCH)
    for key, value in merged.items():
        flag = "--" + key.replace("_", "-")
        if value is True:
            found.append(flag)
        elif isinstance(value, list | tuple):
            found += [flag, *map(str, value)]
        elif value is not False and value is not None:
            found += [flag, str(value)]
    return found


def generate_body(request: GenerateRequest, rid: str) -> Json:
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
            "max_new_tokens": request.max_new_tokens,
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


def generate_result(
    answer: Json, versions: Mapping[str, int], kv: Sequence[KvOrigin]
) -> GenerateResult:
    """Return the result in a response.

    Args:
        answer: The response of the server.
        versions: The policy version of each tag.
        kv: The cache origin of the first span, and of the later spans.

    Raises:
        InferenceFailure: If the response lacks required data.
    """
    try:
        meta = answer["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        token_ids = [int(pair[1]) for pair in pairs]
        logprobs = [float(pair[0]) for pair in pairs]
        reason = _reason(meta["finish_reason"])
        if reason != "abort" and token_ids != answer["output_ids"]:
            raise _odd("its output_ids differ from the tokens of its logprobs")
        num_cached = int(meta.get("cached_tokens") or 0)
        spans = _spans(meta.get("weight_versions"), len(token_ids), versions, kv)
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise _odd(f"{type(e).__name__}: {e}") from e
    if not all(map(math.isfinite, logprobs)):
        raise InferenceFailure("the model's logits are not finite", boundary="engine.generate")
    return GenerateResult(token_ids, logprobs, spans, reason, num_cached)


def num_spans(answer: Any) -> int:
    """Return the number of weight spans in a response."""
    return len(_meta(answer).get("weight_versions") or ())


def num_read(answer: Any) -> tuple[int, int]:
    """Return how many prompt tokens a server computed, and how many were cached.

    Both are 0 for a request that was aborted while it waited: its ``meta_info`` lacks the counts.

    Raises:
        InferenceFailure: If the response has no ``meta_info``, or its counts are not numbers.
    """
    meta = _meta(answer)
    try:
        cached = int(meta.get("cached_tokens") or 0)
        prompt = int(meta.get("prompt_tokens") or cached)
    except (TypeError, ValueError) as e:
        raise _odd(f"{type(e).__name__}: {e}") from e
    return max(prompt - cached, 0), cached


def load_of(said: Any) -> tuple[int, int, float]:
    """Return the numbers of running and waiting requests, and the share of the KV cache in use."""
    loads = said["loads"]
    running = sum(int(one["num_running_reqs"]) for one in loads)
    waiting = sum(int(one["num_waiting_reqs"]) for one in loads)
    return running, waiting, max((float(one["token_usage"]) for one in loads), default=0.0)


def _meta(answer: Any) -> Json:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise _odd("it has no meta_info")
    return meta


def _reason(said: Any) -> FinishReason:
    kind = said["type"]
    if kind == "abort" and said.get("status_code") not in (None, 200, 499, 503):
        raise _odd(str(said.get("message")))
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    return reasons[kind]


def _spans(
    said: Any, num_tokens: int, versions: Mapping[str, int], kv: Sequence[KvOrigin]
) -> tuple[TokenSpan, ...]:
    if not num_tokens:
        return ()
    if not said:
        raise _odd(
            "it does not contain the weights that sampled the tokens "
            "(meta_info.weight_versions); use SGLang 0.5.23"
        )
    spans: list[TokenSpan] = []
    for part in said:
        start, stop = int(part["start"]), min(int(part["end"]), num_tokens)
        if part["version"] not in versions:
            raise _odd(
                f"its weights are {part['version']!r}, which are not of this run; another run "
                "must not use the same server"
            )
        if stop > start:
            spans.append(TokenSpan(start, stop, versions[part["version"]], kv[bool(spans)]))
    bounds = [0, *(s.stop for s in spans)]
    if [s.start for s in spans] != bounds[:-1] or bounds[-1] != num_tokens:
        raise _odd(f"weight_versions {said} do not cover its {num_tokens} tokens")
    return tuple(spans)


def _odd(what: str) -> InferenceFailure:
    return InferenceFailure(f"the SGLang server's answer: {what}", boundary="engine.generate")
