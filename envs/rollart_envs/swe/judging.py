"""Judging an answer to a function-repair task in a box.

Takes: a box that has started, a task and an answer. Gives: a :class:`Judgement`. Never: reads a
file that lies in the box, its interpreter and that one's library apart, or takes a broken box for
a wrong answer.

The judge's source is an argument and the request is stdin: nothing an earlier answer wrote can
stand in for either. An answer that silences the judge has failed, if the judge speaks in a box that
no answer has been in; else the box is what failed.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from rollart_core.boxes.source import BoxSource
from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import SandboxFailure
from rollart_envs.swe import function_judge
from rollart_envs.swe.function_task import FunctionTask, Judgement, read_judgement

_GRACE_S: Final = 20.0
"""Seconds beyond the test's own in which the judge has to answer, on a machine with much to do."""
SILENCED: Final = "it stopped the judge"
_CLEAN_ENV: Final[Mapping[str, str]] = {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}


async def judge_answer(
    box: Sandbox, task: FunctionTask, candidate: str, *, python: str, timeout_s: float
) -> Judgement:
    """Run the hidden test on a candidate.

    Args:
        box: A box; what the candidate leaves in it is the caller's affair.
        task: The task.
        candidate: The agent's source.
        python: Absolute path in the box.
        timeout_s: For the test.

    Raises:
        SandboxFailure: The box is gone.
    """
    nonce = secrets.token_hex(16)
    try:
        result = await box.exec(
            (python, "-I", "-S", "-B", "-c", function_judge.BOOTSTRAP, _judge_source()),
            timeout_s=timeout_s + _GRACE_S,
            env=_CLEAN_ENV,
            stdin=task.request(candidate, nonce=nonce, timeout_s=timeout_s),
        )
    except OSError as error:
        return Judgement("error", f"the judge could not be started: {error}", SILENCED)
    found = read_judgement(result.stdout, nonce)
    if found.verdict != "error":
        return found
    said = result.stderr.decode(errors="replace").strip()[-200:]
    return Judgement("error", f"{found.reason} (exit code {result.exit_code}) {said}", SILENCED)


async def expect_gold(
    boxes: BoxSource, task: FunctionTask, *, python: str, timeout_s: float
) -> None:
    """Raise unless the task's own solution passes in a fresh box.

    Raises:
        SandboxFailure: The judge does not work there, or the task is wrong; a retry cannot help.
    """
    box = await boxes.take()
    try:
        gold = await judge_answer(box, task, task.gold_code, python=python, timeout_s=timeout_s)
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


@cache
def _judge_source() -> str:
    return Path(function_judge.__file__).read_text(encoding="utf-8")
