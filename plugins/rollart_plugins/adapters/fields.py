"""Types of fields that several adapters' options use.

Takes: config values. Gives: validated values. Never: imports a foreign package.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from rollart_core.config.base import Count


def _apart(value: dict[str, tuple[Count, Count]]) -> dict[str, tuple[Count, Count]]:
    ranges = sorted((first, end, name) for name, (first, end) in value.items())
    for first, end, name in ranges:
        if not 0 <= first < end:
            raise ValueError(f"{name}: [{first}, {end}] must be [first, end], first < end")
    for (_, end, one), (first, _, other) in pairwise(ranges):
        if first < end:
            raise ValueError(f"{one} and {other} overlap: a run would train on test tasks")
    return value


def _is_there(value: str) -> str:
    folder = os.path.abspath(os.path.expanduser(value))
    if not os.path.isdir(folder):
        raise ValueError(f"the folder {value} does not exist")
    return folder


Splits: TypeAlias = Annotated[dict[str, tuple[Count, Count]], AfterValidator(_apart)]
"""First and end index of each split. Splits do not overlap."""
Folder: TypeAlias = Annotated[str, AfterValidator(_is_there)]
"""An existing folder, as an absolute path."""
