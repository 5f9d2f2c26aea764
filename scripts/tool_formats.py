#!/usr/bin/env python3
"""Compare the tool formats with chat templates and with the parsers of other projects.

    scripts/tool_formats.py --oracle sglang=PYTHON --oracle vllm=PYTHON --oracle renderers=PYTHON
    scripts/tool_formats.py ... --write       also write docs/reference/tool-formats.md
    scripts/tool_formats.py ... --differ      also print where an oracle differs

PYTHON is an interpreter that has the project; scripts/tool_format_oracle.py runs in it. Chat
templates are in ../shared/data/chat_templates, or in $ROLLART_SHARED.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.tool_cases import (  # noqa: E402 - it is in the folder of tests
    FAMILIES,
    KINDS,
    Case,
    Family,
    broken,
    cases,
    plain,
    same,
)

from rollart_core.models.tool_calls import parse_message  # noqa: E402

NUM_CASES = 100
PAGE = ROOT / "docs" / "reference" / "tool-formats.md"
BEGIN, END = "<!-- scripts/tool_formats.py begins -->", "<!-- scripts/tool_formats.py ends -->"
TITLES = {
    "calls": "render and parse",
    "reasoning": "reasoning",
    "broken": "broken call",
    "parallel": "parallel calls",
    "unicode": "Unicode",
    "marks": "marks in strings",
}


def main() -> None:
    """Print the tables, and write them if asked."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--oracle", action="append", default=[], metavar="NAME=PYTHON")
    arguments.add_argument("--write", action="store_true")
    arguments.add_argument("--differ", action="store_true")
    given = arguments.parse_args()
    shared = Path(os.environ.get("ROLLART_SHARED", ROOT.parent / "shared"))
    rows = [
        (family, kind, case)
        for family in FAMILIES
        for kind in KINDS
        for case in cases(family, drawn(kind), NUM_CASES, shared / "data" / "chat_templates")
    ]
    asked = [case_for_oracles(*row) for row in rows]
    own = [
        own_answer(family, kind, case, text["text"])
        for (family, kind, case), text in zip(rows, asked, strict=True)
    ]
    answers = {}
    for oracle in given.oracle:
        name, _, python = oracle.partition("=")
        answers[name] = _answers(name, python, asked)
    text = f"{_own_table(rows, own)}\n\n{_oracle_table(rows, own, answers)}"
    text += f"\n\n{_difference_table(rows, asked, own, answers, given.differ)}"
    print(text)
    if given.write:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


def drawn(kind: str) -> str:
    """Return the kind of cases that a kind is made from."""
    return "calls" if kind == "broken" else kind


def case_for_oracles(family: Family, kind: str, case: Case) -> dict[str, Any]:
    """Return a case for the oracles."""
    text = case.text
    if kind == "broken":
        text = broken(case, random.Random(zlib.crc32(text.encode())))
    return {
        "family": family.name,
        "alias": family.alias,
        "kind": kind,
        "tools": case.tools,
        "text": text,
        "prompt": case.prompt,
        "reasoning": case.wanted.reasoning,
        "marks": [*family.format.marks, family.stop, "<|im_start|>"],
    }


def own_answer(family: Family, kind: str, case: Case, text: str) -> dict[str, Any]:
    """Return our answer, and whether it is right."""
    parsed = parse_message(text, family.format, tools=case.tools, prompt=case.prompt)
    wanted = case.wanted
    right = not parsed.errors and (
        (plain(parsed), parsed.content.strip(), parsed.reasoning)
        == (plain(wanted), wanted.content.strip(), wanted.reasoning)
    )
    if kind == "broken":
        whole = plain(parsed) == plain(wanted)  # only marks after the call are missing
        right = whole or (not parsed.calls and len(parsed.errors) == 1)
    return {"calls": plain(parsed), "reasoning": parsed.reasoning, "right": right}


