"""An environment that runs in a sandbox, with the interface of a local environment.

    IsolatedEnv (an id, options, ``isolation``) -> EnvSlot, a slot -> EnvSandbox, with several slots

One sandbox of a recipe holds the environments of several episodes. Calls for numbered slots go to
the env server in it. An exception of an environment is raised here as EnvironmentFailure. Once the
sandbox is gone, all calls fail with SandboxFailure.

Takes: an id, its options, the key ``isolation``. Gives: :class:`IsolatedEnv`, with the optional
methods that the environment in the sandbox has. Never: runs the environment's code here, begins an
episode in a retired sandbox, keeps an empty sandbox for long, trusts data from a sandbox, or lets a
call hang: its sandbox is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, Final

import gymnasium

from rollart_core.contracts.sandbox import ExecResult, Sandbox
from rollart_core.errors import (
    ConfigError,
    EnvironmentFailure,
    PluginError,
    SandboxFailure,
    UnknownIdError,
    first_line,
)
from rollart_core.rollout import loop
from rollart_core.spaces import Messages, Text
from rollart_core.types import Observation
from rollart_sandboxes.isolation import config
from rollart_sandboxes.isolation.recipe import Recipe, recipe_of
from rollart_sandboxes.pool.source import SandboxSource

Reset = tuple[Observation, dict[str, Any]]
Step = tuple[Observation, float, bool, bool, dict[str, Any]]
_OPTIONAL = ("oracle", "secrets", "num_tasks", "task_clusters", "corpus")


class IsolatedEnv(gymnasium.Env[Observation, str]):
    """Proxy of an environment in a sandbox.

    If the sandbox fails, the current call fails. The next ``reset`` uses another sandbox.
    """

    def __init__(self, slot: EnvSlot) -> None:
        self._slot = slot
        self.observation_space: Any = Messages() if slot.facts.get("messages") else Text()
        self.action_space = Text()
        offers = slot.facts.get("offers") or ()
        for name in _OPTIONAL:
            if name in offers:  # callers test for optional methods with hasattr
                setattr(self, name, getattr(self, f"_{name}"))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode, and wait for it."""
        super().reset(seed=seed)
        return _pair(loop.run(self._slot.begin(seed, options)))

    def step(self, action: str) -> Step:
        """Act, and wait for the result."""
        return _five(loop.run(self._slot.call("step", action)))

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Reset:
        """Begin an episode."""
        return _pair(await loop.on_loop(self._slot.begin(seed, options)))

    async def astep(self, action: str) -> Step:
        """Act."""
        return _five(await loop.on_loop(self._slot.call("step", action)))

    def close(self) -> None:
        """Close the environment and release its slot; may be called twice."""
        loop.run(self._slot.close())

    def _oracle(self) -> str | None:
        advice: str | None = loop.run(self._slot.call("oracle"))
        return advice

    def _secrets(self) -> list[str]:
        return [str(text) for text in loop.run(self._slot.call("secrets"))]

    def _num_tasks(self, split: str) -> int | None:
        count = loop.run(self._slot.call("num_tasks", split))
        return None if count is None else int(count)

    def _task_clusters(self, split: str) -> list[str] | None:
        names = loop.run(self._slot.call("task_clusters", split))
        return None if names is None else [str(name) for name in names]

    def _corpus(self) -> list[str]:
        return [str(text) for text in loop.run(self._slot.call("corpus"))]


async def open_env(env_id: str, options: Mapping[str, object]) -> IsolatedEnv:
    """Create an environment in a sandbox. If cancelled, a sandbox that hangs is killed.

    Args:
        env_id: Id or ``module:Class``, as in the sandbox.
        options: The environment's own options, and ``isolation``.

    Raises:
        UserError: If the isolation or the options are invalid.
        EpisodeError: If the sandbox does not start, or the environment raises while it is created.
    """
    given, rest = config.split(options)
    recipe = await asyncio.to_thread(_recipe, given, env_id)
    slot = EnvSlot(recipe, env_id, rest)
    try:
        await loop.on_loop(slot.open())
        return IsolatedEnv(slot)
    except BaseException:
        await asyncio.shield(loop.on_loop(slot.close()))
        raise


