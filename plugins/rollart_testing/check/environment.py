"""The checks of one environment, in children: one that does the work, one or two that compare.

Takes: a job for :mod:`rollart_testing.check.child`. Gives: a result for every name asked for.
Never: hangs where an environment hangs: its child is ended, and the check that found it fails.

    first child:  transcript, every check of ``check_env``  hash seed 1, this folder
    second child: transcript                                hash seed 2, elsewhere, network off
    third child:  transcript, where the second had trouble  hash seed 2, network on
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from rollart_testing.agent_checks import AGENT_CHECKS, AGENT_NEEDS
from rollart_testing.check import offline
from rollart_testing.check.catalogue import AGENTS
from rollart_testing.check.process import Child, Ended, Message, environ, said_results
from rollart_testing.check.transcript import error, parting
from rollart_testing.env_checks import CHECKS, NEEDS
from rollart_testing.results import CheckOutcome, CheckResult

FRESH: Final = "fresh_processes_agree"
OFFLINE: Final = "works_offline"
_TIMED: Final = ("reset", "step", "prepare", "finish", "close")
_REPEATS: Final = (*NEEDS["same_verdict_twice"], *AGENT_NEEDS["same_verdict_twice"])
_TIMED_CHECKS: Final = ("within_timeouts",)
_WHILE_FRESH: Final = f"not judged while {FRESH} fails"
_CHILD: Final = "rollart_testing.check.child"


def check_environment(
    job: Mapping[str, Any],
    names: Sequence[str],
    paths: Sequence[Path],
    until: float,
    heard: Callable[[str], None],
) -> dict[str, CheckResult]:
    """Check an environment.

    Args:
        job: Kind, id and options.
        names: The checks asked for.
        paths: Folders to import from before all others.
        until: Monotonic seconds at which all is ended.
        heard: Told the name of each check as it begins.
    """
    compared = FRESH in names or OFFLINE in names
    known = AGENT_CHECKS if job["kind"] == AGENTS else CHECKS
    own = [name for name in names if name in known]
    with tempfile.TemporaryDirectory(prefix="rollart-check-") as elsewhere:
        second = _Second(job, paths, Path.cwd() if job["options"] else Path(elsewhere), until)
        with ThreadPoolExecutor(1) as beside:
            pending = beside.submit(second.run, offline.prefix()[0]) if compared else None
            first = Child(_CHILD, environ(paths), Path.cwd()).run(
                {**job, "transcript": compared, "checks": own},
                until=until,
                heard=lambda message: _tell(message, heard),
            )
            other = pending.result() if pending else None
        found = _own_results(first, own)
        if other is not None:
            heard(FRESH)
            found |= _compared(first, other, second, found)
    return {name: found[name] for name in names}


class _Second:
    """Starts the children that are compared with the first.

    Args:
        job: As for the first.
        paths: As for the first.
        cwd: Their working directory; another than the first's, unless options may name files.
        until: Monotonic seconds at which they are ended.
    """

    def __init__(
        self, job: Mapping[str, Any], paths: Sequence[Path], cwd: Path, until: float
    ) -> None:
        self._job = {**job, "transcript": True, "checks": []}
        self._environ, self._cwd, self._until = environ(paths, second=True), cwd, until

    def run(self, prefix: Sequence[str] = ()) -> Ended:
        """Run one, with the network off when ``prefix`` is what turns it off."""
        child = Child(_CHILD, self._environ, self._cwd, prefix)
        return child.run({**self._job, "offline": bool(prefix)}, until=self._until)


def _tell(message: Message, heard: Callable[[str], None]) -> None:
    if message.get("begin"):
        heard(message["begin"])


def _own_results(first: Ended, names: Sequence[str]) -> dict[str, CheckResult]:
    """Return a result for every check of the first child; what it did not come to is skipped."""
    found = said_results(first)
    if first.why:
        guilty = "within_timeouts" if first.hung_in in _TIMED else first.running or "make"
        where = f" (in {first.running})" if first.running not in {"", guilty} else ""
        found[guilty] = CheckResult(guilty, CheckOutcome.FAIL, f"{first.why}{where}")
    reason = f"not run: {first.why or 'it could not be made'}"
    missing = {
        name: CheckResult(name, CheckOutcome.SKIP, reason) for name in names if name not in found
    }
    return {**found, **missing}


def _compared(
    first: Ended, other: Ended, second: _Second, found: Mapping[str, CheckResult]
) -> dict[str, CheckResult]:
    """Judge what needs a second process: is it the same there, and without a network?"""
    failed = [name for name, result in found.items() if result.outcome is CheckOutcome.FAIL]
    blocked = [name for name in failed if name in (*_REPEATS, *_TIMED_CHECKS)]
    own_error = error(first.said("transcript") or [])
    if blocked or (own_error and failed):
        reason = f"not judged while {(blocked or failed)[0]} fails"
        return {name: _skip(name, reason) for name in (FRESH, OFFLINE)}
    if own_error:
        return {FRESH: _fail(FRESH, own_error), OFFLINE: _skip(OFFLINE, _WHILE_FRESH)}
    cut_off, why_not = offline.prefix()
    trouble = _trouble(first, other)
    online_trouble = _trouble(first, second.run()) if trouble and cut_off else trouble
    fresh = (
        _fail(FRESH, online_trouble) if online_trouble else CheckResult(FRESH, CheckOutcome.PASS)
    )
    if not online_trouble and not first.said("deterministic"):
        fresh = _skip(FRESH, "its spec says that it is not deterministic")
    if first.said("network"):
        return {FRESH: fresh, OFFLINE: _skip(OFFLINE, "its spec says that it needs the network")}
    if not cut_off:
        return {FRESH: fresh, OFFLINE: _skip(OFFLINE, why_not)}
    if trouble and online_trouble:
        return {FRESH: fresh, OFFLINE: _skip(OFFLINE, _WHILE_FRESH)}
    cut = _fail(OFFLINE, f"without a network: {trouble}") if trouble else None
    return {FRESH: fresh, OFFLINE: cut or CheckResult(OFFLINE, CheckOutcome.PASS)}


def _trouble(first: Ended, other: Ended) -> str | None:
    """Return what went otherwise in the other process; None when nothing did."""
    episodes = other.said("transcript")
    if episodes is None:
        return other.why or "it ended without a word"
    if error(episodes):
        return error(episodes)
    return parting(first.said("transcript"), episodes) if first.said("deterministic") else None


def _fail(name: str, reason: str) -> CheckResult:
    return CheckResult(name, CheckOutcome.FAIL, reason)


def _skip(name: str, reason: str) -> CheckResult:
    return CheckResult(name, CheckOutcome.SKIP, reason)
