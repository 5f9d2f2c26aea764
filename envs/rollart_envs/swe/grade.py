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

from rollart_envs.swe.logs import Status, Statuses, mouse_number, short_option, worst

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
    gold: Statuses | None = None,
) -> Grade:
    """Grade a run: full when every test passes, partial when some do and none broke, else none.

    Args:
        statuses: What ran, from a log or a report; nothing when the run gave no proof.
        fail_to_pass: Ids of tests that have to pass now.
        pass_to_pass: Ids of tests that have to pass still.
        framework: A key of ``logs.READERS``.
        gold: What :func:`expected_failures` gave for the gold patch: XFAIL and XPASS count only for
            these tests. None: XFAIL counts and XPASS does not, as in the SWE-bench harness.
    """
    known = _by_task_id(statuses, framework)
    left_out = [
        test for test in (*fail_to_pass, *pass_to_pass) if _is_noise(test) and test not in known
    ]
    mended = _passes([test for test in fail_to_pass if test not in left_out], known, gold)
    kept = _passes([test for test in pass_to_pass if test not in left_out], known, gold)
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


def expected_failures(
    statuses: Statuses, tests: Sequence[str], framework: str = "pytest"
) -> dict[str, Status]:
    """Return the status of those tests of a gold run that ended as XFAIL or XPASS."""
    known = _by_task_id(statuses, framework)
    found = {test: known[test] for test in tests if test in known}
    return {test: status for test, status in found.items() if status in ("XFAIL", "XPASS")}


def _passes(tests: Sequence[str], known: Statuses, gold: Statuses | None) -> dict[str, bool]:
    def passes(test: str) -> bool:
        status = known.get(test)
        if status in ("XFAIL", "XPASS") and gold is not None:
            return gold.get(test) == status
        return status in ("PASSED", "XFAIL")

    return {test: passes(test) for test in tests}


def _is_noise(test: str) -> bool:
    return test.startswith("[")


def _share(passes: dict[str, bool], *, empty: float) -> float:
    return sum(passes.values()) / len(passes) if passes else empty


def _resolution(to_mend: float, to_keep: float) -> Resolution:
    if to_keep < 1 or to_mend == 0:
        return "none"
    return "full" if to_mend == 1 else "partial"
