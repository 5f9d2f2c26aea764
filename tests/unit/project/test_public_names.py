"""Modules that say what is public say it rightly."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = [ROOT, ROOT / "envs", ROOT / "rewards", ROOT / "algorithms", ROOT / "plugins"]


def modules_with_all() -> list[str]:
    found = []
    for folder in FOLDERS:
        for path in sorted(folder.glob("rollart_*/**/*.py")):
            if "\n__all__ = " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(folder).with_suffix("").parts
                found.append(".".join(parts).removesuffix(".__init__"))
    return found


@pytest.mark.parametrize("name", modules_with_all())
def test_all_equals_the_public_names(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as e:
        if str(e.name).startswith("rollart"):
            raise
        pytest.skip(f"{e.name} is not installed here")
    listed = list(module.__all__)
    assert len(listed) == len(set(listed))
    assert [n for n in listed if not hasattr(module, n)] == []
    tree = ast.parse(inspect.getsource(module))
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assert {n for n in defined if not n.startswith("_")} <= set(listed)


def test_the_package_itself_offers_make_and_says_its_plugin_api() -> None:
    import rollart_core

    assert rollart_core.__all__ == ["OLDEST_PLUGIN_API", "PLUGIN_API", "fit", "make"]
