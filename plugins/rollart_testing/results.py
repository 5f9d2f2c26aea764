"""The result of a conformance check: PASS, FAIL or SKIP, with the reason.

Takes: named functions that raise. Gives: one :class:`CheckResult` each. Never: reports a check that
did not run as passed, or one fault twice: a check that depends on a failed one is skipped.
"""

from __future__ import annotations

import importlib
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

from rollart_core.errors import first_line

_CORE: Final = Path(__file__).parents[1]
_STDLIB: Final = Path(sysconfig.get_path("stdlib"))


class CheckOutcome(StrEnum):
    """How a check ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"
    """It could not run; this never counts as a pass."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    name: str
    outcome: CheckOutcome
    reason: str = ""
    """Why it failed or was skipped; for a pass, a remark on what it left out."""


class SkipCheck(Exception):
    """Raised inside a check that cannot run; its message is the reason."""


class CheckFailed(AssertionError):
    """Raised inside a check that found a fault; its message is the reason."""


def expect(truth: object, reason: str) -> None:
    """Raise :class:`CheckFailed` with ``reason`` unless ``truth``."""
    if not truth:
        raise CheckFailed(reason)


def raised(error: BaseException) -> str:
    """Return an exception in one line: its type, its message, and where it was raised.

    The place is the innermost frame outside RollArt and the standard library.
    """
    said = first_line(str(error))
    where = next(filter(_is_theirs, reversed(traceback.extract_tb(error.__traceback__))), None)
    at = f" ({where.filename}:{where.lineno} in {where.name})" if where else ""
    return f"{type(error).__name__}{': ' if said else ''}{said}{at}"


def _is_theirs(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    if path.is_relative_to(_CORE) or frame.filename.startswith("<"):
        return False
    return not path.is_relative_to(_STDLIB) or "site-packages" in path.parts


def torch_or_skip() -> Any:
    """Return torch, for the checks that need a tensor.

    Raises:
        SkipCheck: If it is not installed.
    """
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError:
        raise SkipCheck("torch is not installed") from None


class CheckCourse(TypedDict, total=False):
    """Options for a series of checks."""

    only: Sequence[str] | None
    """Names of the checks to run; None means all."""
    before: Sequence[CheckResult]
    """Results of earlier checks, for those that depend on them."""
    begin: Callable[[str], None]
    """Callback with the name of each check as it begins."""
    done: Callable[[CheckResult], None]
    """Callback with each result."""


def run_checks(
    checks: Mapping[str, Callable[[], str | None]],
    needs: Mapping[str, Sequence[str]] | None = None,
    *,
    basic: Sequence[str] = (),
    **course: Unpack[CheckCourse],
) -> list[CheckResult]:
    """Run the checks in order, and return their results.

    Args:
        checks: Name -> function that raises on a fault; it may return a remark for its pass.
        needs: Name -> earlier checks that it depends on.
        basic: Dependencies of the checks that ``needs`` does not list.
        course: See :class:`CheckCourse`.
    """
    only, before = course.get("only"), course.get("before", ())
    begin, done = course.get("begin"), course.get("done")
    results: list[CheckResult] = []
    for name, check in checks.items():
        if only is not None and name not in only:
            continue
        if begin:
            begin(name)
        wanted = (needs or {}).get(name, basic)
        results.append(run_check(name, check, [*before, *results], wanted))
        if done:
            done(results[-1])
    return results


def run_check(
    name: str,
    check: Callable[[], str | None],
    before: Sequence[CheckResult] = (),
    needs: Sequence[str] = (),
) -> CheckResult:
    """Run one check, unless one of its dependencies ``before`` it did not pass."""
    failed = [r.name for r in before if r.name in needs and r.outcome is CheckOutcome.FAIL]
    if failed:
        return CheckResult(name, CheckOutcome.SKIP, f"not judged while {failed[0]} fails")
    try:
        remark = check()
    except (Exception, SystemExit) as e:
        return _ended(name, e)
    return CheckResult(name, CheckOutcome.PASS, remark or "")


async def run_async_checks(
    checks: Mapping[str, Callable[[], Awaitable[None]]],
) -> list[CheckResult]:
    """Run the checks in order on this loop, and return their results."""
    results = []
    for name, check in checks.items():
        try:
            await check()
        except Exception as e:
            results.append(_ended(name, e))
        else:
            results.append(CheckResult(name, CheckOutcome.PASS))
    return results


def assert_checks(results: Sequence[CheckResult]) -> None:
    """Raise an AssertionError that lists every failed check; for tests of plugins.

    Raises:
        AssertionError: If a check failed, or if there are no results.
    """
    failed = [f"{r.name}: {r.reason}" for r in results if r.outcome is CheckOutcome.FAIL]
    if failed or not results:
        raise AssertionError("\n".join(failed) or "nothing was checked")


def _ended(name: str, error: BaseException) -> CheckResult:
    if isinstance(error, SkipCheck):
        return CheckResult(name, CheckOutcome.SKIP, str(error))
    if isinstance(error, CheckFailed):
        return CheckResult(name, CheckOutcome.FAIL, str(error))
    return CheckResult(name, CheckOutcome.FAIL, raised(error))
