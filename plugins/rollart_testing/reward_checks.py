"""Contract checks of reward functions.

Takes: a reward, and requests it can score. Gives: check results. Never: compares two scores of one
request if the reward is not stateless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from rollart_core.contracts.reward import GroupReward, Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample, results_problem
from rollart_testing.results import CheckResult, SkipCheck, expect, run_checks


def example_request(env_return: float = 0.5, *, index: int = 0) -> RewardRequest:
    """Return a reward request as an episode of two turns would make it."""
    return RewardRequest(
        ticket_id=f"group-0.{index}",
        env_id="unregistered/Env-v0",
        split="train",
        task_index=0,
        messages=(
            {"role": "user", "content": "say red"},
            {"role": "assistant", "content": "red"},
        ),
        env_return=env_return,
        success=env_return == 1.0,
        components={"right": env_return},
        num_turns=1,
        num_loss_tokens=2,
    )


def check_reward(
    reward: Reward | GroupReward,
    *,
    reward_range: tuple[float, float] = (0.0, 1.0),
    requests: Sequence[RewardRequest] | None = None,
) -> list[CheckResult]:
    """Check a reward function.

    Args:
        reward: The reward function.
        reward_range: The range in its spec.
        requests: Requests to score; None means the reward's own examples, or a few generated
            requests with returns 0, 0.5 and 1.
    """
    examples = examples_of(reward)
    asked = requests or [request for one in examples for request in one.requests]
    asked = asked or [example_request(r, index=i) for i, r in enumerate((0.0, 0.5, 1.0))]
    checks = {
        "score": partial(_check_score, reward, asked, reward_range),
        "same_request_same_score": partial(_check_same_score, reward, asked),
        "group_size": partial(_check_group_sizes, reward, asked),
        "examples": partial(_check_examples, reward, examples),
    }
    return run_checks(checks)


def examples_of(reward: Reward | GroupReward) -> Sequence[RewardExample]:
    """Return the reward's own examples with expected values; empty if it has none."""
    examples = getattr(reward, "examples", None)
    return tuple(examples()) if callable(examples) else ()


def _score(reward: Reward | GroupReward, requests: Sequence[RewardRequest]) -> list[RewardResult]:
    if isinstance(reward, GroupReward):
        return reward.score_group(requests)
    return [reward.score(request) for request in requests]


def _check_score(
    reward: Reward | GroupReward,
    requests: Sequence[RewardRequest],
    reward_range: tuple[float, float],
) -> None:
    results = _score(reward, requests)
    problem = results_problem(results, len(requests), reward_range)
    expect(not problem, f"it returned {problem}")


def _check_same_score(reward: Reward | GroupReward, requests: Sequence[RewardRequest]) -> None:
    if not reward.stateless:
        raise SkipCheck("it is not stateless")
    first, second = _score(reward, requests), _score(reward, requests)
    expect(first == second, f"{first}, then {second} for the same requests")


def _check_group_sizes(reward: Reward | GroupReward, requests: Sequence[RewardRequest]) -> None:
    if not isinstance(reward, GroupReward):
        raise SkipCheck("it scores one episode at a time")
    for size in range(1, len(requests) + 1):
        results = reward.score_group(requests[:size])
        expect(len(results) == size, f"{len(results)} results for {size} requests")


def _check_examples(reward: Reward | GroupReward, examples: Sequence[RewardExample]) -> None:
    if not examples:
        raise SkipCheck("the reward has no examples: add the optional method examples()")
    for example in examples:
        values = [result.value for result in _score(reward, example.requests)]
        for value, wanted in zip(values, example.values or values, strict=True):
            said = example.requests[0].answer[:60] if len(example.requests) == 1 else "a group"
            expect(
                math.isclose(value, wanted, abs_tol=1e-6), f"{value:g}, not {wanted:g}: {said!r}"
            )
