"""The process that compares mathematics: one comparison at a time, in its main thread.

Takes: comparisons. Gives: ``right`` (and whether anything was ``found``), ``undecided`` or
``refused``. Never: uses more CPU time for one comparison than is allowed.

An answer of a few characters can make sympy compute for ever. A wall-clock limit would turn right
answers into wrong ones on a busy machine; a CPU time limit does not.

Its coroutines await nothing. They are coroutines because those run in the main thread, where Python
handles signals and the stack is largest.
"""

from __future__ import annotations

import logging
import re
import resource
import signal
from typing import Any

_PLAIN_NUMBER = re.compile(r"\s*[-+]?[\d,]*\.?\d+(?:\s*/\s*\d+)?%?\s*")
_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[|\\begin")


class OutOfTime(BaseException):
    """The comparison has used its CPU time; ``except Exception`` does not catch it."""


async def prepare() -> None:
    """Import math-verify and run one comparison.

    Raises:
        Exception: If that fails here.
    """
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGPROF, _ring)
    compare({"wanted": ["$\\frac{1}{2}$"], "said": "$0.5$", "strict": True, "decimals": 6})


async def limited(request: dict[str, Any]) -> dict[str, Any]:
    """Run a comparison with limits on CPU time and memory, and return its result."""
    cpu_s, memory_bytes = request["cpu_s"], request["memory_bytes"]
    used = resource.getrusage(resource.RUSAGE_SELF)
    # Python sees the signal between two steps; the kernel ends one long step.
    hard_s = int(used.ru_utime + used.ru_stime + 1.5 * cpu_s) + 2
    _set_limit(resource.RLIMIT_CPU, hard_s)
    _set_limit(resource.RLIMIT_AS, memory_bytes)
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
        _set_limit(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)[1])  # for the reply


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Return whether the answer equals one of the right answers."""
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
    """Return a text that is only mathematics, with math delimiters.

    Without delimiters, ``x + 3`` would be read as its last number.
    """
    return text if _MARKED.search(text) or _PLAIN_NUMBER.fullmatch(text) else f"${text}$"


def _set_limit(which: int, soft: int) -> None:
    resource.setrlimit(which, (soft, resource.getrlimit(which)[1]))


def _ring(*_: object) -> None:
    raise OutOfTime
