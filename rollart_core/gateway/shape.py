"""What answers of all shapes have in common.

Takes: a recorded answer. Gives: its head, its usage, its tokens as text. Never: reads requests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rollart_core.contracts.inference import GenerateResult
from rollart_core.gateway.body import SamplingRequest
from rollart_core.gateway.transcript import Answer, ModelCall
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.types import Message


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, and what is told of it."""

    ask: ModelCall
    answer: Answer
    sampling_request: SamplingRequest
    request_id: str
    model: str

    @property
    def message(self) -> Message:
        """What the policy said."""
        return self.answer.message

    @property
    def result(self) -> GenerateResult:
        """What it sampled."""
        return self.answer.result

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        if "tool_calls" in self.message:
            return "tool_calls"
        return "length" if self.result.finish_reason == "length" else "stop"

    def head(self, kind: str) -> dict[str, Any]:
        """Return what stands around the choices."""
        head: dict[str, Any] = {
            "id": self.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
        }
        if self.sampling_request.token_ids:
            head["prompt_token_ids"] = self.ask.token_ids
        if self.sampling_request.ignored:
            head["rollart"] = {"ignored": list(self.sampling_request.ignored)}
        return head

    def usage(self) -> dict[str, Any]:
        """Return how many tokens it took."""
        num_prompt, num_new = len(self.ask.token_ids), len(self.result.token_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": self.result.num_cached_tokens},
        }


def token_texts(result: GenerateResult, tokenizer: ChatTokenizer) -> list[str]:
    """Return each token as text; parts of a character are U+FFFD."""
    return [tokenizer.decode([token]) for token in result.token_ids]
