"""The expert: what to do next in a session, knowing the goal.

Takes: a session. Gives: the next action. Never: cheats the shop; it searches, pages and clicks as a
visitor does, and only chooses its query by looking up where the product will stand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rapidfuzz import fuzz

from rollart_envs.webshop.goals import Goal
from rollart_envs.webshop.session import BACK, BUY, NEXT, PREV, PageKind, Session
from rollart_envs.webshop.shop import Shop

_PRICE = re.compile(r",? and price lower than [\d.]+ dollars$")
_NEVER = 10**6


def next_action(session: Session) -> str | None:
    """Return the expert's next action, or None when the visit is over."""
    if session.page == PageKind.DONE:
        return None
    if session.page == PageKind.SUB:
        return _click(PREV)
    if session.page == PageKind.ITEM and session.product is not None:
        if session.product.asin == session.goal.asin:
            return _click(_missing_option(session) or BUY)
        return _click(BACK)
    query, page_number = find_query(session.shop, session.goal, session.page_size)
    if session.page == PageKind.RESULTS and session.queries[-1] == query:
        return _on_results(session, page_number)
    return f"search[{query}]"


def asked_words(goal: Goal) -> str:
    """Return the words of the instruction that describe the product, in lower case.

    ``Find me soft boots with color: teal, and price lower than 40.00 dollars`` gives
    ``soft boots``.
    """
    words = _PRICE.sub("", goal.instruction_text)
    if isinstance(goal.goal_options, Mapping) and goal.goal_options:
        wanted = ", and ".join(f"{name}: {value}" for name, value in goal.goal_options.items())
        words = words.removesuffix(f" with {wanted}")
    return words.removeprefix("Find me ").lower()


def find_query(shop: Shop, goal: Goal, page_size: int) -> tuple[str, int]:
    """Return the simplest query that puts the product on the first page, and that page's number.

    Where none does, the one whose results hold it soonest.
    """
    best, best_page = "", _NEVER
    for query in _queries(goal):
        page = _page_of(shop, goal.asin, query, page_size)
        if not best or page < best_page:
            best, best_page = query, page
        if best_page == 1:
            break
    return best, best_page


def _queries(goal: Goal) -> Iterator[str]:
    yield asked_words(goal)
    yield _PRICE.sub("", goal.instruction_text).lower()
    yield goal.name.lower()


def _page_of(shop: Shop, asin: str, query: str, page_size: int) -> int:
    for i, product in enumerate(shop.search(query, page_size)):
        if product.asin == asin:
            return i // page_size + 1
    return _NEVER


def _on_results(session: Session, page_number: int) -> str:
    for i, product in enumerate(session.shown):
        if product.asin == session.goal.asin:
            return _click(session.link(i, product))
    if page_number == _NEVER and session.shown:
        return _click(session.link(0, session.shown[0]))
    return _click(NEXT if session.page_number < page_number else PREV)


def _missing_option(session: Session) -> str | None:
    """Return the first wanted value that is still to be clicked."""
    chosen = list(session.options.values())
    for wanted in session.goal.option_values:
        if any(_fits(value, wanted) for value in chosen):
            continue
        offered = [v for v, click in session.clickables.items() if click.option is not None]
        fitting = [v for v in offered if v == wanted] or [v for v in offered if _fits(v, wanted)]
        if fitting:
            return fitting[0]
    return None


def _fits(value: str, wanted: str) -> bool:
    return value == wanted or fuzz.token_set_ratio(value, wanted) > 95


def _click(name: str) -> str:
    return f"click[{name.lower()}]"
