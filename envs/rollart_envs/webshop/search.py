"""Search: BM25 over the catalogue, with the ranking of Lucene's English index.

Takes: products, then queries. Gives: product positions, best first. Never: uses random numbers, or
depends on earlier queries; the cache only saves time.

Terms are stemmed by Porter's algorithm (M. F. Porter, "An algorithm for suffix stripping", Program
14(3), 1980), with two changes from his own later code that Lucene also has: ``bli -> ble`` for
``abli -> able`` and ``logi -> log`` in step 2. Words of one or two letters are not changed.

Score of document d for query q (Robertson et al. 1994; Lucene's form, which drops the constant
factor k1 + 1), with the length |d| rounded down to the nearest length one byte can hold:

    sum over t in q of  ln(1 + (N - n_t + 0.5) / (n_t + 0.5)) * f / (f + k1 * (1 - b + b |d| / avg))
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rollart_envs.webshop.products import Product

K1, B = 0.9, 0.4
NUM_HITS = 50
STOP_WORDS = frozenset(
    """
    a an and are as at be but by for if in into is it no not of on or such that the their then
    there these they this to was will with
    """.split()  # noqa: SIM905 (thirty quotes say no more)
)
# Tokens are Unicode's words (UAX #29): letters join over . ' : ·, digits over . ' , ; — ideographs
# and pictures (Unicode 12 emoji) are single tokens; superscripts and fractions are not tokens.
_PICTURES = (
    "©®‼⁉™ℹ↔-↙↩↪⌚⌛⌨⎈⏏⏩-⏳⏸-⏺Ⓜ▪▫▶◀◻-◾☀-★☇-☒☔-⚅⚐-✅✈-✒✔✖✝✡✨✳✴❄❇❌❎❓-❕❗❣-❧➕-➗➡➰➿⤴⤵"
    "⬅-⬇⬛⬜⭐⭕〰〽㊗㊙\U0001f000-\U0001f0ff\U0001f170\U0001f171\U0001f17e\U0001f17f\U0001f18e"
    "\U0001f191-\U0001f19a\U0001f201-\U0001f3fa\U0001f400-\U0001f64f\U0001f680-\U0001f6ff"
    "\U0001f900-\U0001fffd"
)
_ALONE = "\u3040-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003fffd"
_WORD = rf"(?:(?![{_ALONE}²³¹¼-¾①-⒛❶-➓⁰-₉⅐-⅟])\w)+"
_TOKEN = re.compile(
    rf"[\U0001f1e6-\U0001f1ff]{{2}}"
    rf"|[{_PICTURES}][\U0001f3fb-\U0001f3ff]?(?:\u200d[{_PICTURES}][\U0001f3fb-\U0001f3ff]?)*"
    rf"|[{_ALONE}]"
    rf"|{_WORD}(?:(?:(?<=[^\W\d_])[.:·'’‘․﹒＇．：](?=[^\W\d_])|(?<=\d)[.,;⁄'’‘](?=\d)){_WORD})*"
)
_INVISIBLE = re.compile("[\u00ad\u0300-\u036f\u200e\u200f\u2060\ufe0e\ufe0f\ufeff]")
_POSSESSIVE = re.compile(r"['’＇][sS]$")

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


@lru_cache(maxsize=65536)
def _term(token: str) -> str | None:
    """Return the index term of a token; None for a stop word."""
    word = _POSSESSIVE.sub("", token).lower()
    return None if word in STOP_WORDS or not word.strip("_") else stem(word)


def analyze(text: str) -> list[str]:
    """Return the index terms of ``text``: words without possessives, stop words and endings."""
    tokens = _TOKEN.findall(text if text.isascii() else _INVISIBLE.sub("", text))
    return [t for t in map(_term, tokens) if t]


def document(product: Product) -> str:
    """Return the indexed text of a product: title, description, first bullet, options."""
    options = ", and ".join(f"{name}: {', '.join(v)}" for name, v in product.options.items())
    bullet = product.bullets[0] if product.bullets else ""
    return " ".join([product.title, product.description, bullet, options]).lower()


def quantised_length(length: int) -> int:
    """Return ``length`` as one byte stores it: exact below 40, then with 4 significant bits."""
    if length < 24:
        return length
    return _widen(_narrow(length - 24)) + 24


def _narrow(value: int) -> int:
    """Return ``value`` as 4 significant bits and a shift, encoded in one number."""
    bits = value.bit_length()
    if bits < 4:
        return value
    shift = bits - 4
    return ((value >> shift) & 0x07) | ((shift + 1) << 3)


def _widen(code: int) -> int:
    bits, shift = code & 0x07, (code >> 3) - 1
    return bits if shift == -1 else (bits | 0x08) << shift


class SearchIndex:
    """An inverted index over the products, immutable once built."""

    def __init__(self, products: Sequence[Product]) -> None:
        counts = [Counter(analyze(document(p))) for p in products]
        self.num_documents = len(products)
        # Ties are ordered by ASIN: candidates are in that order, and the sort is stable.
        self._by_asin = np.array(
            sorted(range(len(products)), key=lambda i: products[i].asin), dtype=np.int64
        )
        self._postings = _postings(counts)
        self._search = lru_cache(maxsize=4096)(self._rank)

    def search(self, query: str) -> tuple[int, ...]:
        """Return the positions of at most 50 products that share a term with ``query``."""
        return self._search(query)

    def scores(self, query: str) -> npt.NDArray[np.float32]:
        """Return the score of every product, ``[N]``; 0 if no term is shared."""
        total = np.zeros(self.num_documents, dtype=np.float64)
        for term, count in Counter(analyze(query)).items():
            posting = self._postings.get(term)
            if posting is not None:
                total[posting[0]] += np.float32(count) * posting[1]
        return total.astype(np.float32)

    def _rank(self, query: str) -> tuple[int, ...]:
        scores = self.scores(query)[self._by_asin]
        found = np.flatnonzero(scores > 0)
        if len(found) > NUM_HITS:
            worst = np.partition(scores[found], -NUM_HITS)[-NUM_HITS]
            found = found[scores[found] >= worst]
        order = np.argsort(-scores[found], kind="stable")
        return tuple(self._by_asin[found[order[:NUM_HITS]]].tolist())


Posting = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


def _postings(counts: Sequence[Counter[str]]) -> dict[str, Posting]:
    """Return for each term the documents that contain it and its contribution to their scores."""
    n = len(counts)
    lengths = [sum(c.values()) for c in counts]
    average = np.float32(sum(lengths) / max(1, n))
    kept = np.array([quantised_length(x) for x in lengths], dtype=np.float32)
    norm = np.float32(K1) * (np.float32(1 - B) + np.float32(B) * kept / average)
    where: dict[str, tuple[list[int], list[int]]] = {}
    for i, count in enumerate(counts):
        for term, f in count.items():
            documents, frequencies = where.setdefault(term, ([], []))
            documents.append(i)
            frequencies.append(f)
    return {
        term: _weighed(np.array(docs, dtype=np.int32), np.array(fs, dtype=np.float32), norm, n)
        for term, (docs, fs) in where.items()
    }


def _weighed(
    docs: npt.NDArray[np.int32],
    frequencies: npt.NDArray[np.float32],
    norm: npt.NDArray[np.float32],
    n: int,
) -> Posting:
    idf = np.float32(math.log(1 + (n - len(docs) + 0.5) / (len(docs) + 0.5)))
    one = np.float32(1)
    return docs, idf - idf / (one + frequencies * (one / norm[docs]))


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
    """Return whether ``word`` ends consonant-vowel-consonant, with the last not w, x or y."""
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
    """Restore the letters that the removal of -ed or -ing changed."""
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
