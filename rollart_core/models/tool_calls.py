"""Tool calls: parse the text of each model family into one format.

    hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>      Qwen, Hermes
    llama3   {"name": "f", "parameters": {...}}; {...}                     Llama 3.1 and later
    mistral  [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]          Mistral, Mixtral
             [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]...                       ... since 2025

Takes: the text of one message, including special tokens. Gives: the text outside its calls, the
calls in the format of OpenAI's chat API, and the invalid calls. Never: raises because of the
policy's text, repairs its JSON, or checks which tools exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from rollart_core.types import Message, ToolCall

ToolFormat: TypeAlias = Literal["hermes", "llama3", "mistral"]
TOOL_FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
TOOL_MARKS: dict[ToolFormat, str] = {"hermes": _OPEN, "llama3": _PYTHON_TAG, "mistral": _CALLS}
"""The mark before a call. In some tokenizers it is a special token."""
UNREADABLE = "unreadable"
"""The name of an invalid call."""
_BARE_CALL = re.compile(r'\{\s*"(name|type|parameters|function)"')
"""The start of a ``llama3`` call without a mark."""
_THOUGHT = "</think>"
_OPENS_THOUGHT = "<think>"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class BadToolCall:
    """An invalid tool call."""

    text: str
    """The text that the policy wrote."""
    reason: str
    """The problem in one line, shown to the policy."""


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """The parsed parts of one message of the policy."""

    content: str
    """The text outside the calls, including thoughts and text that is not a call."""
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[BadToolCall, ...] = ()


@dataclass(slots=True)
class _Found:
    """The results of a parser so far."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments (JSON)."""
    errors: list[BadToolCall] = field(default_factory=list)


def detect_tool_format(template_source: str) -> ToolFormat | None:
    """Return the tool-call format of a chat template. None if it is not supported."""
    if _CALLS in template_source:
        return "mistral"
    if _OPEN in template_source:  # another family writes <function=name> in the same tags
        return None if "<function=" in template_source else "hermes"
    if _PYTHON_TAG in template_source or "ipython" in template_source:
        return "llama3"
    return None


def parse_tool_calls(text: str, tool_format: ToolFormat, turn: int = 0) -> ParsedCalls:
    """Parse the calls in one message.

    The text before the first ``</think>`` is a thought and never a call. A ``</think>`` inside a
    call does not end a thought, unless the text begins with ``<think>``.

    Args:
        text: The policy's text, with all tokens except the one that ended it.
        tool_format: The format of the model.
        turn: Index of the message in the conversation. Ids are unique over turns.
    """
    thought, mark, said = text.partition(_THOUGHT)
    opened = text.lstrip().startswith(_OPENS_THOUGHT)
    if opened and not mark:
        return ParsedCalls(content=text)
    if not mark or (not opened and _is_in_call(thought, tool_format)):
        thought, mark, said = "", "", text
    found = _PARSERS[tool_format](said)
    calls = tuple(
        ToolCall(
            id=call_id(turn, index),
            type="function",
            function={"name": name, "arguments": arguments},
        )
        for index, (name, arguments) in enumerate(found.calls)
    )
    return ParsedCalls(thought + mark + found.content, calls, tuple(found.errors))


def checked_calls(content: str, calls: Sequence[ToolCall]) -> ParsedCalls:
    """Return calls that a server parsed. Arguments that are not a JSON object become errors."""
    good, errors = [], []
    for call in calls:
        found = _Found()
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        _take_arguments(found, name, arguments, arguments)
        good += [call] if found.calls else []
        errors += found.errors
    return ParsedCalls(content, tuple(good), tuple(errors))


def call_id(turn: int, index: int) -> str:
    """Return the id of a call: nine letters and digits, identical in every run."""
    number, digits = turn * 1296 + index, ""
    while number or len(digits) < 5:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return f"call{digits}"


def as_called(parsed: ParsedCalls, turn: int) -> Message | None:
    """Return the policy's message with its calls. None if it has none.

    The invalid calls follow the valid ones, with the policy's text as the argument. Each needs a
    call because its answer is an error message.
    """
    bad = [
        ToolCall(
            id=call_id(turn, index),
            type="function",
            function={
                "name": UNREADABLE,
                "arguments": json.dumps({"text": error.text}, ensure_ascii=False),
            },
        )
        for index, error in enumerate(parsed.errors, len(parsed.calls))
    ]
    calls = [*parsed.calls, *bad]
    return Message(role="assistant", content=parsed.content, tool_calls=calls) if calls else None


