"""The network by name: what is named can be reached from a box, and nothing else."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from support.sandbox_types import HELD, missing, opened

from rollart_sandboxes import base as sandboxes
from rollart_sandboxes import network, proxy

PYTHON = "/usr/bin/python3"
FETCH = """
import sys, urllib.request, urllib.error
try:
    with urllib.request.urlopen(sys.argv[1], timeout=20) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as e:
    print(e.code, e.read().decode())
except urllib.error.URLError as e:
    print(e.reason)
"""
TALK = """
import socket, sys
s = socket.create_connection(('127.0.0.1', 3128), 20)
s.sendall(sys.stdin.buffer.read())
got = b''
while True:
    try: data = s.recv(65536)
    except ConnectionResetError: break
    if not data: break
    got += data
sys.stdout.buffer.write(got)
"""

SEND = """
import threading
said = sys.stdin.buffer.read()
sending = threading.Thread(target=lambda: (s.sendall(said), s.shutdown(socket.SHUT_WR)))
sending.start()
"""


@pytest.fixture(params=HELD)
def isolation(request) -> str:
    if why := missing(request.param):
        pytest.skip(why)
    return request.param


@asynccontextmanager
async def web() -> AsyncIterator[tuple[int, list[bytes]]]:
    """Give the port of a server that says hello, and the heads it was sent."""
    heads: list[bytes] = []

    async def serve(reader, writer) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        body = b"hello " + heads[-1].split()[1]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heads


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    async def serve(reader, writer) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
def names(monkeypatch) -> dict[str, list[str]]:
    """Which names resolve to what."""
    known: dict[str, list[str]] = {}

    async def resolve(name: str, port: int) -> list[str]:
        if name not in known:
            raise OSError(-2, "Name or service not known")
        return known[name]

    monkeypatch.setattr(sandboxes, "Proxy", partial(proxy.Proxy, resolve=resolve))
    return known


@pytest.fixture
def loopback_is_public(monkeypatch) -> None:
    """Let the names of a test lead to its own servers."""
    monkeypatch.setattr(network, "public", lambda found: True)


async def fetch(sandbox, url: str) -> str:
    result = await sandbox.exec([PYTHON, "-c", FETCH, url], timeout_s=60)
    assert result.stderr == b""
    return result.stdout.decode().strip()


async def talk(sandbox, said: bytes) -> bytes:
    result = await sandbox.exec([PYTHON, "-c", TALK], timeout_s=60, stdin=said)
    assert result.stderr == b""
    return result.stdout


@pytest.mark.usefixtures("loopback_is_public")
def test_a_name_that_is_allowed_is_reached_and_others_are_not(isolation, names) -> None:
    async def main() -> None:
        async with web() as (port, heads):
            allowed = [f"*.pypi.test:{port}", f"files.test:{port}"]
            async with opened(isolation, network=allowed) as sandbox:
                names.update({n: ["127.0.0.1"] for n in ("www.pypi.test", "evil.test")})
                url = f"http://www.pypi.test:{port}"
                assert await fetch(sandbox, f"{url}/a?b=c") == "200 hello /a?b=c"
                assert f"Host: www.pypi.test:{port}\r\n".encode() in heads[0]
                for name in ("evil.test", "pypi.test", "127.0.0.1.pypi.test.evil.test"):
                    said = await fetch(sandbox, f"http://{name}:{port}/")
                    assert said.startswith(f"403 rollart: the sandbox may not reach {name}:{port}")
                    assert f"it may reach: *.pypi.test:{port}, files.test:{port}" in said
                tunnel = await fetch(sandbox, "https://evil.test/")
                assert "connection failed: 403 the sandbox may not reach evil.test:443" in tunnel
                assert "403" in await fetch(sandbox, "http://www.pypi.test/")  # another port
                said = await fetch(sandbox, f"http://files.test:{port}/")
                assert said == (
                    f"502 rollart: files.test:{port} cannot be reached: Name or service not known"
                )
                assert len(heads) == 1

    asyncio.run(main())


def test_a_name_that_leads_to_a_private_address_is_not_followed(isolation, names) -> None:
    async def main() -> None:
        async with (
            web() as (port, heads),
            opened(isolation, network=[f"pypi.test:{port}"]) as sandbox,
        ):
            for private in ("127.0.0.1", "::ffff:127.0.0.1", "::1", "169.254.169.254"):
                names["pypi.test"] = [private]
                said = await fetch(sandbox, f"http://pypi.test:{port}/")
                assert said.startswith(f"403 rollart: the sandbox may not reach pypi.test:{port}")
                assert said.endswith("its address is not public")
            assert heads == []

    asyncio.run(main())


def test_an_address_can_be_allowed_and_tunnels_carry_anything(isolation) -> None:
    async def main() -> None:
        async with echo() as port, opened(isolation, network=[f"127.0.0.1:{port}"]) as sandbox:
            body = bytes(range(256)) * 8000
            connect = f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            send = TALK.replace("s.sendall(sys.stdin.buffer.read())", SEND)
            result = await sandbox.exec(
                [PYTHON, "-c", send],
                timeout_s=60,
                stdin=connect + body,
                max_output_bytes=4 << 20,
            )
            head, _, echoed = result.stdout.partition(b"\r\n\r\n")
            assert head == b"HTTP/1.1 200 Connection established"
            assert echoed == body
            other = await talk(sandbox, b"CONNECT 127.0.0.1:1 HTTP/1.1\r\n\r\n")
            assert other.startswith(b"HTTP/1.1 403 the sandbox may not reach 127.0.0.1:1")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: pypi.test\r\n\r\n", 400),
        (b"GET https://pypi.test/ HTTP/1.1\r\n\r\n", 400),
        (b"GET ftp://pypi.test/ HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT pypi.test HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT pypi.test:99999 HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT 2130706433:80 HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT pypi.test:80@evil.test:80 HTTP/1.1\r\n\r\n", 400),
        (b"GET http://pypi.test@evil.test/ HTTP/1.1\r\n\r\n", 403),
        (b"GET http://pypi.test\\@evil.test/ HTTP/1.1\r\n\r\n", 403),
        (b"GET http://evil.test/ HTTP/1.1\r\nHost: pypi.test\r\n\r\n", 403),
        (b"GET http://pypi.test/ HTTP/1.1\r\nBroken header: x\r\n\r\n", 400),
        (b"GET http://pypi.test/ HTTP/1.1\r\nA: b\r\n folded: x\r\n\r\n", 400),
        (b"CONNECT evil.test\x00pypi.test:80 HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\r\n\r\n", 400),
        (b"GET http://pypi.test/ HTTP/1.1\r\nA: " + b"a" * 99_000 + b"\r\n\r\n", 431),
    ],
)
def test_odd_requests_get_an_answer_and_go_nowhere(said, status) -> None:
    if why := missing("bubblewrap"):
        pytest.skip(why)

    async def main() -> None:
        async with opened("bubblewrap", network=["pypi.test"]) as sandbox:
            answer = await talk(sandbox, said)
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert answer.count(b"\r\n\r\n") == 1
            assert (await sandbox.exec(["true"], timeout_s=30)).exit_code == 0

    asyncio.run(main())


@pytest.mark.usefixtures("loopback_is_public")
def test_an_address_to_which_there_is_no_road_is_passed_over(monkeypatch) -> None:
    async def resolve(name: str, port: int) -> list[str]:
        return ["2001:db8::1", "2001:db8::2", "127.0.0.1"][: 2 if name == "six.test" else 3]

    connect = asyncio.open_connection

    async def connecting(found: str, port: int, **more):
        if ":" in found:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        return await connect(found, port, **more)

    monkeypatch.setattr(asyncio, "open_connection", connecting)

    async def main() -> None:
        async with echo() as port:
            one = proxy.Proxy([f"both.test:{port}", f"six.test:{port}"], resolve=resolve)
            reader, writer = await one._connect("both.test", port)
            writer.write(b"hello")
            writer.write_eof()
            assert await reader.read() == b"hello"
            writer.close()
            await writer.wait_closed()
            with pytest.raises(proxy.Refused, match="reached: Network is unreachable") as refused:
                await one._connect("six.test", port)
            assert refused.value.status == 502

    asyncio.run(main())


def test_connections_are_capped(monkeypatch) -> None:
    if why := missing("bubblewrap"):
        pytest.skip(why)
    monkeypatch.setattr(proxy, "MOST", 3)
    many = """
