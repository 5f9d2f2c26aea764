"""A record of each test for CI: how it ended, what it cost, and whether it may be retried.

If ``ROLLART_TEST_REPORT`` names a file, each test that ends adds one line of JSON to it: ``id``,
``outcome`` (passed, failed, skipped), ``wall_s``, ``cpu_s`` (of the process, and of its children
that were waited for), ``reason`` of a failure, and ``may_retry``.

A failure may be retried only if it is one of time or of availability (``support/retries.py``).
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from support.retries import may_retry

VARIABLE: Final = "ROLLART_TEST_REPORT"
_CPU_S: Final = "cpu_s"
_MAY_RETRY: Final = "may_retry"
_REASON: Final = "reason"
_began: Final = pytest.StashKey[float]()


class Reporter:
    """The pytest plugin. Under xdist, workers measure and the controller writes."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        """Report to a file, or measure only."""
        self._path = path
        self._writes = writes
        self._lines: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note the CPU time at which a test begins."""
        item.stash[_began] = _cpu_s()
        return (yield)  # type: ignore[return-value]  # what a wrapper of pluggy returns

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Add what the controller needs to know to the report of a phase."""
        report: Any = yield
        if report.when == "teardown":
            report.user_properties.append((_CPU_S, _cpu_s() - item.stash[_began]))
        if report.failed and call.excinfo is not None:
            report.user_properties.append((_MAY_RETRY, may_retry(call.excinfo.value)))
            report.user_properties.append((_REASON, call.excinfo.exconly().partition("\n")[0]))
        return report  # type: ignore[no-any-return]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Put the phases of a test together, and write its line after the last."""
        if not self._writes:
            return
        line = self._lines.setdefault(
            report.nodeid, {"id": report.nodeid, "outcome": "passed", "wall_s": 0.0}
        )
        line["wall_s"] += report.duration
        told = dict(report.user_properties)
        if report.failed:
            again = bool(told.get(_MAY_RETRY)) and line.get(_MAY_RETRY, True)
            reason = told.get(_REASON, "its process ended")
            line |= {"outcome": "failed", _MAY_RETRY: again, _REASON: reason}
        elif report.skipped and line["outcome"] == "passed":
            line["outcome"] = "skipped"
        if report.when == "teardown":
            line[_CPU_S] = told.get(_CPU_S, 0.0)
            self._write(self._lines.pop(report.nodeid))

    def pytest_sessionfinish(self) -> None:
        """Write the tests that did not come to their end: the process that ran them has crashed."""
        for line in self._lines.values():
            self._write({_REASON: "it crashed", **line, "outcome": "failed", _MAY_RETRY: False})

    def _write(self, line: dict[str, Any]) -> None:
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": round(time.time(), 1), **rounded}) + "\n")


def register(config: pytest.Config) -> None:
    """Report the tests of this session, if a file is named for it."""
    if path := os.environ.get(VARIABLE):
        reporter = Reporter(Path(path), writes=not hasattr(config, "workerinput"))
        config.pluginmanager.register(reporter, "rollart-report")


def _cpu_s() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