def make(env_id: str, options: Mapping[str, object]) -> IsolatedEnv:
    """Create an environment in a sandbox, and wait for it.

    Raises:
        UserError: As :func:`open_env`, and if a sandbox cannot start here.
        EpisodeError: As :func:`open_env`.
    """
    given, rest = config.split(options)
    slot = EnvSlot(_recipe(given, env_id), env_id, rest)
    try:
        loop.run(slot.open())
        return IsolatedEnv(slot)
    except BaseException as e:
        loop.run(slot.close())
        if isinstance(e, SandboxFailure) and not e.retryable:
            raise PluginError(f"{env_id}: {e}") from e
        raise


_recipes: dict[str, Recipe] = {}


def _recipe(given: object, env_id: str) -> Recipe:
    """Return the recipe of a sandbox, cached: pip and the Python are not run for each episode."""
    isolation = config.checked(given)
    key = f"{env_id} {isolation.model_dump_json()}"
    if key not in _recipes:
        _recipes[key] = recipe_of(isolation, env_id)
    return _recipes[key]


def _pair(answer: Any) -> Reset:
    observation, info = answer
    return observation, info


def _five(answer: Any) -> Step:
    observation, reward, terminated, truncated, info = answer
    return observation, reward, terminated, truncated, info


LINGER_S = 10.0
"""Seconds that an empty sandbox waits for the next environment, so that it can be reused."""

GRACE_S: Final = 2.0
"""Seconds that the answer to an abandoned call may still take before the sandbox is killed."""
MAX_LINE: Final = 16 << 20
_FILES: Final = ("server.py", "session.py")
_FOLDER: Final = ".rollart"
_ENV: Final = {"PYTHONUTF8": "1"}