import socket
held = []
for i in range(5):
    s = socket.create_connection(('127.0.0.1', 3128), 20); s.settimeout(20)
    s.sendall(b'CONNECT 127.0.0.1:%d HTTP/1.1\\r\\n\\r\\n' % PORT)
    held.append(s); print(s.recv(100).split()[1].decode())
held[0].close()
while True:
    s = socket.create_connection(('127.0.0.1', 3128), 20); s.settimeout(20)
    s.sendall(b'CONNECT 127.0.0.1:%d HTTP/1.1\\r\\n\\r\\n' % PORT)
    said = s.recv(100).split()[1].decode()
    if said == '200': break
print('again')
"""

    async def main() -> None:
        async with echo() as port, opened("bubblewrap", network=[f"127.0.0.1:{port}"]) as sandbox:
            program = many.replace("PORT", str(port))
            result = await sandbox.exec([PYTHON, "-c", program], timeout_s=60)
            assert result.stdout.split() == [b"200"] * 3 + [b"503"] * 2 + [b"again"]

    asyncio.run(main())


def test_connections_leave_descriptors_for_commands() -> None:
    if why := missing("bubblewrap"):
        pytest.skip(why)
    many = """
import socket, time
held = []
for i in range(60):
    try:
        held.append(socket.create_connection(('127.0.0.1', 3128), 20))
    except OSError:
        break
