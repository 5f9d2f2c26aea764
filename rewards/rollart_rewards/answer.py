"""The policy's answer, and the right answers that the environment provides.

Takes: a reward request, and the selected part of the last message. Gives: texts. Never: scores a
task without a right answer as a wrong answer of the policy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollart_core.contracts.reward import RewardRequest
from rollart_rewards.config_answers import AnswerPart, ByPattern, InTag

_SANDBOX = "\\boxed"
_FENCED = re.compile(r"^[ \t]*```[\w+-]*[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def answer_part(text: str, part: AnswerPart) -> str | None:
    """Return the part of a message that is the answer; None if there is no such part.

    Args:
        text: The policy's last message.
        part: The part to return.
    """
    if part == "message":
        return text
    if part == "last_line":
        lines = text.strip().splitlines()
        return lines[-1].strip() if lines else None
    if part == "boxed":
        return _boxed(text)
    if isinstance(part, InTag):
        return _in_tag(text, part.tag)
    assert isinstance(part, ByPattern)
    found = list(re.finditer(part.pattern, text, re.MULTILINE))
    return found[-1][1] if found else None


def references(request: RewardRequest, key: str) -> list[str]:
    """Return the right answers; an answer is right if it matches any of them.

    Args:
        request: The request of one episode.
        key: The key in its context. The value is a text, a number, or a list of them.

    Raises:
        ValueError: If the environment provides no right answer; a retry cannot help.
    """
    given = context_of(request, key)
    several = given if isinstance(given, list | tuple) else [given]
    if several and all(_is_plain(one) for one in several):
        return [str(one) for one in several]
    raise ValueError(
        f"{request.env_id}: reward_context[{key!r}] is {given!r:.80}, not a text, a number or a "
        "list of them"
    )


def context_of(request: RewardRequest, key: str) -> object:
    """Return the value that the environment provides to its reward under a key.

    Raises:
        ValueError: If the environment does not provide the key.
    """
    if key in request.context:
        return request.context[key]
    given = ", ".join(sorted(request.context)) or "nothing"
    raise ValueError(
        f"{request.env_id} provides no {key!r} to its reward: info['reward_context'] has {given}"
    )


def last_block(text: str) -> str:
    """Return the last fenced block of a message, or the whole message if there is none."""
    blocks: Sequence[str] = _FENCED.findall(text)
    return blocks[-1] if blocks else text


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``; braces inside it are matched."""
    start = text.rfind(_SANDBOX + "{")
    if start < 0:
        return None
    depth, begin = 0, start + len(_SANDBOX) + 1
    for position in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def _in_tag(text: str, tag: str) -> str | None:
    opened, closed = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closed)
    start = text.rfind(opened, 0, max(end, 0))
    return text[start + len(opened) : end].strip() if 0 <= start < end else None
