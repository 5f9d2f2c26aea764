"""Starts and ends the servers of ``openenv_servers.py``; the socket is the test's own."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).with_name("openenv_servers.py")


class ServerProcess:
    """A server that can be ended and started again behind one port."""

    def __init__(self, python: str, name: str, sessions: int = 64) -> None:
        self._command = [python, str(SCRIPT), name]
        self._sessions = sessions
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it; who connects before it is ready waits in the socket's queue."""
        fd = self._socket.fileno()
        command = [*self._command, str(fd), str(self._sessions)]
        self._process = subprocess.Popen(command, pass_fds=[fd])

    def wait(self) -> None:
        """Wait until it has ended by itself."""
        assert self._process is not None
        self._process.wait(30)

    def close(self) -> None:
        """End it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._socket.close()
