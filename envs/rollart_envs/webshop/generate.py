"""The generated catalogue: made by code from a seed, in the schema of the official files.

Takes: a number of products, a difficulty and a seed. Gives: ``(rows, attributes, human)`` as in the
three official files. Never: draws from a global random state or copies real data.

Design. Every product is a pair (attribute, noun) that no other product has, sold in two options of
three or four values each. The words are few and shared, but the combinations are not: a test
product consists of words that the policy has seen, in a combination that it has not. So the policy
must learn to *copy* from the instruction into the query and the clicks, not to memorise the
catalogue. No value is a fuzzy match for another one of its product, so every option must be right.

All words are invented for the catalogue; none is taken from a data set. They are short, so that a
small byte-pair vocabulary has one token for each. No word is in two lists, so that each word shows
its category.

Difficulty 1 asks for the pair, and a search for it returns the product first. Difficulty 2 asks for
two attributes, similar products have one of them, and the shop shows the results of the first page
in random order. Difficulty 3 adds a third option with values of two words that share words.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


BRANDS = _words(
    "Arlo Basil Corvo Delta Ember Fjord Gusto Halo Indra Jova Kite Lumo Mirra Noro Orbi Pella "
    "Quill Riva Sento Tova"
)
"""Used in titles, never in instructions."""

ATTRIBUTES = _words(
    "soft warm light thick thin sturdy quiet bright fresh smooth rugged simple fancy padded vented "
    "folding rustic glossy matte sealed quick heavy lined woven"
)

COLORS = _words(
    "red blue green black white pink teal gold navy gray brown purple orange yellow ivory olive "
    "silver coral maroon beige violet lime bronze plum"
)
FLAVORS = _words("vanilla mango cocoa ginger honey mint lemon berry maple cherry salted smoky")
SIZES = _words("small medium large petite tall wide narrow junior")
BEDS = _words("twin full queen king crib bunk cot daybed")
PACKS = _words("single pair trio dozen bulk sampler family travel")
MATERIALS = _words("oak steel bamboo glass marble wicker pine brass cork ceramic")
STYLES = _words("classic modern sport retro urban nordic floral plain striped dotted")
HOWS = _words("hand deep double")
FINISHES = _words("waxed coated polished brushed tinted")
"""Combined with ``HOWS`` at difficulty 3: ``hand waxed`` and ``deep waxed``."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A department of the shop: its products and their options."""

    category: str
    path: str
    nouns: tuple[str, ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]


def _kind(category: str, path: str, nouns: str, **options: tuple[str, ...]) -> Kind:
    return Kind(category, path, _words(nouns), tuple(sorted(options.items())))


KINDS = (
    _kind("fashion", "Clothing › Tops", "shirt jacket sweater vest hoodie coat scarf gloves",
          color=COLORS, size=SIZES),
    _kind("fashion", "Clothing › Shoes", "boots sandals sneakers slippers loafers clogs socks belt",
          color=COLORS, size=SIZES),
    _kind("garden", "Home › Bedding", "blanket pillow sheets mattress curtain rug towel canopy",
          color=COLORS, size=BEDS),
    _kind("garden", "Home › Furniture", "table chair shelf bench stool desk cabinet mirror",
          material=MATERIALS, style=STYLES),
    _kind("grocery", "Food › Snacks", "cookies crackers almonds granola popcorn candy jerky tea",
          flavor=FLAVORS, pack=PACKS),
    _kind("beauty", "Beauty › Care", "shampoo lotion soap candle brush serum cream balm",
          flavor=FLAVORS, pack=PACKS),
    _kind("electronics", "Devices › Home", "speaker earbuds radio lamp charger tripod cable camera",
          color=COLORS, style=STYLES),
    _kind("sports", "Sports › Outdoor", "tent backpack bottle helmet kayak racket lantern cooler",
          color=COLORS, material=MATERIALS),
)  # fmt: skip


Rows = tuple[list[dict[str, Any]], dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]]]