class _Sandboxes:
    """The sandboxes of one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        isolation = recipe.isolation
        self._recipe = recipe
        self._source = SandboxSource(isolation.sandbox, isolation.options, isolation.pool)
        self._starts: dict[EnvSandbox, asyncio.Task[None]] = {}
        self._closing: asyncio.Task[None] | None = None

    async def lend(self) -> EnvSandbox:
        """Return a running sandbox with one more slot in use."""
        most = self._recipe.isolation.num_slots
        free = (b for b in self._starts if b.num_slots < most and not b.retired)
        sandbox = next(free, None)
        if sandbox is None:
            sandbox = EnvSandbox(self._source, self._recipe)
            self._starts[sandbox] = asyncio.create_task(sandbox.start())
        sandbox.num_slots += 1
        sandbox.num_opened += 1
        try:
            await asyncio.shield(self._starts[sandbox])
        except BaseException as e:
            await asyncio.shield(self.take_back(sandbox))
            if isinstance(e, SandboxFailure) and self._recipe.hint:
                said = SandboxFailure(f"{e}. {self._recipe.hint}", boundary=e.boundary)
                said.retryable = e.retryable
                raise said from e
            raise
        return sandbox

    async def take_back(self, sandbox: EnvSandbox) -> None:
        """Release a slot. An empty sandbox is closed; the only sandbox is closed after a delay."""
        sandbox.num_slots -= 1
        if sandbox.num_slots:
            return
        if len(self._starts) == 1 and not sandbox.retired and self._starts[sandbox].done():
            asyncio.get_running_loop().call_later(LINGER_S, self._look, sandbox, sandbox.num_opened)
            return
        await self._close(sandbox)

    async def close_idle(self) -> None:
        """Close the sandboxes without a slot in use."""
        await asyncio.gather(*(self._close(b) for b in list(self._starts) if not b.num_slots))

    def _look(self, sandbox: EnvSandbox, num_opened: int) -> None:
        """Close a sandbox that has not been used since."""
        if sandbox in self._starts and not sandbox.num_slots and sandbox.num_opened == num_opened:
            self._closing = asyncio.create_task(self._close(sandbox))

    async def _close(self, sandbox: EnvSandbox) -> None:
        """Close an empty sandbox, and the pool after the last one."""
        if sandbox.num_slots or (start := self._starts.pop(sandbox, None)) is None:
            return  # a slot has been taken since, or it is already being closed
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await sandbox.close()
        if not self._starts:
            _sandboxes.pop(self._recipe.key, None)
            await self._source.close()


_sandboxes: dict[str, _Sandboxes] = {}


async def close_idle() -> None:
    """Close all sandboxes of this process without a slot in use."""
    await asyncio.gather(*(sandboxes.close_idle() for sandboxes in list(_sandboxes.values())))


def _sandboxes_of(recipe: Recipe) -> _Sandboxes:
    return _sandboxes.setdefault(recipe.key, _Sandboxes(recipe))


def _forget() -> None:
    _sandboxes.clear()  # in a fork, they belong to the parent


os.register_at_fork(after_in_child=_forget)


class EnvSlot:
    """One environment in a sandbox; all its coroutines run on the sandboxes' loop.

    Args:
        recipe: The recipe of the sandbox.
        env_id: Id or ``module:Class``, as in the sandbox.
        options: The environment's own options.
    """

    _numbers = itertools.count(1)

    def __init__(self, recipe: Recipe, env_id: str, options: Mapping[str, object]) -> None:
        self._recipe, self._env_id = recipe, env_id
        self._options = json_options(options)
        self._number = 0
        self._sandbox: EnvSandbox | None = None
        self._sandboxes: _Sandboxes | None = None
        self._closed = False
        self.facts: dict[str, Any] = {}

    async def describe(self) -> dict[str, Any]:
        """Return the sandbox's description of the environment.

        Raises:
            UserError: If it has no such environment, or cannot import it.
            SandboxFailure: If there is no sandbox.
        """
        said = await self._ask("describe")
        if not isinstance(said, dict):
            raise PluginError(f"{self._env_id}: its sandbox sent {type(said).__name__}, not a dict")
        return said

    async def open(self) -> None:
        """Create the environment in a sandbox.

        Raises:
            UserError: If it cannot be created with these options.
            EpisodeError: If it raises while it is created, or the sandbox is gone.
        """
        said = await self._ask("open")
        if not isinstance(said, dict) or not isinstance(said.get("offers", []), list):
            await asyncio.shield(self._leave())
            message = "the sandbox's description of its environment cannot be read"
            raise SandboxFailure(message, boundary="isolation")
        self.facts = said

    async def call(self, call: str, *args: object) -> Any:
        """Call a method of the environment.

        Raises:
            EpisodeError: With the environment's exception, or the reason why the sandbox is gone.
        """
        if self._closed or self._sandbox is None:
            raise RuntimeError("the environment is closed")
        try:
            return await self._sandbox.call(self._number, call, *args)
        except Raised as e:
            raise e.failure(f"env.{call}") from e

    async def begin(self, *args: object) -> Any:
        """Begin an episode, in another sandbox if this one has failed or is used up."""
        if self._closed:
            raise RuntimeError("the environment is closed")
        if self._sandbox is None or self._sandbox.retired:
            await self._leave()
            await self.open()
        assert self._sandbox is not None
        self._sandbox.num_episodes += 1
        return await self.call("reset", *args)

    async def close(self) -> None:
        """Close the environment, and release the slot; may be called twice."""
        self._closed = True
        await self._leave()

    async def _ask(self, call: str) -> Any:
        """Take a slot in a sandbox, and describe or create the environment in it."""
        sandboxes = _sandboxes_of(self._recipe)
        sandbox = await sandboxes.lend()
        self._sandboxes, self._sandbox, self._number = sandboxes, sandbox, next(self._numbers)
        try:
            return await sandbox.call(self._number, call, self._env_id, self._options)
        except Raised as e:
            await self._leave()
            raise self._told(e, call) from e
        except BaseException:
            await self._leave()
            raise

    async def _leave(self) -> None:
        sandbox, sandboxes, self._sandbox = self._sandbox, self._sandboxes, None
        if sandbox is None or sandboxes is None:
            return
        try:
            if sandbox.alive:
                async with asyncio.timeout(_CLOSE_S):
                    await sandbox.call(self._number, "close")
        except (Raised, SandboxFailure, TimeoutError):
            pass  # the environment cannot close in time: release the slot anyway
        finally:
            await asyncio.shield(sandboxes.take_back(sandbox))

    def _told(self, error: Raised, call: str) -> Exception:
        """Convert an exception from the environment's creation into an error for the user."""
        message = f"{self._env_id}: in its sandbox: {first_line(error.message)}"
        if "UnknownIdError" in error.types or "LookupError" in error.types[:1]:
            return UnknownIdError(message)
        if "UserError" in error.types:
            return PluginError(message)
        if "ImportError" in error.types:
            said = f"{self._env_id}: in its sandbox ({self._recipe.python}): {error}"
            return PluginError(first_line(said))
        if call == "describe":
            return PluginError(f"{self._env_id}: in its sandbox: {first_line(str(error))}")
        return error.failure("making the environment")


_CLOSE_S = 5.0


