"""Judge a function by a hidden test in a sandbox, and run a program on many inputs.

Takes: a started sandbox, and a test; or a program and its :class:`Cases`. Gives: a
:class:`Judgement`; or how the program ended on each input, and its output. Never: reads a file of
the sandbox, except its interpreter and standard library; reports a broken sandbox as a wrong
answer; sends the correct outputs into the sandbox; or reads an incomplete answer.

The judge's source is an argument and the request is stdin, so a file that an earlier answer wrote
cannot replace either. An answer that silences the judge has failed, if the judge answers in a new
sandbox that no answer has used; otherwise the sandbox has failed.
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
"""Seconds beyond the test's own limit in which the judge must answer, on a busy machine."""
SILENCED: Final = "it stopped the judge"
CLEAN_ENV: Final[Mapping[str, str]] = {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}

_MOST_BYTES = 64 << 20
"""Maximum bytes of one answer, if the sandbox allows as much."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of the hidden test."""

    verdict: Verdict
    """``error``: the judge itself gave no answer (killed, timeout, broken sandbox)."""
    reason: str = ""
    """For logs; it may contain output of the hidden test."""
    told: str = ""
    """The reason that the agent may see."""


@dataclass(frozen=True, slots=True)
class JudgeInterpreter:
    """The interpreter of a hidden test."""

    path: str
    """Absolute path of a Python in the sandbox."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class HiddenTest:
    """The hidden test of one function."""

    entry_point: str
    """The function's name."""
    test: str
    """Source that calls the function and raises if it is wrong."""
    reference: str = ""
    """Source that runs before the test: helpers, a correct solution. The candidate's function
    replaces the one defined here."""

    def request(self, candidate: str, *, nonce: str, timeout_s: float = 10.0) -> bytes:
        """Return the judge's stdin.

        Args:
            candidate: The agent's source.
            nonce: Random text that only this request contains; the answer must contain it.
            timeout_s: Time limit of the whole test, including the candidate's start.
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


async def find_python(sandbox: Sandbox) -> str:
    """Return the absolute path of ``python3`` on the PATH of an unused sandbox.

    Raises:
        SandboxFailure: If there is none; a retry cannot help.
    """
    code = "import sys; print(sys.executable)"
    result = await sandbox.exec(("python3", "-I", "-S", "-c", code), timeout_s=GRACE_S)
    path = result.stdout.decode(errors="replace").strip()
    if result.exit_code == 0 and path.startswith("/"):
        return path
    failure = SandboxFailure(
        "the sandbox has no python3 on its PATH: set the option python, or use another image",
        boundary="sandbox.python",
    )
    failure.retryable = False
    raise failure


async def judge(
    sandbox: Sandbox, hidden: HiddenTest, candidate: str, interpreter: JudgeInterpreter
) -> Judgement:
    """Run a hidden test on a candidate.

    Args:
        sandbox: A sandbox; the caller must handle what the candidate leaves in it.
        hidden: The test.
        candidate: The agent's source.
        interpreter: The Python that runs it, and its time limit.

    Raises:
        SandboxFailure: If the sandbox is gone.
    """
    nonce, timeout_s = secrets.token_hex(16), interpreter.timeout_s
    try:
        result = await sandbox.exec(
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
    """Return the judge's answer.

    Only one line counts: JSON that contains the nonce of the request. Other output is ignored, and
    two such lines are an error.
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
    """Return the JSON objects, one per line, that contain a nonce."""
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
    """The result of one input."""

    how: str
    """``done``, ``crashed`` or ``out of time``."""
    output: str
    """What it printed, or its result as JSON; empty unless done."""


@dataclass(frozen=True, slots=True)
class Cases:
    """A program and its inputs."""

    inputs: Sequence[object]
    """Texts for stdin; with an ``entry_point``, lists of arguments."""
    entry_point: str = ""
    """The function to call; if empty, the program is run."""
    cpu_s: float = 5.0
    """CPU seconds for one input."""
    stops: bool = False
    """Stop at the first input on which the program does not end successfully."""

    @property
    def wall_s(self) -> float:
        """Wall-clock seconds for one input: a program that waits uses no CPU time."""
        return 10 + 4 * self.cpu_s

    def request(self, source: str, nonce: str) -> bytes:
        """Return the runner's stdin."""
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
    sandbox: Sandbox, cases: Cases, source: str, python: str
) -> list[CaseOutput] | None:
    """Run a program on its inputs.

    Args:
        sandbox: A sandbox; the caller must handle what the program leaves in it.
        cases: The inputs.
        source: The program.
        python: Absolute path of a Python in the sandbox.

    Returns:
        One output for each input, fewer if it stops early; None if the runner did not answer.

    Raises:
        SandboxFailure: If the sandbox is gone, or its output limit is below the size of one output.
    """
    nonce = secrets.token_hex(16)
    try:
        result = await sandbox.exec(
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
        return None  # the program wrote there: the runner writes nothing before its answer
    if len(cases.inputs) > 1:
        return await _in_halves(sandbox, cases, source, python)
    failure = SandboxFailure(
        "the outputs exceed the limit: raise the sandbox's output_bytes", boundary="sandbox.cases"
    )
    failure.retryable = False
    raise failure


def _is_cut(result: ExecResult) -> bool:
    """Return whether a part of stdout is missing, or may be."""
    return result.truncated and (result.stdout_cut is not None or result.stderr_cut is None)


async def _in_halves(
    sandbox: Sandbox, cases: Cases, source: str, python: str
) -> list[CaseOutput] | None:
    """Run a program on the first half of the inputs, then on the rest: answers are shorter."""
    middle = len(cases.inputs) // 2
    first = await run_cases(sandbox, replace(cases, inputs=cases.inputs[:middle]), source, python)
    if first is None or len(first) < middle:
        return first
    if cases.stops and first[-1].how != case_runner.DONE:
        return first
    rest = await run_cases(sandbox, replace(cases, inputs=cases.inputs[middle:]), source, python)
    return None if rest is None else first + rest


def _outputs(stdout: bytes, nonce: str, most: int) -> list[CaseOutput] | None:
    """Return the runner's outputs; None if they cannot be read."""
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
