"""``/v1/completions``: raw completions, of a text or of tokens, without the chat template.

Takes: a parsed body, or an answer. Gives: a prompt and wishes, or JSON objects. Never: asks an
engine or keeps anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rollart_core.gateway.body import Body, SamplingRequest, flag, sampling_request
from rollart_core.gateway.errors import bad_field, unsupported
from rollart_core.gateway.shape import Said, token_texts
from rollart_core.models.tokenizer import ChatTokenizer

DEFAULT_MAX_TOKENS = 16
"""What OpenAI's API says where a request says nothing."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One request to go on with a text."""

    prompt: str | list[int]
    sampling_request: SamplingRequest


def text_request(body: Body, vocab_size: int) -> TextRequest:
    """Read a request.

    Raises:
        RequestError: For a field that is wrong, or asks what cannot be kept.
    """
    if body.get("suffix"):
        raise unsupported("suffix", "answers only go on at the end")
    if flag(body, "echo"):
        raise unsupported("echo", "the prompt is not sent back")
    if (body.get("best_of") or 1) != 1:
        raise unsupported("best_of", "every answer is recorded; ask several times")
    wanted = sampling_request(body, "max_tokens", logprobs=_logprobs(body.get("logprobs")))
    if wanted.max_new_tokens is None:
        wanted = replace(wanted, max_new_tokens=DEFAULT_MAX_TOKENS)
    return TextRequest(_prompt(body.get("prompt"), vocab_size), wanted)


def text_response(said: Said, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the answer as one object."""
    head = {**said.head("text_completion"), "usage": said.usage()}
    return {**head, "choices": [_choice(said, tokenizer)]}


def text_chunks(said: Said, tokenizer: ChatTokenizer) -> Iterator[dict[str, Any]]:
    """Return the answer as the chunks of a stream."""
    head = said.head("text_completion")
    if said.sampling_request.include_usage:
        head["usage"] = None
    yield {**head, "choices": [_choice(said, tokenizer)]}
    if said.sampling_request.include_usage:
        yield {**head, "choices": [], "usage": said.usage()}


def _choice(said: Said, tokenizer: ChatTokenizer) -> dict[str, Any]:
    logprobs = None
    if said.sampling_request.logprobs:
        texts = token_texts(said.result, tokenizer)
        offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
        logprobs = {
            "tokens": texts,
            "token_logprobs": said.result.inference_logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }
    choice = {
        "index": 0,
        "text": said.message["content"],
        "logprobs": logprobs,
        "finish_reason": said.finish_reason,
    }
    if said.sampling_request.token_ids:
        choice["prompt_token_ids"] = said.ask.token_ids
        choice["token_ids"] = said.result.token_ids
    return choice


def _prompt(prompt: object, vocab_size: int) -> str | list[int]:
    """Return the one prompt: text or tokens."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise bad_field("prompt", "must be a text, or a list of tokens that is not empty")
    if any(isinstance(each, str | list) for each in prompt):
        raise unsupported("prompt", "only one prompt at a time; ask several times")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        raise bad_field("prompt", "tokens must be whole numbers")
    if not all(0 <= i < vocab_size for i in prompt):
        raise bad_field("prompt", f"tokens must be at least 0 and below {vocab_size}")
    return prompt


def _logprobs(value: object) -> bool:
    if value is None or value is False:
        return False
    if not isinstance(value, int) or not 0 <= value <= 1:
        raise unsupported("logprobs", "only 0 or 1: those of what was sampled are known")
    return True
