"""Pages as HTML, markup for markup what upstream's server sends.

Takes: a session. Gives: the page. Never: changes the session, or lets a product's text break out of
its place: all values are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import quote_plus

from rollart_envs.webshop import markup
from rollart_envs.webshop.products import Product
from rollart_envs.webshop.session import SUB_PAGES, PageKind, Session, sub_page_texts

_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&#34;", "'": "&#39;"})
_SCRIPT_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"})
_URL_SAFE = "!$'()*,/:;?@"
_SUB_PAGE_NAMES = dict(zip(SUB_PAGES, ("description", "bulletpoints", "reviews"), strict=True))


def html(session: Session, instruction: str | None) -> str:
    """Return the page as HTML."""
    if session.page == PageKind.SEARCH:
        told = "" if instruction is None else f"Instruction: <br>{escape(instruction)}"
        return markup.SEARCH.substitute(instruction=told, url=_url(session))
    if session.page == PageKind.DONE:
        return _done(session)
    return markup.FRAME.substitute(
        instruction="" if instruction is None else f"Instruction:<br>{escape(instruction)}",
        back=_url(session),
        body=_body(session),
        script=_script(session),
    )


def escape(text: object) -> str:
    """Return ``text`` safe for a place in markup."""
    return str(text).translate(_ESCAPES)


def script_json(value: object) -> str:
    """Return ``value`` as JSON, keys in order, safe inside a script."""
    return json.dumps(value, sort_keys=True).translate(_SCRIPT_ESCAPES)


def _url(session: Session, **params: object) -> str:
    """Return the address with ``params``; ``keywords=...`` stands for the session's own."""
    parts = [f"/?session_id={session.goal_index}"]
    for name, value in params.items():
        if name == "keywords":
            parts += _keywords(session.keywords)
        else:
            parts.append(f"{name}={_quoted(str(value))}")
    return "&amp;".join(parts)


@lru_cache(maxsize=64)
def _keywords(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"keywords={_quoted(word)}" for word in words)


def _quoted(text: str) -> str:
    return escape(quote_plus(text, safe=_URL_SAFE, errors="replace"))


def _body(session: Session) -> str:
    if session.page == PageKind.RESULTS:
        return _results(session)
    assert session.product is not None
    asin, options = session.product.asin, session.options
    if session.page == PageKind.ITEM:
        back = _url(session, keywords=..., page=session.page_number)
        return markup.PREVIOUS.substitute(url=back) + _item(session, session.product)
    back = _url(session, asin=asin, keywords=..., page=session.page_number, options=options)
    return markup.PREVIOUS.substitute(url=back) + _sub_page(session)


def _results(session: Session) -> str:
    number = session.page_number
    previous = markup.NO_BUTTON
    if number > 1:
        url = _url(session, keywords=..., page=number - 1)
        previous = markup.BUTTON.substitute(url=url, name="&lt; Prev")
    url = _url(session, keywords=..., page=number + 1)
    return markup.RESULTS.substitute(
        page=number,
        total=len(session.hits),
        buttons=previous + markup.BUTTON.substitute(url=url, name="Next &gt;"),
        products="".join(_result(session, i, p) for i, p in enumerate(session.shown)),
    )


def _result(session: Session, position: int, product: Product) -> str:
    return markup.RESULT.substitute(
        image=escape(product.image),
        url=_url(session, asin=product.asin, keywords=..., page=session.page_number, options={}),
        link=escape(session.link(position, product)),
        title=escape(product.title),
        price=escape(product.price_tag),
        category=escape(product.category),
        query=escape(product.query),
        path=escape(product.product_category),
    )


def _item(session: Session, product: Product) -> str:
    where = {"asin": product.asin, "keywords": ..., "page": session.page_number}
    chosen = session.options
    subs = {
        name.lower(): _url(session, **where, sub_page=name, options=chosen) for name in SUB_PAGES
    }
    groups = (_options(session, where, name, v) for name, v in product.options.items())
    return markup.ITEM.substitute(
        image=escape(product.image),
        options="".join(groups),
        title=escape(product.title),
        price=escape(product.price_tag),
        rating=escape(product.rating),
        buy=_url(session, asin=product.asin, options=chosen),
        **subs,
    )


def _options(
    session: Session, where: Mapping[str, object], name: str, values: tuple[str, ...]
) -> str:
    radios = (
        markup.OPTION.substitute(
            name=escape(name),
            number=i,
            value=escape(value),
            url=_url(session, **where, options={**session.options, name: value}),
        )
        for i, value in enumerate(values)
    )
    return markup.OPTION_GROUP.substitute(name=escape(name), values="".join(radios))


def _script(session: Session) -> str:
    if session.page != PageKind.ITEM or session.product is None:
        return ""
    return markup.ITEM_SCRIPT.substitute(
        options=script_json(session.options),
        images=script_json(dict(session.product.option_images)),
    )


def _sub_page(session: Session) -> str:
    texts = sub_page_texts(session)
    if session.sub_page == "Description":
        content = f'<p class="product-info">{escape(texts[0])}</p>'
    elif session.sub_page == "Features":
        features = (markup.FEATURE.substitute(text=escape(t)) for t in texts)
        content = f"<ul>\n                  {''.join(features)}\n                </ul>"
    else:
        content = ""
    name = _SUB_PAGE_NAMES[session.sub_page]
    return markup.SUB_PAGE.substitute(name=name, content=content)


def _done(session: Session) -> str:
    assert session.product is not None
    assert session.outcome is not None
    return markup.DONE.substitute(
        asin=session.product.asin,
        options=script_json(session.options),
        reward=session.outcome.reward,
    )
