"""Judging a function by a hidden test in a box; and running a program on many inputs.

Takes: a box that has started, and a test; or a program and its :class:`Cases`. Gives: a
:class:`Judgement`; or how the program ended on each input, and its output. Never: reads a file that
lies in the box, its interpreter and that one's library apart, takes a broken box for a wrong
answer, lets the right outputs into the box, or reads an answer of which a part is missing.

The judge's source is an argument and the request is stdin: nothing an earlier answer wrote can
stand in for either. An answer that silences the judge has failed, if the judge speaks in a box that
no answer has been in; else the box is what failed.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypeAlias

from rollart_core.contracts.sandbox import ExecResult, Sandbox
from rollart_core.errors import SandboxFailure
from rollart_sandboxes.judging import case_runner, function_judge

Verdict: TypeAlias = Literal["passed", "failed", "error"]
GRACE_S: Final = 20.0
"""Seconds beyond the test's own in which the judge has to answer, on a machine with much to do."""
SILENCED: Final = "it stopped the judge"
CLEAN_ENV: Final[Mapping[str, str]] = {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}

_MOST_BYTES = 64 << 20
"""Of one answer, where the box allows as much."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What came of running the hidden test."""

    verdict: Verdict
    """``error``: the judge gave no answer of its own (killed, out of time, box broken)."""
    reason: str = ""
    """For logs; it may hold what the hidden test says."""
    told: str = ""
    """What the agent may be told."""


@dataclass(frozen=True, slots=True)
class JudgeInterpreter:
    """What runs a hidden test."""

    path: str
    """A Python, absolute in the box."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class HiddenTest:
    """What one function is judged by."""

    entry_point: str
    """The function's name."""
    test: str
    """Source that calls it and raises when it is wrong."""
    reference: str = ""
    """Source that is run before the test: helpers, a right solution; the candidate's function takes
    the place of its own."""

    def request(self, candidate: str, *, nonce: str, timeout_s: float = 10.0) -> bytes:
        """Return what the judge reads from its stdin.

        Args:
            candidate: The agent's source.
            nonce: Random text that only this request holds; the answer has to bear it.
            timeout_s: For the whole test, the candidate's start included.
        """
        return json.dumps(
            {
                "nonce": nonce,
                "candidate": candidate,
                "reference": self.reference,
                "test": self.test,
                "entry_point": self.entry_point,
                "timeout_s": timeout_s,
            }
        ).encode("utf-8", "surrogatepass")


async def find_python(box: Sandbox) -> str:
    """Return the absolute path of the ``python3`` on the PATH of a box nothing has run in.

    Raises:
        SandboxFailure: There is none; a retry cannot help.
    """
    code = "import sys; print(sys.executable)"
    result = await box.exec(("python3", "-I", "-S", "-c", code), timeout_s=GRACE_S)
    path = result.stdout.decode(errors="replace").strip()
    if result.exit_code == 0 and path.startswith("/"):
        return path
    failure = SandboxFailure(
        "the box has no python3 on its PATH: set the option python, or take another image",
        boundary="box.python",
    )
    failure.retryable = False
    raise failure


async def judge(
    box: Sandbox, hidden: HiddenTest, candidate: str, interpreter: JudgeInterpreter
) -> Judgement:
    """Run a hidden test on a candidate.

    Args:
        box: A box; what the candidate leaves in it is the caller's affair.
        hidden: The test.
        candidate: The agent's source.
        interpreter: What runs it, and for how long.

    Raises:
        SandboxFailure: The box is gone.
    """
    nonce, timeout_s = secrets.token_hex(16), interpreter.timeout_s
    try:
        result = await box.exec(
            (interpreter.path, "-I", "-S", "-B", "-c", function_judge.BOOTSTRAP, _judge_source()),
            timeout_s=timeout_s + GRACE_S,
            env=CLEAN_ENV,
            stdin=hidden.request(candidate, nonce=nonce, timeout_s=timeout_s),
        )
    except OSError as error:
        return Judgement("error", f"the judge could not be started: {error}", SILENCED)
    found = read_judgement(result.stdout, nonce)
    if found.verdict != "error":
        return found
    said = result.stderr.decode(errors="replace").strip()[-200:]
    return Judgement("error", f"{found.reason} (exit code {result.exit_code}) {said}", SILENCED)


def read_judgement(stdout: bytes, nonce: str) -> Judgement:
    """Return what the judge said.

    Only one line counts: JSON that bears the nonce of the request. Anything else on stdout is
    passed over, and two such lines are no answer.
    """
    answers = bearing(stdout, nonce)
    if len(answers) != 1:
        return Judgement("error", f"the judge answered {len(answers)} times instead of once")
    verdict = answers[0].get("verdict")
    reason, told = (str(answers[0].get(name, "")) for name in ("reason", "told"))
    if verdict == "passed":
        return Judgement("passed", reason, told)
    return Judgement("failed" if verdict == "failed" else "error", reason, told)


