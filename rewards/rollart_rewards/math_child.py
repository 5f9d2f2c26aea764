"""The process that compares mathematics: a single file, run beside the reward by its own Python.

Takes: on stdin one JSON object a line, a comparison. Gives: on stdout one JSON object a line: that
it is ready (or what is missing), then an answer for each: ``right``, ``undecided`` or ``refused``.
Never: runs longer on one comparison than it is allowed, in processor time.

sympy can be made to compute for ever by an answer of a few characters. A limit on time as a clock
shows it would take right answers for wrong ones on a busy machine; processor time does not.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any

_PLAIN_NUMBER = re.compile(r"\s*[-+]?[\d,]*\.?\d+(?:\s*/\s*\d+)?%?\s*")
_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[|\\begin")


class OutOfTime(BaseException):
    """The comparison has used its processor time; no ``except Exception`` eats it."""


def main() -> None:
    """Answer comparisons until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
    logging.disable(logging.CRITICAL)
    try:
        signal.signal(signal.SIGPROF, _ring)
        compare({"wanted": ["$\\frac{1}{2}$"], "said": "$0.5$", "strict": True, "decimals": 6})
        ready: dict[str, Any] = {"ready": True}
    except Exception as e:
        ready = {"missing": f"{type(e).__name__}: {e}"}
    print(json.dumps(ready), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(_limited(json.loads(line))), file=out, flush=True)


def _limited(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a comparison, which gets so much processor time and memory."""
    cpu_s, memory_bytes = request["cpu_s"], request["memory_bytes"]
    used = resource.getrusage(resource.RUSAGE_SELF)
    # The signal is seen between two steps of Python; one long step is ended by the kernel.
    hard_s = int(used.ru_utime + used.ru_stime + 1.5 * cpu_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (hard_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    resource.setrlimit(
        resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1])
    )
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        return compare(request)
    except OutOfTime:
        return {"undecided": "time"}
    except MemoryError:
        return {"undecided": "memory"}
    except RecursionError:
        return {"undecided": "depth"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Return whether what was said equals one of the right answers."""
    from math_verify import parse, verify

    wanted = []
    for text in request["wanted"]:
        found = parse(marked(text), parsing_timeout=None)
        if not found:
            return {"refused": f"the right answer {text[:80]!r} cannot be read as mathematics"}
        wanted.append(found)
    text = request["said"]
    said = parse(marked(text) if request.get("is_bare") else text, parsing_timeout=None)
    right = any(
        verify(
            one,
            said,
            float_rounding=request["decimals"],
            strict=request["strict"],
            timeout_seconds=None,
        )
        for one in wanted
    )
    return {"right": right, "found": bool(said)}


def marked(text: str) -> str:
    """Return a text that is mathematics and nothing else, marked as such.

    Unmarked, ``x + 3`` would be read as its last number.
    """
    return text if _MARKED.search(text) or _PLAIN_NUMBER.fullmatch(text) else f"${text}$"


def _ring(*_: object) -> None:
    raise OutOfTime


if __name__ == "__main__":
    main()
