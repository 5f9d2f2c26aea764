"""What test_fork_server.py runs in processes of their own; imports nothing of pytest."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import re
import signal
import sys
import threading

from rollart_core.runtime.process import WorkerProcess


class Part:
    """A part that says what its process is like."""

    def describe(self) -> dict[str, object]:
        """Return all that a new process has, whatever it was started by."""
        import torch

        handlers = {int(n): _name(signal.getsignal(n)) for n in signal.valid_signals()}
        return {
            "environment": dict(os.environ),
            "cwd": os.getcwd(),
            "path": list(dict.fromkeys(sys.path)),
            "num_threads": torch.get_num_threads(),
            "handlers": handlers,
            "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "files": sorted(re.sub(r"\d+", "N", name) for name in _open_files()),
            "garbage": gc.isenabled(),
            "encoding": (sys.stdout.encoding, sys.stderr.line_buffering),
        }

    def draw(self) -> tuple[float, float, int]:
        """Return what generators give that are seeded by chance."""
        import numpy as np
        import torch

        return random.random(), float(np.random.rand()), torch.initial_seed()

    def parent(self) -> int:
        """Return the process that this one was started by."""
        return os.getppid()

    def say(self, text: str) -> None:
        """Write to both streams."""
        print(text)
        print(text, file=sys.stderr)

    async def wait(self) -> None:
        """Never return."""
        await asyncio.Event().wait()


def _open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def ends() -> None:
    """End as the argument says."""
    how = sys.argv[1]
    print("out")
    if how == "raises":
        raise ValueError("trouble")
    if how == "killed":
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(json.loads(how))


def owns_a_part() -> None:
    """Start a part, say which process it is, and wait until this one is killed."""

    async def main() -> None:
        part = WorkerProcess("orphan")
        await part.start("support.forked_programs:Part")
        print(part.pid, flush=True)
        await part.call("wait")

    asyncio.run(main())


def waits() -> None:
    """Say which process this is, and wait until it is killed."""
    print(os.getpid(), flush=True)
    while True:
        signal.pause()


def serves_with_threads() -> None:
    """Be a fork server that something has started a thread in."""
    from support import fork_server

    threading.Thread(target=threading.Event().wait, daemon=True).start()
    fork_server.PRELOADED = ()
    sys.path.insert(0, "")
    fork_server._main(int(sys.argv[1]))


def _name(handler: object) -> str:
    """Return a signal handler as text, without the address of a function."""
    return getattr(handler, "__qualname__", str(handler))
