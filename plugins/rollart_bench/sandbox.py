"""`rollart bench sandbox`: sandboxes compared with `docker exec`: starts, commands, resets, memory.

The peer is a container in which each command is a ``docker exec``: by the ``docker`` program, and
by the engine's API (create, start and inspect, like Docker's own client libraries). Memory is that
of the processes that exist only for one sandbox. A page that n processes share counts 1/n.

Takes: the sandboxes, and the numbers of measurements. Gives: rows; a sandbox or a peer that is not
available is skipped. Never: depends on a sandbox except by its name and the options of its config.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import why_no_sandbox
from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import EpisodeError, UserError, first_line
from rollart_core.plugins import registry

TAKES: Final = ("sandbox", "image", "sandboxes", "execs", "resets", "starts", "held", "short")

MARK_START_MS = 60.0
MARK_EXEC = 10.0
IMAGE = "rollart-test:latest"
SANDBOXES = ("process", "bubblewrap", "docker")
_FOLDERS, _FILES = 80, 25
_GIT = "git reset -q --hard && git clean -qfdx"
_CHANGE = "echo x > d3/f4; rm d5/f6; mkdir new; echo y > new/file"
_REPOSITORY = f"""
for i in $(seq {_FOLDERS}); do
  mkdir d$i; for j in $(seq {_FILES}); do echo $i $j > d$i/f$j; done
done
git init -q . && git config user.email a@example.org && git config user.name A || exit
git add . && git commit -qm first && git gc -q
"""

COMMAND = ["true"]

_COMMON = frozenset({"dockerd", "containerd", "systemd", "init"})


@dataclass(frozen=True, slots=True)
class Extent:
    """The numbers of measurements."""

    num_sandboxes: int
    """Sandboxes, one after the other."""
    num_execs: int
    """Commands in each."""
    num_resets: int
    """Resets in one sandbox."""
    num_started: int
    """Sandboxes whose starts overlap, for the start rate."""
    num_held: int
    """Sandboxes held at the same time."""


@dataclass(slots=True)
class Times:
    """The measurements of one sandbox, in milliseconds."""

    start: list[float] = field(default_factory=list)
    close: list[float] = field(default_factory=list)
    exec: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    """The ratio of each peer's median to ours, per sandbox."""
    reset: list[float] = field(default_factory=list)
    git: list[float] = field(default_factory=list)
    sandboxes_per_s: float = 0.0
    num_held: int = 0
    memory_bytes: list[int] = field(default_factory=list)


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``sandbox`` (``process,bubblewrap,docker``), ``image`` of docker's sandboxes and of
            the peer (``rollart-test:latest``), ``sandboxes`` (10): sandboxes one after the other,
            ``execs`` (30) in each, ``resets`` (10), ``starts`` (32) eight at a time, ``held`` (32)
            concurrently; ``short`` for a fifth of all.

    Returns:
        The object of ``rollart bench --json``.
    """
    asked = Options("sandbox", options)
    share = 5 if asked.short else 1
    extent = Extent(
        num_sandboxes=asked.integer("sandboxes", 10 // share),
        num_execs=asked.integer("execs", 30 // share),
        num_resets=asked.integer("resets", 10 // share),
        num_started=asked.integer("starts", 32 // share),
        num_held=asked.integer("held", 32 // share),
    )
    names, image = asked.names("sandbox", (), SANDBOXES), asked.text("image", IMAGE)
    reasons = {name: why_no_sandbox(name, _options(name, image)) for name in dict.fromkeys(names)}
    no_engine = why_no_sandbox("docker", _options("docker", image))
    rows = asyncio.run(
        _measure_all([n for n in reasons if not reasons[n]], image, extent, peer=not no_engine)
    )
    reasons["docker exec"] = no_engine
    return result(
        "sandbox", rows, skipped_cases={case: why for case, why in reasons.items() if why}
    )


async def _measure_all(
    names: Sequence[str], image: str, extent: Extent, *, peer: bool
) -> list[dict[str, object]]:
    makers = {
        name: partial(registry.build, "sandboxes", name, _options(name, image)) for name in names
    }
    times = {name: Times() for name in makers}
    with ExitStack() as stack:
        ways: Mapping[str, Callable[[], float]] = {}
        if peer and makers:
            container = DockerExec(image)
            stack.callback(container.close)
            ways = container.ways()
        for turn in range(extent.num_sandboxes):
            for name, make in makers.items():
                echo(f"{name}: sandbox {turn + 1} of {extent.num_sandboxes}")
                await _one_sandbox(make, ways, extent.num_execs, times[name])
        for name, make in makers.items():
            echo(f"{name}: resets, concurrent starts, held sandboxes")
            await _resets(make, extent.num_resets, times[name])
            times[name].sandboxes_per_s = await _starts(make, extent.num_started)
            await _hold(make, extent.num_held, times[name])
    return [made for name in makers for made in _rows(name, times[name])]


def _options(name: str, image: str) -> dict[str, Any]:
    model = registry.config_model("sandboxes", name)
    fields = model.model_fields if model is not None else {}
    known: dict[str, Any] = {"trusted": True, "image": image, "pull": "never"}
    return {key: value for key, value in known.items() if key in fields}


async def _one_sandbox(
    make: Callable[[], Sandbox],
    ways: Mapping[str, Callable[[], float]],
    num_execs: int,
    times: Times,
) -> None:
    """Start a sandbox, run commands in turn with the peers, and close it."""
    sandbox = make()
    times.start.append(await _timed(sandbox.start))
    ours: list[float] = []
    theirs: dict[str, list[float]] = {peer: [] for peer in ways}
    try:
        for _ in range(num_execs):
            ours.append(await _timed(partial(sandbox.exec, ["true"], timeout_s=60)))
            for peer, way in ways.items():
                theirs[peer].append(await asyncio.to_thread(way))
    finally:
        times.close.append(await _timed(sandbox.close))
    times.exec += ours
    for peer, values in theirs.items():
        times.peers.setdefault(peer, []).extend(values)
        times.ratios.setdefault(peer, []).append(median(values) / median(ours))


async def _resets(make: Callable[[], Sandbox], num_resets: int, times: Times) -> None:
    """Reset a changed repository, in turn with git's own method."""
    sandbox = make()
    await sandbox.start()
    try:
        made = await sandbox.exec(["/bin/sh", "-c", _REPOSITORY], timeout_s=300)
        snapshot = await sandbox.snapshot()
        for _ in range(num_resets):
            await sandbox.exec(["/bin/sh", "-c", _CHANGE], timeout_s=60)
            times.reset.append(await _timed(partial(sandbox.restore, snapshot)))
            if made.exit_code == 0:
                await sandbox.exec(["/bin/sh", "-c", _CHANGE], timeout_s=60)
                git = partial(sandbox.exec, ["/bin/sh", "-c", _GIT], timeout_s=60)
                times.git.append(await _timed(git))
                await sandbox.restore(snapshot)
    finally:
        await sandbox.close()


