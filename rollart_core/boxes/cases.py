"""A program's outputs on many inputs, from a box.

Takes: a box that has started, a program and inputs. Gives: how it ended on each, and its output.
Never: lets the right outputs into the box.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rollart_core.boxes import case_runner
from rollart_core.boxes.judging import CLEAN_ENV, GRACE_S, bearing
from rollart_core.contracts.sandbox import Sandbox


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
        SandboxFailure: The box is gone.
    """
    nonce = secrets.token_hex(16)
    try:
        result = await box.exec(
            (python, "-I", "-S", "-B", "-c", case_runner.BOOTSTRAP, _runner_source()),
            timeout_s=GRACE_S + len(cases.inputs) * cases.wall_s,
            env=CLEAN_ENV,
            stdin=cases.request(source, nonce),
            max_output_bytes=64 << 20,
        )
    except OSError:
        return None
    answers = bearing(result.stdout, nonce)
    found = answers[0].get("results") if len(answers) == 1 else None
    if not isinstance(found, list) or len(found) > len(cases.inputs):
        return None
    if not all(isinstance(one, list) and len(one) == 2 for one in found):
        return None
    return [CaseOutput(str(how), str(output)) for how, output in found]


@cache
def _runner_source() -> str:
    return Path(case_runner.__file__).read_text(encoding="utf-8")
