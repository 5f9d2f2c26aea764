"""Requests with a known value, which `rollart check` scores.

Takes: an answer of the policy, and the right answer. Gives: requests. Never: refers to an
environment that exists.
"""

from __future__ import annotations

from typing import Any

from rollart_core.contracts.reward import RewardRequest
from rollart_core.contracts.reward_check import RewardExample


def asked(answer: str, *, reference: object = None, **fields: Any) -> RewardRequest:
    """Return the request of an episode of one turn.

    Args:
        answer: The policy's answer.
        reference: The right answer. None: the environment provides none.
        fields: Other fields of the request.
    """
    context = {} if reference is None else {"reference": reference}
    return RewardRequest(
        **{
            "ticket_id": "example.0",
            "env_id": "example/Env-v0",
            "split": "train",
            "task_index": 0,
            "messages": (
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": answer},
            ),
            "env_return": 0.0,
            "success": None,
            "context": context,
            "num_turns": 1,
            "num_loss_tokens": len(answer.split()),
            **fields,
        }
    )


def example(answer: str, reference: object, value: float) -> RewardExample:
    """Return an example for a reward that compares an answer with the right one."""
    return RewardExample((asked(answer, reference=reference),), (value,))
