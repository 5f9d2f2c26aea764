"""What a benchmark prints with ``--json``: its form, and the skips that are allowed.

Nothing here depends on how fast a machine is: of the marks, only those that hold everywhere
(``required``) are asked for.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

LANE_VARIABLE: Final = "ROLLART_LANE"
LANES: Final = ("bench", "nightly", "adapters", "peers", "docker")
SKIPS: Final = Path(__file__).resolve().parents[1] / "bench" / "skips.toml"
SKIPPED: Final = 77
"""Exit code of a benchmark that is skipped as a whole."""
KEYS: Final = ("name", "machine", "rows", "skipped_cases")
ROW_KEYS: Final = (
    *("case", "ours", "peer", "peer_name", "unit"),
    *("ratio", "mark", "meets_mark", "required"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedSkip:
    """One entry of the list."""

    bench: str
    lanes: Sequence[str]
    says: Sequence[str]
    """One of these is in the reason."""
    why: str
    case: str | None = None

    def covers(self, bench: str, case: str | None, reason: str, lane: str) -> bool:
        """Tell whether it allows a skip."""
        same = (case is None) == (self.case is None)
        fits = same and (case is None or fnmatchcase(case, str(self.case)))
        says_so = any(words in reason for words in self.says)
        return self.bench == bench and fits and lane in self.lanes and says_so


def allowed_skips() -> list[AllowedSkip]:
    """Read the list."""
    with SKIPS.open("rb") as file:
        return [AllowedSkip(**entry) for entry in tomllib.load(file)["skip"]]


def lane() -> str:
    """Return the lane of the CI that this is."""
    return os.environ.get(LANE_VARIABLE) or "bench"


def unlisted_skips(bench: str, result: Mapping[str, Any], lane: str) -> list[str]:
    """Return what was skipped though the list does not allow it in this lane."""
    skips: dict[str | None, str] = dict(result.get("skipped_cases") or {})
    if "skipped" in result:
        skips[None] = str(result["skipped"])
    return [
        f"{bench} {case or ''}: {reason}"
        for case, reason in skips.items()
        if not any(entry.covers(bench, case, reason, lane) for entry in allowed_skips())
    ]


def faults_of_skip(bench: str, result: object) -> Iterator[str]:
    """Yield what is wrong with the object of a benchmark that is skipped."""
    if not isinstance(result, Mapping) or list(result) != ["name", "skipped", "rows"]:
        yield f"not the object of a skip: {result!r}"
        return
    if result["name"] != bench or result["rows"] != []:
        yield f"not the name of the benchmark, or rows: {result!r}"
    if not isinstance(result["skipped"], str) or not result["skipped"].strip():
        yield "no reason"


def faults_of(bench: str, result: object) -> Iterator[str]:
    """Yield what is wrong with the object of a benchmark that ran."""
    if not isinstance(result, Mapping) or not set(KEYS) <= set(result):
        yield f"not the object of a benchmark: {result!r}"
        return
    if result["name"].partition(" ")[0] != bench:
        yield f"its name is {result['name']!r}"
    if not isinstance(result["machine"], Mapping) or not {"cpu", "cores"} <= set(result["machine"]):
        yield f"machine: {result['machine']!r}"
    if not isinstance(result["rows"], list) or not result["rows"]:
        yield "no rows"
        return
    for row in result["rows"]:
        yield from (f"{row!r}: {fault}" for fault in _faults_of_row(row))
    cases = [row.get("case") for row in result["rows"]]
    yield from (f"two rows of {case!r}" for case in set(cases) if cases.count(case) > 1)


def _faults_of_row(row: Mapping[str, Any]) -> Iterator[str]:
    # Keys of its own may follow, such as the seconds of `bench start`.
    if list(row)[: len(ROW_KEYS)] != list(ROW_KEYS):
        yield "its keys"
        return
    if not _is_text(row["case"]) or not isinstance(row["unit"], str):
        yield "case and unit must be texts"
    if not _is_finite(row["ours"]):
        yield "ours is no figure"
    if row["peer"] is not None and not _is_finite(row["peer"]):
        yield "peer is no figure"
    if (row["peer"] is None) != (row["peer_name"] is None):
        yield "a peer has a figure and a name, or neither"
    if row["ratio"] is not None and not _is_spread(row["ratio"]):
        yield "ratio"
    if not (row["mark"] is None or _is_text(row["mark"]) or _is_finite(row["mark"])):
        yield "mark"
    if row["meets_mark"] not in (None, True, False) or not isinstance(row["required"], bool):
        yield "meets_mark and required"
    if row["mark"] is None and row["meets_mark"] is not None:
        yield "a mark is met that there is not"
    if row["required"] and row["meets_mark"] is not True:
        yield "misses a mark that holds on every machine"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_spread(value: object) -> bool:
    if not isinstance(value, Mapping) or list(value) != ["min", "median", "max"]:
        return False
    low, middle, high = value.values()
    return all(map(_is_finite, (low, middle, high))) and 0 < low <= middle <= high
