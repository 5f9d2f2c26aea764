"""Runs one program on many inputs: a single file for any Python from 3.8, run in a sandbox.

Takes: one JSON object on stdin (``Cases.request``). Gives: one JSON line on stdout that contains
the request's nonce, with how the program ended on each input and its output. Never: has the correct
outputs: the caller compares them outside of the sandbox.

    input: a text               --stdin-->  the program             --stdout-->  output: a text
    input: a list of arguments  --file--->  the program's function  ---file--->  output: JSON

Outputs are sent as base64, so an answer has a maximum length, independent of its characters.

The program has a separate process for each input, with limits on CPU time, memory and file size.
It can stop this process, or answer in its place. Both only lead to no outputs, or wrong ones.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from typing import Any

MEMORY_BYTES = 1 << 30
OUTPUT_BYTES = 1 << 20
DONE, CRASHED, OUT_OF_TIME = "done", "crashed", "out of time"
BOOTSTRAP = "import sys; exec(compile(sys.argv.pop(1), 'runner.py', 'exec'))"
"""For ``python -c BOOTSTRAP source``."""
CALL = """
import json, sys
folder, name = sys.argv[1:]
with open(folder + "/candidate.py", encoding="utf-8") as file:
    source = file.read()
with open(folder + "/input", encoding="utf-8") as file:
    arguments = json.load(file)
names = {"__name__": "candidate"}
exec(compile(source, "candidate.py", "exec"), names)
function = names[name] if name in names else getattr(names["Solution"](), name)
text = json.dumps(function(*arguments))
with open(folder + "/result", "w", encoding="utf-8") as file:
    file.write(text)
"""
"""Runs the source, then its function or the method of its class ``Solution``."""


def main() -> None:
    """Answer the request on stdin."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    request = json.loads(sys.stdin.buffer.read().decode("utf-8", "surrogatepass"))
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, "candidate.py", request["source"])
        results = list(_all(request, folder))
    answer = json.dumps({"nonce": request["nonce"], "results": results})
    out.write("\n" + answer + "\n")
    out.flush()


def _all(request: Any, folder: str) -> Any:
    """Yield ``[how it ended, output]`` for each input."""
    name = request["entry_point"]
    for given in request["inputs"]:
        _write(folder, "input", json.dumps(given) if name else given)
        for left in ("stdout", "result"):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, left))
        program = ["-c", CALL, folder, name] if name else [os.path.join(folder, "candidate.py")]
        how = _run([sys.executable, "-I", "-B", *program], request, folder)
        yield [how, _read(folder, "result" if name else "stdout") if how == DONE else ""]
        if how != DONE and request["stops"]:
            return


def _run(argv: Any, request: Any, folder: str) -> str:
    """Run a program on the input and return how it ended."""
    cpu_s = max(1, int(request["cpu_s"] + 0.999))

    def limit() -> None:
        for what, value in (
            (resource.RLIMIT_CPU, cpu_s),
            (resource.RLIMIT_AS, MEMORY_BYTES),
            (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            _, hard = resource.getrlimit(what)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(what, (value, value))

    with (
        open(os.path.join(folder, "input"), "rb") as given,
        open(os.path.join(folder, "stdout"), "wb") as printed,
    ):
        process = subprocess.Popen(
            argv,
            stdin=given,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
            preexec_fn=limit,
            env={"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
        )
        try:
            code = process.wait(request["wall_s"])
        except subprocess.TimeoutExpired:
            code = -signal.SIGXCPU
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return OUT_OF_TIME
    return CRASHED if code else DONE


def _write(folder: str, name: str, text: str) -> None:
    path = os.path.join(folder, name)
    with contextlib.suppress(OSError):  # the last run may have left a link
        os.remove(path)
    with open(path, "x", encoding="utf-8", errors="surrogatepass", newline="") as file:
        file.write(text)


def _read(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name), "rb") as file:
            return base64.b64encode(file.read(OUTPUT_BYTES)).decode("ascii")
    except OSError:
        return ""


if __name__ == "__main__":
    main()
