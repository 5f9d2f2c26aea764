"""The import closure: what a lane's result depends on, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from closure import Closure, fingerprint

FILES = {
    "rollart_core/__init__.py": "",
    "rollart_core/plugins/__init__.py": "",
    "rollart_core/plugins/manager.py": "",
    "rollart_core/scheduling/__init__.py": "",
    "rollart_core/scheduling/loop.py": "from . import clock\n",
    "rollart_core/scheduling/clock.py": "",
    "rollart_core/scheduling/table.json": "{}",
    "rollart_core/lazy.py": 'COMMAND = "rollart_core.late:main"\n',
    "rollart_core/late.py": "",
    "rollart_core/other.py": "",
    "plugins/rollart_p/__init__.py": "",
    "plugins/rollart_p/plugin.py": 'SPEC = "rollart_p.engine:Engine"\n',
    "plugins/rollart_p/engine.py": "",
    "plugins/rollart_p/rollart.yaml": "engines:\n  - entry_point: rollart_p.listed:Engine\n",
    "plugins/rollart_p/listed.py": "",
    "tests/conftest.py": "import helper\n",
    "tests/helper.py": "",
    "tests/a/test_a.py": "def test():\n    from rollart_core.scheduling.loop import x\n",
    "tests/a/expected.txt": "7",
    "tests/b/test_b.py": "import rollart_core.lazy\n",
    "tests/c/test_c.py": "from rollart_core.plugins import manager\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository."""
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def closure(root: Path, *roots: str) -> set[str]:
    return {str(path) for path in Closure(root).files(roots)}


def test_it_holds_what_is_imported_anywhere_and_the_data_beside(root: Path) -> None:
    assert closure(root, "tests/a") == {
        "rollart_core/__init__.py",
        "rollart_core/scheduling/__init__.py",
        "rollart_core/scheduling/clock.py",
        "rollart_core/scheduling/loop.py",
        "rollart_core/scheduling/table.json",
        "tests/a/expected.txt",
        "tests/a/test_a.py",
        "tests/conftest.py",
        "tests/helper.py",
    }


def test_it_holds_what_strings_name(root: Path) -> None:
    assert "rollart_core/late.py" in closure(root, "tests/b")


def test_it_holds_what_entry_points_name(root: Path) -> None:
    found = closure(root, "tests/c")
    assert {"plugins/rollart_p/plugin.py", "plugins/rollart_p/engine.py"} <= found
    assert "rollart_core/other.py" not in found


def test_it_holds_what_a_manifest_names(root: Path) -> None:
    assert "plugins/rollart_p/listed.py" in closure(root, "tests/c")


def test_only_a_change_inside_changes_the_fingerprint(root: Path) -> None:
    def now() -> str:
        return fingerprint(root, Closure(root).files(["tests/a"]), "3.11")

    before = now()
    (root / "rollart_core/other.py").write_text("x = 1\n")
    assert now() == before
    assert fingerprint(root, Closure(root).files(["tests/a"]), "3.12") != before
    for name in ("rollart_core/scheduling/clock.py", "rollart_core/scheduling/table.json"):
        (root / name).write_text("7")
        assert now() != before
        before = now()


def test_what_does_not_exist_is_refused(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tests/nope"):
        closure(root, "tests/nope")


def test_of_this_repository_it_holds_the_plugins_and_leaves_out_other_tests(
    repo_root: Path,
) -> None:
    found = closure(repo_root, "tests/adapters")
    assert {"rollart_core/types.py", "tests/conftest.py", "tests/support/pace.py"} <= found
    assert any(name.startswith("plugins/rollart_plugins/adapters/") for name in found)
    assert not any(name.startswith("tests/unit/") for name in found)
