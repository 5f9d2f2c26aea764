"""What a process sees of an environment, in a form that another process can compare.

Takes: a subject. Gives: its first episodes as plain values. Never: keeps long pages, only their
beginning and a hash.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

from rollart_testing.agent_play import (
    AgentSubject,
    garbage_answer,
    plain_answer,
    play_agent,
    random_answer,
)
from rollart_testing.answers import Step, plain
from rollart_testing.play import (
    Options,
    Player,
    Policy,
    Subject,
    garbage_action,
    good_action,
    play,
    random_policy,
    recorded,
)
from rollart_testing.results import CheckFailed, expect, raised

Episode = dict[str, Any]
_NUM_TASKS: Final = 2
_MAX_TURNS: Final = 30
_LONG: Final = 400


def transcript(subject: Subject) -> list[Episode]:
    """Play the first tasks of each split by several policies, and note all.

    An error ends it and is the last episode: ``{"error": ...}``.
    """
    episodes: list[Episode] = []
    try:
        with subject.open() as player:
            for options in ({}, *subject.paced(subject.tasks(player, _NUM_TASKS))):
                for name, policy in _policies(options).items():
                    episodes.append(_episode(player, policy, subject, options))
                    episodes[-1]["what"] = f"{options or 'no options'}, {name}"
    except Exception as e:
        episodes.append({"error": _said(e)})
    return episodes


def agent_transcript(subject: AgentSubject) -> list[Episode]:
    """Play the first tasks of each split of an agent task by several policies, and note all.

    An error ends it and is the last episode: ``{"error": ...}``.
    """
    episodes: list[Episode] = []
    answers = {"plain answers": plain_answer, "malformed answers": garbage_answer}
    try:
        with subject.open() as player:
            for options in ({}, *subject.paced(subject.tasks(player, _NUM_TASKS))):
                policies = {**answers, "random answers": random_answer(str(options))}
                for name, answer in policies.items():
                    played = play_agent(subject, player, answer, options)
                    expect(not played.fault, f"run raised {played.fault}")
                    seen = [{"request": _cut(json.dumps(page))} for page in played.seen]
                    verdict = {"verdict": _cut(json.dumps(plain(played.verdict)))}
                    what = f"{options or 'no options'}, {name}"
                    episodes.append({"steps": [*seen, verdict], "what": what})
    except Exception as e:
        episodes.append({"error": _said(e)})
    return episodes


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, CheckFailed) else raised(error)


def parting(one: Sequence[Episode], two: Sequence[Episode]) -> str | None:
    """Return where two transcripts part; None when they do not.

    They may differ in length, as a slow process plays fewer tasks.
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
    return episodes[-1].get("error") if episodes else "it played nothing"


def _policies(options: Options) -> dict[str, Policy]:
    return {
        "good actions": good_action,
        "malformed actions": garbage_action,
        "random actions": random_policy(options),
    }


def _episode(player: Player, policy: Policy, subject: Subject, options: Options) -> Episode:
    actions: list[str] = []
    steps = play(player, recorded(policy, actions), subject.seed, options, _MAX_TURNS)
    return {"steps": [_noted(s, a) for s, a in zip(steps, ["", *actions], strict=True)]}


def _noted(step: Step, action: str) -> dict[str, str]:
    values = {"action": action, **step._asdict()}
    return {name: _cut(json.dumps(plain(value))) for name, value in values.items()}


def _cut(text: str) -> str:
    if len(text) <= _LONG:
        return text
    return f"{text[:_LONG]} ({blake2b(text.encode(), digest_size=8).hexdigest()})"


def _parts(one: dict[str, str], two: dict[str, str]) -> str:
    return " and ".join(
        f"{name} {one.get(name, '')[:60]} against {two.get(name, '')[:60]}"
        for name in {**one, **two}
        if one.get(name) != two.get(name)
    )
