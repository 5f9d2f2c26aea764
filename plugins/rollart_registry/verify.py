"""Compare installed packages, or the files of a registry, with their signed metadata.

Takes: a lock and an interpreter, or a verified view of a registry. Gives: every difference, one
line each. Never: fixes one, or runs a script.

pip generates the scripts of entry points, so a wheel has no hash of them, and the installed RECORD
can be changed with them. So each script is read, and must equal what pip writes
(:func:`script_fault`):

    #!/path/to/python
    import re, sys
    from MODULE import NAME
    if __name__ == "__main__":
        sys.argv[0] = ...
        sys.exit(NAME())

Versions of pip differ in how they shorten ``argv[0]``; only that line may vary.
"""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import os
import shlex
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Final

from rollart_core.errors import RegistryError
from rollart_registry.client import RegistryClient
from rollart_registry.interpreter import Installed, TargetInterpreter
from rollart_registry.lock import Lock, LockedPackage
from rollart_registry.wheel import Wheel, read_wheel

_WRITTEN_BY_PIP = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def differing_files(wheel: Wheel, interpreter: TargetInterpreter) -> list[str]:
    """Return the differences between an installed distribution and its wheel."""
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
    """Return the differences between an environment and its lock.

    Files of the registry's packages are compared with the wheel in the lock and the registry's
    metadata; files of an index's packages with their installed RECORD.
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
            found.append(f"{present.name} is {have}, but was {present.version} when it was locked")
    return found


def verify_registry(client: RegistryClient) -> tuple[int, list[str]]:
    """Download and compare every wheel of a registry.

    Returns:
        The number of valid releases, and the faults.
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
        return [f"{package.name} is {have}, but the lock has {package.version}"]
    if not installed.record:
        return [f"{package.name} has no RECORD any more to compare its files with"]
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


_NODES: Final = (
    ast.Module,
    ast.Import,
    ast.ImportFrom,
    ast.alias,
    ast.If,
    ast.Compare,
    ast.Eq,
    ast.Expr,
    ast.Call,
    ast.Assign,
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.UnaryOp,
    ast.USub,
    ast.Constant,
    ast.Load,
    ast.Store,
)
_CALLS: Final = ("re.sub", "sys.argv[0].endswith", "sys.argv[0].removesuffix", "sys.exit")


def script_fault(path: Path, value: str, interpreter: TargetInterpreter) -> str:
    """Return the fault of an installed script; empty if there is none.

    Args:
        path: Path of the script.
        value: Value of its entry point: ``module:function``.
        interpreter: The interpreter that the script belongs to.
    """
    try:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
    except OSError as e:
        return f"cannot be read ({e.strerror})"
    except (ValueError, SyntaxError):
        return "is not what pip writes"
    entry = EntryPoint("script", value, "console_scripts")
    if not _same_python(text, interpreter):
        return "is not run by the Python of its environment"
    return "" if _is_pips(tree, entry) else f"does not run {value}"


def _same_python(text: str, interpreter: TargetInterpreter) -> bool:
    lines = text.splitlines()
    try:
        words = shlex.split(lines[0].removeprefix("#!"))
        if words == ["/bin/sh"]:  # for a path that is too long, or has spaces: exec PATH "$0" "$@"
            words = shlex.split(lines[1].removeprefix("'''exec' "))[:1]
    except (IndexError, ValueError):
        return False
    python = os.path.realpath(interpreter.python)
    return len(words) == 1 and os.path.realpath(words[0]) == python


def _is_pips(tree: ast.Module, entry: EntryPoint) -> bool:
    first = entry.attr.partition(".")[0]
    imported = f"from {entry.module} import {first}"
    nodes = list(ast.walk(tree))
    froms = [ast.unparse(node) for node in nodes if isinstance(node, ast.ImportFrom)]
    plain = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    targets = {ast.unparse(t) for n in nodes if isinstance(n, ast.Assign) for t in n.targets}
    renamed = any(isinstance(node, ast.alias) and node.asname for node in nodes)
    return (
        all(isinstance(node, _NODES) for node in nodes)
        and froms == [imported]
        and plain <= {"re", "sys"}
        and not renamed
        and targets <= {"sys.argv[0]"}
        and {*calls} <= {*_CALLS, entry.attr}
        and f"sys.exit({entry.attr}())" in map(ast.unparse, nodes)
    )
