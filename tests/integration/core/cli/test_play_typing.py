"""What a person types in ``rollart play``: actions of several lines, an editor, calls of tools."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.pace import scaled, wait_until
from support.sandbox_types import no_bubblewrap
from typer.testing import CliRunner

from rollart_core.cli import build_app

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
}


class Echo:
    """Shows each action; ``stop`` ends the episode."""

    tools = ()

    def reset(self, *, seed, options):
        return "Say it.", {"tools": self.tools}

    def step(self, action):
        return f"<{action}>", 0.0, action.endswith("stop"), False, {}

    def close(self):
        pass


class EchoCalls(Echo):
    """Declares a tool."""

    tools = (TOOL,)


class EchoTyped(Echo):
    """Makes an action of what a person types."""

    def typed_action(self, text):
        return f"typed: {text}"


def played(typed: str, env: str = "Echo") -> str:
    arguments = ["play", f"{__name__}:{env}"]
    done = CliRunner().invoke(build_app(), arguments, input=typed, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_a_line_is_an_action_and_the_help_says_how_to_type_more():
    shown = played("one\nstop\n")
    assert "<one>" in shown
    for word in ("<<END", "!edit", "?", "Ctrl-D"):
        assert word in shown.partition("Say it.")[0]
    assert "The end." in shown


def test_a_block_and_the_lines_up_to_a_word_are_one_action():
    shown = played("```bash\nls\n  stop\n```\n<<EOF\nx \n\n  y\nEOF\n````\n```\n````\nstop\n")
    assert "<```bash\nls\n  stop\n```>" in shown
    assert "<x \n\n  y>" in shown
    assert "<````\n```\n````>" in shown
    assert "The end." in shown


def test_a_text_that_is_not_ended_is_not_sent():
    shown = played("```bash\nls\n")
    assert "Not sent: there was no line ``` at its end." in shown
    assert "Left before the end." in shown
    assert "<" not in shown.partition("Say it.")[2]


def test_an_environment_decides_what_typed_texts_are():
    shown = played("ls\nstop\n", "EchoTyped")
    assert "<typed: ls>" in shown
    assert "<typed: stop>" in shown


def test_tools_are_called_by_name():
    shown = played('/add {"a": 2}\n/add [2]\n/add {"a"\nstop\n', "EchoCalls")
    assert 'Tool: /add {"a": "integer"}' in shown
    assert '"tool_calls": [{"id": "call_typed", "name": "add", "arguments": {"a": 2}}]' in shown
    assert shown.count("Not sent: the arguments are not JSON") == 2
    assert "The end." in shown


def editor(folder: Path, script: str) -> str:
    """Return the command of an editor: a Python script that gets the file as ``path``."""
    file = folder / "an editor.py"
    file.write_text(f"import pathlib, sys\npath = pathlib.Path(sys.argv[1])\n{script}\n")
    return f"{sys.executable} '{file}'"


def test_an_editor_gets_the_previous_text_and_its_text_is_the_action(tmp_path, monkeypatch):
    monkeypatch.delenv("VISUAL", raising=False)
    script = "path.write_text(path.read_text() + '\\nthe stop\\n')"
    monkeypatch.setenv("EDITOR", editor(tmp_path, script))
    assert "<before\nthe stop>" in played("before\n!edit\n")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("path.write_text(' \\n')", "the text is empty"),
        ("path.unlink()", "No such file"),
        ("path.write_bytes(b'\\xff')", "decode"),
    ],
)
def test_an_editor_that_fails_sends_nothing(tmp_path, monkeypatch, script, why):
    monkeypatch.setenv("VISUAL", editor(tmp_path, script))
    shown = played("!edit\nstop\n")
    assert why in shown
    assert shown.count("Reward") == 1


def test_an_editor_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("VISUAL", "no-such-editor -x")
    assert "The editor 'no-such-editor -x' failed: " in played("!edit\nstop\n")


@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(no_bubblewrap()), reason=no_bubblewrap() or "bubblewrap")
def test_a_repository_is_mended_in_a_real_terminal(tmp_path):
    ours, theirs = pty.openpty()
    env = {
        **os.environ,
        "EDITOR": editor(tmp_path, "path.write_text('ls -d ledger\\n')"),
        "TERM": "dumb",
    }
    command = [Path(sys.executable).with_name("rollart"), "play", "repair", "sandbox=bubblewrap"]
    shown = bytearray()

    def shows(text: str) -> bool:
        os.set_blocking(ours, False)
        with suppress(BlockingIOError):
            shown.extend(os.read(ours, 1 << 16))
        return text in shown.decode(errors="replace").replace("\r\n", "\n")

    def type_lines(*lines: str, until: str) -> None:
        shown.clear()
        os.write(ours, "".join(f"{line}\n" for line in lines).encode())
        wait_until(lambda: shows(until), until)

    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as run:
        os.close(theirs)
        try:
            wait_until(lambda: shows("\n> "), "the prompt")
            type_lines("pwd", until="/work/repo\n> ")
            type_lines("```bash", "echo $((6 * 7))", "```", until="42\n> ")
            type_lines("<<END", "echo 1", "echo 2", "END", until="1\n2\n> ")
            type_lines("!edit", until="ledger\n> ")
            type_lines("```bash", "\x04", until="Not sent")
            type_lines("submit", until="The end. Return: 0")
            assert run.wait(scaled(60)) == 0
        finally:
            run.kill()
            os.close(ours)
