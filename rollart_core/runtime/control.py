"""The control socket of a run: a unix socket in its run directory.

    rollart scale RUN engines=2 --one line of JSON--> control.sock (mode 0600) --> the run
                                <--one line of JSON--

Takes: requests of the run's user on this machine. Gives: the run's answers, or one-line errors.
Never: listens on a network, or waits without limit for a silent client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from rollart_core.errors import RollartError, UserError, first_line
from rollart_core.rollout.asyncio_tasks import cancel_and_wait
from rollart_core.store.journal_schema import FILE as JOURNAL
from rollart_core.suggestions import no_run

SOCKET = "control.sock"
MAX_ADDRESS_BYTES = 100
"""Maximum length of a unix socket's path; systems allow slightly more."""
REQUEST_S = 10.0
"""Seconds within which a connected client must send its request."""
MAX_LINE_BYTES = 1 << 16

Answer = Callable[[Mapping[str, object]], Awaitable[Mapping[str, object]]]
"""Returns the answer to a request; a RollartError becomes ``{"error": ...}``."""


class Control:
    """The server in the run, which answers requests until it is closed."""

    def __init__(self, run_dir: Path, answer: Answer) -> None:
        """Describe the server; ``open`` starts listening."""
        self._path = run_dir / SOCKET
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._asking: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start listening; replace the socket of a killed run.

        Raises:
            OSError: If the folder cannot contain a socket.
        """
        self._path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address(self._path) as address:
                listening.bind(address)
            self._path.chmod(0o600)  # before it listens, so nobody can connect earlier
            self._server = await asyncio.start_unix_server(
                self._serve, sock=listening, limit=MAX_LINE_BYTES
            )
        except BaseException:
            listening.close()
            raise

    async def close(self) -> None:
        """Stop listening; pending requests get no answer."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        await cancel_and_wait(*self._asking)
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            async with asyncio.timeout(REQUEST_S):
                line = await reader.readline()
            answer = await self._answer_to(line)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # the client has disconnected, is silent or sends too much
        finally:
            self._asking.discard(task)
            writer.close()

    async def _answer_to(self, line: bytes) -> Mapping[str, object]:
        try:
            request = json.loads(line)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            return {"error": "a request must be one JSON object on one line"}
        try:
            return await self._answer(request)
        except RollartError as e:
            return {"error": first_line(str(e))}


def ask(run_dir: Path, request: Mapping[str, object], *, timeout_s: float) -> dict[str, object]:
    """Send a request to a run and wait for its answer.

    Raises:
        UserError: If it is not running, does not answer in time, or refuses the request.
    """
    path = run_dir / SOCKET
    if not (run_dir / JOURNAL).is_file():
        raise UserError(no_run(run_dir, JOURNAL))
    if not path.exists():
        raise UserError(f"{run_dir} is not running: it has ended, or has no control socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as talking:
        talking.settimeout(timeout_s)
        try:
            with _address(path) as address:
                talking.connect(address)
            talking.sendall(json.dumps(request).encode() + b"\n")
            line = talking.makefile("rb").readline()
        except TimeoutError:
            raise UserError(f"{run_dir} does not answer within {timeout_s:g} s") from None
        except PermissionError:
            raise UserError(f"{run_dir} belongs to another user: only they may use it") from None
        except OSError:
            raise UserError(f"{run_dir} is not running: it was killed") from None
    if not line:
        raise UserError(f"{run_dir} ended before it answered")
    answer: dict[str, object] = json.loads(line)
    if "error" in answer:
        raise UserError(str(answer["error"]))
    return answer


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield the path of a socket; if it is too long, a short one through its open folder.

    Raises:
        OSError: If the path is too long and this system has no ``/proc``.
    """
    if len(os.fsencode(path)) <= MAX_ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
