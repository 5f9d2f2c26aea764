"""Record episodes in a form that another process can compare.

Takes: a subject (an environment or agent task). Gives: its first episodes as plain values. Never:
keeps long pages, only their beginning and a hash.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

from rollart_testing.play import BRIEF_TURNS, GOOD, MALFORMED, Policy, Subject
from rollart_testing.results import CheckFailed, expect, raised

Episode = dict[str, Any]
_NUM_TASKS: Final = 2
_LONG: Final = 400


def transcript(subject: Subject) -> list[Episode]:
    """Play the first tasks of each split with several policies, and record all episodes.

    An error ends the recording and is the last episode: ``{"error": ...}``.
    """
    episodes: list[Episode] = []
    try:
        with subject.open() as player:
            for options in ({}, *subject.paced(subject.tasks(player, _NUM_TASKS))):
                for policy in (GOOD, MALFORMED, Policy("random", str(options))):
                    played = subject.play(player, policy, options, max_turns=BRIEF_TURNS)
                    expect(not played.fault, f"run raised {played.fault}")
                    acts = f"{policy.way} {played.acts}" if policy != GOOD else subject.good_acts
                    steps = [
                        {name: _cut(json.dumps(value)) for name, value in turn.items()}
                        for turn in played.notes()
                    ]
                    episodes.append({"steps": steps, "what": f"{options or 'no options'}, {acts}"})
    except Exception as e:
        episodes.append({"error": _said(e)})
    return episodes


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, CheckFailed) else raised(error)


def parting(one: Sequence[Episode], two: Sequence[Episode]) -> str | None:
    """Return where two transcripts differ; None if they do not.

    They may differ in length, because a slow process plays fewer tasks.
    """
    for a, b in zip(one, two, strict=False):
        for turn, (x, y) in enumerate(zip(a.get("steps", ()), b.get("steps", ()), strict=False)):
            if x != y:
                return f"{a['what']}, turn {turn}: {_parts(x, y)}"
        if a != b:
            return f"{a.get('what')}: one episode is longer than the other"
    return None


def error(episodes: Sequence[Episode]) -> str | None:
    """Return what ended a transcript early, if anything did."""
    return episodes[-1].get("error") if episodes else "it played no episode"


def _cut(text: str) -> str:
    if len(text) <= _LONG:
        return text
    return f"{text[:_LONG]} ({blake2b(text.encode(), digest_size=8).hexdigest()})"


def _parts(one: dict[str, str], two: dict[str, str]) -> str:
    return " and ".join(
        f"{name} {one.get(name, '')[:60]} versus {two.get(name, '')[:60]}"
        for name in {**one, **two}
        if one.get(name) != two.get(name)
    )
