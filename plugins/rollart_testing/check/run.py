"""From what a person typed to a report.

Takes: a target, options and a choice of checks. Gives: a :class:`Report`. Never: runs a plugin's
code in this process (its hooks apart, where it is installed), or leaves a child behind.
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
from rollart_testing.check.catalogue import AGENTS, PARTS, STATIC, checked_only, checks_of, wanted
from rollart_testing.check.environment import check_environment
from rollart_testing.check.own_tests import OWN_TESTS, why_none
from rollart_testing.check.process import Child, Message, environ, said_results
from rollart_testing.check.report import Report, Result
from rollart_testing.check.static import MAX_IMPORT_S, NO_FACTS, Facts, run_static_checks
from rollart_testing.check.target import KINDLESS, Target, open_target
from rollart_testing.results import CheckOutcome, CheckResult

Heard = Callable[[str, str], None]
"""Told (id, what is going on)."""

TIMEOUT_S: Final = 600.0
_PROBE_S: Final = 60.0
_NUM_PROBES: Final = 3
_PROBE: Final = "rollart_testing.check.probe"
_CHILD: Final = "rollart_testing.check.child"


def run(
    target: str,
    *,
    only: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    timeout_s: float = TIMEOUT_S,
    heard: Heard = lambda plugin_id, what: None,
) -> Report:
    """Check as :func:`rollart_testing.check.check` does, and tell ``heard`` what is going on."""
    asked = checked_only(only)
    with tempfile.TemporaryDirectory(prefix="rollart-check-") as scratch:
        found = _opened(target, Path(scratch), options or {})
        if options and found.ids is None:
            raise UserError(
                f"options are for one plugin, and {target} may hold several: "
                "install it, and name an id"
            )
        results = list(_results(found, asked, dict(options or {}), timeout_s, heard))
    return Report(found.name, found.version, tuple(results))


def _opened(target: str, scratch: Path, options: Mapping[str, object]) -> Target:
    try:
        return open_target(target, scratch)
    except UnknownIdError:
        if registry.ISOLATION not in options:
            raise
        reason = "it is not installed here, only in its box"
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
    """Run the tests of the package; of a single plugin there are none."""
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
    """Return what a probe found; where its import was slow, the least time of several counts."""
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
    """Return whether an environment's spec says that its program owns its loop."""
    for kind, spec in facts.specs if facts is not None else ():
        if kind == "environments" and spec.get("id") == plugin_id:
            return spec.get("kind") == "agent"
    try:
        said = registry.spec("environments", plugin_id)
    except UserError:  # it is in a box alone; or broken, as the checks will say
        return False
    return isinstance(said, EnvSpec) and said.kind == "agent"


def _ids(facts: Facts | None) -> list[tuple[str, str]]:
    if facts is None or facts.broken or facts.errors:
        return []
    return [(kind, str(spec["id"])) for kind, spec in facts.specs if "id" in spec]


def _nothing_to_run(facts: Facts | None) -> str:
    if facts is None or facts.broken or facts.errors:
        return "nothing could be run: see entry_point"
    return "it registers nothing that can be run"


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
            reason += "; check one of its environments, ADAPTER::FOREIGN_ID"
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
    reason = ended.why or "not run: it could not be made"
    return {name: found.get(name, CheckResult(name, CheckOutcome.SKIP, reason)) for name in names}
