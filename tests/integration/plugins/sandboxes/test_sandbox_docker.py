"""Boxes of a Docker engine: what only they have, and every way in which an engine fails them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pace import scaled, until, wait_until
from support.processes import is_running, wait_gone
from support.sandbox_types import IMAGE, IN_DOCKER, MIB, no_docker, opened

from rollart_core.errors import SandboxFailure
from rollart_sandboxes import container, docker_host
from rollart_sandboxes.docker import DockerSandbox
from rollart_sandboxes.engine import Engine, EngineError
from rollart_sandboxes.pool.owner import HOST_LABEL, OWNER_LABEL, labels, owner_mark
from rollart_testing import assert_checks
from rollart_testing.check.child import check_part

pytestmark = pytest.mark.docker
WITHIN_S = scaled(120.0)
"""For commands that take a moment."""


@pytest.fixture(autouse=True)
def _needs_docker() -> None:
    if why := no_docker():
        pytest.skip(why)


def sh(text: str) -> list[str]:
    return ["/bin/sh", "-c", text]


async def names(engine: Engine, owner: str = "") -> list[str]:
    """Return the containers of a process, by default this one."""
    query = {"all": 1, "filters": {"label": [f"{OWNER_LABEL}={owner or owner_mark()}"]}}
    return [c["Names"][0][1:] for c in await engine.ask("GET", "/containers/json", query=query)]


def test_keeps_its_contract(tmp_path) -> None:
    assert_checks(check_part("sandboxes", "docker", tmp_path, IN_DOCKER))


def test_nobody_without_any_right() -> None:
    command = (
        "id -u; grep -hoE '(Cap...|Seccomp|NoNewPrivs):.*' /proc/self/status; "
        "for p in /x /etc/x /proc/sysrq-trigger /proc/sys/kernel/hostname /sys/power/state "
        "/sys/fs/cgroup/x /sys/fs/cgroup/memory/memory.limit_in_bytes /proc/1/oom_score_adj; "
        "do echo 1 > $p; done"
    )

    async def main() -> None:
        async with opened("docker") as sandbox:
            result = await sandbox.exec(sh(command), timeout_s=WITHIN_S)
            uid, *rest = result.stdout.decode().splitlines()
            held = dict(line.split(":\t") for line in rest)
            assert (uid, held["NoNewPrivs"], held["Seccomp"]) == ("1000", "1", "2")
            assert {held[f"Cap{which}"] for which in ("Inh", "Prm", "Eff", "Bnd")} == {"0" * 16}
            assert result.stderr.count(b"cannot create") == 8
            for tool in ("mount -t tmpfs t /tmp", "unshare -r id", "dmesg", "chroot / id"):
                assert (await sandbox.exec(sh(tool), timeout_s=WITHIN_S)).exit_code != 0

    asyncio.run(main())


def test_limits_are_the_engines_and_the_figures_are_there() -> None:
    async def main() -> None:
        limits = {"memory_bytes": 200 * MIB, "num_pids": 77, "cpus": 0.5, "num_open_files": 99}
        async with opened("docker", **limits) as sandbox:
            assert isinstance(sandbox, DockerSandbox)
            known = await Engine().ask("GET", f"/containers/{sandbox.name}/json")
            host = known["HostConfig"]
            held = sandbox.enforced_by
            assert (held["disk_bytes"], held["root_bytes"]) == ("tmpfs", "read-only")
            assert host["Memory"] == 200 * MIB if held["memory_bytes"] else True
            assert host["PidsLimit"] == 77 if held["num_pids"] else True
            assert host["NanoCpus"] == 500_000_000 if held["cpus"] else True
            assert (host["NetworkMode"], host["LogConfig"]["Type"]) == ("none", "none")
            assert (host["ReadonlyRootfs"], host["IpcMode"]) == (True, "private")
            shown = await sandbox.exec(sh("ulimit -n; ulimit -c"), timeout_s=WITHIN_S)
            assert shown.stdout == b"99\n0\n"
            before = sandbox.memory_used_bytes
            await sandbox.exec(sh("head -c 50000000 /dev/zero > big"), timeout_s=WITHIN_S)
            after = sandbox.memory_used_bytes
            assert before is not None
            assert after is not None
            assert 40 * MIB < after - before < 80 * MIB

    asyncio.run(main())


def test_a_sandbox_over_its_memory_loses_the_command_and_lives() -> None:
    code = "held = []\nwhile True: held.append(bytearray(1 << 20))"

    async def main() -> None:
        async with opened("docker", memory_bytes=64 * MIB) as sandbox:
            for _ in range(3):
                greedy = await sandbox.exec(["python3", "-c", code], timeout_s=WITHIN_S)
                assert greedy.exit_code == 137
                assert (await sandbox.exec(["echo", "on"], timeout_s=WITHIN_S)).stdout == b"on\n"

    asyncio.run(main())


def test_a_container_that_dies_in_an_episode_fails_its_calls_and_says_so() -> None:
    async def main() -> None:
        async with opened("docker") as sandbox:
            running = asyncio.create_task(sandbox.exec(["sleep", "1000"], timeout_s=1000))
            await sandbox.exec(["true"], timeout_s=WITHIN_S)
            await container.remove(Engine(), sandbox.name)
            for call in (running, sandbox.exec(["true"], timeout_s=WITHIN_S)):
                with pytest.raises(
                    SandboxFailure, match=r"sandbox is gone.*; its container is"
                ) as raised:
                    await call
                assert raised.value.retryable

    asyncio.run(main())


def test_a_folder_cannot_take_the_memory_of_its_sandbox() -> None:
    async def main() -> None:
        async with opened("docker", memory_bytes=64 * MIB, disk_bytes=512 * MIB) as sandbox:
            for _ in range(3):
                filled = await sandbox.exec(
                    sh("head -c 300000000 /dev/zero > big"), timeout_s=WITHIN_S
                )
                assert (filled.exit_code, b"No space" in filled.stderr) == (1, True)
                assert (await sandbox.exec(["rm", "big"], timeout_s=WITHIN_S)).exit_code == 0

    asyncio.run(main())


def test_a_writable_root_is_the_boxs_own_and_in_its_snapshots(tmp_path) -> None:
    (tmp_path / "shown").write_text("shown")

    async def main() -> None:
        options = {"writable_root": True, "user": "0:0", "snapshot_paths": ["/opt"]}
        async with opened("docker", **options, ro_binds=[str(tmp_path)]) as sandbox:
            await sandbox.exec(
                sh("echo 1 > /opt/kept; echo 1 > /etc/rollart-x"), timeout_s=WITHIN_S
            )
            kept = await sandbox.snapshot()
            await sandbox.exec(
                sh("echo 2 > /opt/kept; echo 2 > /opt/more; rm -r /usr/share"), timeout_s=30
            )
            await sandbox.restore(kept)
            assert await sandbox.read_file("/opt/kept") == b"1\n"
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file("/opt/more")
            assert (await sandbox.exec(["ls", "/usr/share"], timeout_s=WITHIN_S)).exit_code == 2
            assert await sandbox.read_file(f"{tmp_path}/shown") == b"shown"
            with pytest.raises(OSError, match="Read-only"):
                await sandbox.write_file(f"{tmp_path}/shown", b"spoilt")
        async with opened("docker", **options) as other:
            with pytest.raises(FileNotFoundError):
                await other.read_file("/etc/rollart-x")
            assert (await other.exec(["ls", "/usr/bin/env"], timeout_s=WITHIN_S)).exit_code == 0
            assert other.enforced_by["root_bytes"] in {"", "storage"}  # type: ignore[attr-defined]

    asyncio.run(main())
    assert not Path("/etc/rollart-x").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": "rollart-no-such-image"}, "there is no image 'rollart-no-such-image'"),
        ({"image": "Not A Name"}, "is not a valid name of an image"),
        ({"python": "/usr/bin/no-python"}, "has no /usr/bin/no-python: use an image with Python"),
        ({"runtime": "no-runsc"}, "no runtime 'no-runsc': install it"),
        ({"ro_binds": ["/no-such-folder"]}, "does not exist: /no-such-folder"),
        ({"host": "unix:///no-such.sock"}, "no Docker engine answers at unix:///no-such.sock"),
        ({"host": "ssh://somewhere"}, "is not an address of a Docker engine"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line_and_not_tried_again(options, said) -> None:
    async def main() -> list[str]:
        with pytest.raises(SandboxFailure, match=said) as raised:
            async with opened("docker", **options):
                pass
        assert not raised.value.retryable
        assert "\n" not in str(raised.value)
        return await names(Engine())

    assert asyncio.run(main()) == []


def test_a_start_that_is_given_up_leaves_no_container() -> None:
    async def main() -> list[str]:
        for share in (0.02, 0.1, 0.3):
            sandbox = DockerSandbox(**IN_DOCKER)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(share * 0.5):
                    await sandbox.start()
                    await asyncio.sleep(10)
            await sandbox.close()
        with pytest.raises(SandboxFailure, match=r"within 0\.001 s"):
            async with opened("docker", start_timeout_s=0.001):
                pass
        return await names(Engine())

    assert asyncio.run(main()) == []


def test_a_container_is_gone_when_its_host_is_killed() -> None:
    code = f"""
