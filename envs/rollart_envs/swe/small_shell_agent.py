"""A minimal agent for a repository: a single file for Python 3.8 or newer, run in a sandbox.

Takes: the endpoint from its environment, and the task as its argument. Gives: the changes of the
commands that the model asks for. Never: needs a package, makes more than ``NUM_TURNS`` requests, or
continues after ``NUM_BAD`` answers in a row that are no command.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request

NUM_TURNS = 50
NUM_BAD = 3
TIMEOUT_S = 60
MAX_CHARS = 10000
FENCED = re.compile(r"^```(?:bash|sh|shell)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
FORMAT = """\
Answer with exactly one shell command in one fenced block:

```bash
git status
```

Each command runs in a fresh shell in the repository. When the work is done, answer with `submit` in
such a block."""


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's answer."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"] or "")


def run(command: str) -> str:
    """Return what a command printed."""
    end = ""
    with tempfile.TemporaryFile() as file:  # a pipe would wait for background processes
        shell = subprocess.Popen(
            ["bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(TIMEOUT_S)
            end = f"\n(exit code {code})" if code else ""
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            end = f"\n(stopped after {TIMEOUT_S} s)"
        file.seek(0)
        said = file.read().decode("utf-8", "replace").strip()
    if len(said) > MAX_CHARS:
        said = said[: MAX_CHARS // 2] + "\n[...]\n" + said[-MAX_CHARS // 2 :]
    return (said + end).strip() or "(no output)"


def main() -> None:
    """Run the model's commands until it submits."""
    messages = [{"role": "user", "content": sys.argv[1] + "\n" + FORMAT}]
    num_bad = 0
    for _ in range(NUM_TURNS):
        said = ask(messages)
        commands = FENCED.findall(said)
        num_bad = 0 if len(commands) == 1 else num_bad + 1
        if num_bad == NUM_BAD:
            return
        messages.append({"role": "assistant", "content": said})
        if len(commands) != 1:
            told = f"Your answer has {len(commands)} commands. {FORMAT}"
        elif commands[0].strip() == "submit":
            return
        else:
            told = run(commands[0])
        messages.append({"role": "user", "content": told})


if __name__ == "__main__":
    main()
