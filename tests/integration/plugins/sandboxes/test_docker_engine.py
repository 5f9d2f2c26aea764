"""The client of the Docker Engine against engines that answer in every wrong way; and cgroups."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rollart_core.errors import SandboxFailure
from rollart_sandboxes import cgroup, docker_host, engine
from rollart_sandboxes.container import Container
from rollart_sandboxes.docker import DockerSandbox
from rollart_sandboxes.engine import Engine, EngineError

OK = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n"


@pytest.fixture(autouse=True)
def _nobody_has_answered(monkeypatch) -> None:
    monkeypatch.setattr(engine, "_answered", set())


def told(answer: bytes, ask, folder: Path):
    """Return what ``ask`` gives with an engine that answers so, and what it was asked."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        heard.append(head + await reader.readexactly(size))
        writer.write(answer)
        if answer:
            writer.close()
        await reader.read()
        writer.close()
        ended.set()

    ended = asyncio.Event()

    async def main():
        path = folder / "s"
        async with await asyncio.start_unix_server(serve, path):
            found = await ask(Engine(f"unix://{path}"))
            await ended.wait()
            return found

    return asyncio.run(main()), heard


def test_an_answer_is_json_or_lines_of_json_or_nothing(tmp_path) -> None:
    async def ask(one: Engine):
        return await one.ask("POST", "/x", query={"a": "b c", "f": {"label": ["l"]}}, body={"n": 1})

    for answer, said in ((b'{"a": 1}', {"a": 1}), (b"", None), (b"{}\n{}\n", [{}, {}])):
        found, (heard,) = told(OK + answer, ask, tmp_path)
        assert found == said
        head, body = heard.split(b"\r\n\r\n")
        assert head.startswith(b"POST /x?a=b+c&f=%7B%22label%22%3A+%5B%22l%22%5D%7D HTTP/1.0\r\n")
        assert json.loads(body) == {"n": 1}


@pytest.mark.parametrize(
    ("answer", "said", "retryable"),
    [
        (b'HTTP/1.0 500 E\r\n\r\n{"message": "no space left"}', "says: no space left", True),
        (b"HTTP/1.0 500 E\r\n\r\n<html>", "says: <html>", True),
        (b"HTTP/1.0 500 E\r\n\r\n", "no reason given", True),
        (OK + b"{broken", "which is not JSON", True),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "is not a Docker engine", False),
        (b"HTTP/1.0 200", "no Docker engine answers", False),
        (b"", "did not answer within 0.2 s", True),
    ],
)
def test_a_wrong_answer_is_a_typed_failure(tmp_path, answer, said, retryable) -> None:
    async def ask(one: Engine):
        with pytest.raises(SandboxFailure, match=said) as raised:
            await one.ask("GET", "/x", timeout_s=60 if answer else 0.2)
        return raised.value.retryable

    assert told(answer, ask, tmp_path)[0] is retryable


def test_no_permission_on_the_socket_says_which_group(monkeypatch) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(asyncio, "open_unix_connection", refused)
    with pytest.raises(SandboxFailure, match="usermod -aG docker") as raised:
        asyncio.run(Engine("unix:///s").ask("GET", "/x"))
    assert not raised.value.retryable


@pytest.mark.parametrize("host", ["/var/run/docker.sock", "unix://", "tcp://", "npipe:////./x"])
def test_an_address_of_another_kind_is_refused(host) -> None:
    with pytest.raises(SandboxFailure, match="is not an address of a Docker engine"):
        Engine(host)


def test_the_usual_address(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://box:1")
    assert Engine().host == "tcp://box:1"
    assert Engine("unix:///mine").host == "unix:///mine"
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "docker.sock").touch()
    system = Path("/var/run/docker.sock")
    expected = system if system.exists() else tmp_path / "docker.sock"
    assert engine.usual_host() == f"unix://{expected}"


