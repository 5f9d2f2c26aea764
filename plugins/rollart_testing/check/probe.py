"""Import the hook modules of a package and report: ``python -m rollart_testing.check.probe``.

Takes: one line of JSON on stdin (entry points, or one ``module:Class``). Gives: one line of JSON on
the given pipe: loaded modules, import time and the specs of the hooks. Never: imports a class that
a spec names, unless there is only a class.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import asdict
from importlib.metadata import EntryPoint
from importlib.metadata import entry_points as installed
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Load the modules that a hook module may import without cost before timing it.
from rollart_core.plugins import hookspecs  # noqa: F401
from rollart_core.plugins.manager import GROUP, KINDS, Plugins, load
from rollart_core.plugins.manifest import MANIFEST_NAME
from rollart_core.plugins.registry import kind_of


def main() -> None:
    """Run the request on stdin."""
    job = json.loads(sys.stdin.buffer.readline())
    answer = {"kind": kind_of(job["class"])} if job.get("class") else facts(job["entry_points"])
    with os.fdopen(job["fd"], "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(answer, default=list) + "\n")


def facts(entry_points: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the facts on the hook modules of one distribution.

    Args:
        entry_points: Name and value of each.
    """
    before = set(sys.modules)
    modules = [value.partition(":")[0] for _, value in entry_points]
    began = time.process_time()
    errors = {m: e for m in modules if (e := _import_error(m)) is not None}
    cpu_s = time.process_time() - began
    named = os.environ.pop("ROLLART_PLUGINS", None)
    # An installed entry point knows its distribution: RollArt's own may have reserved commands.
    known = {one.value: one for one in installed(group=GROUP)}
    found = [known.get(value) or EntryPoint(name, value, GROUP) for name, value in entry_points]
    own = load(found=found)
    loaded = sorted(set(sys.modules) - before)
    if named is not None:
        os.environ["ROLLART_PLUGINS"] = named
    return {
        "cpu_s": cpu_s,
        "loaded": loaded,
        "errors": errors,
        "specs": _specs(own),
        "broken": _broken(own, load(), {value for _, value in entry_points}),
        "manifests": dict(_manifests(modules)),
    }


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return None


def _specs(own: Plugins) -> list[tuple[str, dict[str, Any]]]:
    """Return (kind, spec) of all registered plugins, broken or not."""
    working = [r for kind in KINDS for r in own.registered(kind).values()]
    return [(r.kind, asdict(r.spec)) for r in (*working, *own.broken_specs)]


def _broken(own: Plugins, everyone: Plugins, values: set[str]) -> dict[str, str]:
    """Return why entry points are broken, alone or with other installed packages."""
    found = [*everyone.broken, *own.broken]
    return {plugin.name: str(plugin.broken) for plugin in found if plugin.module in values}


def _manifests(modules: list[str]) -> Any:
    """Yield (package, text) of the manifests in the hook modules' packages or above them."""
    for module in dict.fromkeys(modules):
        package = module
        while package:
            text = _manifest_text(package)
            if text is not None:
                yield package, text
                break
            package = package.rpartition(".")[0]


def _manifest_text(package: str) -> str | None:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, MANIFEST_NAME)
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace")
    return None


if __name__ == "__main__":
    main()