def json_options(options: Mapping[str, object]) -> dict[str, Any]:
    """Return options in the form that is sent to a sandbox.

    Raises:
        ConfigError: If one of them is not a plain value.
    """
    try:
        return dict(json.loads(json.dumps(dict(options))))
    except (TypeError, ValueError) as e:
        message = f"options of an isolated environment must be plain values: {first_line(str(e))}"
        raise ConfigError(message) from e


class Raised(Exception):
    """An exception that an environment in a sandbox raised."""

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
    """A sandbox; all its coroutines run on the sandboxes' loop.

    Args:
        source: Where the sandbox comes from.
        recipe: What runs in it.
    """

    def __init__(self, source: SandboxSource, recipe: Recipe) -> None:
        self._source, self._recipe = source, recipe
        self._sandbox: Sandbox | None = None
        self._program: asyncio.Task[None] | None = None
        self._write: Callable[[bytes], None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._late: dict[int, asyncio.TimerHandle] = {}
        self._rest = bytearray()
        self._ids = itertools.count(1)
        self._failure: SandboxFailure | None = None
        self._closing: asyncio.Task[None] | None = None
        self.num_slots = 0
        self.num_opened = 0
        """Number of slots that it has ever had."""
        self.num_episodes = 0
        self._until = float("inf")

    @property
    def alive(self) -> bool:
        """False if it will never answer again."""
        return self._failure is None

    @property
    def retired(self) -> bool:
        """True if no more episodes may begin in it."""
        isolation = self._recipe.isolation
        used_up = self.num_episodes >= isolation.episodes_per_sandbox
        old = asyncio.get_running_loop().time() >= self._until
        return not self.alive or bool(self._late) or used_up or old

    async def start(self) -> None:
        """Take a sandbox and start the server in it.

        Raises:
            SandboxFailure: If there is none, or it does not start.
        """
        began = asyncio.get_running_loop().time()
        try:
            self._sandbox = await self._source.take(**self._recipe.needs)
            for name in _FILES:
                content = files(__package__).joinpath(name).read_bytes()
                await self._sandbox.write_file(f"{_FOLDER}/{name}", content)
        except BaseException as e:
            self._fail(f"the sandbox did not start: {e}")
            await self.close()
            raise
        # Episodes begin in the first half of its lifetime, so that they can end in the second half.
        ttl_s = float(self._recipe.isolation.options["ttl_s"])
        self._until = began + ttl_s / 2
        self._program = asyncio.create_task(self._run(self._sandbox, ttl_s))
        await asyncio.sleep(0)  # the task first sets the write function

    async def call(self, slot: int, call: str, *args: object) -> Any:
        """Make one call for a slot. If cancelled, it has ``GRACE_S`` before its sandbox is killed.

        Raises:
            Raised: The environment's exception.
            SandboxFailure: If the sandbox is gone.
        """
        if self._failure is not None or self._write is None:
            raise self._gone(call)
        key = next(self._ids)
        request = {"id": key, "call": call, "seat": slot, "args": args}
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
        """Stop the sandbox; may be called twice."""
        self._end("the sandbox is closed")
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        program, sandbox = self._program, self._sandbox
        if program is not None:
            program.cancel()
            await asyncio.wait({program})
        if sandbox is not None:
            await self._source.give_back(sandbox)

    async def _run(self, sandbox: Sandbox, ttl_s: float) -> None:
        """Run the server until it ends; then end the sandbox."""
        folder = f"{_FOLDER}/"
        argv = [self._recipe.python, *(folder + name for name in _FILES)]
        try:
            ended = await sandbox.program(
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
                self._end(f"the sandbox wrote a line of more than {MAX_LINE} bytes")
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        try:
            for line in lines:
                self._settle(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            self._end(f"the sandbox's answer violates the protocol: {type(e).__name__}")

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
        reason = f"env.{call} did not return: the sandbox was killed"
        later = asyncio.get_running_loop().call_later(GRACE_S, self._end, reason)
        self._late[key] = later

    def _end(self, message: str) -> None:
        """Kill the sandbox; waiting calls fail immediately."""
        self._fail(message)
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    def _fail(self, message: str) -> None:
        """End all current and later calls; the first reason is kept."""
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
    """Return why the server has ended."""
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    said = f": {first_line(lines[-1])}" if lines else ""
    if ended.timed_out:
        return f"the sandbox's lifetime is over{said}"
    if ended.exit_code == 137:
        return f"the environment was killed in its sandbox, probably for its memory use{said}"
    return f"the environment ended its own process, exit code {ended.exit_code}{said}"
