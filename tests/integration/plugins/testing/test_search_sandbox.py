"""Hidden tests are found wherever they lie in a box that an agent can read."""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.pace import scaled
from support.sandbox_types import no_bubblewrap, opened
from support.swe_repositories import git, write

from rollart_testing import search_files as search_sandbox
from rollart_testing.sandbox_checks import distinctive_lines

TESTS = "def test_area():\n    assert area(2, 3) == 6\n    assert area(4, 5) == 20\n"
LINES = distinctive_lines([TESTS], "")


def searched(folder: Path) -> dict[str, object]:
    order = json.dumps({"secrets": LINES, "budget_s": 100})
    done = subprocess.run(
        [sys.executable, "-c", Path(search_sandbox.__file__).read_text()],
        input=order.encode(),
        cwd=folder,
        capture_output=True,
        check=True,
        timeout=scaled(110),
    )
    return json.loads(done.stdout)


def test_a_file_is_found_and_what_only_looks_alike_is_not(tmp_path):
    write(tmp_path, {"a/b.py": "def area(w, h):\n    return w * h\n\ndef test_area():\n"})
    found = searched(tmp_path)
    assert (found["where"], found["num_files"]) == (None, 1)
    write(tmp_path, {"a/.hidden": f"# old\n{TESTS}"})
    found = searched(tmp_path)
    assert (found["where"], found["lines"]) == (str(tmp_path / "a/.hidden"), [3, 3])


def test_the_objects_of_a_repository_are_looked_at(tmp_path):
    git(tmp_path, "init", "-q")
    write(tmp_path, {"test_a.py": TESTS})
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "x")
    (tmp_path / "test_a.py").unlink()
    assert searched(tmp_path)["where"] == str(tmp_path / ".git")


def test_a_patch_notifies_by_what_it_adds():
    patch = (
        "diff --git a/t.py b/t.py\n--- a/t.py\n+++ b/t.py\n@@ -1,2 +1,3 @@\n"
        " def stays_as_it_is():\n-    was_there_before()\n+    comes_with_the_patch()\n"
        "+    stands_on_the_page()\n+    and_this_one_too()\n"
    )
    lines = distinctive_lines([patch, "short", "x = 1"], "a page\n  stands_on_the_page()\n")
    assert lines == [["and_this_one_too()", "comes_with_the_patch()"]]


def test_all_of_a_walled_sandbox_is_searched(tmp_path):
    if why := no_bubblewrap():
        pytest.skip(why)

    async def places() -> list[object]:
        source, order = (
            Path(search_sandbox.__file__).read_text(),
            json.dumps({"secrets": LINES, "budget_s": 100}),
        )
        found = []
        async with opened("bubblewrap") as sandbox:
            for path in (None, "/work/x/t.py", "/tmp/t.py", "/dev/shm/t.py"):
                if path:
                    await sandbox.write_file(path, TESTS.encode())
                result = await sandbox.exec(
                    ("python3", "-I", "-S", "-c", source), timeout_s=200, stdin=order.encode()
                )
                said = json.loads(result.stdout)
                found.append(said["where"])
                if path:
                    await sandbox.exec(("rm", path), timeout_s=60)
        return found

    # What only devices and the system's own folders hold is not looked at.
    assert asyncio.run(places()) == [None, "/work/x/t.py", "/tmp/t.py", None]


def test_it_is_one_file_for_python_3_8():
    tree = ast.parse(Path(search_sandbox.__file__).read_text(), feature_version=(3, 8))
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names
