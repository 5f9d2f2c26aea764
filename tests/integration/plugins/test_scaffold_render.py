from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from rollart_core.cli import build_app
from rollart_core.errors import UserError
from rollart_core.plugins import manager as plugins
from rollart_plugins import new as render
from rollart_plugins import package_names as names

KINDS = tuple(names.REGISTERED_AS)
WORDING = render.Wording("acme", "Made for a test.")


def scaffold(*arguments: str, stdin: str | None = None) -> SimpleNamespace:
    """Run a command line; return its exit code, its output, and the error it raised, if any."""
    done = CliRunner().invoke(build_app(), arguments, input=stdin)
    error = str(done.exception) if isinstance(done.exception, UserError) else ""
    assert error or done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return SimpleNamespace(code=done.exit_code, out=done.stdout, error=error)


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_is_rendered_whole(kind: names.Kind, tmp_path: Path) -> None:
    name = names.name_package(kind, "acme-grid-maze")
    folder = render.render(name, WORDING, tmp_path)
    texts = {p: p.read_text() for p in folder.rglob("*") if p.is_file()}
    assert folder == tmp_path / "acme-grid-maze"
    assert list(tmp_path.iterdir()) == [folder]
    assert stat.S_IMODE(folder.stat().st_mode) & 0o055 == 0o055
    assert not [
        p for p, text in texts.items() if "cookiecutter" in text or "cookiecutter" in str(p)
    ]
    for path, text in texts.items():
        if path.suffix == ".py":
            compile(text, path, "exec")
        assert not text or (text.endswith("\n") and not text.endswith("\n\n")), path
    wanted = ["README.md", "LICENSE", ".gitignore", "pyproject.toml", ".github/workflows/ci.yml"]
    assert [name for name in wanted if not (folder / name).is_file()] == []