open('ready', 'w').close()
time.sleep(1000)
"""

    async def main() -> None:
        async with opened("bubblewrap", network=["pypi.test"], num_open_files=64) as sandbox:
            held = asyncio.create_task(sandbox.exec([PYTHON, "-c", many], timeout_s=1000))
            while (await sandbox.exec(["test", "-e", "ready"], timeout_s=30)).exit_code:
                pass
            results = await asyncio.gather(
                *(sandbox.exec(["true"], timeout_s=60) for _ in range(4))
            )
            assert [result.exit_code for result in results] == [0] * 4
            held.cancel()

    asyncio.run(main())


def test_a_sandbox_without_names_has_no_proxy_and_no_variables(isolation) -> None:
    async def main() -> None:
        async with opened(isolation) as sandbox:
            result = await sandbox.exec(["env"], timeout_s=30)
            assert b"proxy" not in result.stdout.lower()
            refused = await sandbox.exec([PYTHON, "-c", TALK], timeout_s=30)
            assert b"ConnectionRefusedError" in refused.stderr
        async with opened(isolation, network=["pypi.test"]) as sandbox:
            result = await sandbox.exec(["sh", "-c", "echo $http_proxy $HTTPS_PROXY"], timeout_s=30)
            assert result.stdout == b"http://127.0.0.1:3128 http://127.0.0.1:3128\n"

    asyncio.run(main())


def test_a_reset_ends_connections(isolation) -> None:
    over = asyncio.Event()

    async def hold(reader, writer) -> None:
        await over.wait()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(hold, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, opened(isolation, network=[f"127.0.0.1:{port}"]) as sandbox:
            snapshot = await sandbox.snapshot()
            connect = f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode()
            program = [PYTHON, "-c", TALK]
            held = asyncio.create_task(sandbox.exec(program, timeout_s=1000, stdin=connect))
            tunnels = sandbox._connection._tunnels
            while not tunnels._tunnels:
                await asyncio.sleep(0.01)  # the test's timeout ends the wait
            await sandbox.restore(snapshot)
            assert (await held).exit_code == 137
            while tunnels._tunnels:
                await asyncio.sleep(0.01)
            assert (await talk(sandbox, b"x\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
            over.set()

    asyncio.run(main())
