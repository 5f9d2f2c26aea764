"""What is in a file: where its bytes lie, and a digest by which a change shows.

Takes: descriptors of regular files. Gives: spans, bytes, digests. Never: reads a hole.

Where memory is the disk (tmpfs), the kernel does not ask to be told of the first write to a page
of a shared mapping that was read before: the file has other bytes then, and its old change time.
The digest begins with a key, and neither leaves the agent: nobody in the box can look for another
content of the same digest.
"""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Tuple

CHUNK = 1 << 18
KEY = os.urandom(32)
# An overlay tells what the file system of its upper folder does, which is a disk's.
TELLING = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "overlay"}


class Telling:
    """Which file systems set the change time at whatever writes to a file."""

    def __init__(self) -> None:
        self.devices: Dict[int, bool] = {}

    def of(self, handle: int, device: int) -> bool:
        """Whether that of a file does; one that is not known does not."""
        if device not in self.devices:
            self.devices[device] = kind(handle) in TELLING
        return self.devices[device]


def kind(handle: int) -> str:
    """Return the kind of a file's file system; empty where there is no telling."""
    try:
        with open(f"/proc/self/fdinfo/{handle}") as file:
            mount = [line.split()[1] for line in file if line.startswith("mnt_id:")]
        with open("/proc/self/mountinfo") as file:
            for line in file:
                if line.split(" ", 1)[0] in mount:
                    return line.partition(" - ")[2].split(" ", 1)[0]
    except OSError:
        pass
    return ""


def hasher(size: int, spans: List[Tuple[int, int]]) -> Any:
    """Return what takes the bytes of the spans, in turn, and gives their digest."""
    from hashlib import sha256  # of those with a key or none, the one that processors help with

    return sha256(b"%s%d %s " % (KEY, size, repr(spans).encode()))


def digest(handle: int, found: os.stat_result) -> bytes:
    """Return the digest of a file."""
    spans = data_spans(handle, found)
    whole = hasher(found.st_size, spans)
    for start, length in spans:
        for data in span(handle, start, length):
            whole.update(data)
    return bytes(whole.digest())


def data_spans(handle: int, found: os.stat_result) -> List[Tuple[int, int]]:
    """Return where the bytes of a file lie that are not holes, as start and length."""
    size, at = found.st_size, 0
    spans: List[Tuple[int, int]] = []
    if found.st_blocks * 512 >= size:
        return [(0, size)] if size else []
    while at < size:
        try:
            start = os.lseek(handle, at, os.SEEK_DATA)
        except OSError as e:
            if e.errno == errno.ENXIO:
                break
            return [(0, size)]
        at = os.lseek(handle, start, os.SEEK_HOLE)
        spans.append((start, min(at, size) - start))
    return spans


def span(handle: int, start: int, length: int) -> Iterator[bytes]:
    """Yield so many bytes of a file, with zeros for what is no longer there."""
    while length:
        data = os.pread(handle, min(CHUNK, length), start) or bytes(min(CHUNK, length))
        yield data
        start, length = start + len(data), length - len(data)
