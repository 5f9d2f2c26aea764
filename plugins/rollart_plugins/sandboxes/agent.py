"""The exec agent: the one program that runs inside every box, whatever its wall.

Takes: frames on stdin. Gives: frames on stdout; a frame is two lengths (u32 header, u32 body, big
endian), a JSON header and raw bytes. Calls run side by side, each with an ``id``; the tunnels of
``forward`` are streams (``s``). Never: needs more than Python 3.8 and the standard library, lets
one call wait for another, outlives its stdin, or leaves a process behind.

The host sends this file's source as the first bytes (see ``connection.BOOTSTRAP``), so no image has
to hold it. In a process-id namespace it should be pid 1: then nothing inside can kill it.
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
import stat
import struct
import subprocess
import sys
import threading
import time

# A box starts in the time that these imports take: what few calls need is imported there.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import queue
    import socket
    from typing import Any, Callable, Deque, Dict, List, Optional, Set, Tuple

PROTOCOL = 1
CHUNK = 1 << 18
MAX_FRAME = 1 << 26
BACKLOG = 1 << 22
WINDOW = 1 << 20
LENGTHS = struct.Struct(">II")
MARK = "ROLLART_EXEC"
SHUT_WR = 1
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


class Output:
    """What one pipe gave: its first and its last bytes, within a cap."""

    def __init__(self, limit: int) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self.head_room, self.tail_room = limit - limit // 2, limit // 2
        self.cut = False

    def add(self, data: bytes) -> None:
        room = self.head_room - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > self.tail_room:
            self.cut = True
            if len(self.tail) > 2 * self.tail_room + CHUNK:
                self.trim()

    def trim(self) -> None:
        del self.tail[: len(self.tail) - self.tail_room]

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


class Tunnel:
    """One connection to a forwarded socket: what waits to be written, and what may be read."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.connection = number, connection
        self.waiting: Deque[bytes] = collections.deque()
        self.credit = WINDOW
        self.read_ended = self.write_ended = self.shut = False


