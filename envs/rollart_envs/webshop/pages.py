"""Pages as text: upstream's ``text`` and ``text_rich``, and a terse form.

Takes: a session. Gives: the observation. Never: changes the session.

Upstream renders HTML, parses it again and keeps the text nodes; this module lists the nodes
directly. The terse form prints only what a purchase needs, and prints an option exactly as in
``click[...]``: in brackets, with no space after the opening one. A byte-level tokenizer then makes
the same tokens of it on the page, in the instruction and in the action:

    Find me soft boots with color: [teal], and size: [wide], and price lower than 40.00 dollars
    [search]                                        > search[soft boots]
    [item 1] Halo soft boots $31.5 ...              > click[item 1]
    Halo soft boots $31.5
    color: [red] [teal] [plum] ...                  > click[teal]
    color: teal                                     (the response to an option's click)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

from rollart_envs.webshop.goals import Goal
from rollart_envs.webshop.page_html import script_json
from rollart_envs.webshop.session import (
    BACK,
    BUY,
    NEXT,
    PREV,
    SUB_PAGES,
    PageKind,
    Session,
    sub_page_texts,
)


class Tag(Enum):
    """The element that a text is in, as far as ``text_rich`` shows it."""

    TEXT = 0
    BUTTON = 1
    OPTION = 2
    PRODUCT = 3


Node = tuple[Tag, str]


def text(session: Session, instruction: str | None) -> str:
    """Return the page as one line, with its texts separated by ``[SEP]``."""
    return " [SEP] ".join(t.strip() for _, t in _nodes(session, instruction) if not _blank(t))


def text_rich(session: Session, instruction: str | None) -> str:
    """Return the page as lines, with buttons and chosen options marked."""
    url, clicked, lines = session.url, [], []
    for tag, t in _nodes(session, instruction):
        if _blank(t):
            continue
        if tag is Tag.OPTION and f'"{t}"' in url:
            clicked.append(f"You have clicked {t}.\n")
            lines.append(f"  [clicked button] {t} [clicked button_]\n")
        elif tag is Tag.TEXT:
            lines.append(f"{t}\n")
        else:
            indent = {Tag.BUTTON: "", Tag.OPTION: "  ", Tag.PRODUCT: "\n"}[tag]
            lines.append(f"{indent}[button] {t} [button_]\n")
    return "".join(reversed(clicked)) + "".join(lines)


def terse(session: Session, instruction: str | None) -> str:
    """Return the least text that a purchase needs; after an option's click only the choice."""
    if session.page == PageKind.ITEM and session.last_option is not None:
        lines = [f"{name}: {value}" for name, value in session.options.items()]
    else:
        lines = list(_terse_lines(session))
    if instruction is not None and session.page != PageKind.DONE:
        lines.insert(0, instruction)
    return "\n".join(lines)


def terse_instruction(goal: Goal) -> str:
    """Return the instruction with the wanted values of a synthetic goal in brackets."""
    instruction = goal.instruction_text
    if isinstance(goal.goal_options, Mapping):
        for name, value in goal.goal_options.items():
            instruction = instruction.replace(f"{name}: {value}", f"{name}: [{value}]")
    return instruction


def _blank(t: str) -> bool:
    """Return whether an HTML parser drops ``t``: empty, or white space with a line break."""
    return not t or ("\n" in t and not t.strip(" \n\t\f\r"))


def _terse_lines(session: Session) -> Iterator[str]:
    if session.page == PageKind.SEARCH:
        yield "[search]"
    elif session.page == PageKind.RESULTS:
        for i, product in enumerate(session.shown):
            yield f"[{session.link(i, product).lower()}] {product.title} {product.price_tag}"
        yield "[< prev] [next >]" if session.page_number > 1 else "[next >]"
    elif session.page == PageKind.DONE:
        assert session.outcome is not None
        yield f"score {session.outcome.reward:.2f}"
    elif session.product is not None:
        product = session.product
        if session.page == PageKind.SUB:
            yield from (t for t in sub_page_texts(session) if t)
        else:
            yield f"{product.title} {product.price_tag}"
            for name, values in product.options.items():
                yield f"{name}: " + " ".join(f"[{value}]" for value in values)
            yield f"[{BUY.lower()}]"


def _nodes(session: Session, instruction: str | None) -> Iterator[Node]:
    if session.page == PageKind.DONE:
        yield from ((Tag.TEXT, t) for t in _done_texts(session))
        return
    if session.page == PageKind.SEARCH:
        yield Tag.TEXT, "WebShop"
    if instruction is not None:
        yield Tag.TEXT, "Instruction: " if session.page == PageKind.SEARCH else "Instruction:"
        yield Tag.TEXT, instruction
    if session.page == PageKind.SEARCH:
        yield Tag.BUTTON, "Search"
        return
    yield Tag.BUTTON, BACK
    if session.page == PageKind.RESULTS:
        yield from _results_nodes(session)
    elif session.page == PageKind.SUB:
        yield Tag.BUTTON, PREV
        pad = " " if session.sub_page == "Features" else ""
        yield from ((Tag.TEXT, f"{pad}{t}") for t in sub_page_texts(session))
    else:
        yield from _item_nodes(session)


def _results_nodes(session: Session) -> Iterator[Node]:
    yield Tag.TEXT, f"Page {session.page_number} (Total results: {len(session.hits)})"
    if session.page_number > 1:
        yield Tag.BUTTON, PREV
    yield Tag.BUTTON, NEXT
    for i, product in enumerate(session.shown):
        yield Tag.PRODUCT, session.link(i, product)
        yield Tag.TEXT, product.title
        yield Tag.TEXT, product.price_tag


def _item_nodes(session: Session) -> Iterator[Node]:
    product = session.product
    assert product is not None
    yield Tag.BUTTON, PREV
    for name, values in product.options.items():
        yield Tag.TEXT, name
        yield from ((Tag.OPTION, value) for value in values)
    yield Tag.TEXT, product.title
    yield Tag.TEXT, f"Price: {product.price_tag}"
    yield Tag.TEXT, f"Rating: {product.rating}"
    yield from ((Tag.BUTTON, name) for name in (*SUB_PAGES, BUY))


def _done_texts(session: Session) -> Iterator[str]:
    product, outcome = session.product, session.outcome
    assert product is not None
    assert outcome is not None
    yield from ("Thank you for shopping with us!", "Your code: ", "None")
    yield from (" (Paste it in your MTurk interface.)", "Purchased", "asin", product.asin)
    yield from ("options", script_json(session.options))
    for name in ("attrs", "category", "query", "product category"):
        yield from (name, "None")
    yield from ("Target", "asin", "options", "attrs", "price upper", "instuction text")
    yield from ("category", "product category", "query", "Goal ", "None", "Reward")
    yield from ("Your score (min 0.0, max 1.0)", str(outcome.reward), "Reward Details ", "None")
