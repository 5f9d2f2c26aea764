"""A program whose plugins print while they are loaded: its own output is on stdout, all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.pace import scaled

LOUD = """
import sys
import program
from rollart_core.plugins.hookspecs import hookimpl
print("plugin: import")
program.importing.set()
assert program.go_on.wait(60)
{end}
@hookimpl
def rollart_environments():
    print("plugin: hook")
    return []
"""
PROGRAM = """
import os, subprocess, sys, threading
importing, go_on = threading.Event(), threading.Event()

def beside():
    # While another thread imports the plugin.
    assert importing.wait(60)
    print("program: thread", flush=True)
    subprocess.run([sys.executable, "-c", "print('program: child')"], check=True)
    go_on.set()

def main():
    from rollart_core.plugins.manager import plugins
    print("program: before", flush=True)
    threads = [threading.Thread(target=plugins) for _ in range(4)]
    threads.append(threading.Thread(target=beside))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("program: after", flush=True)
    os.system("echo program: shell")
"""


@pytest.mark.parametrize("end", ["", "raise RuntimeError", "sys.exit(3)"])
def test_all_that_a_program_prints_is_on_its_stdout(tmp_path: Path, end: str) -> None:
    (tmp_path / "loud.py").write_text(LOUD.format(end=end), encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    # The main program runs in the import of another module, as a console script may.
    done = subprocess.run(
        [sys.executable, "-c", "import program; program.main()"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "ROLLART_PLUGINS": "loud"},
        timeout=scaled(60),
        check=True,
    )
    told = ["before", "thread", "child", "after", "shell"]
    assert done.stdout.splitlines() == [f"program: {one}" for one in told]
    assert done.stderr.splitlines() == ["plugin: import", "plugin: hook"][: 1 if end else 2]