WORDS = ("no", "on", "off", "true", "false", "null")
"""What YAML takes for something else than text, where nothing says that it is text."""


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        *((kind, f"acme-promised-{kind}") for kind in KINDS),
        *product(KINDS, ("yes",)),
        *product(("reward",), WORDS),
    ],
)
def test_its_manifest_says_what_its_names_promise(
    kind: names.Kind, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = names.name_package(kind, given)
    folder = render.render(name, WORDING, tmp_path)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("ROLLART_PLUGINS", f"{name.module}.plugin")
    loaded = plugins.load()
    assert loaded.broken == ()
    for registered_as, (plugin_id, alias) in name.specs.items():
        spec = loaded.registered(registered_as)[plugin_id].spec
        assert isinstance(spec, plugins.PluginSpec)
        assert spec.alias == alias
    for example in folder.glob("example.yaml"):
        assert yaml.safe_load(example.read_text())["name"] == name.slug
    for module in [m for m in sys.modules if m.split(".")[0] == name.module]:
        del sys.modules[module]  # another package of that name is tried next


def test_what_all_packages_share_is_the_same_in_every_template() -> None:
    for shared in ("LICENSE", ".gitignore"):
        texts = {
            (render.template(kind) / "{{cookiecutter.slug}}" / shared).read_text() for kind in KINDS
        }
        assert len(texts) == 1, shared


def test_what_a_person_says_cannot_break_the_package(tmp_path: Path) -> None:
    import tomllib

    name = names.name_package("env", "acme-maze")
    wording = render.Wording('A "B" \\ {{ C }}\n', 'It\'s: #1 {% x %}\t"now".')
    folder = render.render(name, wording, tmp_path)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["authors"] == [{"name": "A 'B' / {{ C }}"}]
    assert project["description"] == "It's: #1 {% x %} 'now'."
    compile((folder / "acme_maze/__init__.py").read_text(), "x", "exec")


def test_a_package_that_cannot_be_finished_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cookiecutter import generate

    whole = generate.generate_file
    made: list[str] = []

    def until_the_fifth(project_dir: str, infile: str, *rest: object) -> None:
        made.append(infile)
        if len(made) == 5:
            raise OSError(28, "No space left on device")
        whole(project_dir, infile, *rest)

    monkeypatch.setattr(generate, "generate_file", until_the_fifth)
    with pytest.raises(UserError, match=r"cannot be created: .*No space left"):
        render.render(names.name_package("env", "acme-maze"), WORDING, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_makes_a_package_and_says_how_to_go_on(tmp_path: Path) -> None:
    done = scaffold("new-env", "acme_maze", "--output", str(tmp_path), "--non-interactive")
    assert done.code == 0
    assert f"pip install -e '{tmp_path}/acme-maze[dev]'" in done.out
    assert "rollart check acme/Maze-v1" in done.out
    again = scaffold("new-env", "acme-maze", "--output", str(tmp_path), "--non-interactive")
    assert again.code == 1
    assert "never overwritten" in again.error


def test_an_agent_environment_is_made_and_what_is_neither_is_refused(tmp_path: Path) -> None:
    kind = ("--kind", "agent", "--output", str(tmp_path), "--json")
    made = json.loads(scaffold("new-env", "acme-guess", *kind).out)
    assert made["ids"] == {"environments": "acme/Guess-v1"}
    assert "kind: agent" in (tmp_path / "acme-guess/acme_guess/rollart.yaml").read_text()
    refused = scaffold("new-env", "acme-guess", "--kind", "agnet", "--output", str(tmp_path))
    assert refused.code == 1
    assert "is not one of step, tool, agent. Did you mean 'agent'?" in refused.error


def test_json_says_what_was_made(tmp_path: Path) -> None:
    done = scaffold("new-reward", "acme-brevity", "--output", str(tmp_path), "--json")
    assert json.loads(done.out) == {
        "path": str(tmp_path / "acme-brevity"),
        "module": "acme_brevity",
        "ids": {"rewards": "acme/Brevity-v1"},
    }


def test_on_a_terminal_it_asks_until_the_id_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    answers = "toy/Maze-v1\nlabs/Dark-v2\nAda\n\n"
    done = scaffold("new-env", "acme-maze", "--output", str(tmp_path), stdin=answers)
    assert done.code == 0, done
    manifest = (tmp_path / "acme-maze/acme_maze/rollart.yaml").read_text()
    assert "id: labs/Dark-v2" in manifest
    assert 'summary: "Find the way out of a maze."' in manifest
    assert "Ada" in (tmp_path / "acme-maze/LICENSE").read_text()


def test_an_adapted_environment_records_its_cases(tmp_path: Path) -> None:
    folder = render.render(names.name_package("env", "acme-grid-maze"), WORDING, tmp_path)
    maze, cases = folder / "acme_grid_maze/env.py", folder / "tests/cases.jsonl"
    maze.write_text(maze.read_text().replace("1.0 if terminated", "0.5 if terminated"))
    run = partial(subprocess.run, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)})
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_cases.py"]
    assert run(tests, capture_output=True).returncode == 1
    run([sys.executable, "tests/test_cases.py"], check=True, capture_output=True)
    returns = {(c["kind"], c["return"]) for c in map(json.loads, cases.read_text().splitlines())}
    assert {("full", 0.5), ("zero", 0.0)} <= returns
    done = run(tests, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_hint_is_a_check_or_the_example(kind: names.Kind, tmp_path: Path) -> None:
    command = f"new-{kind}" if kind in ("reward", "algorithm", "mapper") else "new-env"
    further = ("--kind", kind) if kind in ("agent", "tool") else ()
    made = scaffold(command, "acme-made", "--output", str(tmp_path), "--non-interactive", *further)
    last = made.out.splitlines()[-1].strip()
    has_example = (tmp_path / "acme-made/example.yaml").is_file()
    assert has_example == (kind in ("env", "agent", "tool", "algorithm"))
    assert last.startswith("rollart run" if has_example else "rollart check acme/Made")
    assert "rollart check acme/Made" in made.out
