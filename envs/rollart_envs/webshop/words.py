"""The words the generated catalogue is made of: all invented for it, none taken from a data set.

Takes: nothing. Gives: word lists. Short words, so that a small byte-pair vocabulary holds each as
one token, and no word in two lists, so that each says by itself what it is.
"""

from __future__ import annotations

from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


BRANDS = _words(
    "Arlo Basil Corvo Delta Ember Fjord Gusto Halo Indra Jova Kite Lumo Mirra Noro Orbi Pella "
    "Quill Riva Sento Tova"
)
"""In titles, never in instructions."""

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
"""With ``HOWS`` before them, at difficulty 3: ``hand waxed`` beside ``deep waxed``."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A department of the shop: what it sells and what one can choose."""

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
