"""The exec agent: the program that runs inside every sandbox of every type.

Takes: frames on stdin. Gives: frames on stdout; a frame is two lengths (u32 header, u32 body, big
endian), a JSON header and raw bytes. Calls run concurrently, each with an ``id``; the tunnels of
``forward`` are streams (``s``). Never: needs more than Python 3.8 and the standard library, lets
one call wait for another, outlives its stdin, or leaves a process behind.

The host sends the files of this folder as the first bytes (see ``connection.bootstrap``), so images
need not contain them. In a process-id namespace the agent should be pid 1: then nothing inside can
kill it.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import json
import os
import resource
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time

from rollart_sandboxes.inside.files import Files
from rollart_sandboxes.inside.processes import (
    MARK,
    children,
    descendants,
    die_first,
    lower,
    marked,
    signal_one,
)
from rollart_sandboxes.inside.snapshots import Snapshots
from rollart_sandboxes.inside.streams import Streams, Tunnel, socketpair
from rollart_sandboxes.inside.tree import FOLDER, remove

# These imports are part of a sandbox's start time: rarely used modules are imported on use.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import queue
    from typing import Any, Callable, Deque, Dict, List, Optional, Set, Tuple

PROTOCOL = 1
CHUNK = 1 << 18
MAX_FRAME = 1 << 26
BACKLOG = 1 << 22
LENGTHS = struct.Struct(">II")
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


class Output:
    """Output of one pipe: its first and its last bytes, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self.head_limit, self.tail_limit = limit - limit // 2, limit // 2
        self.cut = False

    def add(self, data: bytes) -> None:
        left = self.head_limit - len(self.head)
        self.head += data[:left]
        self.tail += data[left:]
        if len(self.tail) > self.tail_limit:
            self.cut = True
            if len(self.tail) > 2 * self.tail_limit + CHUNK:
                self.trim()

    def trim(self) -> None:
        del self.tail[: len(self.tail) - self.tail_limit]

    def bytes(self) -> bytes:
        if self.cut:
            self.trim()
        return bytes(self.head + self.tail)


class Exec:
    """One running command."""

    def __init__(self, call: Any, header: Dict[str, Any], process: Any, stdin: bytes) -> None:
        self.call, self.process, self.pid = call, process, process.pid
        self.token = header["token"]
        self.started = time.monotonic()
        self.deadline = self.started + header["timeout_s"]
        self.timed_out = self.cancelled = False
        self.stdin = memoryview(stdin)
        self.stream: Optional[Tunnel] = None
        limit = header["max_output_bytes"]
        pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
        self.outputs = {pipe: Output(limit) for pipe in pipes}


