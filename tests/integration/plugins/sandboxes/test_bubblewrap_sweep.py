"""What bubblewrap leaves when its monitor is killed before the box began."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess

import pytest
from support.processes import is_running, wait_gone
from support.sandbox_types import missing

from rollart_sandboxes.bubblewrap import BubblewrapSandbox

pytestmark = pytest.mark.skipif(bool(missing("bubblewrap")), reason=str(missing("bubblewrap")))


def test_a_sandbox_whose_monitor_died_before_it_began_is_swept() -> None:
    (said, says), (held, holds) = os.pipe(), os.pipe()
    # As ours, but the monitor waits before it lets the box begin.
    argv = ["bwrap", "--unshare-user", "--unshare-pid", "--as-pid-1", "--die-with-parent"]
    argv += ["--hostname", "box", "--unshare-uts", "--info-fd", str(says)]
    argv += ["--userns-block-fd", str(held), "--ro-bind", "/usr", "/usr", "/usr/bin/true"]
    with subprocess.Popen(argv, pass_fds=(says, held)) as monitor:
        os.close(says)
        os.close(held)
        with open(said) as info:
            child = int(json.load(info)["child-pid"])
        assert is_running(child)
        assert asyncio.run(BubblewrapSandbox.sweep()) == []  # its monitor lives
        assert is_running(child)
        monitor.kill()
        monitor.wait()
    os.close(holds)
    assert is_running(child)
    [told] = asyncio.run(BubblewrapSandbox.sweep())
    assert str(child) in told
    wait_gone(child)
