"""Reading what :mod:`rollart_envs.swe.report_plugin` wrote.

Takes: the report's bytes and the nonce of the run. Gives: test id -> status. Never: takes a report
that lacks its end, or in which a line was forged, repeated, moved or taken out.
"""

from __future__ import annotations

import hashlib
import hmac
import json

from rollart_envs.swe.logs import Status, worst
from rollart_envs.swe.report_plugin import TAMPERED, signed_text

_STATUSES: tuple[Status, ...] = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
RAN = (0, 1)
"""pytest's exit codes that mean the tests ran to the end: all passed, or some failed."""


class ReportError(ValueError):
    """A report that proves nothing, and why."""


def read_report(content: bytes, nonce: str) -> dict[str, Status]:
    """Return the status of each test in a report.

    Raises:
        ReportError: It has no end, pytest did not run to the end, or a line is not the plugin's.
    """
    records = [_record(line, number, nonce) for number, line in enumerate(content.splitlines())]
    if not records or "end" not in records[-1]:
        raise ReportError("the report has no end: the tests were stopped, or ended the process")
    if records[-1]["end"] == TAMPERED:
        raise ReportError(f"tampered: {records[-1].get('why') or 'the runner was changed'}")
    if records[-1]["end"] not in RAN:
        raise ReportError(f"pytest ended with code {records[-1]['end']}")
    pairs = [(str(record.get("id")), _status(record)) for record in records[:-1]]
    return worst(pairs)


def _record(line: bytes, number: int, nonce: str) -> dict[str, object]:
    try:
        record = json.loads(line)
        mac = record["mac"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ReportError(f"line {number + 1} of the report is not the plugin's") from None
    right = hmac.new(nonce.encode(), signed_text(record), hashlib.sha256).hexdigest()
    if not isinstance(mac, str) or not hmac.compare_digest(mac.encode(), right.encode()):
        raise ReportError(f"line {number + 1} of the report is not signed by this run")
    if record.get("n") != number:
        raise ReportError(f"line {number + 1} of the report is out of its order")
    return dict(record)


def _status(record: dict[str, object]) -> Status:
    for status in _STATUSES:
        if record.get("status") == status:
            return status
    raise ReportError(f"the report holds the status {record.get('status')!r}")
