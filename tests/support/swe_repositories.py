"""Small repositories with a bug and its fix, for tests of repair tasks."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

Files = Mapping[str, str | None]
IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b")

SHAPES = {
    "shapes/__init__.py": "def area(w, h):\n    return w + h\n\n\ndef edge(w, h):\n"
    "    return 2 * (w + h)\n",
    "tests/__init__.py": "",
    "tests/asserts.py": "def same(a, b):\n    assert a == b, (a, b)\n",
    "tests/test_shapes.py": "import unittest\n\nfrom shapes import edge\n"
    "from tests.asserts import same\n\n\nclass TestShapes(unittest.TestCase):\n"
    "    def test_edge(self):\n        same(edge(2, 3), 10)\n",
    "pytest.ini": "[pytest]\naddopts = -q\n",
}
_SOURCE, _TESTS = SHAPES["shapes/__init__.py"], SHAPES["tests/test_shapes.py"]
FIX = {"shapes/__init__.py": _SOURCE.replace("return w + h", "return w * h", 1)}
TESTS = {
    "tests/test_shapes.py": _TESTS.replace("import edge", "import area, edge")
    + "\n    def test_area(self):\n        same(area(2, 3), 6)\n"
}


def git(folder: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", *IDENTITY, *args], cwd=folder, capture_output=True, check=True, timeout=60
    )
    return done.stdout.decode()


def write(folder: Path, files: Files) -> None:
    """Write files; None removes one."""
    for name, text in files.items():
        path = folder / name
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def diff(folder: Path, files: Files) -> str:
    """Return the patch that changes these files of a clean repository, and leave it clean."""
    write(folder, files)
    git(folder, "add", "-A", "-f")
    patch = git(folder, "diff", "--cached", "HEAD")
    git(folder, "reset", "-q", "--hard")
    return patch


def shapes_task(repos: Path, framework: str = "unittest", **extra: object) -> dict[str, object]:
    """Make the repository ``acme/shapes`` below a folder, and return a task's row."""
    folder = repos / "acme__shapes"
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    write(folder, SHAPES)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "base")
    base = git(folder, "rev-parse", "HEAD").strip()
    patch, test_patch = diff(folder, FIX), diff(folder, TESTS)
    write(folder, {**FIX, **TESTS})
    git(folder, "commit", "-q", "-a", "-m", "The area is a product, SECRETLY")
    ids = {
        "unittest": "tests.test_shapes.TestShapes.{}",
        "pytest": "tests/test_shapes.py::TestShapes::{}",
    }[framework]
    return {
        "instance_id": f"acme__shapes-{framework}",
        "repo": "acme/shapes",
        "base_commit": base,
        "problem_statement": "The area of a rectangle is wrong.",
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": [ids.format("test_area")],
        "PASS_TO_PASS": [ids.format("test_edge")],
        "framework": framework,
        **extra,
    }


def pytest_packages(folder: Path, *further: str) -> Path:
    """Copy pytest, what it needs and further packages to where a box may read them."""
    folder.mkdir(mode=0o755)
    needed = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
    for name in (*needed, *further):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        ignored = shutil.ignore_patterns("tests", "__pycache__")
        shutil.copytree(Path(spec.origin).parent, folder / name, ignore=ignored)
        if name == "pytest":
            shutil.copy(Path(spec.origin).parent.parent / "py.py", folder)
        libraries = Path(spec.origin).parents[1] / f"{name}.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, folder / libraries.name)
    site = Path(importlib.import_module("pluggy").__file__ or "").parents[1]
    (about,) = site.glob("pluggy-*.dist-info")
    shutil.copytree(about, folder / about.name)  # without it pytest loads no plugin by name
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            os.chmod(os.path.join(parent, name), 0o755)
    return folder