def _is_in_call(before: str, tool_format: ToolFormat) -> bool:
    """Return whether this text has a call that has not ended."""
    if tool_format == "hermes":
        return before.rfind(_OPEN) > before.rfind(_CLOSE)
    bare = tool_format == "llama3" and _BARE_CALL.match(before.lstrip())
    return bool(bare) or TOOL_MARKS[tool_format] in before


def _hermes(text: str) -> _Found:
    found, said = _Found(), []
    before, *blocks = text.split(_OPEN)
    said.append(before)
    for block in blocks:
        inside, mark, after = block.partition(_CLOSE)
        if not mark:  # policies often end the message instead of closing the last call
            after = ""
        _take(found, inside.strip(), "arguments")
        said.append(after)
    content = "".join(said)
    found.content = content.strip() if blocks else content
    return found


def _llama3(text: str) -> _Found:
    before, tag, after = text.partition(_PYTHON_TAG)
    body = (after if tag else text).strip()
    if not tag and not _BARE_CALL.match(body):
        return _Found(content=text)
    found = _Found(content=before.strip() if tag else "")
    for piece in _json_pieces(body):
        _take(found, piece, "parameters")
    return found


def _mistral(text: str) -> _Found:
    before, *blocks = text.split(_CALLS)
    found = _Found(content=before.strip() if blocks else before)
    for block in blocks:
        named = re.match(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]", block)
        if named is None:
            _take_list(found, block.strip())
        else:
            _take_arguments(found, named[1], block[named.end() :].strip(), block.strip())
    return found


_PARSERS: dict[ToolFormat, Callable[[str], _Found]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}


def _json_pieces(body: str) -> list[str]:
    """Return the JSON objects of the body. The last piece is the text that is not one."""
    decoder, pieces, at = json.JSONDecoder(), [], 0
    while at < len(body):
        try:
            _, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            end = len(body)
        pieces.append(body[at:end])
        at = end + len(body[end:]) - len(body[end:].lstrip("; \n\t"))
    return pieces


def _take_list(found: _Found, text: str) -> None:
    """Parse a JSON list of calls."""
    try:
        calls, end = json.JSONDecoder().raw_decode(text)
        _loads(text[:end])
    except (ValueError, RecursionError) as e:
        found.errors.append(BadToolCall(text, f"the tool calls are not valid JSON: {e}"))
        return
    rest = text[end:].strip()
    if rest:
        found.content = f"{found.content}\n{rest}".strip()
    for call in calls if isinstance(calls, list) else [calls]:
        _take_object(found, call, json.dumps(call, ensure_ascii=False), "arguments")


def _take(found: _Found, text: str, key: str) -> None:
    """Parse one call written as a JSON object."""
    try:
        call = _loads(text)
    except (ValueError, RecursionError) as e:
        found.errors.append(BadToolCall(text, f"the tool call is not valid JSON: {e}"))
        return
    _take_object(found, call, text, key)


def _take_object(found: _Found, call: object, text: str, key: str) -> None:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]  # the API format, which some policies repeat
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        shape = f'{{"name": ..., "{key}": {{...}}}}'
        found.errors.append(BadToolCall(text, f"a tool call is a JSON object {shape}"))
        return
    other = "arguments" if key == "parameters" else "parameters"
    arguments = call.get(key, call.get(other, {}))
    if isinstance(arguments, str):
        _take_arguments(found, call["name"], arguments, text)
    else:
        as_text = json.dumps(arguments, ensure_ascii=False)
        _take_arguments(found, call["name"], as_text, text)


def _take_arguments(found: _Found, name: str, arguments: str, text: str) -> None:
    try:
        value = _loads(arguments) if arguments else {}
    except (ValueError, RecursionError) as e:
        found.errors.append(BadToolCall(text, f"the arguments of {name} are not valid JSON: {e}"))
        return
    if isinstance(value, dict):
        found.calls.append((name, arguments or "{}"))
    else:
        found.errors.append(BadToolCall(text, f"the arguments of {name} are not a JSON object"))


def _loads(text: str) -> object:
    """Return the value of a JSON text. NaN, infinities and lone surrogates are rejected."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value
