"""A minimal agent: a single file for Python 3.8 or newer, run in a sandbox.

Takes: the endpoint from its environment, and the task as its argument. Gives: the source that the
model answers with, in ``solution.py``. Never: needs a package, or makes more requests than
``NUM_TRIES``.

It runs each answer once. If that fails, it sends the error to the model and tries again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request

NUM_TRIES = 3
FENCED = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


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


def main() -> None:
    """Ask until the answer runs without an error."""
    with open("solution.py", encoding="utf-8") as file:
        buggy = file.read()
    ending = "Answer with the whole file in one ```python block."
    task = f"{sys.argv[1]}\n```python\n{buggy.strip()}\n```\n{ending}"
    messages = [{"role": "user", "content": task}]
    for _ in range(NUM_TRIES):
        said = ask(messages)
        messages.append({"role": "assistant", "content": said})
        blocks = FENCED.findall(said)
        problem = "there is no ```python block in your answer"
        if blocks:
            with open("solution.py", "w", encoding="utf-8") as file:
                file.write(blocks[-1])
            loaded = subprocess.run(
                [sys.executable, "solution.py"], stderr=subprocess.PIPE, timeout=10
            )
            if loaded.returncode == 0:
                return
            problem = loaded.stderr.decode("utf-8", "replace").strip().split("\n")[-1]
        messages.append({"role": "user", "content": f"{problem}. {ending}"})


if __name__ == "__main__":
    main()
