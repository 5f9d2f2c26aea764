"""Lines of Python source, counted as Python counts them.

Takes: a source. Gives: its lines, each with its end. Never: splits where only ``str.splitlines``
sees a line's end, such as a form feed: the numbers in a syntax tree would mean other lines.
"""

from __future__ import annotations

import re

_END = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")


def source_lines(source: str) -> list[str]:
    """Return the lines; joined they are the source, and line ``n`` of a tree is at ``n - 1``."""
    return _END.split(source)
