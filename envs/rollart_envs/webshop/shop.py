"""The shop: catalogue, search index, prices and goals, built once and shared by all environments.

Takes: a :class:`WebShopConfig`. Gives: an immutable :class:`Shop`, the same object for every equal
config in the process. Never: stores the state of an episode.

Splits are by product: all goals of a product are in one split. 5 of 28 products are in ``test``, 3
of 28 in ``warm`` (for the checks of the warm start), the rest in ``train``. With the 560 products
of the generated catalogue these are 100, 60 and 400.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from rollart_envs.webshop.config import Goals, NounTagger, WebShopConfig
from rollart_envs.webshop.files import find_files
from rollart_envs.webshop.generate import DEFAULT_NUM_PRODUCTS, Rows, generate
from rollart_envs.webshop.goals import Goal, human_goals, shuffled, synthetic_goals
from rollart_envs.webshop.nouns import Nouns, make_nouns
from rollart_envs.webshop.products import Product, draw_prices, load_products
from rollart_envs.webshop.search import SearchIndex

SPLITS = ("train", "warm", "test")
_TEST, _WARM, _WHOLE = 5, 3, 28


@dataclass(frozen=True)
class Shop:
    """The parts of the shop that no episode changes."""

    products: tuple[Product, ...]
    prices: Mapping[str, float]
    goals: tuple[Goal, ...]
    """In upstream's shuffled order; ``options={"goal": i}`` indexes it."""
    splits: Mapping[str, tuple[int, ...]]
    """Split -> positions in ``goals``."""
    index: SearchIndex
    nouns: Nouns
    by_asin: Mapping[str, Product]
    cumulative_weights: tuple[float, ...]
    shuffle_results: bool = False
    """Whether the results of the first page are in random order (difficulty 2 and 3)."""

    def search(self, query: str, page_size: int) -> tuple[Product, ...]:
        """Return at most 50 products for ``query``, in display order."""
        hits = list(self.index.search(query))
        if self.shuffle_results:
            head = hits[:page_size]
            random.Random(query).shuffle(head)
            hits[:page_size] = head
        return tuple(self.products[i] for i in hits)


_lock = threading.Lock()


def open_shop(config: WebShopConfig) -> Shop:
    """Return the shop of ``config``; the first call in this process builds it.

    Raises:
        ValueError: If ``data_dir`` lacks a file or has one that cannot be read.
    """
    with _lock:
        return _build(
            config.data_dir,
            config.goals,
            config.seed,
            config.num_products,
            config.difficulty or 1,
            config.noun_tagger,
        )


@lru_cache(maxsize=8)
def _build(
    data_dir: Path | None,
    kind: Goals,
    seed: int,
    num_products: int | None,
    difficulty: int,
    noun_tagger: NounTagger,
) -> Shop:
    nouns = make_nouns(noun_tagger)
    if data_dir is None:
        products, index = _generated(num_products or DEFAULT_NUM_PRODUCTS, difficulty, seed)
    else:
        products, index = _official(data_dir, num_products)
    rng = random.Random(seed)
    prices = draw_prices(products, rng)
    make_goals = synthetic_goals if kind == "synthetic" else human_goals
    goals = shuffled(make_goals(products, prices, rng))
    if not goals:
        raise ValueError(f"goals: {kind}: none of the {len(products)} products has a goal")
    return Shop(
        products=products,
        prices=prices,
        goals=goals,
        splits=split_goals(goals),
        index=index,
        nouns=nouns,
        by_asin={p.asin: p for p in products},
        cumulative_weights=tuple(accumulate(g.weight for g in goals)),
        shuffle_results=data_dir is None and difficulty > 1,
    )


Catalogue = tuple[tuple[Product, ...], SearchIndex]


@lru_cache(maxsize=8)
def _generated(num_products: int, difficulty: int, seed: int) -> Catalogue:
    products = tuple(load_products(*generate(num_products, difficulty, seed)))
    return products, SearchIndex(products)


@lru_cache(maxsize=2)
def _official(data_dir: Path, num_products: int | None) -> Catalogue:
    rows, attributes, human = read_files(data_dir)
    try:
        products = tuple(load_products(rows[:num_products], attributes, human))
    except (AttributeError, KeyError, TypeError, IndexError) as e:
        raise ValueError(f"data_dir: {data_dir}: a product has the wrong format: {e!r}") from e
    return products, SearchIndex(products)


def split_goals(goals: Sequence[Goal]) -> dict[str, tuple[int, ...]]:
    """Return split -> positions in ``goals``; no product is in two splits."""
    asins = sorted({g.asin for g in goals})
    random.Random("rollart webshop splits").shuffle(asins)
    num_test = round(len(asins) * _TEST / _WHOLE)
    num_warm = round(len(asins) * _WARM / _WHOLE)
    split_of = dict.fromkeys(asins, "train")
    split_of.update(dict.fromkeys(asins[:num_test], "test"))
    split_of.update(dict.fromkeys(asins[num_test : num_test + num_warm], "warm"))
    return {
        split: tuple(i for i, g in enumerate(goals) if split_of[g.asin] == split)
        for split in SPLITS
    }


def read_files(data_dir: Path) -> Rows:
    """Read products, attributes and human instructions from ``data_dir``.

    The files of 1,000 products are used if they exist, else the files of all products.

    Raises:
        ValueError: If a file is missing or has the wrong format.
    """
    try:
        paths = find_files(data_dir)
    except ValueError as e:
        raise ValueError(f"data_dir: {e}") from None
    rows, attributes, human = map(_read_json, paths)
    if (
        not isinstance(rows, list)
        or not isinstance(attributes, dict)
        or not isinstance(human, dict)
    ):
        raise ValueError(f"data_dir: {data_dir}: a list of products and two mappings are expected")
    return rows, attributes, human


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ValueError(f"data_dir: cannot read {path.name}: {e}") from e