def test_frames_of_two_streams_are_told_apart(tmp_path) -> None:
    def frame(stream: int, content: bytes) -> bytes:
        return bytes([stream, 0, 0, 0]) + len(content).to_bytes(4, "big") + content

    frames = frame(1, b"ab") + frame(2, b"oops") + frame(1, b"") + frame(1, b"cdef") + b"\x01"

    async def ask(one: Engine):
        container = Container(one, "x", await one.attach("x"))
        first = await container.stdout.readexactly(5)
        with pytest.raises(asyncio.IncompleteReadError) as raised:
            await container.stdout.readexactly(2)
        container.stdin.close()
        return first, raised.value.partial, await container.stderr.read()

    head = b"HTTP/1.1 101 UPGRADED\r\nUpgrade: tcp\r\n\r\n"
    found, _ = told(head + frames, ask, tmp_path)
    assert found == (b"abcde", b"f", b"oops")


def test_a_container_that_cannot_be_attached_to_is_a_refusal(tmp_path) -> None:
    async def ask(one: Engine):
        with pytest.raises(EngineError, match="is paused") as raised:
            await one.attach("x")
        return raised.value.status

    answer = b'HTTP/1.1 409 Conflict\r\n\r\n{"message": "is paused"}'
    assert told(answer, ask, tmp_path)[0] == 409


def test_limits_that_the_engine_cannot_hold_are_not_asked_for() -> None:
    sandbox = DockerSandbox(image="x", cpus=1.5, num_pids=9, user="7:8", runtime="runsc")
    sandbox._about = {"MemoryLimit": True, "SwapLimit": False, "PidsLimit": False}
    settings = sandbox._settings(["/data", "/tmp"])
    host = settings["HostConfig"]
    assert host["Memory"] == 2 << 30
    assert not {"MemorySwap", "PidsLimit", "NanoCpus"} & set(host)
    assert (sandbox.enforced_by["num_pids"], sandbox.enforced_by["cpus"]) == ("", "")
    assert (host["Runtime"], host["ReadonlyRootfs"], host["CapDrop"]) == ("runsc", True, ["ALL"])
    assert "uid=7,gid=8" in host["Tmpfs"]["/data"]  # a volume of the image has a size too
    assert "mode=1777" in host["Tmpfs"]["/tmp"]


def test_who_root_of_a_sandbox_is() -> None:
    assert docker_host.users({"SecurityOptions": ["name=seccomp,profile=default"]}) == ""
    assert docker_host.users({"SecurityOptions": ["name=userns"]}) == "remap"
    assert docker_host.users({"SecurityOptions": ["name=rootless", "name=userns"]}) == "rootless"


@pytest.mark.parametrize(
    ("lines", "folder", "key"),
    [
        (["4:memory:/docker/abc", "0::/docker/abc"], "memory/docker/abc", "memory.usage_in_bytes"),
        (["0::/system.slice/docker-abc.scope"], "system.slice/docker-abc.scope", "memory.current"),
    ],
)
def test_the_memory_of_a_container_in_cgroups_of_both_versions(
    tmp_path, monkeypatch, lines, folder, key
) -> None:
    monkeypatch.setattr(cgroup, "_MOUNT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "_PROC", tmp_path / "proc")
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text("\n".join(lines))
    group = tmp_path / "cgroup" / folder
    group.mkdir(parents=True)
    (group / key).write_text("4096\n")
    assert cgroup.memory_group(7, holding="abc") == group
    assert cgroup.memory_group(7, holding="def") is None
    assert cgroup.memory_group(8, holding="abc") is None
    assert cgroup.memory_used_bytes(group) == 4096


def test_what_is_over_its_time_wherever_it_was_made(monkeypatch) -> None:
    monkeypatch.setattr(docker_host.time, "time", lambda: 10_000.0)
    overdue = docker_host._is_overdue
    assert overdue({"rollart.ttl": "600"}, 9_000)
    assert not overdue({"rollart.ttl": "600"}, 9_200)  # its agent has five minutes to say so
    assert not overdue({"rollart.ttl": "soon"}, 0)
    assert not overdue({}, 0)
