"""Files of the sandbox: sent to the host, and written for it.

Takes: the calls ``read_file`` and ``write_file``. Gives: the bytes of a regular file; an atomic
write. Never: reads a device or a pipe.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict

CHUNK = 1 << 18


class Files:
    """Transfers files for the agent, in the threads of its calls."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def read(self, header: Dict[str, Any]) -> None:
        path, most = self.agent.inside(header["path"]), header["max_bytes"]
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", header["path"])
            size, num_read = os.fstat(fd).st_size, 0
            while True:
                data = b"" if size > most else os.read(fd, CHUNK)
                num_read += len(data)
                if max(size, num_read) > most:  # files of /proc have size 0, and others grow
                    raise OSError(errno.EFBIG, f"larger than {most} bytes", header["path"])
                if not data:
                    return
                self.agent.send_when_possible({"id": header["id"], "part": 1}, data)
        finally:
            os.close(fd)

    def write(self, header: Dict[str, Any]) -> None:
        path = self.agent.inside(os.path.realpath(self.agent.inside(header["path"])))
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
        pieces = self.agent.uploads[call]
        while True:
            data = pieces.get()
            if data is None:
                raise InterruptedError(errno.EINTR, "cancelled")
            if not data:
                return
            yield data
            self.agent.send({"id": call, "ack": len(data)})