def _answers(name: str, python: str, asked: list[dict[str, Any]]) -> list[Any]:
    script = Path(__file__).with_name("tool_format_oracle.py")
    done = subprocess.run(
        [python, script, name], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    for line in done.stderr.splitlines():
        if line.startswith("no parser"):
            print(f"{name}: {line}", file=sys.stderr)
    found: list[Any] = json.loads(done.stdout)
    return found


def agrees(own: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Return whether an oracle has the same calls and, if it says, the same reasoning."""
    if "error" in answer:
        return False
    try:
        calls = [(name, same(json.loads(arguments or "{}"))) for name, arguments in answer["calls"]]
    except ValueError:
        return False
    return calls == own["calls"] and answer.get("reasoning", own["reasoning"]) == own["reasoning"]


def _own_table(rows: list[tuple[Family, str, Case]], own: list[dict[str, Any]]) -> str:
    right: Counter[tuple[str, str]] = Counter()
    by_template: Counter[tuple[str, str]] = Counter()
    for (family, kind, case), answer in zip(rows, own, strict=True):
        right[family.name, kind] += answer["right"]
        by_template[family.name, kind] += case.by_template
    lines = [["models", "format", *TITLES.values()]]
    for family in FAMILIES:
        cells = []
        for kind in KINDS:
            mark = "" if by_template[family.name, kind] else " (formatter)"
            cells.append(f"{right[family.name, kind]}/{NUM_CASES}{mark * bool(family.template)}")
        template = "" if family.template else " (no template)"
        lines.append([family.name + template, f"`{family.alias}`", *cells])
    return _table(lines)


def _oracle_table(
    rows: list[tuple[Family, str, Case]],
    own: list[dict[str, Any]],
    answers: dict[str, list[Any]],
) -> str:
    lines = [["models", *answers]]
    for family in FAMILIES:
        cells = []
        for found in answers.values():
            pairs = [
                agrees(mine, other)
                for (each, _, _), mine, other in zip(rows, own, found, strict=True)
                if each is family and other is not None
            ]
            cells.append(f"{sum(pairs)}/{len(pairs)}" if pairs else "–")
        lines.append([family.name, *cells])
    return _table(lines)


def _difference_table(
    rows: list[tuple[Family, str, Case]],
    asked: list[dict[str, Any]],
    own: list[dict[str, Any]],
    answers: dict[str, list[Any]],
    show: bool,
) -> str:
    """Return why the oracles differ. ``show``: also print the first cases of each reason."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for name, given in answers.items():
        for (family, _, _), case, mine, other in zip(rows, asked, own, given, strict=True):
            if other is None or agrees(mine, other):
                continue
            counted = found.setdefault((name, reason(case, mine, other)), Counter())
            counted[family.name] += 1
            if show and counted[family.name] <= 2:
                why = reason(case, mine, other)
                print(f"--- {name} {family.name}: {why}\n{case['text']!r}\n{mine}\n{other}")
    lines = [["parser", "difference", "models (cases)"]]
    for (name, why), counted in sorted(found.items()):
        models = ", ".join(f"{each} ({n})" for each, n in counted.items())
        lines.append([name, why, models])
    return _table(lines)


def reason(case: dict[str, Any], own: dict[str, Any], other: dict[str, Any]) -> str:
    """Return why an answer differs from ours, which is what was rendered."""
    if "error" in other:
        return f"It raises {other['error'].partition(':')[0]}."
    if case["kind"] == "broken":
        if not own["calls"]:
            return "It accepts a truncated call."
        return "It does not take a complete call without the marks after it."
    got = [(name, _loaded(arguments)) for name, arguments in other["calls"]]
    wanted = [(name, json.loads(arguments)) for name, arguments in own["calls"]]
    strings = json.dumps(wanted, ensure_ascii=False)
    if case["alias"] in ("lfm2", "llama4", "olmo3") and any("-" in name for name, _ in wanted):
        return "It does not read names of tools with a hyphen."
    if case["kind"] == "marks" and re.search(r"a [<\[`][^ ]* b", strings):
        return "A mark inside a string ends the string, the call or the reasoning."
    if len(got) != len(wanted):
        return _why_missing(case, wanted)
    reasons = {
        _why_value(a, b)
        for (_, x), (_, y) in zip(wanted, got, strict=True)
        for a, b in _pairs(x, y)
    }
    return min(reasons, default="It does not separate reasoning from the content.")


def _why_missing(case: dict[str, Any], wanted: list[Any]) -> str:
    if case["alias"] == "harmony":
        return "It does not read the recipient before the channel, as the template writes it."
    if case["alias"] == "phi4":
        return "It reads only the mark `functools`."
    if "<|python_end|>" in case["text"]:
        return "It does not read JSON after text between the marks."
    if case["alias"] == "llama4" and re.search(r"-\d", case["text"]):
        return "It does not read negative numbers inside objects and lists."
    if re.search(r"^(True|False|None)$", case["text"], re.MULTILINE):
        return _WORDS
    if case["reasoning"]:
        return "It does not read calls after reasoning."
    return "It does not read several calls." if len(wanted) > 1 else "It finds no call."


_WORDS = "It does not read `True`, `False` and `None`, which the template writes."


def _why_value(wanted: Any, got: Any) -> str:
    if isinstance(wanted, str) and isinstance(got, str) and wanted.strip() == got.strip():
        return "It strips white space of strings."
    if isinstance(wanted, str) and "\u2028" in wanted:
        return "It reads U+2028 as the end of a line."
    if str(wanted) == got:
        return (
            _WORDS if wanted is None or isinstance(wanted, bool) else "It reads a number as text."
        )
    if wanted is None and got == "null":
        return "It reads `null` as text."
    if isinstance(wanted, str):
        return "It changes a text that looks like another type, such as `null` or `007`."
    if got is None:
        return "It reads another value as null if null is allowed."
    return "It reads a value in another way."


def _pairs(one: Any, two: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the different values of two objects."""
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        for key in one:
            yield from _pairs(one[key], two[key])
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for a, b in zip(one, two, strict=True):
            yield from _pairs(a, b)
    elif same(one) != same(two):
        yield one, two


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _table(lines: list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, f"|{' --- |' * len(lines[0])}", *body])


if __name__ == "__main__":
    main()
