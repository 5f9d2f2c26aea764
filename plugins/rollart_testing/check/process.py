"""Run checks in a watched child process; a hanging call is ended and reported.

Takes: a job (plain values) and limits. Gives: the child's messages and how it ended. Never: leaves
the child or its subprocesses alive.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rollart_core.errors import first_line
from rollart_testing.check.watch import WatchFile
from rollart_testing.results import CheckOutcome, CheckResult

Message = dict[str, Any]
OTHER_CALL_S: Final = 120.0
"""Time limit in seconds for calls without one in the spec, such as ``oracle()``."""
_GRACE_S: Final = 0.5
_EXIT_S: Final = 2.0
_CRASH_S: Final = 30.0
_POLL_S: Final = 0.05
_HASH_SEEDS: Final = ("1", "2")


@dataclass(slots=True)
class Ended:
    """How a child ended, and its messages."""

    messages: list[Message] = field(default_factory=list)
    running: str = ""
    """The check that was running; empty if none."""
    hung_in: str = ""
    """The call that did not return in time; empty if none."""
    why: str = ""
    """Why it did not finish; empty if it did."""

    def said(self, key: str) -> Any:
        """Return the value of the last message with ``key``, or None."""
        found = [message[key] for message in self.messages if key in message]
        return found[-1] if found else None


@dataclass(frozen=True, slots=True)
class Child:
    """How to start a child.

    Args:
        module: The module for ``python -m``; it gets the job on stdin and a pipe for messages.
        environ: Its environment variables.
        cwd: Its working directory.
        prefix: Words before the command, such as ``unshare -n``.
    """

    module: str
    environ: Mapping[str, str]
    cwd: Path
    prefix: Sequence[str] = ()

    def run(
        self,
        job: Mapping[str, object],
        *,
        until: float,
        heard: Callable[[Message], None] = lambda message: None,
    ) -> Ended:
        """Run the job until it ends or exceeds a limit.

        Args:
            job: Plain values.
            until: Deadline in monotonic seconds.
            heard: Callback for each message.
        """
        with tempfile.TemporaryDirectory(prefix="rollart-check-") as name:
            folder = Path(name)
            watch = WatchFile(folder / "watch")
            read_end, write_end = os.pipe()
            whole = {**job, "folder": name, "watch": str(watch.path), "fd": write_end}
            with (folder / "log").open("w+b") as log:
                process = self._start(whole, write_end, log)
                try:
                    ended = _listen(process, read_end, watch, until, heard)
                    if ended.why == "":
                        ended.why = _fate(process, log, _CRASH_S if ended.running else _EXIT_S)
                    if ended.why == "" and ended.running:
                        ended.why = "its process ended before the job was done"
                finally:
                    _end(process)
                    os.close(read_end)
        return ended

    def _start(
        self, job: Mapping[str, object], write_end: int, log: Any
    ) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [*self.prefix, sys.executable, "-P", "-m", self.module],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
                env=dict(self.environ),
                cwd=self.cwd,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        assert process.stdin is not None
        # stdin stays open: the child ends when it closes, which also happens if this process dies.
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        return process


def said_results(ended: Ended) -> dict[str, CheckResult]:
    """Return the results that a child sent, by name."""
    return {
        m["done"]: CheckResult(m["done"], CheckOutcome(m["outcome"]), m["reason"])
        for m in ended.messages
        if "done" in m
    }


def environ(paths: Sequence[Path], *, second: bool = False) -> dict[str, str]:
    """Return the environment variables of a child.

    Args:
        paths: Folders to import from before all others.
        second: Use a different hash seed, time zone and locale than for the first child.
    """
    own = [entry or str(Path.cwd()) for entry in sys.path]
    further = [entry for entry in own if Path(entry).is_dir() and not _is_pythons(entry)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *further]),
        "PYTHONHASHSEED": _HASH_SEEDS[second],
        "TZ": "Pacific/Kiritimati" if second else "UTC",
        "LC_ALL": "C" if second else "C.UTF-8",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _is_pythons(entry: str) -> bool:
    return any(Path(entry).is_relative_to(home) for home in {sys.prefix, sys.base_prefix}) and (
        "site-packages" in entry or "lib" in Path(entry).parts
    )


def _listen(
    process: subprocess.Popen[bytes],
    read_end: int,
    watch: WatchFile,
    until: float,
    heard: Callable[[Message], None],
) -> Ended:
    """Take messages until the pipe closes or a limit passes."""
    ended, waiting = Ended(), b""
    limits: Mapping[str, float] = {}
    while True:
        readable, _, _ = select.select([read_end], [], [], _POLL_S)
        if readable:
            chunk = os.read(read_end, 65536)
            if not chunk:
                return ended
            *lines, waiting = (waiting + chunk).split(b"\n")
            for line in lines:
                message = json.loads(line)
                ended.messages.append(message)
                ended.running = message.get("begin", "" if "done" in message else ended.running)
                limits = message.get("limits", limits)
                heard(message)
            continue
        if process.poll() is not None:  # a subprocess holds the pipe open
            return ended
        if time.monotonic() > until:
            ended.why = "the time for all checks (--timeout) is up"
            return ended
        late = _late(watch, limits)
        if late:
            ended.hung_in, ended.why = late
            return ended


def _late(watch: WatchFile, limits: Mapping[str, float]) -> tuple[str, str] | None:
    """Return the call that exceeded its limit, and a message."""
    under_way = watch.call()
    if under_way is None:
        return None
    call, began = under_way
    limit_s = limits.get(call, OTHER_CALL_S)
    if time.monotonic() - began <= limit_s + _GRACE_S:
        return None
    return call, f"{call} did not return within {limit_s:g} s"


def _fate(process: subprocess.Popen[bytes], log: Any, limit_s: float) -> str:
    """Return why a child that closed its pipe failed; empty if it did not."""
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return ""  # all messages arrived; nothing_left_open checks what keeps it alive
    if code == 0:
        return ""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    last = first_line(lines[-1]) if lines else "it printed nothing"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"its process {how}: {last}"


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
