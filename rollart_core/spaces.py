"""Gymnasium spaces for text: any Unicode string, and lists of chat messages.

Takes: seeds. Gives: spaces that test membership and sample. Never: limits the alphabet (gymnasium's
own ``Text`` rejects spaces by default), or interprets a text.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from rollart_core.types import Message

ROLES = ("system", "user", "assistant", "tool")
_SAMPLE_CHARS = 32
# Character ranges of samples: ASCII with white space, Latin and Greek, CJK, emoji.
_RANGES = ((0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x400), (0x4E00, 0x9FA6), (0x1F600, 0x1F650))


class Text(gymnasium.Space[str]):
    """All Unicode strings of at most ``max_length`` characters that UTF-8 can encode.

    Args:
        max_length: Maximum number of characters. None means no limit.
        seed: Seed for ``sample``.
    """

    def __init__(self, max_length: int | None = None, *, seed: int | None = None) -> None:
        if max_length is not None and max_length < 0:
            raise ValueError(f"max_length is {max_length}; it must be 0 or more, or None")
        self.max_length = max_length
        super().__init__(seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Always False: text has no fixed-size array."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Return a random string of up to 32 characters, of several scripts.

        Args:
            mask: Must be None.
            probability: Must be None.
        """
        _refuse_masks(mask, probability)
        limit = _SAMPLE_CHARS if self.max_length is None else min(self.max_length, _SAMPLE_CHARS)
        length = int(self.np_random.integers(limit + 1))
        return "".join(self._char() for _ in range(length))

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a string of this space. Lone surrogates are never in it."""
        if not isinstance(x, str) or (self.max_length is not None and len(x) > self.max_length):
            return False
        return not any("\ud800" <= char <= "\udfff" for char in x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and other.max_length == self.max_length

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Text({'' if self.max_length is None else self.max_length})"

    def _char(self) -> str:
        low, high = _RANGES[int(self.np_random.integers(len(_RANGES)))]
        return chr(int(self.np_random.integers(low, high)))


_KEYS = frozenset(Message.__required_keys__ | Message.__optional_keys__)


class Messages(gymnasium.Space[list[Message]]):
    """All lists of at most ``max_messages`` chat messages, each a dict of ``role`` and ``content``.

    A message may also have the tool fields of :class:`~rollart_core.types.Message`. Samples have
    none.

    Args:
        max_messages: Maximum number of messages. None means no limit.
        max_length: Maximum number of characters of one ``content``. None means no limit.
        seed: Seed for ``sample``.
    """

    def __init__(
        self,
        max_messages: int | None = None,
        *,
        max_length: int | None = None,
        seed: int | None = None,
    ) -> None:
        if max_messages is not None and max_messages < 1:
            raise ValueError(f"max_messages is {max_messages}; it must be 1 or more, or None")
        self.max_messages = max_messages
        self.content = Text(max_length)
        super().__init__(seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Always False: messages have no fixed-size array."""
        return False

    def seed(self, seed: int | None = None) -> int:
        """Seed this space and the space of its contents, and return the seed."""
        used = int(super().seed(seed))
        self.content.seed(used)
        return used

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> list[Message]:
        """Return one to four random messages.

        Args:
            mask: Must be None.
            probability: Must be None.
        """
        _refuse_masks(mask, probability)
        most = 4 if self.max_messages is None else min(4, self.max_messages)
        roles = self.np_random.integers(len(ROLES), size=int(self.np_random.integers(1, most + 1)))
        return [Message(role=ROLES[int(r)], content=self.content.sample()) for r in roles]

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a list of messages of this space."""
        if not isinstance(x, list) or (
            self.max_messages is not None and len(x) > self.max_messages
        ):
            return False
        return all(self._is_message(message) for message in x)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Messages)
            and other.max_messages == self.max_messages
            and other.content == self.content
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Messages({self.max_messages}, max_length={self.content.max_length})"

    def _is_message(self, message: object) -> bool:
        return (
            isinstance(message, dict)
            and {"role", "content"} <= message.keys() <= _KEYS
            and all(isinstance(message.get(key, ""), str) for key in _KEYS - {"tool_calls"})
            and isinstance(message.get("tool_calls", []), list)
            and self.content.contains(message["content"])
        )


def _refuse_masks(mask: Any | None, probability: Any | None) -> None:
    if mask is not None or probability is not None:
        raise ValueError("text spaces have no mask and no probability; pass None")
