"""Split Python source into lines, as Python counts them.

Takes: a source. Gives: its lines, each with its line end. Never: splits at characters that only
``str.splitlines`` treats as a line end, such as a form feed: the line numbers of a syntax tree
would not match.
"""

from __future__ import annotations

import re

_END = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")


def source_lines(source: str) -> list[str]:
    """Return the lines; joined they are the source, and line ``n`` of a tree is at ``n - 1``."""
    return _END.split(source)