class Agent:
    """The loop that answers frames."""

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes = reads, writes
        self.selector = selectors.DefaultSelector()
        self.received = bytearray()
        self.out: Deque[memoryview] = collections.deque()
        self.out_bytes = 0
        self.room = threading.Condition()
        self.execs: Dict[int, Exec] = {}
        self.uploads: Dict[int, "queue.Queue[Optional[bytes]]"] = {}
        self.tunnels: Dict[int, Tunnel] = {}
        self.num_tunnels = 0
        self.root = "/"
        self.roots: List[str] = []
        self.env: Dict[str, str] = {}
        self.confine = self.own_root = self.running = False
        self.ends_at = float("inf")
        self.pid = os.getpid()

    # -- the loop

    def run(self) -> None:
        """Answer until stdin ends or the time of the box is over."""
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
        """Kill whatever runs, and remove a folder of the agent's own."""
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
            wipe(self.root)
            os.rmdir(self.root)

    def on_wake(self, mask: int) -> None:
        try:
            os.read(self.wake_read, 4096)
        except BlockingIOError:
            pass
        self.reap()
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
        with self.room:
            self.out.append(memoryview(data))
            self.out_bytes += len(data)
        if threading.current_thread() is threading.main_thread():
            self.flush()
        else:
            self.wake()

    def send_when_room(self, header: Dict[str, Any], body: bytes) -> None:
        """Send from a thread, once the host has taken enough of what was sent before."""
        with self.room:
            self.room.wait_for(lambda: self.out_bytes < BACKLOG)
        self.send(header, body)

    def wake(self) -> None:
        try:
            os.write(self.wake_write, b"\0")
        except BlockingIOError:
            pass

    def flush(self, mask: int = 0) -> None:
        with self.room:
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
            self.room.notify_all()
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
        if header.get("ttl_s"):
            self.ends_at = time.monotonic() + header["ttl_s"]
        said = {"protocol": PROTOCOL, "pid": self.pid, "root": self.root}
        self.send({"id": header["id"], "python": sys.version.split()[0], **said})

    def op_ping(self, header: Dict[str, Any], body: bytes) -> None:
        self.send({"id": header["id"]})

    def op_exec(self, header: Dict[str, Any], body: bytes) -> None:
        cwd = self.inside(header.get("cwd") or "")
        if not os.path.isdir(cwd):
            raise NotADirectoryError(errno.ENOTDIR, "no such folder to run in", cwd)
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
        except OSError as e:
            if ours is not None:
                ours.close()
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
            tunnel = self.tunnels[header["stream"]] = Tunnel(header["stream"], ours)
            run.stream = tunnel
            self.tend(tunnel)

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
        self.in_thread(header["id"], self.read_file, header)

    def op_write_file(self, header: Dict[str, Any], body: bytes) -> None:
        import queue

        self.uploads[header["id"]] = queue.Queue()
        self.in_thread(header["id"], self.write_file, header)

    def op_snapshot(self, header: Dict[str, Any], body: bytes) -> None:
        self.in_thread(header["id"], self.snapshot, header)

    def op_restore(self, header: Dict[str, Any], body: bytes) -> None:
        import queue

        self.uploads[header["id"]] = queue.Queue()
        self.in_thread(header["id"], self.restore, header)

    def in_thread(self, call: int, work: Callable[[Dict[str, Any]], None], header: Any) -> None:
        def run() -> None:
            try:
                work(header)
            except Exception as e:
                self.fail(call, e)
            else:
                self.send({"id": header["id"]})
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
        """Take what a pipe holds, at most ``times`` chunks: others want to be heard too."""
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
        """Collect the dead; the group of a command that ended dies before its id can be reused."""
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
            self.last_words(run.stream)
        if run.cancelled:
            return
        *first, err = (output.bytes() for output in run.outputs.values())
        out = first[0] if first else b""  # of a program with a stream, only stderr is collected
        reply = {
            "id": run.call,
            "exit_code": 137 if run.timed_out else code,
            "timed_out": run.timed_out,
            "truncated": any(output.cut for output in run.outputs.values()),
            "wall_s": time.monotonic() - run.started,
            "out": len(out),
        }
        self.send(reply, out + err)

    def sweep(self) -> None:
        """Kill what outlived its command: children that are no command and bear no live mark."""
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

    # -- files

    def inside(self, path: str) -> str:
        """Return the absolute path; where the box has no root of its own, refuse one outside."""
        if "\0" in path:
            raise ValueError("a path holds a NUL")
        whole = os.path.join(self.root, path)
        if not self.confine:
            return whole
        real = os.path.realpath(whole)
        if real != self.root and not real.startswith(self.root + os.sep):
            raise PermissionError(errno.EACCES, "outside the box", path)
        return real

    def read_file(self, header: Dict[str, Any]) -> None:
        path, most = self.inside(header["path"]), header["max_bytes"]
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", header["path"])
            if os.fstat(fd).st_size > most:
                raise OSError(errno.EFBIG, f"larger than {most} bytes", header["path"])
            while True:
                data = os.read(fd, CHUNK)
                if not data:
                    return
                self.send_when_room({"id": header["id"], "part": 1}, data)
        finally:
            os.close(fd)

    def write_file(self, header: Dict[str, Any]) -> None:
        path = self.inside(os.path.realpath(self.inside(header["path"])))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = os.path.join(os.path.dirname(path), ".rollart-" + os.urandom(8).hex())
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                for data in self.uploaded(header["id"]):
                    file.write(data)
                os.fchmod(file.fileno(), header["mode"] & 0o7777)
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise

    def uploaded(self, call: int) -> Any:
        """Yield what the host sends; each piece is acknowledged, the last one is empty."""
        pieces = self.uploads[call]
        while True:
            data = pieces.get()
            if data is None:
                raise InterruptedError(errno.EINTR, "cancelled")
            if not data:
                return
            yield data
            self.send({"id": call, "ack": len(data)})

    def snapshot(self, header: Dict[str, Any]) -> None:
        import tarfile

        def send(data: bytes) -> int:
            self.send_when_room({"id": header["id"], "part": 1}, bytes(data))
            return len(data)

        writer = type("Writer", (), {"write": staticmethod(send)})()
        with tarfile.open(mode="w|", fileobj=writer, bufsize=CHUNK) as archive:
            for number, root in enumerate(self.roots):
                pack(archive, root, str(number))

    def restore(self, header: Dict[str, Any]) -> None:
        import tarfile

        pieces, rest = self.uploaded(header["id"]), bytearray()

        def read(size: int) -> bytes:
            while len(rest) < size:
                data = next(pieces, b"")
                if not data:
                    break
                rest.extend(data)
            given = bytes(rest[:size])
            del rest[:size]
            return given

        for root in self.roots:
            wipe(root)
        reader = type("Reader", (), {"read": staticmethod(read)})()
        with tarfile.open(mode="r|", fileobj=reader, bufsize=CHUNK) as archive:
            unpack(archive, self.roots)
        collections.deque(pieces, maxlen=0)

    # -- tunnels

    def op_forward(self, header: Dict[str, Any], body: bytes) -> None:
        import socket

        path = self.inside(header["path"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
        except OSError as e:
            listener.close()
            raise OSError(e.errno, e.strerror, header["path"]) from None
        listener.listen(64)
        listener.setblocking(False)
        number = header["forward"]
        self.watch(listener, selectors.EVENT_READ, lambda _: self.accept(listener, number))
        self.send({"id": header["id"]})

    def accept(self, listener: socket.socket, forward: int) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        self.num_tunnels += 1
        tunnel = self.tunnels[self.num_tunnels] = Tunnel(self.num_tunnels, connection)
        self.send({"op": "open", "s": tunnel.number, "forward": forward})
        self.tend(tunnel)

    def last_words(self, tunnel: Tunnel) -> None:
        """Send what a program that has ended left in its stream, within a window."""
        for _ in range(16):
            if not tunnel.shut and not tunnel.read_ended and tunnel.credit > 0:
                self.on_tunnel(tunnel, selectors.EVENT_READ)
        if not tunnel.shut:
            self.shut(tunnel)

    def tend(self, tunnel: Tunnel) -> None:
        """Listen for what a tunnel can do now; it is over when both directions are."""
        if tunnel.shut:
            return
        if tunnel.read_ended and tunnel.write_ended and not tunnel.waiting:
            self.shut(tunnel)
            return
        mask = 0
        if not tunnel.read_ended and tunnel.credit > 0:
            mask |= selectors.EVENT_READ
        if tunnel.waiting:
            mask |= selectors.EVENT_WRITE
        self.watch(tunnel.connection, mask, lambda m: self.on_tunnel(tunnel, m))

    def on_tunnel(self, tunnel: Tunnel, mask: int) -> None:
        if tunnel.shut:
            return
        try:
            if mask & selectors.EVENT_READ:
                data = tunnel.connection.recv(min(CHUNK, tunnel.credit))
                tunnel.read_ended = not data
                tunnel.credit -= len(data)
                self.send({"op": "data" if data else "eof", "s": tunnel.number}, data)
            if mask & selectors.EVENT_WRITE:
                self.pour(tunnel)
        except BlockingIOError:
            pass
        except OSError:
            self.send({"op": "reset", "s": tunnel.number})
            self.shut(tunnel)
        self.tend(tunnel)

    def pour(self, tunnel: Tunnel) -> None:
        sent = tunnel.connection.send(tunnel.waiting[0])
        rest = tunnel.waiting.popleft()[sent:]
        if rest:
            tunnel.waiting.appendleft(rest)
        self.send({"op": "ack", "s": tunnel.number, "n": sent})
        if not tunnel.waiting and tunnel.write_ended:
            tunnel.connection.shutdown(SHUT_WR)

    def op_stream(self, header: Dict[str, Any], body: bytes) -> None:
        """Take what the host says of a tunnel: data, eof, ack or reset."""
        tunnel = self.tunnels.get(header["s"])
        if tunnel is None:
            return
        what = header["what"]
        if what == "data":
            tunnel.waiting.append(body)
            if len(tunnel.waiting) == 1:
                self.on_tunnel(tunnel, selectors.EVENT_WRITE)
                return
        elif what == "ack":
            tunnel.credit += header["n"]
        elif what == "eof":
            tunnel.write_ended = True
            if not tunnel.waiting:
                try:
                    tunnel.connection.shutdown(SHUT_WR)
                except OSError:
                    self.shut(tunnel)
        else:
            self.shut(tunnel)
        self.tend(tunnel)

    def shut(self, tunnel: Tunnel) -> None:
        tunnel.shut = True
        self.watch(tunnel.connection, 0, self.flush)
        tunnel.connection.close()
        self.tunnels.pop(tunnel.number, None)


# -- processes


def children() -> List[int]:
    """Return the process ids of this process's children."""
    try:
        found: List[int] = []
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children") as file:
                found += map(int, file.read().split())
        return found
    except OSError:
        me = os.getpid()
        return [pid for pid, parent in parents().items() if parent == me]


def parents() -> Dict[int, int]:
    """Return each process's parent."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    found[int(name)] = int(file.read().rsplit(b")", 1)[1].split()[1])
            except (OSError, IndexError, ValueError):
                pass
    return found


def descendants(top: List[int]) -> Set[int]:
    """Return these processes and all below them."""
    below: Dict[int, List[int]] = collections.defaultdict(list)
    for pid, parent in parents().items():
        below[parent].append(pid)
    found: Set[int] = set()
    left = list(top)
    while left:
        pid = left.pop()
        if pid not in found:
            found.add(pid)
            left += below[pid]
    return found


def marked(pid: int, tokens: Set[bytes]) -> bool:
    """Whether a process was started with the mark of one of these commands."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read(1 << 20).split(b"\0")
    except OSError:
        return False
    mark = MARK.encode() + b"="
    return any(e.startswith(mark) and e[len(mark) :] in tokens for e in entries)


def signal_one(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def socketpair() -> Tuple["socket.socket", "socket.socket"]:
    """Return both ends of a program's stream; the first is the agent's."""
    import socket

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, theirs


def die_first(pid: int) -> None:
    """Where memory runs out, a command dies before the agent does."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def lower(which: int, value: int) -> None:
    """Lower a limit for this process and all it starts."""
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, value))


# -- trees


def wipe(root: str) -> None:
    """Remove all that is in a folder, whatever its modes."""
    try:
        entries = list(os.scandir(root))
    except PermissionError:
        os.chmod(root, 0o700)
        entries = list(os.scandir(root))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            wipe(entry.path)
            os.rmdir(entry.path)
        else:
            try:
                os.unlink(entry.path)
            except PermissionError:
                os.chmod(root, 0o700)
                os.unlink(entry.path)


def pack(archive: Any, path: str, name: str) -> None:
    """Add a tree to an archive, also what its owner may not read at present."""
    info = archive.gettarinfo(path, name)
    if info is None:
        return
    openable = info.isreg() or info.isdir()
    closed = openable and not os.access(path, os.R_OK | (os.X_OK if info.isdir() else 0))
    if closed:
        os.chmod(path, 0o700)
    try:
        if info.isreg():
            with open(path, "rb") as file:
                archive.addfile(info, file)
        else:
            archive.addfile(info)
        if info.isdir():
            for entry in sorted(os.listdir(path)):
                pack(archive, os.path.join(path, entry), name + "/" + entry)
    finally:
        if closed:
            os.chmod(path, info.mode)


def unpack(archive: Any, roots: List[str]) -> None:
    """Unpack what :func:`pack` packed; modes of folders come last, so that they can be filled."""
    folders: List[Tuple[str, int, float]] = []
    for info in archive:
        number, _, below = info.name.partition("/")
        root = roots[int(number)]
        path = os.path.join(root, below) if below else root
        if info.isdir():
            if below:
                os.mkdir(path, 0o700)
            folders.append((path, info.mode, info.mtime))
            continue
        if info.islnk():
            first, _, rest = info.linkname.partition("/")
            os.link(os.path.join(roots[int(first)], rest), path)
            continue
        info.name = below
        # Python 3.12 wants to be told that these members are trusted: they came from this tree.
        archive.extraction_filter = lambda member, _: member
        archive.extract(info, root, numeric_owner=True)
    for path, mode, mtime in reversed(folders):
        try:
            os.chmod(path, mode)
            os.utime(path, (mtime, mtime))
        except OSError:
            pass


def main() -> None:
    """Keep stdin and stdout for the frames alone, and answer."""
    reads, writes = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    os.umask(0o022)
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # What runs in the box may neither trace the agent nor open its pipes.
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    Agent(reads, writes).run()


if __name__ == "__main__":
    main()
