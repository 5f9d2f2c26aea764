"""The state of an episode: the page, the query and the chosen options.

Takes: the shop, a goal, actions. Gives: the current page, and what can be clicked. Never: makes
text; :mod:`rollart_envs.webshop.pages` renders a session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from rapidfuzz import fuzz, utils

from rollart_envs.webshop.goals import Goal
from rollart_envs.webshop.nouns import Nouns
from rollart_envs.webshop.products import Product
from rollart_envs.webshop.shop import Shop

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
    """The result of a purchase."""

    reward: float
    r_type: float
    r_att: float
    r_option: float | None
    """None if the goal asks for no option."""
    r_price: bool
    w_att: float
    w_option: float
    w_price: float
    query_match: bool
    category_match: bool
    title_score: float

    @property
    def success(self) -> bool:
        """Whether everything that was asked for is met."""
        return self.reward == 1

    def components(self) -> dict[str, float]:
        """Return the components as floats."""
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
    """Return the reward of buying ``product`` at ``price`` with ``options``, and its components."""
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
    """Count the wanted attributes that the product has, or that its texts contain word for word."""
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
    """Return the part of an option that is compared: ASCII letters and digits, lower case.

    A value that contains a known colour is replaced by that colour. A pair is replaced by a colour
    if one of its two parts is one. Other pairs are printed as they are.
    """
    plain = next((color for color in _COLORS if color in option), str(option))
    return utils.default_process("".join(c for c in plain if c.isascii()))


BACK, NEXT, PREV, BUY = "Back to Search", "Next >", "< Prev", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")
_SUB_PAGE_OF = {name.lower(): name for name in SUB_PAGES}
MAX_QUERY_CHARS = 4000
"""Longer queries are cut, because pages repeat the query in every link."""

_BASE_URL = "http://127.0.0.1:3000"


class PageKind(StrEnum):
    """The pages of the shop."""

    SEARCH = "search"
    RESULTS = "results"
    ITEM = "item"
    SUB = "sub"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Click:
    """The effect of a click, in addition to its name."""

    asin: str | None = None
    option: str | None = None
    """Name of the option that a value belongs to."""


_BUTTON = Click()


def parse_action(action: str) -> tuple[str, str | None]:
    """Split ``name[argument]``; the argument is None if the action does not have that form.

    Only the first line is used, and the last bracket pair on it that is not empty.
    """
    line = action.split("\n", 1)[0]
    close = line.rfind("]")
    start = line.rfind("[", 1, max(close - 1, 1))
    if start < 1:
        return action, None
    return line[:start], line[start + 1 : close]


@dataclass(slots=True)
class Session:
    """One visit with one goal."""

    shop: Shop
    goal: Goal
    goal_index: int
    page_size: int = 10
    handles: bool = False
    page: PageKind = PageKind.SEARCH
    keywords: tuple[str, ...] = ()
    page_number: int = 1
    hits: tuple[Product, ...] = ()
    """All results of the current query."""
    product: Product | None = None
    options: dict[str, str] = field(default_factory=dict)
    sub_page: str = ""
    queries: list[str] = field(default_factory=list)
    """All queries of this visit."""
    last_option: str | None = None
    """The option that the last action chose, if it chose one."""
    outcome: PurchaseOutcome | None = None
    """The result of the purchase, if there is one."""
    clickables: Mapping[str, Click] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clickables = self._find_clickables()

    def act(self, action: str) -> bool:
        """Carry out ``action``; return False and change nothing if it is not possible here."""
        name, given = parse_action(action)
        argument = (given or "").lower()
        if name == "search" and argument:
            self._search(argument)
        elif name == "click" and argument in self.clickables and argument != "search":
            self._click(argument)
        else:
            return False
        self.clickables = self._find_clickables()
        return True

    @property
    def shown(self) -> tuple[Product, ...]:
        """The products on the current page of results."""
        start = (self.page_number - 1) * self.page_size
        return self.hits[start : start + self.page_size]

    @property
    def url(self) -> str:
        """The address that upstream's browser would show."""
        place = "/".join(
            (_BASE_URL, _URL_NAMES[self.page], str(self.goal_index)) if self.page != PageKind.SEARCH
            else (_BASE_URL, str(self.goal_index))
        )  # fmt: skip
        words = "+".join(self.keywords)
        asin = self.product.asin if self.product else ""
        if self.page == PageKind.RESULTS:
            return f"{place}/{words}/{self.page_number}"
        if self.page == PageKind.ITEM:
            return f"{place}/{asin}/{words}/{self.page_number}/{json.dumps(self.options)}"
        if self.page == PageKind.SUB:
            return f"{place}/{asin}/{words}/{self.page_number}/{self.sub_page}/{self.options}"
        return f"{place}/{asin}/{self.options}" if self.page == PageKind.DONE else place

    def link(self, position: int, product: Product) -> str:
        """Return the text of the link to the product at ``position`` (from 0) on this page."""
        return f"item {position + 1}" if self.handles else product.asin

    def _search(self, query: str) -> None:
        query = query[:MAX_QUERY_CHARS]
        self.queries.append(query)
        self.keywords = tuple(query.split(" "))
        self.hits = self.shop.search(" ".join(self.keywords), self.page_size)
        self._open_results(1)

    def _open_results(self, number: int) -> None:
        self.page, self.page_number = PageKind.RESULTS, number
        self.product, self.options, self.last_option = None, {}, None

    def _click(self, name: str) -> None:
        click = self.clickables[name]
        self.last_option = None
        if name == BUY.lower():
            self._buy()
        elif name == BACK.lower():
            self.page, self.keywords, self.hits = PageKind.SEARCH, (), ()
            self.product, self.options = None, {}
        elif name in (NEXT.lower(), PREV.lower()) and self.page == PageKind.RESULTS:
            self._open_results(self.page_number + (1 if name == NEXT.lower() else -1))
        elif name == PREV.lower() and self.page == PageKind.ITEM:
            self._open_results(self.page_number)
        elif name in _SUB_PAGE_OF:
            self.page, self.sub_page = PageKind.SUB, _SUB_PAGE_OF[name]
        else:
            self._open_item(name, click)

    def _open_item(self, name: str, click: Click) -> None:
        self.page = PageKind.ITEM
        if click.asin is not None:
            self.product = self.shop.by_asin[click.asin]
        elif click.option is not None:
            self.options[click.option] = name
            self.last_option = click.option

    def _buy(self) -> None:
        assert self.product is not None
        self.page = PageKind.DONE
        price = self.shop.prices[self.product.asin]
        self.outcome = judge(self.product, self.goal, price, self.options, self.shop.nouns)

    def _find_clickables(self) -> dict[str, Click]:
        """Return what can be clicked, buttons first, then products, then options."""
        if self.page == PageKind.SEARCH:
            return {"search": _BUTTON}
        if self.page == PageKind.DONE:
            return {}
        names = [BACK]
        if self.page == PageKind.RESULTS:
            names += [PREV, NEXT] if self.page_number > 1 else [NEXT]
        else:
            names.append(PREV)
        if self.page == PageKind.ITEM:
            names += [*SUB_PAGES, BUY]
        found = {name.lower(): _BUTTON for name in names}
        if self.page == PageKind.RESULTS:
            for i, product in enumerate(self.shown):
                found[self.link(i, product).lower()] = Click(asin=product.asin)
        if self.page == PageKind.ITEM and self.product is not None:
            for option, values in self.product.options.items():
                found.update(dict.fromkeys(values, Click(option=option)))
        return found


def sub_page_texts(session: Session) -> tuple[str, ...]:
    """Return the texts of the description, features or reviews page."""
    product = session.product
    assert product is not None
    if session.sub_page == "Description":
        return (product.description,)
    return product.bullets if session.sub_page == "Features" else ()


_URL_NAMES = {
    PageKind.SEARCH: "",
    PageKind.RESULTS: "search_results",
    PageKind.ITEM: "item_page",
    PageKind.SUB: "item_sub_page",
    PageKind.DONE: "done",
}
