"""The assignment of sessions to rows of the KV cache, and the content of these rows.

Takes: prompts. Gives: sessions with a slot; decides eviction and prefix sharing. Never: runs the
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from rollart_cpu.inference.runner import Int64Array

KvOrigin: TypeAlias = Literal["fresh", "kept", "recomputed"]
"""See :class:`rollart_core.types.TokenSpan`."""

MIN_SHARED_TOKENS = 8
"""A shorter common prefix is computed; it is not copied or waited for."""


@dataclass(slots=True, eq=False)
class Session:
    """One row of the cache and its tokens."""

    session_id: str
    """Empty for a request without a session."""
    group_id: str
    slot: int
    tokens: Int64Array
    """``[max_tokens]``; the first ``length`` are valid."""
    length: int = 0
    num_kv: int = 0
    """Number of tokens whose keys and values are in the cache."""
    version: int = 0
    """Oldest policy_version of these tokens."""
    kv: KvOrigin = "fresh"
    """The effect of the newest weight swap on them."""
    busy: bool = False
    settled: bool = False
    """True after its siblings were searched for a common prefix."""
    last_used: int = 0

    def begin_turn(self, prompt: Int64Array) -> None:
        """Set a new prompt; keep the cache of the prefix in common with the old tokens."""
        kept = min(common_prefix(prompt, self.tokens[: self.num_kv]), len(prompt) - 1)
        if self.num_kv and not kept:
            self.kv = "fresh"
        self.num_kv, self.length = kept, len(prompt)
        self.tokens[: len(prompt)] = prompt
        self.busy, self.settled = True, kept > 0

    def append(self, token: int) -> None:
        """Add a sampled token, which is not yet in the cache."""
        self.tokens[self.length] = token
        self.length += 1

    def lose_cache(self) -> None:
        """Mark the cache of this session as invalid."""
        self.num_kv, self.kv, self.settled = 0, "fresh", False

    def swap(self, version: int, *, keep: bool) -> int:
        """Register new weights; return the number of tokens to compute again."""
        lost = self.num_kv
        if keep and lost:
            self.kv = "kept"
            return 0
        if lost:
            self.kv = "recomputed"
        self.num_kv, self.version, self.settled = 0, version, False
        return lost


class SessionTable:
    """All sessions of an engine."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_id: dict[str, Session] = {}
        self._groups: dict[str, dict[int, Session]] = {}
        self._clock = 0

    def __iter__(self) -> Iterator[Session]:
        for group in list(self._groups.values()):
            yield from list(group.values())

    def __len__(self) -> int:
        return sum(len(group) for group in self._groups.values())

    def acquire(self, session_id: str, group_id: str) -> Session | None:
        """Return an idle session with this id, or a new one; None if every slot is busy.

        A second concurrent request of a session gets a separate session that is not kept.
        """
        known = self._by_id.get(session_id) if session_id else None
        if known is not None and not known.busy:
            return known
        if not self._free and not self._evict():
            return None
        name = "" if known is not None else session_id
        tokens = np.zeros(self._max_tokens, np.int64)
        session = Session(name, group_id, self._free.pop(), tokens)
        if name:
            self._by_id[name] = session
        self._groups.setdefault(group_id, {})[session.slot] = session
        return session

    def _evict(self) -> bool:
        """Free the slot of the session that has been idle longest."""
        idle = [s for s in self._by_id.values() if not s.busy]
        if not idle:
            return False
        self.forget(min(idle, key=lambda s: s.last_used))
        return True

    def end_turn(self, session: Session) -> None:
        """Make a session idle, or remove it if it has no id."""
        self._clock += 1
        session.busy, session.last_used = False, self._clock
        if session.kv == "recomputed":
            session.kv = "fresh"
        if not session.session_id:
            self.forget(session)

    def release(self, session_id: str) -> None:
        """Remove a session; a busy one is removed at the end of its turn."""
        session = self._by_id.pop(session_id, None)
        if session is None:
            return
        session.session_id = ""
        if not session.busy:
            self.forget(session)

    def forget(self, session: Session) -> None:
        """Remove a session and free its slot."""
        if session.session_id:
            self._by_id.pop(session.session_id, None)
        group = self._groups[session.group_id]
        del group[session.slot]
        if not group:
            del self._groups[session.group_id]
        self._free.append(session.slot)

    def donor(self, session: Session, version: int) -> tuple[Session | None, int]:
        """Search a new session's siblings for a common prefix.

        Returns:
            ``(sibling, n)`` to copy the first n tokens from it; ``(sibling, 0)`` to wait, because
            the sibling is computing the common prefix; ``(None, 0)`` if there is none.
        """
        best: Session | None = None
        most = session.num_kv
        prompt = session.tokens[: session.length]
        for other in self._groups[session.group_id].values() if session.group_id else ():
            if other is session or (other.num_kv and other.version != version):
                continue
            # a session that itself waits for a donor cannot be waited for
            known = other.length if other.busy and other.settled else other.num_kv
            common = min(common_prefix(prompt, other.tokens[:known]), len(prompt) - 1)
            if common >= most + MIN_SHARED_TOKENS:
                if other.num_kv < common:
                    return other, 0
                best, most = other, common
        return best, most if best else 0


def common_prefix(a: Int64Array, b: Int64Array) -> int:
    """Return the number of leading tokens that two rows share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