def bearing(stdout: bytes, nonce: str) -> list[dict[str, object]]:
    """Return the JSON objects, one a line, that bear a nonce."""
    return [found for line in stdout.splitlines() if (found := _answer(line, nonce))]


def _answer(line: bytes, nonce: str) -> dict[str, object] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("nonce") == nonce else None


@cache
def _judge_source() -> str:
    return Path(function_judge.__file__).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class CaseOutput:
    """What came of one input."""

    how: str
    """``done``, ``crashed`` or ``out of time``."""
    output: str
    """What it printed, or its result as JSON; empty unless done."""


@dataclass(frozen=True, slots=True)
class Cases:
    """A program and its inputs."""

    inputs: Sequence[object]
    """Texts for stdin; with an ``entry_point`` lists of arguments."""
    entry_point: str = ""
    """The function that is called; empty: the program is run."""
    cpu_s: float = 5.0
    """Processor seconds for one input."""
    stops: bool = False
    """Whether to stop at the first input on which the program does not end well."""

    @property
    def wall_s(self) -> float:
        """Seconds by the clock for one input: a program that waits uses no processor time."""
        return 10 + 4 * self.cpu_s

    def request(self, source: str, nonce: str) -> bytes:
        """Return what the runner reads from its stdin."""
        return json.dumps(
            {
                "nonce": nonce,
                "source": source,
                "entry_point": self.entry_point,
                "inputs": list(self.inputs),
                "cpu_s": self.cpu_s,
                "wall_s": self.wall_s,
                "stops": self.stops,
            }
        ).encode("utf-8", "surrogatepass")


async def run_cases(
    box: Sandbox, cases: Cases, source: str, python: str
) -> list[CaseOutput] | None:
    """Run a program on its inputs.

    Args:
        box: A box; what the program leaves in it is the caller's affair.
        cases: The inputs.
        source: The program.
        python: A Python, absolute in the box.

    Returns:
        One output for each input, fewer when it stops early; None when the runner did not answer.

    Raises:
        SandboxFailure: The box is gone, or gives back less than one output may hold.
    """
    nonce = secrets.token_hex(16)
    try:
        result = await box.exec(
            (python, "-I", "-S", "-B", "-c", case_runner.BOOTSTRAP, _runner_source()),
            timeout_s=GRACE_S + len(cases.inputs) * cases.wall_s,
            env=CLEAN_ENV,
            stdin=cases.request(source, nonce),
            max_output_bytes=_MOST_BYTES,
        )
    except OSError:
        return None
    if not _is_cut(result):
        return _outputs(result.stdout, nonce, len(cases.inputs))
    if not result.stdout.startswith(b'\n{"nonce": "%s"' % nonce.encode()):
        return None  # somebody else has written there: the runner writes nothing before its answer
    if len(cases.inputs) > 1:
        return await _in_halves(box, cases, source, python)
    failure = SandboxFailure(
        "the outputs do not fit: raise the sandbox's output_bytes", boundary="box.cases"
    )
    failure.retryable = False
    raise failure


def _is_cut(result: ExecResult) -> bool:
    """Whether a part of stdout is missing, or may be."""
    return result.truncated and (result.stdout_cut is not None or result.stderr_cut is None)


async def _in_halves(
    box: Sandbox, cases: Cases, source: str, python: str
) -> list[CaseOutput] | None:
    """Run a program on the first inputs, then on the others: each answer is half as long."""
    middle = len(cases.inputs) // 2
    first = await run_cases(box, replace(cases, inputs=cases.inputs[:middle]), source, python)
    if first is None or len(first) < middle:
        return first
    if cases.stops and first[-1].how != case_runner.DONE:
        return first
    rest = await run_cases(box, replace(cases, inputs=cases.inputs[middle:]), source, python)
    return None if rest is None else first + rest


def _outputs(stdout: bytes, nonce: str, most: int) -> list[CaseOutput] | None:
    """Return what the runner said; None when it said nothing that can be read."""
    answers = bearing(stdout, nonce)
    found = answers[0].get("results") if len(answers) == 1 else None
    if not isinstance(found, list) or len(found) > most:
        return None
    if not all(isinstance(one, list) and len(one) == 2 for one in found):
        return None
    try:
        return [CaseOutput(str(how), _text(str(output))) for how, output in found]
    except ValueError:
        return None


def _text(output: str) -> str:
    return base64.b64decode(output, validate=True).decode("utf-8", "replace")


@cache
def _runner_source() -> str:
    return Path(case_runner.__file__).read_text(encoding="utf-8")
