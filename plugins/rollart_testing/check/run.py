"""Run all checks of a target and build the report.

Takes: a target, options and a selection of checks. Gives: a :class:`Report`. Never: runs a plugin's
code in this process (except the hooks of installed plugins), or leaves a child running.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rollart_core.contracts.env import EnvSpec
from rollart_core.errors import UnknownIdError, UserError
from rollart_core.plugins import registry
from rollart_testing.agent_checks import AGENT_CHECKS, AGENT_NEEDS
from rollart_testing.check import offline
from rollart_testing.check.catalogue import AGENTS, PARTS, STATIC, checked_only, checks_of, wanted
from rollart_testing.check.own_tests import OWN_TESTS, why_none
from rollart_testing.check.process import Child, Ended, Message, environ, said_results
from rollart_testing.check.report import Report, Result
from rollart_testing.check.static import MAX_IMPORT_S, NO_FACTS, Facts, run_static_checks
from rollart_testing.check.target import KINDLESS, Target, open_target
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
        names: The requested checks.
        paths: Folders to import from before all others.
        until: Deadline in monotonic seconds.
        heard: Callback with the name of each check as it begins.
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
                heard=lambda message: _notify(message, heard),
            )
            other = pending.result() if pending else None
        found = _own_results(first, own)
        if other is not None:
            heard(FRESH)
            found |= _compared(first, other, second, found)
    return {name: found[name] for name in names}


class _Second:
    """Starts the child processes that are compared with the first one.

    Args:
        job: As for the first.
        paths: As for the first.
        cwd: Their working directory; it differs from the first child's, unless options may name
            files.
        until: Deadline in monotonic seconds.
    """

    def __init__(
        self, job: Mapping[str, Any], paths: Sequence[Path], cwd: Path, until: float
    ) -> None:
        self._job = {**job, "transcript": True, "checks": []}
        self._environ, self._cwd, self._until = environ(paths, second=True), cwd, until

    def run(self, prefix: Sequence[str] = ()) -> Ended:
        """Run one child; ``prefix`` may turn the network off."""
        child = Child(_CHILD, self._environ, self._cwd, prefix)
        return child.run({**self._job, "offline": bool(prefix)}, until=self._until)


def _notify(message: Message, heard: Callable[[str], None]) -> None:
    if message.get("begin"):
        heard(message["begin"])


def _own_results(first: Ended, names: Sequence[str]) -> dict[str, CheckResult]:
    """Return a result for every check of the first child; checks that did not run are skipped."""
    found = said_results(first)
    if first.why:
        guilty = "within_timeouts" if first.hung_in in _TIMED else first.running or "make"
        where = f" (in {first.running})" if first.running not in {"", guilty} else ""
        found[guilty] = CheckResult(guilty, CheckOutcome.FAIL, f"{first.why}{where}")
    reason = f"not run: {first.why or 'it could not be created'}"
    missing = {
        name: CheckResult(name, CheckOutcome.SKIP, reason) for name in names if name not in found
    }
    return {**found, **missing}


def _compared(
    first: Ended, other: Ended, second: _Second, found: Mapping[str, CheckResult]
) -> dict[str, CheckResult]:
    """Return the results of checks in further processes: a new one, and one without a network."""
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
    """Return what differed in the other process; None if nothing did."""
    episodes = other.said("transcript")
    if episodes is None:
        return other.why or "it ended without a message"
    if error(episodes):
        return error(episodes)
    return parting(first.said("transcript"), episodes) if first.said("deterministic") else None


def _fail(name: str, reason: str) -> CheckResult:
    return CheckResult(name, CheckOutcome.FAIL, reason)


def _skip(name: str, reason: str) -> CheckResult:
    return CheckResult(name, CheckOutcome.SKIP, reason)


Heard = Callable[[str, str], None]
"""Callback with (id, current activity)."""

TIMEOUT_S: Final = 600.0
_PROBE_S: Final = 60.0
_NUM_PROBES: Final = 3
_PROBE: Final = "rollart_testing.check.probe"


def run(
    target: str,
    *,
    only: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    timeout_s: float = TIMEOUT_S,
    heard: Heard = lambda plugin_id, what: None,
) -> Report:
    """Run :func:`rollart_testing.check.check`, and report progress to ``heard``."""
    asked = checked_only(only)
    with tempfile.TemporaryDirectory(prefix="rollart-check-") as scratch:
        found = _opened(target, Path(scratch), options or {})
        if options and found.ids is None:
            raise UserError(
                f"options apply to one plugin, but {target} may hold several: "
                "install it, and give an id"
            )
        results = list(_results(found, asked, dict(options or {}), timeout_s, heard))
    distribution = found.dist.name if found.dist is not None else ""
    return Report(found.name, found.version, tuple(results), distribution)


def _opened(target: str, scratch: Path, options: Mapping[str, object]) -> Target:
    try:
        return open_target(target, scratch)
    except UnknownIdError:
        if registry.ISOLATION not in options:
            raise
        reason = "it is not installed here, only in its sandbox"
        return Target(name=target, ids=[("environments", target)], no_static=reason)


def _results(
    target: Target,
    only: Sequence[str],
    options: Mapping[str, object],
    timeout_s: float,
    heard: Heard,
) -> Iterator[Result]:
    names = [name for name in STATIC if wanted("static", name, only)]
    facts = None
    if target.entry_points and (names or target.ids is None):
        heard(target.static_id, "static")
        facts = _facts(target)
    for result in _static(target, facts, names):
        yield Result(target.static_id, "static", result.name, result.outcome, result.reason)
    if only and set(only) <= {"static", *STATIC}:
        return
    with ThreadPoolExecutor(1) as beside:
        tests = beside.submit(_own_tests, target, only, timeout_s)
        yield from _of_plugins(target, facts, only, options, timeout_s, heard)
        heard(target.static_id, OWN_TESTS)
        for result in tests.result():
            yield Result(target.static_id, "runtime", result.name, result.outcome, result.reason)


def _own_tests(target: Target, only: Sequence[str], timeout_s: float) -> list[CheckResult]:
    """Run the tests of the package; a single plugin has none."""
    if target.ids is not None or not wanted("runtime", OWN_TESTS, only):
        return []
    if reason := why_none(target.project):
        return [CheckResult(OWN_TESTS, CheckOutcome.SKIP, reason)]
    job, until = {"kind": OWN_TESTS}, time.monotonic() + timeout_s
    child = Child(_CHILD, environ(target.paths), target.project or Path.cwd())
    ended = child.run(job, until=until)
    found = said_results(ended).get(OWN_TESTS)
    return [found or CheckResult(OWN_TESTS, CheckOutcome.FAIL, ended.why)]


def _of_plugins(
    target: Target,
    facts: Facts | None,
    only: Sequence[str],
    options: Mapping[str, object],
    timeout_s: float,
    heard: Heard,
) -> Iterator[Result]:
    ids = target.ids if target.ids is not None else _ids(facts)
    for kind, plugin_id in ids:
        known = _kind_of(target, plugin_id) if kind == KINDLESS else kind
        if known == "environments" and _is_agent(facts, plugin_id):
            known = AGENTS
        yield from _of_plugin(target, (known, plugin_id), only, options, timeout_s, heard)
    if not ids:
        yield Result(target.static_id, "runtime", "make", CheckOutcome.SKIP, _nothing_to_run(facts))


def _static(target: Target, facts: Facts | None, names: Sequence[str]) -> list[CheckResult]:
    if target.no_static:
        return [CheckResult(name, CheckOutcome.SKIP, target.no_static) for name in names]
    return run_static_checks(target, facts or NO_FACTS, names)


def _facts(target: Target) -> Facts:
    """Return the facts of a probe; a slow import is timed again, and the minimum counts."""
    job = {"entry_points": [list(pair) for pair in target.entry_points]}
    until = time.monotonic() + _PROBE_S
    child = Child(_PROBE, environ(target.paths), Path.cwd())
    said: list[Message] = []
    while len(said) < _NUM_PROBES:
        probe = child.run(job, until=until)
        if not probe.messages:
            return replace(NO_FACTS, errors={target.entry_points[0][1]: probe.why})
        said.append(probe.messages[0])
        if said[-1]["cpu_s"] <= MAX_IMPORT_S:
            break
    return Facts(**{**said[0], "cpu_s": min(found["cpu_s"] for found in said)})


def _kind_of(target: Target, path: str) -> str:
    child = Child(_PROBE, environ(target.paths), Path.cwd())
    ended = child.run({"class": path}, until=time.monotonic() + _PROBE_S)
    return str(ended.said("kind") or "environments")


def _is_agent(facts: Facts | None, plugin_id: str) -> bool:
    """Return whether an environment is an agent environment by its spec."""
    for kind, spec in facts.specs if facts is not None else ():
        if kind == "environments" and spec.get("id") == plugin_id:
            return spec.get("kind") == "agent"
    try:
        said = registry.spec("environments", plugin_id)
    except UserError:  # it is only in a sandbox; or it is broken, which the checks report
        return False
    return isinstance(said, EnvSpec) and said.kind == "agent"


def _ids(facts: Facts | None) -> list[tuple[str, str]]:
    if facts is None or facts.broken or facts.errors:
        return []
    return [(kind, str(spec["id"])) for kind, spec in facts.specs if "id" in spec]


def _nothing_to_run(facts: Facts | None) -> str:
    if facts is None or facts.broken or facts.errors:
        return "nothing could run: see entry_point"
    return "it registers nothing that can run"


def _of_plugin(
    target: Target,
    of_kind: tuple[str, str],
    only: Sequence[str],
    options: Mapping[str, object],
    timeout_s: float,
    heard: Heard,
) -> Iterator[Result]:
    kind, plugin_id = of_kind
    wanted_checks = checks_of(kind, only)
    if kind not in PARTS:
        reason = f"{plugin_id}: there are no checks for {kind}"
        if kind == "env_adapters":
            reason += "; check one of its environments as ADAPTER::FOREIGN_ID"
        yield Result(target.static_id, "runtime", "make", CheckOutcome.SKIP, reason)
        return
    names = [name for _, name in wanted_checks]
    until = time.monotonic() + timeout_s
    job = {"kind": kind, "id": plugin_id, "options": dict(options)}
    if kind in ("environments", AGENTS):
        found = check_environment(job, names, target.paths, until, lambda w: heard(plugin_id, w))
    else:
        found = _check_part(job, names, target.paths, until, lambda what: heard(plugin_id, what))
    for group, name in wanted_checks:
        result = found[name]
        yield Result(plugin_id, group, name, result.outcome, result.reason)


def _check_part(
    job: Mapping[str, Any],
    names: Sequence[str],
    paths: Sequence[Path],
    until: float,
    heard: Callable[[str], None],
) -> dict[str, CheckResult]:
    heard(job["kind"])
    ended = Child(_CHILD, environ(paths), Path.cwd()).run(job, until=until)
    found = said_results(ended)
    if ended.why and "make" not in found:
        found["make"] = CheckResult("make", CheckOutcome.FAIL, ended.why)
    reason = ended.why or "not run: it could not be created"
    return {name: found.get(name, CheckResult(name, CheckOutcome.SKIP, reason)) for name in names}
