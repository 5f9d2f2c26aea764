"""Goals: the shopping tasks.

Takes: products and their true prices. Gives: upstream's list of goals, in upstream's order. Never:
uses a global random state. Price limits come from the caller's generator, and the final order from
a private one with upstream's seed.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollart_envs.webshop.products import Product

SHUFFLE_SEED = 233
NO_LIMIT = 1000000.0
_PRICE_STEPS = tuple(10.0 * i for i in range(1, 100))


@dataclass(frozen=True, slots=True)
class Goal:
    """One shopping task."""

    asin: str
    category: str
    query: str
    name: str
    product_category: str
    instruction_text: str
    attributes: tuple[str, ...]
    price_upper: float
    goal_options: Mapping[str, str] | Sequence[str]
    """Synthetic goals have the option name of each value; human ones do not."""
    weight: float = 1.0

    @property
    def option_values(self) -> tuple[str, ...]:
        """The wanted values."""
        options = self.goal_options
        return tuple(options.values() if isinstance(options, Mapping) else options)


def synthetic_goals(
    products: Iterable[Product], prices: Mapping[str, float], rng: random.Random
) -> list[Goal]:
    """Return a goal for each product with an instruction and each combination of its options."""
    goals: list[Goal] = []
    for product in products:
        if product.instruction is None:
            continue
        limit, limit_text = _price_limit(prices[product.asin], rng)
        for options in _combinations(product):
            wanted = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = product.instruction + (f" with {wanted}" if wanted else "") + limit_text
            goals.append(_goal(product, text, product.instruction_attributes, limit, options))
    counts = Counter(a for goal in goals for a in goal.attributes)
    return [replace(g, weight=_rarity(g.attributes, counts)) for g in goals]


def human_goals(
    products: Iterable[Product], prices: Mapping[str, float], rng: random.Random
) -> list[Goal]:
    """Return a goal for each human instruction that asks for an attribute."""
    goals = []
    for product in products:
        for human in product.human:
            if not human.attributes:
                continue
            limit, limit_text = _price_limit(prices[product.asin], rng)
            text = human.text.strip(".") + limit_text
            goals.append(_goal(product, text, human.attributes, limit, human.options))
    return goals


def shuffled(goals: Sequence[Goal]) -> tuple[Goal, ...]:
    """Return the goals in the order of upstream's server."""
    order = list(goals)
    random.Random(SHUFFLE_SEED).shuffle(order)
    return tuple(order)


def _goal(
    product: Product,
    text: str,
    attributes: tuple[str, ...],
    limit: float,
    options: Mapping[str, str] | Sequence[str],
) -> Goal:
    return Goal(
        asin=product.asin,
        category=product.category,
        query=product.query,
        name=product.title,
        product_category=product.product_category,
        instruction_text=text,
        attributes=attributes,
        price_upper=limit,
        goal_options=options,
    )


def _price_limit(price: float, rng: random.Random) -> tuple[float, str]:
    """Draw two of the next four tens above ``price`` and return the larger one as the limit."""
    steps = [p for p in _PRICE_STEPS if p > price][:4]
    if len(steps) < 2:
        return NO_LIMIT, ""
    limit = max(rng.sample(steps, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _combinations(product: Product) -> Iterable[dict[str, str]]:
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _rarity(attributes: Sequence[str], counts: Mapping[str, int]) -> float:
    return sum(1.0 / counts[a] for a in attributes) / len(attributes)
