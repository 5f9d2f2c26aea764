"""What is asked of every node before a run starts on it, and what is wrong with the answers.

Takes: facts that nodes tell. Gives: functions to run there, and problems that name the node. Never:
imports ray. The functions travel as they are, without their module: a node that has no rollart, or
another one, can still answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

MISSING = "none"
"""The version of what is not there."""


def versions(distributions: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of these distributions in this process."""
    return ask_versions(distributions)()


def ask_versions(distributions: Sequence[str]) -> Callable[[], dict[str, str]]:
    """Return a function that tells a node's versions."""
    wanted = list(distributions)

    def tell() -> dict[str, str]:
        import platform
        from importlib.metadata import PackageNotFoundError, version

        found = {"Python": ".".join(platform.python_version_tuple()[:2])}
        for name in wanted:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "none"
        return found

    return tell


def differences(driver: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return where nodes differ from the driver, a line a node.

    Args:
        driver: Its versions.
        nodes: Title of a node -> its versions.
    """
    found = []
    for title, theirs in nodes.items():
        other = [
            f"{name} {_said(theirs.get(name, MISSING))} (here {_said(ours)})"
            for name, ours in driver.items()
            if theirs.get(name, MISSING) != ours
        ]
        if other:
            found.append(f"node {title} has {', '.join(other)}: install the same there")
    return found


def ask_whether_there(path: str) -> Callable[[], bool]:
    """Return a function that tells whether a node has a file or folder."""

    def there() -> bool:
        import os

        return os.path.exists(path)

    return there


def ask_whether_seen(path: str, text: str) -> Callable[[], bool]:
    """Return a function that tells whether a node reads ``text`` in a file at ``path``."""

    def seen() -> bool:
        try:
            with open(path, encoding="utf-8") as file:
                return file.read() == text
        except OSError:
            return False

    return seen


def ask_to_write(path: str, text: str) -> Callable[[], str]:
    """Return a function that writes a file and tells why not, or an empty string."""

    def write() -> str:
        import os

        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as e:
            return str(e)
        return ""

    return write


def ask_to_remove(path: str) -> Callable[[], None]:
    """Return a function that removes a file or a folder, if it is there."""

    def remove() -> None:
        import os
        import shutil

        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.exists(path):
            os.unlink(path)

    return remove


def ask_for_a_port(host: str) -> Callable[[], int]:
    """Return a function that finds a port of a node that is free."""

    def find() -> int:
        import socket

        with socket.socket() as listener:
            listener.bind((host, 0))
            return int(listener.getsockname()[1])

    return find


def check_what_is_missing(
    kind: str, plugin_id: str, options: Mapping[str, Any]
) -> Callable[[], list[str]]:
    """Return a function that tells what a plugin's options name and a node with this rollart lacks.

    Args:
        kind: Of the plugin, such as ``inference_engines``.
        plugin_id: Its id.
        options: As its config model checked them.
    """
    given = dict(options)

    def tell() -> list[str]:
        from rollart_core.config.validation.preflight import missing

        return [problem.within() for problem in missing(kind, plugin_id, given)]

    return tell


def check_sandbox_on_node(
    env_id: str, options: Mapping[str, Any]
) -> Callable[[], tuple[str, str] | None]:
    """Return a function that tries a box of an environment on a node that has this rollart.

    The function returns what is wrong and how to mend it, or None.
    """
    given = dict(options)

    def fault() -> tuple[str, str] | None:
        from rollart_core.errors import RollartError, first_line
        from rollart_core.plugins import registry
        from rollart_core.rollout import loop
        from rollart_sandboxes.pool.doctor import diagnose
        from rollart_sandboxes.pool.source import close_all

        try:
            if registry.ISOLATION in given:
                from rollart_sandboxes.isolation.describe import describe

                describe(env_id, given)
                return None
            sandbox = dict(given["sandbox"])
            found = loop.run(diagnose(sandbox.pop("id"), sandbox))
        except RollartError as e:
            return first_line(str(e)), ""
        finally:
            close_all()
        if found.works:
            return None
        bad = [f for f in found.findings if f.state == "bad"] or list(found.findings)
        return f"{found.sandbox}: {bad[-1].what}: {bad[-1].says}", bad[-1].mend

    return fault


def _said(version: str) -> str:
    return "not installed" if version == MISSING else version