import asyncio
from rollart_sandboxes.pool.owner import owner_mark
from rollart_sandboxes.docker import DockerSandbox
async def main():
    box = DockerSandbox(image={IMAGE!r}, pull="never")
    await box.start()
    asyncio.create_task(box.exec(["sleep", "1000"], timeout_s=1000))
    await asyncio.sleep(0)  # the agent takes calls in their order
    await box.exec(["true"], timeout_s=1000)
    print(box.agent_pid, owner_mark(), flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    agent, owner = host.stdout.readline().split()
    assert asyncio.run(names(Engine(), owner)) != []
    host.send_signal(signal.SIGKILL)
    host.communicate()
    wait_gone(int(agent))
    wait_until(lambda: not asyncio.run(names(Engine(), owner)), "the end of the container")


async def made(**more: str) -> str:
    """Make a container that was never started, as a process that was killed leaves it."""
    name = f"rollart-{uuid.uuid4().hex}"
    settings = {"Image": IMAGE, "Cmd": ["true"], "Labels": {**labels(), **more}}
    await Engine().ask("POST", "/containers/create", query={"name": name}, body=settings)
    return name


async def is_there(name: str) -> bool:
    try:
        await Engine().ask("GET", f"/containers/{name}/json")
    except EngineError as e:
        assert e.status == 404  # noqa: PT017 - which refusal it is
        return False
    return True


def test_what_dead_owners_left_is_swept_and_nothing_else(monkeypatch) -> None:
    monkeypatch.setattr(docker_host, "_OVERDUE_S", 0.0)
    dead = owner_mark().partition(":")[0] + ":1"

    far = {OWNER_LABEL: dead, HOST_LABEL: "another machine"}

    async def swept() -> bool:
        """Whether this sweep told of what it removed; that of another process may be first."""
        orphan = await made(**{OWNER_LABEL: dead})
        overdue = await made(**far, **{docker_host.TTL_LABEL: "-5"})
        removed = " ".join(await DockerSandbox.sweep())
        assert [await is_there(name) for name in (orphan, overdue)] == [False, False]
        return orphan in removed and overdue in removed

    async def main() -> None:
        mine = await made()
        others = await made(**far, **{docker_host.TTL_LABEL: "3600"})
        try:
            assert any([await swept() for _ in range(3)])
            assert [await is_there(name) for name in (mine, others)] == [True, True]
        finally:
            faults = await DockerSandbox.remove({"container": [noted(mine), noted(others)]})
        assert faults == []
        assert [await is_there(name) for name in (mine, others)] == [False, False]

    asyncio.run(main())


def noted(name: str) -> str:
    return f"{Engine().host} {name}"


def test_removing_is_for_containers_of_ours_alone_and_may_be_repeated() -> None:
    async def main() -> None:
        assert await DockerSandbox.remove({"container": [noted("rollart-gone")]}) == []
        assert await DockerSandbox.remove({"container": ["unix:///no.sock rollart-x"]}) == []
        (fault,) = await DockerSandbox.remove({"container": [noted("somebody-elses")]})
        assert "not a container of RollArt" in fault

    asyncio.run(main())


def test_a_sandbox_notes_what_it_leaves_before_it_is_made() -> None:
    class Noted:
        def __init__(self) -> None:
            self.labels = labels("line-7")
            self.left: dict[str, str] = {}

        def leaves(self, kind: str, what: str) -> None:
            self.left[kind] = what

    line = Noted()

    async def main() -> None:
        sandbox = DockerSandbox(**IN_DOCKER)
        sandbox.line = line
        await sandbox.start()
        try:
            host, name = line.left["container"].split()
            known = await Engine(host).ask("GET", f"/containers/{name}/json")
            assert known["Config"]["Labels"]["rollart.ledger"] == "line-7"
            assert float(known["Config"]["Labels"]["rollart.ttl"]) == 3600
            assert Path(line.left["usage"]).is_dir()
        finally:
            await sandbox.close()

    asyncio.run(main())


def test_the_doctor_hears_what_the_engine_holds(monkeypatch) -> None:
    found = {finding.what: finding for finding in asyncio.run(DockerSandbox.examine())}
    assert found["engine"].state == "ok"
    assert {"memory", "pids", "cpu", "seccomp", "users", "image", "runtimes"} <= set(found)
    assert all(finding.mend for finding in found.values() if finding.state != "ok")
    monkeypatch.setenv("DOCKER_HOST", "unix:///no-such.sock")
    (bad,) = asyncio.run(DockerSandbox.examine())
    assert (bad.state, "start it" in bad.mend) == ("bad", True)


@pytest.mark.parametrize("count", [16, pytest.param(50, marks=pytest.mark.nightly)])
def test_many_sandboxes_in_one_process_at_once(count) -> None:
    async def main() -> list[str]:
        starts = asyncio.Semaphore(8)
        sandboxes = [DockerSandbox(**IN_DOCKER, memory_bytes=64 * MIB) for _ in range(count)]

        async def up(sandbox: DockerSandbox) -> None:
            async with starts:
                await sandbox.start()

        try:
            await asyncio.gather(*(up(sandbox) for sandbox in sandboxes))
            for _ in range(3):
                said = await asyncio.gather(
                    *(
                        sandbox.exec(["echo", sandbox.name], timeout_s=WITHIN_S)
                        for sandbox in sandboxes
                    )
                )
                assert [r.stdout.decode().strip() for r in said] == [
                    sandbox.name for sandbox in sandboxes
                ]
            assert len(await names(Engine())) == count
        finally:
            await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        return await names(Engine())

    assert asyncio.run(main()) == []


def test_the_script_that_makes_engine_and_image_takes_what_is_there(repo_root, tmp_path) -> None:
    script = str(repo_root / "tests/docker/engine")
    apart = {
        "ROLLART_DOCKER_RUN": str(tmp_path / "run"),
        "ROLLART_DOCKER_DIR": str(tmp_path / "kept"),
    }
    env = {**os.environ, "DOCKER_HOST": Engine().host, **apart}

    def said(*words: str) -> tuple[int, str]:
        run = subprocess.run([script, *words], env=env, capture_output=True, text=True)
        return run.returncode, run.stdout

    assert said("up") == (0, f"export DOCKER_HOST={Engine().host}\n")
    assert said("run", "/bin/sh", "-c", "echo $DOCKER_HOST; exit 3") == (3, f"{Engine().host}\n")
    assert said("down") == (0, "")  # it is not its own
    assert said()[0] == 1
    assert asyncio.run(answers(Engine().host))


def test_an_engine_that_a_run_of_the_script_starts_ends_with_the_last_run(repo_root) -> None:
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("only root can start an engine of its own, where dockerd is installed")
    if Path("/var/run/docker.sock").exists():
        pytest.skip("the script takes the engine of this machine")
    folder = Path(tempfile.mkdtemp(prefix="ra-", dir="/tmp"))  # a socket's path has to be short
    places = {"ROLLART_DOCKER_RUN": f"{folder}/run", "ROLLART_DOCKER_DIR": f"{folder}/kept"}
    env = {**os.environ, **places, "ROLLART_TEST_IMAGE": "none"}
    del env["DOCKER_HOST"]
    script = str(repo_root / "tests/docker/engine")
    command = [script, "run", "/bin/sh", "-c", "echo $DOCKER_HOST; read line; exit 3"]

    def begun() -> subprocess.Popen[str]:
        run = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert run.stdout is not None
        assert run.stdout.readline() == f"unix://{folder}/run/docker.sock\n"
        return run

    host = f"unix://{folder}/run/docker.sock"
    runs: list[subprocess.Popen[str]] = []
    try:
        runs = [begun(), begun()]
        runs[0].communicate("on\n")
        assert runs[0].returncode == 3
        assert asyncio.run(answers(host))
        runs[1].communicate("on\n")
        assert runs[1].returncode == 3
        assert not asyncio.run(answers(host))
        assert {path.name for path in folder.iterdir()} == {"run.users"}
    finally:
        for run in runs:
            run.kill()
            run.communicate()
        subprocess.run([script, "down"], env=env, check=True)
        shutil.rmtree(folder)


@contextlib.contextmanager
def engine_of_its_own() -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Give an engine that may be killed: its address, and a list whose last is its process."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("only root can start an engine of its own, where dockerd is installed")
    folder = Path(tempfile.mkdtemp(prefix="ra-", dir="/tmp"))  # a socket's path has to be short
    started: list[subprocess.Popen[bytes]] = []
    try:
        begin(folder, started)
        yield f"unix://{folder}/s", started
    finally:
        for process in started[-1:]:
            process.kill()  # its own end waits for what another one has left
            process.wait()
        for shim in shims(folder):  # an engine that was killed could not end them
            os.kill(shim, signal.SIGKILL)
            wait_gone(shim)
        for mounted in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (at := mounted.split()[1]).startswith(f"{folder}/"):
                subprocess.run(["umount", "-l", at], check=True)
        shutil.rmtree(folder)


def shims(folder: Path) -> list[int]:
    """Return what still runs of an engine that kept everything in ``folder``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{folder}/".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found


def begin(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    again = f"{time.monotonic_ns()}"  # what an engine that was killed left there is in the way
    paths = {"data-root": "data", "exec-root": f"exec{again}", "pidfile": f"pid{again}"}
    argv = ["dockerd", "-H", f"unix://{folder}/s", "--bridge=none", "--iptables=false"]
    argv += ["--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
    argv += [f"--{option}={folder}/{path}" for option, path in paths.items()]
    with (folder / "log").open("ab") as log:
        started.append(subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True))

    def is_up() -> bool:
        assert started[-1].poll() is None, (folder / "log").read_text()[-2000:]
        return asyncio.run(answers(f"unix://{folder}/s"))

    wait_until(is_up, "an engine that answers", limit_s=180)


async def answers(host: str) -> bool:
    try:
        await Engine(host).ask("GET", "/version")
    except SandboxFailure:
        return False
    return True


def give_image(host: str) -> dict[str, object]:
    """Give an engine an image without files, and return the options of boxes of it.

    They have the programs of this machine: copying the image for tests takes far longer.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("bin", "lib", "lib64", "sbin"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
    query = "fromSrc=-&repo=rollart-nothing&tag=latest"
    put = ["curl", "-fsS", "--unix-socket", host.removeprefix("unix://"), "-X", "POST", "-T", "-"]
    url = f"http://docker/images/create?{query}"
    subprocess.run([*put, "-o", "/dev/null", url], input=archive.getvalue(), check=True)
    return {"image": "rollart-nothing:latest", "pull": "never", "ro_binds": ["/usr"]}


@pytest.mark.timeout(300)
def test_an_engine_that_hangs_or_dies_is_a_typed_failure_and_hangs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_of_its_own() as (host, started):
        options = {**give_image(host), "host": host, "start_timeout_s": WITHIN_S}
        folder = Path(host.removeprefix("unix://")).parent

        async def hangs() -> None:
            sandbox = DockerSandbox(**options)
            await sandbox.start()
            assert sandbox.agent_pid is not None
            os.kill(started[-1].pid, signal.SIGSTOP)
            try:
                with monkeypatch.context() as patch:  # nobody answers, however long it takes
                    patch.setattr(container, "_UNDO_S", 0.5)
                    patch.setattr(container, "_REMOVED_S", 0.5)
                    with pytest.raises(SandboxFailure, match=r"within 0\.3 s|not answer"):
                        await DockerSandbox(**{**options, "start_timeout_s": 0.3}).start()
                    async with asyncio.timeout(WITHIN_S):
                        await sandbox.close()
                await until(lambda: not is_running(sandbox.agent_pid), "the end of the agent")
            finally:
                os.kill(started[-1].pid, signal.SIGCONT)

        async def dies() -> int:
            sandbox = DockerSandbox(**options)
            await sandbox.start()
            running = asyncio.create_task(sandbox.exec(["sleep", "1000"], timeout_s=1000))
            writing = asyncio.create_task(sandbox.write_file("x", bytes(64 * MIB)))
            await asyncio.sleep(0)
            await sandbox.exec(["true"], timeout_s=WITHIN_S)
            agent = sandbox.agent_pid
            assert agent is not None
            started[-1].kill()
            for call in (running, writing):
                with pytest.raises(SandboxFailure, match="gone; no Docker engine") as raised:
                    await call
                assert raised.value.retryable
            with pytest.raises(SandboxFailure, match="the sandbox is gone"):
                await sandbox.exec(["true"], timeout_s=WITHIN_S)
            await sandbox.close()
            with pytest.raises(SandboxFailure, match="no Docker engine answers") as raised:
                await DockerSandbox(**options).start()
            assert raised.value.retryable  # it was there before, and may be again
            return agent

        asyncio.run(hangs())
        agent = asyncio.run(dies())
        started.pop().wait()
        wait_gone(agent)  # nobody holds its stdin any more
        begin(folder, started)

        async def comes_back() -> None:
            sandbox = DockerSandbox(**options)
            await sandbox.start()
            try:
                assert (await sandbox.exec(["echo", "on"], timeout_s=WITHIN_S)).stdout == b"on\n"
                query = {"all": 1}
                there = await Engine(host).ask("GET", "/containers/json", query=query)
                assert [c["Names"][0][1:] for c in there] == [sandbox.name]
            finally:
                await sandbox.close()

        asyncio.run(comes_back())
