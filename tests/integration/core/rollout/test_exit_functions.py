"""What lives on the background loop is closed when its process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollart_core.rollout import loop

AT_EXIT = """
from rollart_core.rollout import loop

def fail():
    raise RuntimeError("it cannot close")

loop.at_exit(lambda: print("closed"))
loop.at_exit(fail)
{end}
"""


@pytest.mark.parametrize(
    "end", ["", "import os; from rollart_core.runtime.child import leave; leave(); os._exit(0)"]
)
def test_a_process_closes_what_it_has_open_however_it_ends_in_order(end: str) -> None:
    code = AT_EXIT.format(end=end)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("closed\n", "")


def test_each_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_at_exit", [])
    called: list[int] = []

    def close() -> None:
        called.append(1)

    loop.at_exit(close)
    loop.at_exit(close)
    loop.run_exit_functions()
    loop.run_exit_functions()
    assert called == [1]