class Agent:
    """The event loop that answers frames."""

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes = reads, writes
        self.selector = selectors.DefaultSelector()
        self.received = bytearray()
        self.out: Deque[memoryview] = collections.deque()
        self.out_bytes = 0
        self.can_send = threading.Condition()
        self.execs: Dict[int, Exec] = {}
        self.uploads: Dict[int, "queue.Queue[Optional[bytes]]"] = {}
        self.later: Deque[Callable[[], None]] = collections.deque()
        self.files = Files(self)
        self.streams = Streams(self)
        self.snapshots = Snapshots(self)
        self.num_execs = 0
        self.frozen = False
        self.root = "/"
        self.roots: List[str] = []
        self.env: Dict[str, str] = {}
        self.confine = self.own_root = self.running = False
        self.ends_at = float("inf")
        self.pid = os.getpid()

    # -- the loop

    def run(self) -> None:
        """Answer until stdin ends or the sandbox's lifetime is over."""
        self.wake_read, self.wake_write = os.pipe()
        for fd in (self.reads, self.writes, self.wake_read, self.wake_write):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        self.selector.register(self.reads, selectors.EVENT_READ, self.on_readable)
        self.selector.register(self.wake_read, selectors.EVENT_READ, self.on_wake)
        self.running = True
        try:
            while self.running:
                for key, mask in self.selector.select(self.patience()):
                    key.data(mask)
                self.expire()
        finally:
            self.end()

    def patience(self) -> Optional[float]:
        ends = min([self.ends_at, *(e.deadline for e in self.execs.values())])
        return None if ends == float("inf") else max(0.0, min(ends - time.monotonic(), 3600.0))

    def expire(self) -> None:
        now = time.monotonic()
        if now >= self.ends_at:
            self.running = False
        for run in list(self.execs.values()):
            if now >= run.deadline:
                run.timed_out, run.deadline = True, float("inf")
                self.kill(run)

    def end(self) -> None:
        """Kill all commands, and remove the folder that the agent created, if any."""
        for run in list(self.execs.values()):
            self.kill(run)
        self.execs.clear()
        for _ in range(100):
            self.sweep()
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            time.sleep(0.01)
        if self.own_root:
            fd = os.open(self.root, FOLDER)
            for name in os.listdir(fd):
                remove(fd, name)
            os.close(fd)
            os.rmdir(self.root)

    def on_wake(self, mask: int) -> None:
        try:
            os.read(self.wake_read, 4096)
        except BlockingIOError:
            pass
        self.reap()
        while self.later:
            self.later.popleft()()
        self.flush()

    # -- frames

    def on_readable(self, mask: int) -> None:
        try:
            data = os.read(self.reads, CHUNK)
        except BlockingIOError:
            return
        if not data:
            self.running = False
            return
        self.received += data
        while len(self.received) >= LENGTHS.size:
            head, body = LENGTHS.unpack_from(self.received)
            if head + body > MAX_FRAME:
                raise ValueError("a frame is too large")
            end = LENGTHS.size + head + body
            if len(self.received) < end:
                return
            header = json.loads(bytes(self.received[LENGTHS.size : LENGTHS.size + head]))
            content = bytes(self.received[LENGTHS.size + head : end])
            del self.received[:end]
            self.dispatch(header, content)

    def dispatch(self, header: Dict[str, Any], body: bytes) -> None:
        try:
            getattr(self, "op_" + header["op"])(header, body)
        except Exception as e:
            if "id" not in header:
                raise
            self.fail(header["id"], e)

    def send(self, header: Dict[str, Any], body: bytes = b"") -> None:
        text = json.dumps(header, separators=(",", ":")).encode()
        data = LENGTHS.pack(len(text), len(body)) + text + body
        with self.can_send:
            self.out.append(memoryview(data))
            self.out_bytes += len(data)
        if threading.current_thread() is threading.main_thread():
            self.flush()
        else:
            self.wake()

    def send_when_possible(self, header: Dict[str, Any], body: bytes) -> None:
        """Send from a thread, once the host has read enough of the earlier frames."""
        with self.can_send:
            self.can_send.wait_for(lambda: self.out_bytes < BACKLOG)
        self.send(header, body)

    def wake(self) -> None:
        try:
            os.write(self.wake_write, b"\0")
        except BlockingIOError:
            pass

    def flush(self, mask: int = 0) -> None:
        with self.can_send:
            try:
                while self.out:
                    sent = os.write(self.writes, self.out[0])
                    self.out_bytes -= sent
                    if sent == len(self.out[0]):
                        self.out.popleft()
                    else:
                        self.out[0] = self.out[0][sent:]
            except BlockingIOError:
                pass
            except OSError:
                self.running = False
                self.out.clear()
            self.can_send.notify_all()
            waiting = bool(self.out)
        self.watch(self.writes, selectors.EVENT_WRITE if waiting else 0, self.flush)

    def watch(self, what: Any, mask: int, callback: Callable[[int], None]) -> None:
        known = self.selector.get_map().get(what)
        if known is None and mask:
            self.selector.register(what, mask, callback)
        elif known is not None and not mask:
            self.selector.unregister(what)
        elif known is not None and known.events != mask:
            self.selector.modify(what, mask, callback)

    def fail(self, call: int, error: BaseException) -> None:
        said: Dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
        if isinstance(error, OSError):
            name = error.filename
            said.update(errno=error.errno, message=error.strerror or str(error))
            said.update(filename=os.fsdecode(name) if isinstance(name, (str, bytes)) else None)
        self.send({"id": call, "error": said})

    # -- calls

    def op_hello(self, header: Dict[str, Any], body: bytes) -> None:
        for name, value in header.get("limits", {}).items():
            lower(getattr(resource, name), value)
        self.own_root = bool(header.get("own_root"))
        if self.own_root:
            self.root = os.path.realpath(header["own_root"])
            os.mkdir(self.root, 0o700)
        else:
            self.root = os.path.realpath(header["root"])
        self.roots = [self.root, *header.get("more_roots", ())]
        self.confine = bool(header.get("confine"))
        self.env = {"HOME": self.root, "PWD": self.root, **header.get("env", {})}
        if header.get("proxy"):
            self.streams.proxy(**header["proxy"])
            url = "http://127.0.0.1:%d" % header["proxy"]["port"]
            for name, value in (("http", url), ("https", url), ("no", "localhost,127.0.0.1,::1")):
                self.env.update({name + "_proxy": value, name.upper() + "_PROXY": value})
        if header.get("ttl_s"):
            self.ends_at = time.monotonic() + header["ttl_s"]
        said = {"protocol": PROTOCOL, "pid": self.pid, "root": self.root}
        self.send({"id": header["id"], "python": sys.version.split()[0], **said})

    def inside(self, path: str) -> str:
        """Return the absolute path; without a separate root, refuse paths outside the folder."""
        if "\0" in path:
            raise OSError(errno.EINVAL, "a path contains a NUL", path)
        whole = os.path.join(self.root, path)
        if not self.confine:
            return whole
        real = os.path.realpath(whole)
        if real != self.root and not real.startswith(self.root + os.sep):
            raise PermissionError(errno.EACCES, "outside the sandbox's folder", path)
        return real

    def op_ping(self, header: Dict[str, Any], body: bytes) -> None:
        self.send({"id": header["id"]})

    def op_exec(self, header: Dict[str, Any], body: bytes) -> None:
        cwd = self.inside(header.get("cwd") or "")
        if self.frozen:
            raise OSError(errno.EBUSY, "the sandbox is being restored to a snapshot")
        self.num_execs += 1
        if not os.path.isdir(cwd):
            raise NotADirectoryError(errno.ENOTDIR, "the working folder does not exist", cwd)
        header["token"] = os.urandom(8).hex()
        env = {**self.env, **(header.get("env") or {}), MARK: header["token"]}
        stdin, stdout = (subprocess.PIPE if body else subprocess.DEVNULL), subprocess.PIPE
        ours, theirs = socketpair() if "stream" in header else (None, None)
        if theirs is not None:
            stdin = stdout = theirs.fileno()
        try:
            process = subprocess.Popen(
                header["argv"],
                cwd=cwd,
                env=env,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except (OSError, ValueError) as e:
            if ours is not None:
                ours.close()
            if not isinstance(e, OSError):  # an argument that no system call accepts, such as a NUL
                raise OSError(errno.EINVAL, str(e)) from None
            if e.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE):
                raise
            code = 127 if isinstance(e, FileNotFoundError) else 126
            said = f"{header['argv'][0]}: {e.strerror}\n".encode("utf-8", "surrogateescape")
            reply = {"id": header["id"], "exit_code": code, "out": 0, "wall_s": 0.0}
            self.send(reply, said)
            return
        finally:
            if theirs is not None:
                theirs.close()
        die_first(process.pid)
        run = Exec(header["id"], header, process, body)
        self.execs[process.pid] = run
        for pipe in run.outputs:
            os.set_blocking(pipe.fileno(), False)
            self.watch(pipe, selectors.EVENT_READ, self.drainer(run, pipe))
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            self.watch(process.stdin, selectors.EVENT_WRITE, lambda _: self.feed(run))
        if ours is not None:
            run.stream = self.streams.add(header["stream"], ours)
            self.streams.tend(run.stream)

    def drainer(self, run: Exec, pipe: Any) -> Callable[[int], None]:
        return lambda _: self.drain(run, pipe, 4)

    def op_cancel(self, header: Dict[str, Any], body: bytes) -> None:
        for run in list(self.execs.values()):
            if run.call == header["call"]:
                run.cancelled = True
                self.kill(run)
        waiting = self.uploads.pop(header["call"], None)
        if waiting is not None:
            waiting.put(None)

    def op_data(self, header: Dict[str, Any], body: bytes) -> None:
        upload = self.uploads.get(header["id"])
        if upload is not None:
            upload.put(body)

    def op_read_file(self, header: Dict[str, Any], body: bytes) -> None:
        self.in_thread(header["id"], self.files.read, header)

    def op_write_file(self, header: Dict[str, Any], body: bytes) -> None:
        import queue

        self.uploads[header["id"]] = queue.Queue()
        self.in_thread(header["id"], self.files.write, header)

    def op_snapshot(self, header: Dict[str, Any], body: bytes) -> None:
        self.in_thread(header["id"], self.snapshots.take, header)

    def op_rewind(self, header: Dict[str, Any], body: bytes) -> None:
        self.frozen = True
        self.in_thread(header["id"], self.snapshots.rewind, header)

    def thaw(self) -> None:
        """Allow commands again after the folders have been restored."""
        self.frozen = False
        self.later.append(self.streams.after_restore)
        self.wake()

    def op_restore(self, header: Dict[str, Any], body: bytes) -> None:
        import queue

        self.uploads[header["id"]] = queue.Queue()
        self.in_thread(header["id"], self.snapshots.restore, header)

    def op_forward(self, header: Dict[str, Any], body: bytes) -> None:
        self.streams.forward(self.inside(header["path"]), header["path"], header["forward"])
        self.send({"id": header["id"]})

    def op_forward_port(self, header: Dict[str, Any], body: bytes) -> None:
        self.send({"id": header["id"], "port": self.streams.proxy(0, header["forward"])})

    def op_stream(self, header: Dict[str, Any], body: bytes) -> None:
        self.streams.take(header, body)

    def in_thread(
        self,
        call: int,
        work: Callable[[Dict[str, Any]], Optional[Tuple[Dict[str, Any], bytes]]],
        header: Dict[str, Any],
    ) -> None:
        """Run slow work in a thread; it may return further fields and the body of the answer."""

        def run() -> None:
            try:
                more, body = work(header) or ({}, b"")
            except Exception as e:
                self.fail(call, e)
            else:
                self.send({"id": call, **more}, body)
            finally:
                self.uploads.pop(call, None)

        threading.Thread(target=run, daemon=True).start()

    # -- commands

    def feed(self, run: Exec) -> None:
        pipe = run.process.stdin
        if pipe.closed:
            return
        try:
            run.stdin = run.stdin[os.write(pipe.fileno(), run.stdin[:CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            run.stdin = run.stdin[:0]
        if not run.stdin:
            self.drop(pipe)

    def drain(self, run: Exec, pipe: Any, times: int) -> None:
        """Read from a pipe, at most ``times`` chunks, so that other pipes are read too."""
        for _ in range(0 if pipe.closed else times):
            try:
                data = os.read(pipe.fileno(), CHUNK)
            except BlockingIOError:
                return
            if not data:
                self.drop(pipe)
                return
            run.outputs[pipe].add(data)

    def drop(self, pipe: Any) -> None:
        self.watch(pipe, 0, self.flush)
        pipe.close()

    def kill(self, run: Exec) -> None:
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except OSError:
            pass

    def reap(self) -> None:
        """Reap dead children; a command's group is killed before its process id can be reused."""
        swept = False
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if dead is None:
                break
            run = self.execs.get(dead.si_pid)
            if run is not None:
                self.kill(run)
                del self.execs[run.pid]
            _, status = os.waitpid(dead.si_pid, 0)
            swept = True
            if run is not None:
                self.sweep()
                self.finish(run, status)
        if swept:
            self.sweep()

    def finish(self, run: Exec, status: int) -> None:
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        run.process.returncode = code
        for pipe in run.outputs:
            if not pipe.closed:
                self.drain(run, pipe, 16)
            if not pipe.closed:
                self.drop(pipe)
        if run.process.stdin is not None and not run.process.stdin.closed:
            self.drop(run.process.stdin)
        if run.stream is not None:
            self.streams.last_words(run.stream)
        if run.cancelled:
            return
        cuts = [len(output.head) if output.cut else None for output in run.outputs.values()]
        *first, err = (output.bytes() for output in run.outputs.values())
        out = first[0] if first else b""  # for a program with a stream, only stderr is collected
        reply = {
            "id": run.call,
            "exit_code": 137 if run.timed_out else code,
            "timed_out": run.timed_out,
            "cuts": [None, *cuts][-2:],
            "wall_s": time.monotonic() - run.started,
            "out": len(out),
        }
        self.send(reply, out + err)

    def sweep(self) -> None:
        """Kill processes that outlived their command: children without a live mark."""
        if self.pid == 1 and not self.execs:
            try:
                os.kill(-1, signal.SIGKILL)
            except OSError:
                pass
            return
        tokens = {run.token.encode() for run in self.execs.values()}
        stopped: Set[int] = set()
        for _ in range(20):
            top = [p for p in children() if p not in self.execs and not marked(p, tokens)]
            found = descendants(top) - stopped if top else set()
            if not found:
                break
            for pid in found:
                signal_one(pid, signal.SIGSTOP)
            stopped |= found
        for pid in stopped:
            signal_one(pid, signal.SIGKILL)


def main() -> None:
    """Reserve stdin and stdout for frames, and answer until the end."""
    reads, writes = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    os.umask(0o022)
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Code in the sandbox may neither trace the agent nor open its pipes.
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    Agent(reads, writes).run()
