"""Each benchmark runs in its short form, by the command line, and gives rows as documented.

Which of them may be skipped in which lane of the CI is in ``skips.toml``; any other skip fails. No
mark of speed is tested, only those that hold on every machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.bench_results import SKIPPED, faults_of, faults_of_skip, lane, unlisted_skips
from support.pace import scaled

from rollart_bench.async_ import CASES
from rollart_bench.cli import benchmarks

pytestmark = pytest.mark.bench

LIMIT_S = 900.0
"""Ends a benchmark that hangs; most take less than ten seconds."""
FORMS = [
    *((name,) for name in benchmarks()),
    *(("async", f"case={case}") for case in CASES),
]


@contextmanager
def _command(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start ``rollart``; afterwards it has ended, and what it started has too."""
    process = subprocess.Popen(
        [Path(sys.executable).with_name("rollart"), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # it ends what it started
            with suppress(subprocess.TimeoutExpired):
                process.wait(scaled(30))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_the_short_form_runs_and_gives_rows(form: tuple[str, ...], tmp_path: Path) -> None:
    name, *options = form
    with _command("bench", name, *options, "short=true", "--json", cwd=tmp_path) as process:
        out, err = process.communicate(timeout=scaled(LIMIT_S))
    assert "Traceback" not in err, err[-3000:]
    assert process.returncode in (0, SKIPPED), err[-3000:]
    result = json.loads(out)  # one object, and nothing else
    check = faults_of_skip if process.returncode == SKIPPED else faults_of
    faults = [*check(name, result), *unlisted_skips(name, result, lane())]
    assert not faults, "\n".join(faults)
    if "picture" in result:
        assert (tmp_path / result["picture"]).read_bytes().startswith(b"\x89PNG")
