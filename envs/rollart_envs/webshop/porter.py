"""Porter's stemmer, with the two departures of his own later code that Lucene also has.

Takes: a lower-case word. Gives: its stem. Never: touches words of one or two letters.
Source: M. F. Porter, "An algorithm for suffix stripping", Program 14(3), 1980; the departures are
``bli -> ble`` for ``abli -> able`` and ``logi -> log`` in step 2.
"""

from __future__ import annotations

from itertools import pairwise

_STEP2 = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize",
    "bli": "ble", "alli": "al", "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize",
    "ation": "ate", "ator": "ate", "alism": "al", "iveness": "ive", "fulness": "ful",
    "ousness": "ous", "aliti": "al", "iviti": "ive", "biliti": "ble", "logi": "log",
}  # fmt: skip
_STEP3 = {
    "icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": "",
}  # fmt: skip
_STEP4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou",
    "ism", "ate", "iti", "ous", "ive", "ize",
)  # fmt: skip
_BY_LENGTH = {id(rules): sorted(rules, key=len, reverse=True) for rules in (_STEP2, _STEP3, _STEP4)}


def stem(word: str) -> str:
    """Return the stem of a lower-case ``word``."""
    if len(word) <= 2:
        return word
    word = _step1c(_step1b(_step1a(word)))
    word = _replace(_replace(word, _STEP2), _STEP3)
    return _step5(_step4(word))


def _is_consonant(word: str, i: int) -> bool:
    letter = word[i]
    if letter in "aeiou":
        return False
    if letter == "y":
        return i == 0 or not _is_consonant(word, i - 1)
    return True


def _measure(part: str) -> int:
    """Count the vowel-consonant sequences of ``part`` (Porter's m)."""
    kinds = [_is_consonant(part, i) for i in range(len(part))]
    return sum(after and not before for before, after in pairwise(kinds))


def _has_vowel(part: str) -> bool:
    return any(not _is_consonant(part, i) for i in range(len(part)))


def _double_consonant(word: str) -> bool:
    return len(word) >= 2 and word[-1] == word[-2] and _is_consonant(word, len(word) - 1)


def _ends_cvc(word: str) -> bool:
    """Tell whether ``word`` ends consonant-vowel-consonant, the last not w, x or y."""
    n = len(word)
    return (
        n >= 3
        and _is_consonant(word, n - 1)
        and not _is_consonant(word, n - 2)
        and _is_consonant(word, n - 3)
        and word[-1] not in "wxy"
    )


def _step1a(word: str) -> str:
    if not word.endswith("s"):
        return word
    if word.endswith("sses") or word.endswith("ies"):
        return word[:-2]
    return word if word.endswith("ss") else word[:-1]


def _step1b(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        part = word[: -len(suffix)]
        if word.endswith(suffix) and _has_vowel(part):
            return _mend(part)
    return word


def _mend(word: str) -> str:
    """Give back what the loss of -ed or -ing took."""
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _double_consonant(word):
        return word if word[-1] in "lsz" else word[:-1]
    return word + "e" if _measure(word) == 1 and _ends_cvc(word) else word


def _step1c(word: str) -> str:
    return word[:-1] + "i" if word.endswith("y") and _has_vowel(word[:-1]) else word


def _replace(word: str, rules: dict[str, str]) -> str:
    for suffix in _BY_LENGTH[id(rules)]:
        if word.endswith(suffix):
            part = word[: -len(suffix)]
            return part + rules[suffix] if _measure(part) > 0 else word
    return word


def _step4(word: str) -> str:
    for suffix in _BY_LENGTH[id(_STEP4)]:
        if word.endswith(suffix):
            part = word[: -len(suffix)]
            if suffix == "ion" and not part.endswith(("s", "t")):
                return word
            return part if _measure(part) > 1 else word
    return word


def _step5(word: str) -> str:
    if word.endswith("e"):
        m = _measure(word[:-1])
        if m > 1 or (m == 1 and not _ends_cvc(word[:-1])):
            word = word[:-1]
    return word[:-1] if word.endswith("ll") and _measure(word) > 1 else word
