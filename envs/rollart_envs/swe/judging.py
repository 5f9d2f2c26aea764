"""Check that the judge of function-repair tasks works in a new sandbox.

Takes: a source of sandboxes, and a task. Gives: a failure if its own solution does not pass.
Never: treats a broken sandbox as a wrong answer.
"""

from __future__ import annotations

from rollart_core.errors import SandboxFailure
from rollart_envs.swe.function_task import FunctionTask
from rollart_sandboxes.judging.functions import JudgeInterpreter, judge
from rollart_sandboxes.pool.source import SandboxSource


async def expect_gold(
    sandboxes: SandboxSource, task: FunctionTask, interpreter: JudgeInterpreter
) -> None:
    """Raise an error unless the task's own solution passes in a new sandbox.

    Raises:
        SandboxFailure: If the judge does not work there, or the task is wrong. No retry can help.
    """
    sandbox = await sandboxes.take()
    try:
        gold = await judge(sandbox, task.hidden, task.gold_code, interpreter)
    finally:
        await sandboxes.give_back(sandbox)
    if gold.verdict != "passed":
        failure = SandboxFailure(
            f"{task.task_id}: its own solution is judged {gold.verdict} in a new sandbox: "
            f"{gold.reason}",
            boundary="swe.judge",
        )
        failure.retryable = False
        raise failure
