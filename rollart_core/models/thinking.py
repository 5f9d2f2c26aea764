"""Thoughts of the policy: their marks in a chat template, and whether later prompts keep them.

    sampled text  ──split──> reasoning and content ──template──> the next prompt, with or without it

Takes: a chat template, which is rendered with probes. Gives: :class:`Thinking`, the role of
observations, and the reason why a trajectory needs several rows. Never: guesses from the name of a
model or from a part of the template's source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rollart_core.config.problems import Problem
from rollart_core.config.run import Rollout
from rollart_core.models.chat_template import ChatTemplate, TemplateRefusal
from rollart_core.types import Message

ObservationRole = Literal["user", "tool"]

_USER, _THOUGHT, _ANSWER = "zq1user", "zq2thought", "zq3answer"
_TAG, _LAST_TAG = re.compile(r"<[^<>]*>"), re.compile(r"<[^<>]*>[^<>]*$")
_INLINE = ("<think>", "\n</think>\n\n")
_PRESERVING = (("preserve_thinking", True), ("truncate_history_thinking", False))
"""Variables with which templates keep earlier thoughts."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """How the policy writes a thought before its answer."""

    opening: str
    """The text before a thought."""
    closing: str
    """The text between a thought and the answer, as the template writes it."""
    end: str
    """The first mark of ``closing``. It ends a thought, also before a tool call."""
    bare: str
    """The text before an answer without a thought."""
    state: Literal["free", "opened", "closed"]
    """Whether the generation prompt leaves the opening to the policy, contains it, or ends an empty
    thought (thinking is off)."""

    def split(self, text: str) -> tuple[str, str]:
        """Return the thought and the answer in a text of the policy. Either may be empty."""
        if not self._begins(text):
            return "", text.removeprefix(self.bare)
        thought, _, answer = text.partition(self.end)
        thought = thought.strip().removeprefix(self.opening).strip()
        rest = self.closing.partition(self.end)[2].strip()
        return thought, answer.lstrip("\n").removeprefix(rest).lstrip("\n")

    def is_open(self, text: str) -> bool:
        """Return whether a text of the policy ends inside a thought."""
        return self._begins(text) and self.end not in text

    def _begins(self, text: str) -> bool:
        return self.state == "opened" or text.lstrip().startswith(self.opening)


@dataclass(frozen=True, slots=True)
class History:
    """How earlier turns appear in later prompts."""

    observation_role: ObservationRole = "user"
    """Role of text observations after the first."""
    keeps_thinking: bool = False
    """Whether earlier turns stay as they were sampled. If False, the template decides."""


FOLLOWED = History()
"""The chat template decides, and observations are user messages."""


@lru_cache(maxsize=64)
def find_thinking(template: ChatTemplate) -> Thinking | None:
    """Return how the model of a chat template thinks; None if the template knows no thoughts."""
    user, answer = Message(role="user", content=_USER), Message(role="assistant", content=_ANSWER)
    inline = Message(role="assistant", content=f"{_INLINE[0]}\n{_THOUGHT}{_INLINE[1]}{_ANSWER}")
    try:
        prompt = template.render([user], add_generation_prompt=True)
        whole = template.render([user, Message(**answer, reasoning_content=_THOUGHT)])
        plain = template.render([user, answer])
    except TemplateRefusal:
        return None
    at, end = whole.find(_THOUGHT), whole.find(_ANSWER)
    if 0 <= at < end:
        closing = whole[at + len(_THOUGHT) : end]
        pairs = enumerate(zip(whole[:at], prompt, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(at, len(prompt)))
        opening = whole[same:at].strip()
        if not opening and (last := _LAST_TAG.search(whole[:at])):
            opening = last[0].strip()
    elif _drops_inline(template, [user, inline, user]):
        opening, closing = _INLINE
    else:
        return None
    tag = _TAG.search(closing)
    if not opening or tag is None:
        return None
    head = prompt.rstrip()
    state: Literal["free", "opened", "closed"] = "opened" if head.endswith(opening) else "free"
    bare = plain[len(prompt) : plain.find(_ANSWER)] if plain.startswith(prompt) else ""
    closed = head.endswith(closing.strip())
    return Thinking(opening, closing, tag[0], bare, "closed" if closed else state)


def _drops_inline(template: ChatTemplate, messages: list[Message]) -> bool:
    try:
        shown = template.render(messages, add_generation_prompt=True)
    except TemplateRefusal:
        return False
    return _ANSWER in shown and _THOUGHT not in shown


def appends(template: ChatTemplate, role: ObservationRole, *, keeps: bool = False) -> bool:
    """Return whether turns with text observations extend one row.

    Args:
        template: The chat template.
        role: The role of the observations.
        keeps: Whether earlier thoughts stay in the prompt (``rollout.keep_thinking: true``).
    """
    thinking = find_thinking(template)
    said = Message(role="assistant", content=_ANSWER)
    if thinking is not None and thinking.state != "closed":
        said["reasoning_content"] = _THOUGHT
    talk = [Message(role="user", content=_USER)]
    try:
        prompt = template.render(talk, add_generation_prompt=True)
        for turn in range(2):
            shown = f"observation {turn}"
            talk += [Message(**said), Message(role=role, content=shown)]
            found = template.continuation(prompt, talk, len(talk) - 2, keeps=keeps)
            if found is None or shown not in found[0]:
                return False
            prompt = found[1]
    except TemplateRefusal:
        return False
    return True


def observation_role(template: ChatTemplate, asked: str, *, keeps: bool) -> ObservationRole:
    """Return the role of text observations after the first.

    Args:
        template: The chat template.
        asked: ``auto``, ``user`` or ``tool``. ``auto`` is ``user``, unless only ``tool`` keeps one
            row per trajectory.
        keeps: As for :func:`appends`.
    """
    if asked != "auto":
        return "tool" if asked == "tool" else "user"
    only_tool = not appends(template, "user", keeps=keeps) and appends(template, "tool")
    return "tool" if only_tool else "user"


def why_rows(template: ChatTemplate, history: History) -> str | None:
    """Return why each turn begins a new row, and how to avoid it; None if turns extend one row."""
    role = history.observation_role
    if appends(template, role, keeps=history.keeps_thinking):
        return None
    ways = [
        f"model.chat_template_kwargs.{name}={value}" for name, value in _helping(template, role)
    ]
    if appends(template, role, keeps=True):
        ways.append("rollout.keep_thinking=true, which keeps every turn as it was sampled")
    what = "removes earlier thoughts" if find_thinking(template) else "changes earlier messages"
    how = f"; set {' or '.join(ways)}" if ways else ""
    return f"the chat template {what} when a turn is added{how}"


def history_of(template: ChatTemplate, rollout: Rollout) -> History:
    """Return how a run shows earlier turns with this template."""
    keeps = bool(rollout.keep_thinking)
    role = observation_role(template, rollout.observation_role, keeps=keeps)
    return History(role, keeps)


def thinking_problems(template: ChatTemplate, rollout: Rollout) -> Iterator[Problem]:
    """Yield the keys of ``rollout`` that a chat template does not support."""
    thinking = find_thinking(template)
    for key in ("keep_thinking", "max_thinking_tokens"):
        if getattr(rollout, key) is None:
            continue
        if thinking is None:
            message = "the chat template of this model has no marks for thoughts; remove it"
            yield Problem(("rollout", key), message)
        elif thinking.state == "closed" and key == "max_thinking_tokens":
            message = "has no effect, because the chat template turns thinking off; remove it"
            yield Problem(("rollout", key), message)
    if rollout.observation_role == "tool" and not appends(template, "tool", keeps=True):
        message = "tool: the chat template of this model shows no tool messages without a call; "
        yield Problem(("rollout", "observation_role"), message + "use user or auto")


def _helping(template: ChatTemplate, role: ObservationRole) -> Iterator[tuple[str, str]]:
    """Yield the variables of the template with which turns extend one row."""
    for name, value in _PRESERVING:
        if name in template.variables and appends(template.with_kwargs({name: value}), role):
            yield name, str(value).lower()
