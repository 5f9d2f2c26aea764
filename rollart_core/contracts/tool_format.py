"""Tool formats: how the models of one family write reasoning and tool calls.

Takes: the text of one message of the policy. Gives: the base of tool formats, their spec, and
:class:`ParsedMessage`. Never: raises because of the policy's text, or checks which tools exist.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from rollart_core.contracts.spec import PluginSpec
from rollart_core.types import FunctionCall, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormatSpec(PluginSpec):
    """The spec of a tool format."""


@dataclass(frozen=True, slots=True)
class BadToolCall:
    """An invalid tool call."""

    text: str
    """The text that the policy wrote."""
    reason: str
    """The problem in one line, shown to the policy."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """The parts of one message of the policy."""

    content: str
    """The text of the answer, without reasoning and calls."""
    reasoning: str = ""
    """The text before the answer, without its marks."""
    calls: tuple[ToolCall, ...] = ()
    """The valid calls. RollArt sets their ids."""
    errors: tuple[BadToolCall, ...] = ()


class ToolFormat(ABC):
    """Base class of tool formats. The instance is shared by all conversations."""

    marks: tuple[str, ...] = ()
    """Texts around reasoning and calls. If the tokenizer has special tokens for them, the decoded
    text contains them."""
    stops: tuple[str, ...] = ()
    """Texts that end a message after its calls, in addition to the usual end of a message."""
    thought: str = ""
    """The text that opens the reasoning. If the chat template ends the prompt with it,
    :meth:`parse` gets it before the text."""

    @abstractmethod
    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> ParsedMessage:
        """Parse one message.

        Args:
            text: The policy's text, without the token that ended it.
            tools: The tools that the policy may call. Formats that write values without types get
                the types from their schemas.
        """

    @abstractmethod
    def render(self, message: ParsedMessage) -> str:
        """Return the message as a model of the family writes it. ``errors`` are ignored."""

    def call_id(self, name: str, index: int) -> str:
        """Return the id of a call, for templates that write ids instead of names. Empty: any."""
        return ""


def tool_call(name: str, arguments: str) -> ToolCall:
    """Return a call without an id.

    Args:
        name: Name of the tool.
        arguments: A JSON object; empty text means no arguments.

    Raises:
        ValueError: If the arguments are not a JSON object. The message is one line for the policy.
    """
    try:
        value = strict_json(arguments) if arguments else {}
    except (ValueError, RecursionError) as e:
        raise ValueError(f"the arguments of {name} are not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"the arguments of {name} are not a JSON object")
    function = FunctionCall(name=name, arguments=arguments or "{}")
    return ToolCall(id="", type="function", function=function)


def strict_json(text: str) -> object:
    """Return the value of a JSON text.

    Raises:
        ValueError: If it is not valid, or has NaN, infinities or lone surrogates.
        RecursionError: If it is nested too deeply.
    """
    value: object = json.loads(text)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value
