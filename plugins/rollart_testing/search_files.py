"""Search the files of a sandbox for texts: a single script for Python 3.8 or later, run inside it.

Takes: one JSON object on stdin, ``{"secrets": [[line, ...], ...], "budget_s": seconds}``. Gives:
one JSON line: the file with most lines of a secret, or null; the number of files read; whether time
was up before all were read. Never: writes anything, or reads system folders (``/usr`` and similar),
devices or pipes.

Files, objects of git repositories and process environments are searched in the same way.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence, Set
from typing import Any

MAX_BYTES = 1 << 20
GIT_BYTES = 64 << 20
SKIPPED = {"/proc", "/sys", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}
SKIPPED |= {"/var/lib/dpkg", "/var/cache", "/etc/ssl"}
GIT_S = 20
SHARE = 0.6


def held(text: bytes, secrets: Sequence[Sequence[bytes]]) -> tuple[int, int] | None:
    """Return (lines found, lines) of the first secret that a text mostly holds; None if none."""
    for secret in secrets:
        may_miss, found = (1 - SHARE) * len(secret), 0
        for number, line in enumerate(secret):
            found += line in text
            if number + 1 - found > may_miss:
                break
        else:
            return found, len(secret)
    return None


def files(root: str, seen: Set[str]) -> Iterator[str]:
    """Yield regular files below a folder, and the ``.git`` folders of repositories."""
    for parent, folders, names in os.walk(root):
        whole = {name: os.path.join(parent, name) for name in folders}
        folders[:] = [n for n in folders if whole[n] not in SKIPPED and whole[n] not in seen]
        if ".git" in folders:
            yield os.path.join(parent, ".git")
        for name in names:
            yield os.path.join(parent, name)


def text_of(path: str) -> bytes | None:
    """Return the content of a file, or of all objects of a ``.git``; None if it is unreadable."""
    try:
        about = os.stat(path)
        if stat.S_ISREG(about.st_mode):
            with open(path, "rb") as file:
                return file.read(MAX_BYTES)
        if stat.S_ISDIR(about.st_mode):
            command = ["git", "--git-dir", path, "cat-file", "--batch-all-objects", "--batch"]
            said = subprocess.run(command, capture_output=True, timeout=GIT_S)
            return said.stdout[:GIT_BYTES]
    except (OSError, ValueError, subprocess.SubprocessError):
        pass
    return None


def environments() -> Iterator[str]:
    """Yield the files with the environments of processes."""
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            yield os.path.join("/proc", name, "environ")


def places() -> Iterator[str]:
    """Yield paths to search: the working folder first; without isolation, only that folder."""
    here = os.getcwd()
    if not os.path.ismount(here):
        yield from files(here, set())
        return
    first = {here, "/tmp", "/home", "/root", "/testbed"}
    for root in sorted(first):
        yield from files(root, set())
    yield from environments()
    yield from files("/", first)


def search(secrets: Sequence[Sequence[str]], budget_s: float) -> dict[str, Any]:
    """Return the result of the search."""
    wanted = [[line.encode() for line in secret] for secret in secrets]
    ends_at, num_files = time.monotonic() + budget_s, 0
    for path in places():
        if time.monotonic() > ends_at:
            return {"where": None, "num_files": num_files, "is_cut": True}
        text = text_of(path)
        if text is None:
            continue
        num_files += 1
        found = held(text, wanted)
        if found:
            return {"where": path, "lines": found, "num_files": num_files, "is_cut": False}
    return {"where": None, "num_files": num_files, "is_cut": False}


if __name__ == "__main__":
    order = json.loads(sys.stdin.read())
    print(json.dumps(search(order["secrets"], order["budget_s"])))
