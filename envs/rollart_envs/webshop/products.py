"""Products as the shop keeps them, cleaned as upstream does.

Takes: rows of upstream's ``items_*.json`` with the attribute and instruction files of the folder.
Gives: :class:`Product` records and seeded prices. Never: reads a file or uses a global random
state.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

_NOT_PRICE = re.compile(r"[^\d.]")
_DEFAULT_PRICE = 100.0
_MAX_ASIN_LEN = 10


@dataclass(frozen=True, slots=True)
class HumanInstruction:
    """One human instruction, with the attributes and options it asks for."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """One product of the catalogue."""

    asin: str
    category: str
    query: str
    """The search words that found it, in lower case."""
    product_category: str
    """A path such as ``Home › Bedding › Pillows``."""
    title: str
    description: str
    bullets: tuple[str, ...]
    price_tag: str
    """As printed: ``$9.99`` or ``$9.99 to $12.5``."""
    pricing: tuple[float, ...]
    """One price, or the two ends of a range."""
    options: Mapping[str, tuple[str, ...]]
    option_images: Mapping[str, str | None]
    attributes: tuple[str, ...]
    instruction: str | None
    """The synthetic instruction, without options and price."""
    instruction_attributes: tuple[str, ...]
    human: tuple[HumanInstruction, ...]
    image: str
    rating: str = "N.A."


def load_products(
    rows: Iterable[Row], attributes: Mapping[str, Row], human: Mapping[str, Sequence[Row]]
) -> list[Product]:
    """Clean ``rows``, without ids that are not ASINs and without repeated ids."""
    seen: set[str] = set()
    products = []
    for row in rows:
        asin = row["asin"]
        if asin == "nan" or len(asin) > _MAX_ASIN_LEN or asin in seen:
            continue
        seen.add(asin)
        products.append(_clean(row, attributes.get(asin, {}), human.get(asin, ())))
    return products


def draw_prices(products: Iterable[Product], rng: random.Random) -> dict[str, float]:
    """Return each product's true price, drawn if only a range is known.

    It draws one ``uniform`` per range in the order of the products, as upstream does.
    """
    return {
        p.asin: p.pricing[0] if len(p.pricing) == 1 else rng.uniform(*p.pricing[:2])
        for p in products
    }


def _clean(row: Row, extra: Row, human: Sequence[Row]) -> Product:
    pricing, tag = _parse_price(row.get("pricing"))
    options, images = _parse_options(row.get("customization_options"))
    bullets = row["small_description"]
    pictures = row.get("images") or [""]
    return Product(
        asin=row["asin"],
        category=row["category"],
        query=row["query"].lower().strip(),
        product_category=row["product_category"],
        title=row["name"],
        description=row["full_description"],
        bullets=tuple(bullets) if isinstance(bullets, list) else (bullets,),
        price_tag=tag,
        pricing=pricing,
        options=options,
        option_images=images,
        attributes=tuple(extra.get("attributes", ("DUMMY_ATTR",))),
        instruction=extra.get("instruction"),
        instruction_attributes=tuple(extra.get("instruction_attributes") or ()),
        human=tuple(
            HumanInstruction(
                h["instruction"],
                tuple(h["instruction_attributes"]),
                tuple(h["instruction_options"]),
            )
            for h in human
        ),
        image=pictures[0],
    )


def _parse_price(text: str | None) -> tuple[tuple[float, ...], str]:
    """Return (one price or a range, the price tag)."""
    if not text:
        return (_DEFAULT_PRICE,), f"${_DEFAULT_PRICE}"
    prices = tuple(float(_NOT_PRICE.sub("", part)) for part in text.split("$")[1:])
    if len(prices) == 1:
        return prices, f"${prices[0]}"
    return prices[:2], f"${prices[0]} to ${prices[1]}"


def _parse_options(
    raw: Mapping[str, Sequence[Row] | None] | str | None,
) -> tuple[dict[str, tuple[str, ...]], dict[str, str | None]]:
    """Return (option name -> values, value -> image)."""
    options: dict[str, tuple[str, ...]] = {}
    images: dict[str, str | None] = {}
    if not isinstance(raw, Mapping):
        return options, images
    for name, contents in raw.items():
        if contents is None:
            continue
        values = []
        for content in contents:
            value = content["value"].strip().replace("/", " | ").lower()
            values.append(value)
            images[value] = content.get("image")
        options[name.lower()] = tuple(values)
    return options, images
