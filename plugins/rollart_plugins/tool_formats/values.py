"""Values of arguments that are not written as JSON.

Takes: text. Gives: :func:`typed`, which uses the JSON schema of a parameter for a value without
quotes, and :class:`Reader`, which reads the literals of Python, JSON and Gemma. Never: evaluates
code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rollart_core.contracts.tool_format import strict_json
from rollart_core.types import ToolSpec
from rollart_plugins.tool_formats.parsing import FAULTS

_WORDS: Final = {"True": True, "False": False, "None": None}
_WORDS_JSON: Final = {**_WORDS, "true": True, "false": False, "null": None}
_NUMBER = re.compile(r"-?(\d+)(\.\d*)?([eE][-+]?\d+)?")
_WORD = re.compile(r"[A-Za-z]+")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "0": "\0"}
_TYPES: Final[Mapping[type, tuple[str, ...]]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number", "integer"),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def parameters_of(tools: Sequence[ToolSpec], name: str) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's parameters; empty if there is no such tool."""
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool["function"].get("parameters", {})
    return {}


def typed(text: str, key: str, schema: Mapping[str, Any]) -> object:
    """Return the value of a parameter that is written without quotes.

    A text is the value of a parameter of type string. For another type, or if the type is unknown,
    it is read as a literal; a text that is not one stays a text.

    Args:
        text: The text.
        key: Name of the parameter.
        schema: The schema of all parameters of the tool.
    """
    properties = schema.get("properties")
    given = properties.get(key) if isinstance(properties, dict) else None
    types = set(_types(given, schema, 0))
    if types == {"string"}:
        return text
    value = literal(text)
    if not types or "string" not in types or types & set(_TYPES[type(value)]):
        return value
    return text


def literal(text: str) -> object:
    """Return the value of a literal of JSON or Python. Another text is its own value."""
    try:
        return strict_json(text)
    except FAULTS:
        pass
    word = text.strip()
    if word in _WORDS:
        return _WORDS[word]
    if word[:1] not in ("[", "{"):
        return text
    try:
        reader = Reader(word)
        value = reader.value()
        reader.space()
        return value if reader.at == len(word) else text
    except FAULTS:
        return text


def _types(schema: object, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Yield the types that a schema allows; nothing if it allows any."""
    if not isinstance(schema, dict) or depth > 8:
        return
    given = schema.get("type")
    yield from [given] if isinstance(given, str) else given or ()
    for value in [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]:
        yield _TYPES.get(type(value), ("string",))[0]
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(key, ()):
            yield from _types(each, root, depth + 1)
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    yield from _types(root.get("$defs", {}).get(name), root, depth + 1)


class Reader:
    """Reads literals from a position of a text.

    Args:
        text: The text.
        at: Where to begin.
        quotes: The marks around strings. A mark of several characters has no escapes inside.
    """

    def __init__(
        self, text: str, at: int = 0, quotes: Sequence[str] = ('"""', "'''", '"', "'")
    ) -> None:
        self.text, self.at, self._quotes = text, at, quotes

    def space(self) -> None:
        """Skip white space."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def skip(self, mark: str) -> bool:
        """Skip white space and the mark. Return whether the mark was there."""
        self.space()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def expect(self, mark: str) -> None:
        """Skip white space and the mark.

        Raises:
            ValueError: If the mark is not there.
        """
        if not self.skip(mark):
            raise ValueError(f"expected {mark!r} at character {self.at}{self._seen()}")

    def value(self, ends: re.Pattern[str] | None = None) -> Any:
        """Read a value.

        Args:
            ends: What follows a string. A quote that is not followed by it is part of the string,
                because some templates do not escape quotes.

        Raises:
            ValueError: If there is no value.
        """
        self.space()
        for quote in self._quotes:
            if self.text.startswith(quote, self.at):
                return self._string(quote, ends or _AFTER)
        if self.skip("["):
            return self._items("]", self.value)
        if self.skip("("):
            return self._items(")", self.value)
        if self.skip("{"):
            return dict(self._items("}", self._pair))
        return self._scalar()

    def _items(self, end: str, read: Callable[[], Any]) -> list[Any]:
        items = []
        while not self.skip(end):
            items.append(read())
            if not self.skip(","):
                self.expect(end)
                break
        return items

    def _pair(self) -> tuple[str, Any]:
        self.space()
        if any(self.text.startswith(quote, self.at) for quote in self._quotes):
            key = self.value()
        else:
            key, self.at = self._until(":")
        self.expect(":")
        return key, self.value()

    def _until(self, mark: str) -> tuple[str, int]:
        end = self.text.find(mark, self.at)
        if end < 0:
            raise ValueError(f"expected {mark!r} after character {self.at}{self._seen()}")
        return self.text[self.at : end].strip(), end

    def _string(self, quote: str, ends: re.Pattern[str]) -> str:
        start = at = self.at + len(quote)
        while True:
            end = self.text.find(quote, at)
            if end < 0:
                raise ValueError(f"the string at character {self.at} has no end")
            body = self.text[start:end]
            escaped = len(quote) == 1 and (len(body) - len(body.rstrip("\\"))) % 2
            if not escaped and (len(quote) > 1 or ends.match(self.text, end + 1)):
                self.at = end + len(quote)
                return body if len(quote) > 3 else _joined(_ESCAPE.sub(_unescaped, body))
            at = end + 1

    def _scalar(self) -> Any:
        if number := _NUMBER.match(self.text, self.at):
            self.at = number.end()
            is_whole = number[2] is None and number[3] is None
            return int(number[0]) if is_whole else float(number[0])
        word = _WORD.match(self.text, self.at)
        if word is None or word[0] not in _WORDS_JSON:
            raise ValueError(f"expected a value at character {self.at}{self._seen()}")
        self.at = word.end()
        return _WORDS_JSON[word[0]]

    def _seen(self) -> str:
        return f", got {self.text[self.at : self.at + 20]!r}"


_AFTER = re.compile(r"\s*([,:)\]}]|\Z)")
"""What follows a string inside a value."""


def _joined(text: str) -> str:
    """Join surrogate pairs, which JSON writes for characters beyond U+FFFF."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    return text


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "uUx" and len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPES.get(code, code if code in "\\'\"/" else found[0])
