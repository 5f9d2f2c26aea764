"""WebShop's reward, in [0, 1].

Takes: the product bought, its true price, the options chosen and the goal. Gives: the reward and
its parts. Never: looks at how the shopper came there.

    r = r_type * (matched attributes + matched options + [price <= limit])
               / (goal attributes + goal options + 1)            (arXiv 2207.01206, section 3)

Upstream hands the options of a synthetic goal to the fuzzy matcher as (name, value) pairs, so that
words of the option's name take part in the match. That is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rapidfuzz import fuzz, utils

from rollart_envs.webshop.goals import Goal
from rollart_envs.webshop.nouns import Nouns
from rollart_envs.webshop.products import Product

_FUZZY = 85
_COLORS = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
    burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee
    cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia
    gold granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender
    lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
    mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red
    rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower
    tan taupe teal tiger turquoise violet walnut wheat white wine yellow
""".split()  # noqa: SIM905 (a hundred quotes say no more)


@dataclass(frozen=True, slots=True)
class PurchaseOutcome:
    """A purchase, judged."""

    reward: float
    r_type: float
    r_att: float
    r_option: float | None
    """None when the goal asks for no option."""
    r_price: bool
    w_att: float
    w_option: float
    w_price: float
    query_match: bool
    category_match: bool
    title_score: float

    @property
    def success(self) -> bool:
        """Whether everything asked for was met."""
        return self.reward == 1

    def components(self) -> dict[str, float]:
        """Return the parts as floats."""
        parts = {
            "score": self.reward,
            "r_type": self.r_type,
            "r_att": self.r_att,
            "r_price": float(self.r_price),
            "title_score": self.title_score,
        }
        if self.r_option is not None:
            parts["r_option"] = self.r_option
        return parts


def judge(
    product: Product, goal: Goal, price: float, options: Mapping[str, str], nouns: Nouns
) -> PurchaseOutcome:
    """Return the reward of buying ``product`` at ``price`` with ``options``, and its parts."""
    r_type, query_match, category_match, title_score = _type_reward(product, goal, nouns)
    attributes = _matched_attributes(product, goal.attributes)
    wanted = goal.goal_options
    pairs: Sequence[str | tuple[str, str]] = (
        list(wanted.items()) if isinstance(wanted, Mapping) else list(wanted)
    )
    chosen = _matched_options(list(options.values()), pairs)
    r_price = price <= goal.price_upper
    asked = len(goal.attributes) + len(pairs) + 1
    return PurchaseOutcome(
        reward=(attributes + chosen + r_price) / asked * r_type,
        r_type=r_type,
        r_att=attributes / len(goal.attributes),
        r_option=chosen / len(pairs) if pairs else None,
        r_price=r_price,
        w_att=len(goal.attributes) / asked,
        w_option=len(pairs) / asked,
        w_price=1 / asked,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
    )


def _type_reward(product: Product, goal: Goal, nouns: Nouns) -> tuple[float, bool, bool, float]:
    query_match = product.query == goal.query
    category_match = len(_path(product.product_category) & _path(goal.product_category)) >= 2
    # Upstream divides by the number of noun tokens, repeats included.
    wanted = nouns(goal.name)
    common = len(set(nouns(product.title)) & set(wanted))
    title_score = common / len(wanted) if wanted else 0.2
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:
        r_type = 0.1
    if title_score == 0.0:
        r_type = 0.0
    return r_type, query_match, category_match, title_score


def _path(category: str) -> set[str]:
    return {part.strip() for part in category.split("›")}


def _matched_attributes(product: Product, wanted: Sequence[str]) -> int:
    """Count the wanted attributes that the product has, or that its texts hold word for word."""
    has = [utils.default_process(a) for a in product.attributes]
    texts: tuple[str, ...] = ()
    count = 0
    for attribute in wanted:
        if _fuzzy_in(utils.default_process(attribute), has):
            count += 1
            continue
        texts = texts or (
            product.title.lower(),
            " ".join(product.bullets).lower(),
            product.description.lower(),
        )
        count += any(attribute in text for text in texts)
    return count


def _matched_options(chosen: Sequence[str], wanted: Sequence[str | tuple[str, str]]) -> int:
    """Count the wanted options that one of the chosen values matches."""
    values = [_option_text(v) for v in chosen]
    return sum(_fuzzy_in(_option_text(w), values) for w in wanted)


def _fuzzy_in(wanted: str, candidates: Sequence[str]) -> bool:
    return any(
        wanted and candidate and fuzz.token_set_ratio(candidate, wanted) > _FUZZY
        for candidate in candidates
    )


@lru_cache(maxsize=16384)
def _option_text(option: str | tuple[str, str]) -> str:
    """Return what is compared of an option: ASCII letters and digits, lower case.

    A value with a known colour in it stands for that colour; so does a pair, where one of its two
    parts is one. Other pairs are taken as they print.
    """
    plain = next((color for color in _COLORS if color in option), str(option))
    return utils.default_process("".join(c for c in plain if c.isascii()))
