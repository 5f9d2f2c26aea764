"""What the documents and examples tell a person to type can be typed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from rollart_core.cli import COMMANDS, build_app, main
from rollart_core.config import resolve_plugin
from rollart_core.config.load import is_suite, read_yaml
from rollart_core.config.model import NewModel
from rollart_core.models.new import new_model

ROOT = Path(__file__).resolve().parents[3]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
)
WALKED = [
    ROOT / "docs" / page
    for page in (
        "tutorials/environment.md",
        "guides/reward.md",
        "guides/algorithm.md",
        "guides/mapper.md",
    )
]
"""Pages whose commands ``test_docs_pages.py`` types, each on top of those before it."""
SCAFFOLDED = "run acme-maze/"
"""``tests/packaging/test_one_minute_road.py`` runs what `rollart new-env` made."""
MISSION = "run examples/mission.yaml"
"""Has a third-party package: ``test_bench_mission.py`` resolves it."""
BLOCK_LINE = re.compile(r"^(?: {4}|\$ ?)?rollart (.+?)(?: +#.*)?$", flags=re.MULTILINE)
IN_TEXT = re.compile(r"`rollart ([^`]+)`")
PLACEHOLDERS = re.compile(r"\b[A-Z][A-Z_]+\b")


def shown(leave_out: Sequence[Path] = ()) -> list[str]:
    """Return every command line of the documents, of the examples' comments and of ``--help``."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES if page not in leave_out]
    found = [line for text in texts for line in (*BLOCK_LINE.findall(text), *IN_TEXT.findall(text))]
    for example in ROOT.glob("examples/*.yaml"):
        found += re.findall(r"rollart (.+)$", example.read_text("utf-8"), flags=re.MULTILINE)
    found += [command.example.removeprefix("rollart ") for command in COMMANDS.values()]
    return sorted({line for line in found if not line.startswith("-")})


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    new_model(str(path), NewModel(num_layers=1, vocab_size=320), ["What is 1? 1"], 0)
    return path


@pytest.fixture
def filled(model: Path, tmp_path: Path) -> Path:
    """A folder that can stand for what a person fills in."""
    for path in model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    rows = ({"question": f"What is {n}?", "answer": str(n)} for n in range(4_000))
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_there_are_commands_to_check() -> None:
    assert {line.split()[0] for line in shown()} >= {
        "run",
        "list",
        "info",
        "play",
        "audit",
        "model",
    }


@pytest.mark.parametrize("line", shown())
def test_a_command_line_of_the_documents_parses(line: str, filled: Path) -> None:
    words = shlex.split(PLACEHOLDERS.sub(str(filled), line))
    command: Any = typer.main.get_command(build_app())
    context = command.make_context("rollart", [*words])
    while hasattr(command, "resolve_command") and words:  # a group, and the command it names
        name, command, words = command.resolve_command(context, words)
        if words:  # a command that is only named, in a sentence, exists: that is all
            context = command.make_context(name, words, parent=context)


def test_the_reference_says_which_commands_have_json() -> None:
    group: Any = typer.main.get_command(build_app())
    context = group.make_context("rollart", ["list"])

    def has_json(command: Any) -> bool:
        inner = getattr(command, "commands", None)
        if inner:
            return all(has_json(one) for one in inner.values())
        return any("--json" in param.opts for param in command.params)

    without = [name for name in COMMANDS if not has_json(group.resolve_command(context, [name])[1])]
    assert set(without) == {"play", "plot", "model", "registry"}
    says = "except `play`, `plot`, `model` and some subcommands of `registry`"
    assert says in (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")


def runs() -> list[str]:
    """Return the shown command lines that run a config, and each example by itself."""
    started = [line for line in shown(WALKED) if line.startswith("run ") and "--resume" not in line]
    started = [line for line in started if not line.startswith(SCAFFOLDED)]
    configs = (path for path in ROOT.glob("examples/*.yaml") if not is_suite(read_yaml(path)))
    examples = {f"run examples/{path.name}" for path in configs}
    examples.discard(MISSION)
    return sorted({*started, *examples})


@pytest.mark.parametrize("line", runs())
def test_what_the_documents_run_passes_a_dry_run(
    line: str,
    filled: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "examples/custom_env"))
    monkeypatch.syspath_prepend(str(ROOT / "examples/rlvr"))
    # Executables and images are this machine's business, not the documents'.
    monkeypatch.setattr(resolve_plugin, "missing", lambda kind, plugin_id, options: [])
    line = line.replace("data=train.jsonl", f"data={filled}/train.jsonl")
    words = shlex.split(PLACEHOLDERS.sub(str(filled), line))
    given = [word for word in words if word != "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["rollart", *given, "--dry-run"])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code, capsys.readouterr().err


def test_the_minimal_config_passes_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs/reference/config.md").read_text(encoding="utf-8")
    block = text.partition("## A minimal config")[2].partition("```yaml\n")[2]
    config = tmp_path / "minimal.yaml"
    config.write_text(block.partition("```")[0])
    monkeypatch.setattr(sys, "argv", ["rollart", "run", str(config), "--dry-run"])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code, capsys.readouterr().err


def test_make_targets_of_the_documents_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"(?:^ {4}|`)make ([a-z]+)", text, flags=re.MULTILINE)
        assert set(named) <= set(targets), page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_the_documents_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert not [u for u in links if "://" not in u and not (page.parent / u).exists()]
