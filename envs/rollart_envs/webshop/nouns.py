"""The nouns of a product title, for the type part of the reward.

Takes: a title. Gives: its nouns in lower case, with repeats. Upstream uses spaCy. If spaCy's small
English model is not installed, rules are used, and the result names the tagger that was used.
Never: imports spaCy before a tagger that needs it is made.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal, Protocol

SPACY_MODEL = "en_core_web_sm"
NO_SPACY = (
    f"spacy needs spaCy and its model {SPACY_MODEL}; install both, or use noun_tagger: builtin"
)
_WORD = re.compile(r"[^\W_]{2,}")
_NOT_NOUNS = frozenset(
    """
    a about above all also an and any are as at be best better big both but by can extra
    easy every for from full great good has have high if in inch into is it its large long
    low made make makes medium mini more most multi my new no non not of off on one only or
    other our out over per plus pre premium pro quick safe set short slim small so soft
    super that the their these this to two ultra under up use used very was we wide will
    with without x you your
    """.split()  # noqa: SIM905 (a hundred quotes say no more)
)
_NOT_NOUN_ENDINGS = ("able", "ible", "less", "ful", "ous", "ly")


class Nouns(Protocol):
    """A noun tagger."""

    name: str
    """The value of ``info["noun_tagger"]``."""

    def __call__(self, text: str) -> tuple[str, ...]:
        """Return the nouns of ``text`` in lower case."""


class RuleNouns:
    """Every word that is not a number or function word and has no adjective ending."""

    name = "builtin"

    def __init__(self) -> None:
        self._find = lru_cache(maxsize=8192)(_find_nouns)

    def __call__(self, text: str) -> tuple[str, ...]:
        """Return the nouns of ``text`` in lower case."""
        return self._find(text)


class SpacyNouns:
    """spaCy's part-of-speech tags, as upstream uses them."""

    name = f"spacy:{SPACY_MODEL}"

    def __init__(self) -> None:
        import spacy

        self._nlp = spacy.load(SPACY_MODEL)
        self._find = lru_cache(maxsize=8192)(self._tag)

    def __call__(self, text: str) -> tuple[str, ...]:
        """Return the nouns of ``text`` in lower case."""
        return self._find(text)

    def _tag(self, text: str) -> tuple[str, ...]:
        return tuple(t.text.lower() for t in self._nlp(text) if t.pos_ in ("NOUN", "PROPN"))


def has_spacy() -> bool:
    """Return whether spaCy and its model are installed."""
    return find_spec("spacy") is not None and find_spec(SPACY_MODEL) is not None


def make_nouns(which: Literal["auto", "spacy", "builtin"]) -> Nouns:
    """Return the requested tagger.

    Raises:
        ValueError: If ``spacy`` is requested and it or its model is not installed.
    """
    installed = has_spacy()
    if which == "spacy" and not installed:
        raise ValueError(f"noun_tagger: {NO_SPACY}")
    return SpacyNouns() if installed and which != "builtin" else RuleNouns()


def _find_nouns(text: str) -> tuple[str, ...]:
    words = (w.lower() for w in _WORD.findall(text))
    return tuple(w for w in words if _may_be_noun(w))


def _may_be_noun(word: str) -> bool:
    return not word[0].isdigit() and word not in _NOT_NOUNS and not word.endswith(_NOT_NOUN_ENDINGS)
