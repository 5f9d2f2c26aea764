"""Compare what is installed, or what a registry serves, with what was signed.

Takes: a lock and an interpreter, or a verified view of a registry. Gives: every difference, one
line each. Never: mends one.
"""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Iterator
from pathlib import Path

from rollart_core.errors import RegistryError
from rollart_registry.client import RegistryClient
from rollart_registry.interpreter import Installed, TargetInterpreter
from rollart_registry.lock import Lock, LockedPackage
from rollart_registry.script import script_fault
from rollart_registry.wheel import Wheel, read_wheel

_WRITTEN_BY_PIP = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def differing_files(wheel: Wheel, interpreter: TargetInterpreter) -> list[str]:
    """Return where an installed distribution differs from its wheel; nothing: nowhere."""
    installed = interpreter.installed.get(wheel.distribution)
    if installed is None:
        return [f"{wheel.distribution} is not installed"]
    if installed.version != wheel.version:
        return [f"{wheel.distribution} {installed.version} is installed, not {wheel.version}"]
    found = [
        f"{path} {_difference(installed.location / path, sha256)}"
        for path, sha256 in wheel.files.items()
        if path.rpartition("/")[2] not in _WRITTEN_BY_PIP
        and _difference(installed.location / path, sha256)
    ]
    for name, value in wheel.scripts.items():
        path = interpreter.bin / name
        if fault := script_fault(path, value, interpreter):
            found.append(f"{path} {fault}")
    return found


def verify_lock(client: RegistryClient, lock: Lock, interpreter: TargetInterpreter) -> list[str]:
    """Return where an environment differs from its lock.

    Files of the registry's packages are compared with the wheel that the lock and the registry's
    metadata name; those of an index's packages with the RECORD that was installed with them.
    """
    found: list[str] = []
    for package in lock.packages:
        if package.target is not None:
            wheel = read_wheel(client.download(package.target, package.sha256))
            found += differing_files(wheel, interpreter)
        else:
            found += _record_differences(package, interpreter)
    for present in lock.present:
        installed = interpreter.installed.get(present.name)
        if installed is None or installed.version != present.version:
            have = installed.version if installed else "not installed"
            found.append(f"{present.name} is {have}, and was {present.version}")
    return found


def verify_registry(client: RegistryClient) -> tuple[int, list[str]]:
    """Download and compare every wheel of a registry.

    Returns:
        How many releases hold, and what is wrong.
    """
    good, wrong = 0, []
    for release in client.releases():
        try:
            client.wheel(release)
            good += 1
        except RegistryError as e:
            wrong.append(str(e))
    return good, wrong + list(client.refused.values())


def _record_differences(package: LockedPackage, interpreter: TargetInterpreter) -> list[str]:
    installed = interpreter.installed.get(package.name)
    if installed is None or installed.version != package.version:
        have = installed.version if installed else "not installed"
        return [f"{package.name} is {have}, and the lock says {package.version}"]
    if not installed.record:
        return [f"{package.name} has no RECORD any more, to compare its files with"]
    return [
        f"{path} {difference}"
        for path, sha256 in _record(installed)
        if (difference := _difference(installed.location / path, sha256))
    ]


def _record(installed: Installed) -> Iterator[tuple[str, str]]:
    for row in csv.reader((installed.location / installed.record).read_text("utf-8").splitlines()):
        if len(row) > 1 and row[1].startswith("sha256="):
            digest = row[1].removeprefix("sha256=")
            yield row[0], base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()


def _difference(path: Path, sha256: str) -> str:
    try:
        with path.open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError as e:
        return f"cannot be read ({e.strerror})"
    return "" if same else "was changed after it was installed"
