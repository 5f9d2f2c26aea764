"""The pages that teach are walked from top to bottom: their files written, their commands typed.

A block whose first line is a comment that names a file is that file. In a ``console`` block, a line
that begins with ``$`` is typed, and each line below it stands somewhere in what that prints, in
order. A line ``...`` stands for lines that are left out.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = (
    "docs/tutorials/environment.md",
    "docs/guides/reward.md",
    "docs/guides/algorithm.md",
    "docs/guides/mapper.md",
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w./-]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that it is, if it is one."""
        named = FILE.match(self.text)
        return named[1] if named else None

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each command with the lines that it must print."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, *printed = part.rstrip("\n").split("\n")
            yield command, [line.strip() for line in printed if line.strip() not in {"", "..."}]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in BLOCK.finditer(text)
    ]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment of its own, offline, in which all that is installed here can be imported."""
    made = tmp_path / "venv"
    venv.create(made, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(made)}))
    here = sysconfig.get_path("purelib")
    (site / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    for name, code in {
        "rollart": "from rollart_core.cli import main; main()",
        "pip": "import runpy; runpy.run_module('pip', run_name='__main__')",
    }.items():
        script = made / "bin" / name
        script.write_text(f"#!{made}/bin/python\n{code}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {
        **{k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "ROLLART_PLUGINS"}},
        "PATH": f"{made / 'bin'}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as the opposite: no isolation
        # test_one_minute_road.py installs what `rollart new` makes together with what it needs
        "PIP_NO_DEPS": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "COLUMNS": "160",
    }


def type_in(command: str, folder: Path, environ: dict[str, str]) -> str:
    """Return what a command prints; it must succeed."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed(page: str, tmp_path: Path, environ: dict[str, str]) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for block in blocks(page):
        if block.file:
            target = folder / block.file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            for command, wanted in block.commands():
                printed = rest = type_in(command, folder, environ)
                for line in wanted:
                    where = f"{page}:{block.line}: $ {command}\n{printed}"
                    assert line in rest, f"{line!r} is not printed by {where}"
                    rest = rest.partition(line)[2]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_executed(page: str) -> None:
    found = blocks(page)
    assert [b.line for b in found if not b.file and b.language != "console"] == []
    commands = [shlex.split(c) for b in found if b.language == "console" for c, _ in b.commands()]
    assert any(words[:2] == ["rollart", "check"] for words in commands)
    for block in found:
        if block.language == "python":
            compile(block.text, f"{page}:{block.line}", "exec")


def test_a_page_that_promises_too_much_fails(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for name, text, reason in (
        ("one", "```console\n$ echo one\ntwo\n```\n", "'two' is not printed"),
        ("two", "```python\n# a/b.py\n```\n```console\n$ cat a/b.py\nx\n```\n", "'x' is not"),
        ("three", "```console\n$ false\n```\n", r"\$ false"),
    ):
        (tmp_path / f"{name}.md").write_text(text)
        (tmp_path / name).mkdir()
        with pytest.raises(AssertionError, match=reason):
            test_a_page_can_be_followed(f"{name}.md", tmp_path / name, environ)


def test_extras_are_installed_in_one_way_and_all_are_listed() -> None:
    """``rollart[EXTRA]`` adds to what is installed, from a clone too; a path needs the clone."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    install = ROOT / "docs/guides/install.md"
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*/*.md"))]:
        text = page.read_text(encoding="utf-8")
        for extras in re.findall(r"rollart\[([a-z,-]+)\]", text):
            assert set(extras.split(",")) <= set(known), f"{page}: {extras}"
        assert page == install or not re.findall(r"pip install -e '?\.\[", text), page
    table = re.findall(r"^\| (`.+?) \|", install.read_text(encoding="utf-8"), flags=re.MULTILINE)
    listed = [name for row in table for name in re.findall(r"`([a-z-]+)`", row)]
    assert sorted(listed) == sorted(set(known) - {"bench", "dev"})
