"""One box with the env server in it, which holds the environments of several episodes.

Takes: calls for numbered seats. Gives: their answers; EnvironmentFailure for what an environment
raised, SandboxFailure for all calls once the box is gone. Never: trusts what comes out of the box,
or lets a call that hangs live: its box is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, Final

from rollart_core.contracts.sandbox import ExecResult, Sandbox
from rollart_core.errors import EnvironmentFailure, SandboxFailure, first_line
from rollart_sandboxes.isolation.recipe import Recipe
from rollart_sandboxes.pool.source import SandboxSource

GRACE_S: Final = 2.0
"""How long the answer to a call that was given up may still come before the box is killed."""
MAX_LINE: Final = 16 << 20
_FILES: Final = ("server.py", "session.py")
_FOLDER: Final = ".rollart"
_ENV: Final = {"PYTHONUTF8": "1"}


class Raised(Exception):
    """What an environment in a box raised."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        types = error.get("types")
        self.types = [str(t) for t in types] if isinstance(types, list) and types else ["Exception"]
        self.message = str(error.get("message", ""))
        self.trace = str(error.get("trace", ""))[-4000:]
        super().__init__(f"{self.types[0]}: {self.message}")

    def failure(self, call: str) -> EnvironmentFailure:
        """Return it as the failure of an episode."""
        message = f"{call}: {self.types[0]}: {first_line(self.message)}"
        return EnvironmentFailure(message, boundary=call, detail=self.trace)


class EnvSandbox:
    """A box; all its coroutines run on the boxes' loop.

    Args:
        source: Where the box comes from.
        recipe: What runs in it.
    """

    def __init__(self, source: SandboxSource, recipe: Recipe) -> None:
        self._source, self._recipe = source, recipe
        self._box: Sandbox | None = None
        self._program: asyncio.Task[None] | None = None
        self._write: Callable[[bytes], None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._late: dict[int, asyncio.TimerHandle] = {}
        self._rest = bytearray()
        self._ids = itertools.count(1)
        self._failure: SandboxFailure | None = None
        self._closing: asyncio.Task[None] | None = None
        self.num_seats = 0
        self.num_opened = 0
        """Seats that it has ever had."""
        self.num_episodes = 0
        self._until = float("inf")

    @property
    def alive(self) -> bool:
        """False when it will never answer again."""
        return self._failure is None

    @property
    def retired(self) -> bool:
        """True when no more episodes may begin in it."""
        isolation = self._recipe.isolation
        used_up = self.num_episodes >= isolation.episodes_per_box
        old = asyncio.get_running_loop().time() >= self._until
        return not self.alive or bool(self._late) or used_up or old

    async def start(self) -> None:
        """Take a box and bring the server up in it.

        Raises:
            SandboxFailure: When there is none, or it does not come up.
        """
        began = asyncio.get_running_loop().time()
        try:
            self._box = await self._source.take(**self._recipe.needs)
            for name in _FILES:
                content = files(__package__).joinpath(name).read_bytes()
                await self._box.write_file(f"{_FOLDER}/{name}", content)
        except BaseException as e:
            self._fail(f"the box did not start: {e}")
            await self.close()
            raise
        # Half of its time is for episodes to begin in, the other half for them to end in.
        ttl_s = float(self._recipe.isolation.options["ttl_s"])
        self._until = began + ttl_s / 2
        self._program = asyncio.create_task(self._run(self._box, ttl_s))
        await asyncio.sleep(0)  # the task hands over the way to write

    async def call(self, seat: int, call: str, *args: object) -> Any:
        """Make one call for a seat; cancelled, it has ``GRACE_S`` more before the box is killed.

        Raises:
            Raised: What the environment raised.
            SandboxFailure: When the box is gone.
        """
        if self._failure is not None or self._write is None:
            raise self._gone(call)
        key = next(self._ids)
        request = {"id": key, "call": call, "seat": seat, "args": args}
        line = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        future = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._write(line)
        try:
            return await future
        except asyncio.CancelledError:
            if key in self._waiting:
                self._give_up(key, call)
            raise

    async def close(self) -> None:
        """Take the box down; may be called twice."""
        self._end("the box is closed")
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        program, box = self._program, self._box
        if program is not None:
            program.cancel()
            await asyncio.wait({program})
        if box is not None:
            await self._source.give_back(box)

    async def _run(self, box: Sandbox, ttl_s: float) -> None:
        """Run the server until it ends, and with it the box."""
        folder = f"{_FOLDER}/"
        argv = [self._recipe.python, *(folder + name for name in _FILES)]
        try:
            ended = await box.program(
                argv, take=self._take, begun=self._begun, timeout_s=ttl_s, env=_ENV
            )
        except Exception as e:
            self._end(first_line(str(e)))
        else:
            self._end(_why(ended))

    def _begun(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def _take(self, data: bytes) -> None:
        self._rest += data
        if b"\n" not in data:
            if len(self._rest) > MAX_LINE:
                self._end(f"the box wrote a line of more than {MAX_LINE} bytes")
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        try:
            for line in lines:
                self._settle(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            self._end(f"the box answered outside the protocol: {type(e).__name__}")

    def _settle(self, answer: Mapping[str, Any]) -> None:
        key = answer["id"]
        timer = self._late.pop(key, None)
        if timer is not None:
            timer.cancel()
        future = self._waiting.pop(key, None)
        if future is None or future.done():
            return
        if "error" in answer:
            future.set_exception(Raised(answer["error"]))
        else:
            future.set_result(answer["value"])

    def _give_up(self, key: int, call: str) -> None:
        reason = f"env.{call} did not come back: the box was killed"
        later = asyncio.get_running_loop().call_later(GRACE_S, self._end, reason)
        self._late[key] = later

    def _end(self, message: str) -> None:
        """Kill the box; what waits fails now."""
        self._fail(message)
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    def _fail(self, message: str) -> None:
        """Let all calls end, now and later; the first reason stays."""
        if self._failure is None:
            self._failure = SandboxFailure(message, boundary="isolation")
        for timer in self._late.values():
            timer.cancel()
        self._late.clear()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._gone("call"))
        self._waiting.clear()

    def _gone(self, call: str) -> SandboxFailure:
        return SandboxFailure(f"env.{call}: {self._failure}", boundary=f"env.{call}")


def _why(ended: ExecResult) -> str:
    """Say why the server is no more."""
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    said = f": {first_line(lines[-1])}" if lines else ""
    if ended.timed_out:
        return f"the box's time is over{said}"
    if ended.exit_code == 137:
        return f"the environment was killed in its box, most likely for its memory{said}"
    return f"the environment ended its own process, exit code {ended.exit_code}{said}"
