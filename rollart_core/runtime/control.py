"""How a run is spoken to from outside: a unix socket in its run directory.

    rollart scale RUN engines=2 --one line of JSON--> control.sock (mode 0600) --> the run
                                <--one line of JSON--

Takes: requests of this machine's user. Gives: what the run answers, or in a line why it cannot.
Never: listens on a network, or waits for ever on who says nothing.
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
from rollart_core.store.journal_schema import FILE as JOURNAL
from rollart_core.suggestions import no_run

SOCKET = "control.sock"
MAX_ADDRESS_BYTES = 100
"""Of a unix socket's path; systems allow a little more."""
REQUEST_S = 10.0
"""Who has connected says what it wants within this."""
MAX_LINE_BYTES = 1 << 16

Answer = Callable[[Mapping[str, object]], Awaitable[Mapping[str, object]]]
"""From a request to its answer; an error of ours becomes ``{"error": ...}``."""


class Control:
    """The run's end: answers requests until it is closed."""

    def __init__(self, run_dir: Path, answer: Answer) -> None:
        """Describe it; ``open`` begins to listen."""
        self._path = run_dir / SOCKET
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._asking: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen; a socket that a killed run left is replaced.

        Raises:
            OSError: When there can be no socket in that folder.
        """
        self._path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address(self._path) as address:
                listening.bind(address)
            self._path.chmod(0o600)  # before it listens: nobody can have connected
            self._server = await asyncio.start_unix_server(
                self._serve, sock=listening, limit=MAX_LINE_BYTES
            )
        except BaseException:
            listening.close()
            raise

    async def close(self) -> None:
        """Listen no more; who still waits for an answer gets none."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
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
            pass  # who asked is gone, or says nothing, or far too much
        finally:
            self._asking.discard(task)
            writer.close()

    async def _answer_to(self, line: bytes) -> Mapping[str, object]:
        try:
            request = json.loads(line)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            return {"error": "a request is one JSON object on one line"}
        try:
            return await self._answer(request)
        except RollartError as e:
            return {"error": first_line(str(e))}


def ask(run_dir: Path, request: Mapping[str, object], *, timeout_s: float) -> dict[str, object]:
    """Ask a run something and wait for its answer.

    Raises:
        UserError: When it does not run, does not answer in time, or says no.
    """
    path = run_dir / SOCKET
    if not (run_dir / JOURNAL).is_file():
        raise UserError(no_run(run_dir, JOURNAL))
    if not path.exists():
        raise UserError(f"{run_dir} is not running: it has ended, or cannot be spoken to")
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
            raise UserError(f"{run_dir} belongs to another user: only they may ask it") from None
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
    """Give a short name for a socket's path, by way of its open folder where it is too long.

    Raises:
        OSError: When it is too long and this system has no such way.
    """
    if len(os.fsencode(path)) <= MAX_ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
