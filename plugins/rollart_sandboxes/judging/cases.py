"""A program's outputs on many inputs, from a box.

Takes: a box that has started, a program and inputs. Gives: how it ended on each, and its output.
Never: lets the right outputs into the box, or reads an answer of which a part is missing.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rollart_core.contracts.sandbox import ExecResult, Sandbox
from rollart_core.errors import SandboxFailure
from rollart_sandboxes.judging import case_runner
from rollart_sandboxes.judging.functions import CLEAN_ENV, GRACE_S, bearing

_MOST_BYTES = 64 << 20
"""Of one answer, where the box allows as much."""


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
