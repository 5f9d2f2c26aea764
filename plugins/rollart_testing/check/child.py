"""What runs in a child of ``rollart check``: ``python -m rollart_testing.check.child``.

Takes: one line of JSON on stdin (the job). Gives: lines of JSON on the pipe that the job names:
``{"begin": name}``, ``{"done": name, "outcome", "reason"}``, ``{"limits": {call: s}}``, and at the
end ``{"transcript": ...}``. Never: outlives its parent: it ends when stdin closes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from rollart_core.errors import first_line
from rollart_core.plugins import registry
from rollart_testing.agent_checks import AGENT_BASIC, run_agent_checks
from rollart_testing.agent_play import AgentSubject
from rollart_testing.check.catalogue import AGENTS
from rollart_testing.check.offline import bring_loopback_up
from rollart_testing.check.own_tests import OWN_TESTS, run_own_tests
from rollart_testing.check.plugin_kinds import check_part
from rollart_testing.check.transcript import transcript
from rollart_testing.check.watch import SharedWatch
from rollart_testing.env_checks import BASIC, run_env_checks
from rollart_testing.env_play import EnvSubject
from rollart_testing.results import CheckOutcome, CheckResult

FRESH: Final = "fresh_processes_agree"


def main() -> None:
    """Do the job of stdin."""
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.set_inheritable(job["fd"], False)  # what an environment starts must not hold the pipe
    if job.get("offline"):
        bring_loopback_up()
    with os.fdopen(job["fd"], "w", encoding="utf-8", buffering=1) as pipe:
        if job["kind"] == OWN_TESTS:
            _send(pipe, begin=OWN_TESTS)
            _done(partial(_send, pipe), run_own_tests())
        elif job["kind"] in ("environments", AGENTS):
            _environment(job, partial(_send, pipe))
        else:
            _part(job, partial(_send, pipe))


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # not through sys.stdin, whose lock would outlast this thread
    os._exit(1)


def _send(pipe: Any, **message: object) -> None:
    pipe.write(json.dumps(message) + "\n")


def _environment(job: dict[str, Any], send: Callable[..., None]) -> None:
    try:
        subject = _subject(job)
    except Exception as e:
        _done(
            send,
            CheckResult("make", CheckOutcome.FAIL, f"{type(e).__name__}: {first_line(str(e))}"),
        )
        return
    spec = subject.spec
    send(limits=subject.limits_s, deterministic=spec.deterministic, network=spec.network)
    basic: Sequence[str]
    course: Callable[..., list[CheckResult]]
    if isinstance(subject, AgentSubject):
        basic, course = AGENT_BASIC, partial(run_agent_checks, subject)
    else:
        basic, course = BASIC, partial(run_env_checks, subject)
    course = partial(course, begin=lambda name: send(begin=name), done=partial(_done, send))
    needed = basic if job["transcript"] else job["checks"]
    before = course(only=[name for name in basic if name in needed])
    if job["transcript"]:
        send(begin=FRESH)
        send(transcript=transcript(subject))
        send(begin="")
    course(only=[name for name in job["checks"] if name not in basic], before=before)


def _subject(job: dict[str, Any]) -> AgentSubject | EnvSubject:
    plugin_id, options = job["id"], job["options"]
    spec = registry.env_spec(plugin_id, options)
    make = partial(registry.make, plugin_id, **options)
    of_kind = AgentSubject if job["kind"] == AGENTS else EnvSubject
    return of_kind(make, spec, watch=SharedWatch(Path(job["watch"])))


def _part(job: dict[str, Any], send: Callable[..., None]) -> None:
    folder = Path(job["folder"], "part")
    folder.mkdir()
    for result in check_part(job["kind"], job["id"], folder, job["options"]):
        _done(send, result)


def _done(send: Callable[..., None], result: CheckResult) -> None:
    send(done=result.name, outcome=result.outcome.value, reason=result.reason)


if __name__ == "__main__":
    main()