async def _starts(make: Callable[[], Sandbox], num_sandboxes: int, at_once: int = 8) -> float:
    """Return how many sandboxes start per second, with a number of concurrent starts."""
    sandboxes = [make() for _ in range(num_sandboxes)]
    limit = asyncio.Semaphore(at_once)

    async def start(sandbox: Sandbox) -> None:
        async with limit:
            await sandbox.start()

    try:
        began = time.perf_counter()
        await asyncio.gather(*map(start, sandboxes))
        return num_sandboxes / (time.perf_counter() - began)
    finally:
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


async def _hold(make: Callable[[], Sandbox], num_sandboxes: int, times: Times) -> None:
    """Hold sandboxes at the same time: count those that respond, and the memory of each."""
    sandboxes: list[Sandbox] = []
    try:
        for _ in range(num_sandboxes):
            sandbox = make()
            try:
                await sandbox.start()
            except EpisodeError as e:
                echo(f"after {len(sandboxes)} sandboxes: {first_line(str(e))}")
                break
            sandboxes.append(sandbox)
        done = [await sandbox.exec(["true"], timeout_s=60) for sandbox in sandboxes]
        times.num_held = sum(result.exit_code == 0 for result in done)
        pids = [pid for sandbox in sandboxes if (pid := getattr(sandbox, "agent_pid", None))]
        times.memory_bytes = [size for pid in pids if (size := memory_bytes(pid)) is not None]
    finally:
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


