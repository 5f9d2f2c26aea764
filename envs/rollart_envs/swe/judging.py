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
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What runs a hidden test."""

    path: str
    """A Python, absolute in the box."""
    timeout_s: float


async def find_python(box: Sandbox) -> str:
    """Return the absolute path of the ``python3`` on the PATH of a box nothing has run in.

    Raises:
        SandboxFailure: There is none; a retry cannot help.
    """
    code = "import sys; print(sys.executable)"
    result = await box.exec(("python3", "-I", "-S", "-c", code), timeout_s=_GRACE_S)
    path = result.stdout.decode(errors="replace").strip()
    if result.exit_code == 0 and path.startswith("/"):
        return path
    failure = SandboxFailure(
        "the box has no python3 on its PATH: set the option python, or take another image",
        boundary="swe.python",
    )
    failure.retryable = False
    raise failure


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
    nonce, timeout_s = secrets.token_hex(16), interpreter.timeout_s
    try:
        result = await box.exec(
            (interpreter.path, "-I", "-S", "-B", "-c", function_judge.BOOTSTRAP, _judge_source()),
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


@cache
def _judge_source() -> str:
    return Path(function_judge.__file__).read_text(encoding="utf-8")
