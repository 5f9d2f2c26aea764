from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rollart_core.cli import build_app
from rollart_core.contracts.env import EnvSpec
from rollart_core.errors import UserError
from rollart_core.plugins import manager as plugins
from rollart_core.plugins.hookspecs import hookimpl
from rollart_plugins import new as render
from rollart_plugins import package_names as names
from rollart_registry import wheel

KINDS = tuple(names.REGISTERED_AS)
WORDING = render.Wording("acme", "Made for a test.")


def scaffold(*arguments: str, stdin: str | None = None) -> SimpleNamespace:
    """Run a command line; return its exit code, its output, and the error it raised, if any."""
    done = CliRunner().invoke(build_app(), arguments, input=stdin)
    error = str(done.exception) if isinstance(done.exception, UserError) else ""
    assert error or done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return SimpleNamespace(code=done.exit_code, out=done.stdout, error=error)


@pytest.mark.parametrize(
    ("given", "plugin_id", "class_name"),
    [
        ("acme-maze", "acme/Maze-v1", "MazeEnv"),
        ("acme_maze", "acme/Maze-v1", "MazeEnv"),
        ("acme-grid-world-2", "acme/GridWorld2-v1", "GridWorld2Env"),
        ("puzzles", "puzzles/Puzzles-v1", "PuzzlesEnv"),
        ("acme-2048", "acme/2048-v1", "Acme2048Env"),
        ("acme-env", "acme/Env-v1", "AcmeEnv"),
        ("acme-test-env", "acme/TestEnv-v1", "TestEnv"),
    ],
)
def test_one_name_gives_all_others(given: str, plugin_id: str, class_name: str) -> None:
    name = names.name_package("env", given)
    assert name.slug == given.replace("_", "-")
    assert name.module == given.replace("-", "_")
    assert (name.plugin_id, name.class_name) == (plugin_id, class_name)
    assert name.class_name.isidentifier()


def test_an_id_of_ones_own_gives_the_classes_their_name() -> None:
    name = names.name_package("env", "acme-maze", "labs/Dark-Maze-v3")
    assert (name.namespace, name.base, name.module) == ("labs", "DarkMaze", "acme_maze")
    assert name.specs["rewards"] == ("labs/Dark-MazeReward-v1", "acme-maze-reward")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("Acme Maze", "small letters, digits and hyphens, starting with a letter, such as 'acme-"),
        ("AcmeMaze", "such as 'acme-maze'"),
        ("2048", "such as 'acme-maze'"),
        ("acme--maze", "such as 'acme-maze'"),
        ("acme-", "such as 'acme'"),
        ("../acme", "such as 'acme'"),
        ("", "such as 'acme-maze'"),
        ("a" * 33, "at most 32"),
        ("class", "is a Python keyword: try 'my-class'"),
        ("json", "is a module of Python: try 'my-json'"),
        ("runs", "git and the build of a wheel exclude: try 'my-runs'"),
        ("rollart", "are reserved"),
        ("rollart-maze", "are reserved"),
        ("rollart_envs", "are reserved"),
        ("webshop-better", "the namespace 'webshop' is reserved"),
        ("toy-maze", "the namespace 'toy' is reserved"),
        ("swe-bench", "my-team/Bench-v1"),
    ],
)
def test_a_name_that_cannot_be_one_says_how_to_mend_it(given: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        names.name_package("env", given)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "plugin_id",
    [
        *("acme/Maze", "Acme/Maze-v1", "acme-Maze-v1", "", "a/b/C-v1"),
        *("acme/A²-v1", "acme/A-v²", "acme/A-v٣"),  # no class of Python could be called so
    ],
)
def test_an_id_of_the_wrong_form(plugin_id: str) -> None:
    with pytest.raises(UserError, match="not of the form 'namespace/Name-vN'"):
        names.name_package("env", "acme-maze", plugin_id)


@pytest.mark.parametrize("kind", KINDS)
def test_no_package_is_called_what_its_own_git_or_wheel_leaves_out(kind: names.Kind) -> None:
    ignored = (render.template(kind) / "{{cookiecutter.slug}}/.gitignore").read_text().split()
    patterns = [*(line.rstrip("/") for line in ignored), *wheel._LEFT_OUT]
    refused = [p for p in patterns if p.isidentifier() and p != "__pycache__"]
    assert {"build", "dist", "runs", "venv"} <= set(refused)
    for given in refused:
        with pytest.raises(UserError, match=f"try 'my-{given}'"):
            names.name_package(kind, given)


@pytest.mark.parametrize("plugin_id", ["rollart/Maze-v1", "rollart-x/Maze-v1", "toy/Maze-v1"])
def test_an_id_in_a_namespace_of_rollart(plugin_id: str) -> None:
    with pytest.raises(UserError, match="is reserved: give another with --id"):
        names.name_package("env", "acme-maze", plugin_id)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("numpy", "distribution 'numpy' is already installed"),
        ("prompt_toolkit2", None),
        ("typing_extensions", "distribution 'typing-extensions' is already installed"),
        ("yaml", "a module 'yaml' already exists"),
    ],
)
def test_what_is_installed_is_taken(given: str, reason: str | None) -> None:
    name = names.name_package("env", given)
    if reason is None:
        names.refuse_taken(name)
        return
    with pytest.raises(UserError, match=reason):
        names.refuse_taken(name)


@pytest.mark.parametrize(
    "spec",
    [
        EnvSpec(id="acme/Maze-v1", entry_point="a:B"),
        EnvSpec(id="other/Labyrinth-v1", alias="acme-maze", entry_point="a:B"),
        EnvSpec(id="acme/Maze-v1", entry_point="broken"),
    ],
)
def test_an_id_or_alias_that_is_registered_is_taken(spec: EnvSpec) -> None:
    hook = hookimpl(lambda: [spec])
    brings = SimpleNamespace(__name__="labyrinth", rollart_environments=hook)
    name = names.name_package("env", "acme-maze")
    names.refuse_taken(name)
    with plugins.using({"lab": brings}), pytest.raises(UserError, match="is taken by plugin 'lab'"):
        names.refuse_taken(name)
    with plugins.using({"lab": brings}):  # the id of a reward is another matter
        names.refuse_taken(names.name_package("reward", "acme-maze"))


def test_what_exists_is_never_written_over(tmp_path: Path) -> None:
    name = names.name_package("env", "acme-maze")
    (tmp_path / "acme-maze").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="exists and is never overwritten"):
        render.render(name, WORDING, tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        render.render(name, WORDING, tmp_path / "none")


def test_other_kinds_of_environments_are_refused(tmp_path: Path) -> None:
    done = scaffold("new-env", "acme-maze", "--kind", "stop", "--output", str(tmp_path))
    assert done.code == 1
    assert "not one of step, tool, agent. Did you mean 'step'?" in done.error
    assert list(tmp_path.iterdir()) == []