async def _timed(action: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await action()
    return (time.perf_counter() - began) * 1e3


def _rows(name: str, times: Times) -> Iterator[dict[str, object]]:
    mark = MARK_START_MS if name == "bubblewrap" else None
    yield from _spread(f"{name}: start", times.start, mark)
    yield from _spread(f"{name}: exec true", times.exec)
    for peer, values in times.peers.items():
        yield row(
            f"{name}: exec true beside {peer}, p50",
            median(times.exec),
            median(values),
            peer,
            "ms",
            ratios=times.ratios[peer],
            mark=MARK_EXEC,
        )
    yield from _spread(f"{name}: close", times.close)
    ratios = [git / ours for git, ours in zip(times.git, times.reset, strict=False)]
    yield row(
        f"{name}: resets of {_FOLDERS * _FILES} files, 4 changed",
        1e3 / median(times.reset),
        1e3 / median(times.git) if times.git else None,
        _GIT if times.git else None,
        "1/s",
        ratios=ratios or None,
    )
    yield row(f"{name}: starts, 8 at once", times.sandboxes_per_s, None, None, "1/s")
    yield row(f"{name}: sandboxes held at once", times.num_held, None, None, "sandboxes")
    if times.memory_bytes:  # not every system reports it
        size = median(times.memory_bytes) / 2**20
        yield row(f"{name}: memory of an empty box", size, None, None, "MiB")


def _spread(
    case: str, values: Sequence[float], mark: float | None = None
) -> Iterator[dict[str, object]]:
    cuts = quantiles(values, n=100, method="inclusive")
    met = cuts[49] < mark if mark is not None else None
    yield row(f"{case}, p50", cuts[49], None, None, "ms", mark=mark, meets_mark=met)
    yield row(f"{case}, p95", cuts[94], None, None, "ms")


class _Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=60)
        self._path = path

    def connect(self) -> None:
        """Connect to the engine."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


class DockerExec:
    """One running container.

    Args:
        image: Its image.

    Raises:
        UserError: If there is no engine, or it does not have the image.
    """

    def __init__(self, image: str) -> None:
        host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self._socket = host.removeprefix("unix://")
        self._name = f"rollart-bench-{uuid.uuid4().hex}"
        if not Path(self._socket).exists():
            raise UserError(f"no Docker engine at {host}")
        self._ask(
            "POST",
            f"/containers/create?name={self._name}",
            {
                "Image": image,
                "Entrypoint": ["sleep", "3600"],
                "HostConfig": {"NetworkMode": "none", "AutoRemove": True},
            },
        )
        try:
            self._ask("POST", f"/containers/{self._name}/start")
        except BaseException:
            self.close()
            raise

    def ways(self) -> dict[str, Callable[[], float]]:
        """Return the functions that run a command and return its milliseconds, by peer name."""
        found = {"docker exec, by API": self.by_api}
        if shutil.which("docker"):
            found["docker exec, by CLI"] = self.by_cli
        return found

    def by_cli(self) -> float:
        """Run a command with the ``docker`` program."""
        began = time.perf_counter()
        subprocess.run(["docker", "exec", self._name, *COMMAND], check=True, capture_output=True)
        return (time.perf_counter() - began) * 1e3

    def by_api(self) -> float:
        """Run a command, read its output and get its exit code, with three requests."""
        began = time.perf_counter()
        asked = {"Cmd": COMMAND, "AttachStdout": True, "AttachStderr": True}
        made = self._ask("POST", f"/containers/{self._name}/exec", asked)
        self._ask("POST", f"/exec/{made['Id']}/start", {"Detach": False, "Tty": False})
        if self._ask("GET", f"/exec/{made['Id']}/json")["ExitCode"] != 0:
            raise UserError("docker exec of `true` failed")
        return (time.perf_counter() - began) * 1e3

    def close(self) -> None:
        """Remove the container."""
        self._ask("DELETE", f"/containers/{self._name}?force=1")

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        connection = _Connection(self._socket)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
        except OSError as e:
            raise UserError(f"the Docker engine at {self._socket} does not answer: {e}") from e
        finally:
            connection.close()
        if answer.status >= 300 and not (method == "DELETE" and answer.status in (404, 409)):
            raise UserError(f"error of the Docker engine: {said.decode(errors='replace').strip()}")
        return json.loads(said) if said[:1] == b"{" else None


def memory_bytes(pid: int) -> int | None:
    """Return the memory of a process and of its ancestors that exist only for it.

    These are bubblewrap's monitor, or the shim of a container. None if the system (or the owner of
    the process) does not allow it.
    """
    total = 0
    while pid > 1 and pid != os.getpid():
        folder = Path("/proc", str(pid))
        try:
            name = (folder / "comm").read_text().strip()
            if name in _COMMON:
                break
            total += _pss(folder)
            pid = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            return None
    return total


def _pss(folder: Path) -> int:
    for line in (folder / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{folder} has no Pss")
