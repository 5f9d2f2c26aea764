"""Play whole episodes with functions instead of a model."""

import asyncio
from collections.abc import Callable

import pytest
from rollart_core.contracts.agent import AgentResult, Recorded
from rollart_testing import ScriptedEndpoint
from rollart_testing.endpoint import RecordedRequest

from {{ cookiecutter.module }}.task import {{ cookiecutter.class_name }}


def halves(asked: RecordedRequest) -> str:
    """Answer with the middle of the remaining interval."""
    low, high = 1, 9
    said = [str(message["content"]) for message in asked.messages[1:]]
    for guess, reply in zip(said[::2], said[1::2], strict=True):
        if reply == "Higher.":
            low = int(guess) + 1
        else:
            high = int(guess) - 1
    return str((low + high) // 2)


def played(
    answer: Callable[[RecordedRequest], str], task: int = 0, max_requests: int = 9
) -> tuple[AgentResult, ScriptedEndpoint]:
    """Play a task of the test split."""

    async def episode(endpoint: ScriptedEndpoint) -> AgentResult:
        env = {{ cookiecutter.class_name }}()
        await env.prepare(seed=0, options={"split": "test", "task": task})
        await env.run(endpoint.endpoint)
        result = await env.finish(Recorded())
        env.close()
        return result

    with ScriptedEndpoint(answer, max_requests=max_requests) as endpoint:
        return asyncio.run(episode(endpoint)), endpoint


def test_who_halves_what_is_left_finds_most_numbers() -> None:
    results = [played(halves, task)[0] for task in range(12)]
    assert sum(result.reward for result in results) >= 6
    assert all(result.success == (result.reward == 1.0) for result in results)


@pytest.mark.parametrize("said", ["", "7 or 8", "no idea", "٣"])
def test_an_answer_that_is_no_number_earns_nothing(said: str) -> None:
    result, endpoint = played(lambda asked: said)
    assert (result.reward, result.components["guesses"]) == (0.0, 3.0)
    assert len(endpoint.asked) == 3


def test_a_program_that_is_refused_ends_with_what_it_has() -> None:
    result, endpoint = played(lambda asked: "nothing", max_requests=1)
    assert result.components["guesses"] == 1.0
    assert endpoint.num_refused == 1
