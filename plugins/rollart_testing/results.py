"""What a conformance check says: PASS, FAIL or SKIP, with the reason.

Takes: named functions that raise. Gives: one :class:`CheckResult` each. Never: lets a check that
did not run pass for one that did, or one breach fail twice: a check that needs another is skipped
when that one failed.
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
    """It could not be run; never to be shown as a pass."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check's outcome."""

    name: str
    outcome: CheckOutcome
    reason: str = ""
    """Why it failed or was skipped; of a pass, what it did less than usual."""


class SkipCheck(Exception):
    """Raised inside a check that cannot run; its message is the reason."""


class CheckFailed(AssertionError):
    """Raised inside a check that found a breach; its message is the reason."""


def expect(truth: object, reason: str) -> None:
    """Raise :class:`CheckFailed` with ``reason`` unless ``truth``."""
    if not truth:
        raise CheckFailed(reason)


def raised(error: BaseException) -> str:
    """Return an exception in one line: its type, what it says, and where it was raised.

    The place is the innermost one that is neither RollArt's own nor the standard library's.
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
        SkipCheck: When it is not installed.
    """
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError:
        raise SkipCheck("torch is not installed") from None


class CheckCourse(TypedDict, total=False):
    """How checks are gone through, where not simply all of them."""

    only: Sequence[str] | None
    """Names of those to run; None: all."""
    before: Sequence[CheckResult]
    """Results of checks that ran before, for those that need them."""
    begin: Callable[[str], None]
    """Told the name of each as it begins."""
    done: Callable[[CheckResult], None]
    """Told how each ended."""


def run_checks(
    checks: Mapping[str, Callable[[], str | None]],
    needs: Mapping[str, Sequence[str]] | None = None,
    *,
    basic: Sequence[str] = (),
    **course: Unpack[CheckCourse],
) -> list[CheckResult]:
    """Run each check in turn, and say how it ended.

    Args:
        checks: Name -> what raises; it may return a remark for its pass.
        needs: Name -> the checks it cannot be judged without, which come before it.
        basic: What those need that ``needs`` does not name.
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
    """Run one check, unless one that it needs did not hold among those ``before`` it."""
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
    """Run each check in turn on this loop, and say how it ended."""
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
        AssertionError: When a check failed, or when there are no results.
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