DEFAULT_NUM_PRODUCTS = 560
MAX_PRODUCTS = sum(len(kind.nouns) for kind in KINDS) * len(ATTRIBUTES)
_ASIN_LETTERS = "BCDFGHJKLMNPQRSTVWXZ0123456789"


def generate(num_products: int = DEFAULT_NUM_PRODUCTS, difficulty: int = 1, seed: int = 0) -> Rows:
    """Return products, their attributes and instructions, and human-style instructions.

    Raises:
        ValueError: If there are fewer pairs of words than ``num_products``.
    """
    if num_products > MAX_PRODUCTS:
        raise ValueError(
            f"num_products: the generated catalogue has at most {MAX_PRODUCTS}, not {num_products}"
        )
    rng = random.Random(f"rollart webshop {seed} {difficulty}")
    rows: list[dict[str, Any]] = []
    attributes: dict[str, dict[str, Any]] = {}
    human: dict[str, list[dict[str, Any]]] = {}
    for kind, noun, first in _pairs(num_products, rng):
        row, extra, words = _product(kind, noun, first, difficulty, rng)
        rows.append(row)
        attributes[row["asin"]] = extra
        human[row["asin"]] = [words]
    return rows, attributes, human


def _pairs(num_products: int, rng: random.Random) -> list[tuple[Kind, str, str]]:
    """Return distinct (noun, attribute) pairs, with nouns used evenly, in random order."""
    nouns = [(kind, noun) for kind in KINDS for noun in kind.nouns]
    decks = [rng.sample(ATTRIBUTES, len(ATTRIBUTES)) for _ in nouns]
    pairs = [
        (*nouns[i % len(nouns)], decks[i % len(nouns)][i // len(nouns)])
        for i in range(num_products)
    ]
    rng.shuffle(pairs)
    return pairs


def _product(
    kind: Kind, noun: str, first: str, difficulty: int, rng: random.Random
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    attributes = [first]
    if difficulty > 1:
        attributes.append(rng.choice([a for a in ATTRIBUTES if a != first]))
    asked = " ".join([*attributes, noun])
    options = _options(kind, difficulty, rng)
    asin = "B0" + "".join(rng.choices(_ASIN_LETTERS, k=8))
    row = {
        "name": f"{rng.choice(BRANDS)} {asked}",
        "full_description": f"A {asked} for every day.",
        "small_description": [f"{word} {noun}" for word in attributes],
        "pricing": f"${rng.randint(4, 95)}.{rng.choice(('0', '5'))}",
        "images": [""],
        "product_category": f"{kind.path} › {noun}",
        "average_rating": "",
        "customization_options": {
            name: [{"value": value, "image": None} for value in values]
            for name, values in options.items()
        },
        "asin": asin,
        "category": kind.category,
        "query": noun,
    }
    extra = {
        "attributes": attributes,
        "instruction": f"Find me {asked}",
        "instruction_attributes": attributes,
    }
    return row, extra, _free_words(asin, asked, attributes, options, rng)


def _free_words(
    asin: str,
    asked: str,
    attributes: Sequence[str],
    options: Mapping[str, Sequence[str]],
    rng: random.Random,
) -> dict[str, Any]:
    wanted = [rng.choice(values) for values in options.values()]
    opening = rng.choice(("i am looking for", "i need", "please find", "get me", "i want to buy"))
    return {
        "asin": asin,
        "instruction": f"{opening} {asked} in {' and '.join(wanted)}.",
        "instruction_attributes": list(attributes),
        "instruction_options": wanted,
    }


def _options(kind: Kind, difficulty: int, rng: random.Random) -> dict[str, list[str]]:
    """Return option name -> values, in the order of the names (as in the instruction)."""
    groups = {name: rng.sample(values, rng.randint(3, 4)) for name, values in kind.options}
    if difficulty == 3:
        finishes = [f"{how} {finish}" for how in HOWS for finish in FINISHES]
        groups["finish"] = rng.sample(finishes, 5)
    return dict(sorted(groups.items()))
