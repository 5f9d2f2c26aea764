"""Requests whose value is known, which `rollart check` scores.

Takes: what the policy said, and what is right. Gives: requests. Never: stands for an environment
that there is.
"""

from __future__ import annotations

from typing import Any

from rollart_core.contracts.reward import RewardRequest
from rollart_core.contracts.reward_check import RewardExample


def asked(answer: str, *, reference: object = None, **fields: Any) -> RewardRequest:
    """Return the request of an episode of one turn.

    Args:
        answer: What the policy said.
        reference: What is right; None: the environment does not say.
        fields: Others of the request.
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
    """Return an example of a reward that compares an answer with a right one."""
    return RewardExample((asked(answer, reference=reference),), (value,))
