"""Grading: does a patch mend what it should, and break nothing?

Takes: a task's test ids, and the status of each test that ran. Gives: a :class:`Grade`. Never:
counts a test that did not run, or was skipped, as passed.

Ids in SWE-bench were read from logs and are cut at their first space (``test_x[*arg`` of
``test_x[*arg, **kwargs]``), so that one of them may stand for several tests; of these the worst
counts, as pytest prints failures last and the harness keeps the last line. A few are no tests at
all: ``[`` and ``[100%]---`` came from output of pytest in pytest. No run can give these: they are
left out, and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rollart_envs.swe.logs import Statuses, mouse_number, short_option, worst

Resolution: TypeAlias = Literal["full", "partial", "none"]


@dataclass(frozen=True, slots=True)
class Grade:
    """How a patch did."""

    resolution: Resolution
    fail_to_pass: float
    """Share of the tests that had to become good and did, in [0, 1]."""
    pass_to_pass: float
    """Share of the tests that had to stay good and did, in [0, 1]; 1 when there are none."""
    failed: tuple[str, ...]
    """Tests that had to pass and did not, as the task names them."""
    left_out: tuple[str, ...] = ()
    """Ids of the task that name no test."""

    @property
    def reward(self) -> float:
        """1 for a full resolution, else 0."""
        return float(self.resolution == "full")


def grade(
    statuses: Statuses,
    *,
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    framework: str = "pytest",
) -> Grade:
    """Grade a run: full when every test passes, partial when some do and none broke, else none.

    Args:
        statuses: What ran, from a log or a report; nothing when the run gave no proof.
        fail_to_pass: Ids of tests that have to pass now.
        pass_to_pass: Ids of tests that have to pass still.
        framework: A key of ``logs.READERS``.
    """
    known = _by_task_id(statuses, framework)
    left_out = [
        test for test in (*fail_to_pass, *pass_to_pass) if _is_noise(test) and test not in known
    ]
    mended = _passes(fail_to_pass, known, left_out)
    kept = _passes(pass_to_pass, known, left_out)
    failed = tuple(test for test, passed in (*mended.items(), *kept.items()) if not passed)
    to_mend, to_keep = _share(mended, empty=0.0), _share(kept, empty=1.0)
    return Grade(_resolution(to_mend, to_keep), to_mend, to_keep, failed, tuple(left_out))


def cut_id(test: str) -> str:
    """Return a pytest id as a log's reader keeps it: up to its first space."""
    return test.split(maxsplit=1)[0] if "::" in test else test


def _by_task_id(statuses: Statuses, framework: str) -> Statuses:
    """Return statuses under the whole ids and, for pytest, under those the harness would use."""
    if framework not in ("pytest", "pytest-options", "matplotlib"):
        return statuses
    change = {"pytest-options": short_option, "matplotlib": mouse_number}.get(framework, str)
    short = worst((change(cut_id(test)), status) for test, status in statuses.items())
    return {**short, **{test: status for test, status in statuses.items() if test not in short}}


def _passes(tests: Sequence[str], known: Statuses, left_out: Sequence[str]) -> dict[str, bool]:
    return {test: known.get(test) in ("PASSED", "XFAIL") for test in tests if test not in left_out}


def _is_noise(test: str) -> bool:
    return test.startswith("[")


def _share(passes: dict[str, bool], *, empty: float) -> float:
    return sum(passes.values()) / len(passes) if passes else empty


def _resolution(to_mend: float, to_keep: float) -> Resolution:
    if to_keep < 1 or to_mend == 0:
        return "none"
    return "full" if to_mend == 1 else "partial"
