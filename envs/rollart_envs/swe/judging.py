"""Judging an answer to a function-repair task in a box.

Takes: a box that has started, a task and an answer. Gives: a judgement. Never: takes a broken box
for a wrong answer.
"""

from __future__ import annotations

from rollart_core.boxes.judging import Interpreter, Judgement, judge
from rollart_core.boxes.source import BoxSource
from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import SandboxFailure
from rollart_envs.swe.function_task import FunctionTask


async def judge_answer(
    box: Sandbox, task: FunctionTask, candidate: str, interpreter: Interpreter
) -> Judgement:
    """Run the hidden test on a candidate.

    Args:
        box: A box; what the candidate leaves in it is the caller's affair.
        task: The task.
        candidate: The agent's source.
        interpreter: What runs it, and for how long.

    Raises:
        SandboxFailure: The box is gone.
    """
    return await judge(box, task.hidden, candidate, interpreter)


async def expect_gold(boxes: BoxSource, task: FunctionTask, interpreter: Interpreter) -> None:
    """Raise unless the task's own solution passes in a fresh box.

    Raises:
        SandboxFailure: The judge does not work there, or the task is wrong; a retry cannot help.
    """
    box = await boxes.take()
    try:
        gold = await judge_answer(box, task, task.gold_code, interpreter)
    finally:
        await boxes.give_back(box)
    if gold.verdict != "passed":
        failure = SandboxFailure(
            f"{task.task_id}: its own solution is judged {gold.verdict} in a fresh box: "
            f"{gold.reason}",
            boundary="swe.judge",
        )
        failure.retryable = False
        raise failure
