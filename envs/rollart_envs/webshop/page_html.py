"""Pages as HTML, with the same markup as upstream's server.

Takes: a session. Gives: the page. Never: changes the session, or lets a product's text break the
markup: all values are escaped.

The frames of the pages are templates, with ``§{name}`` for each value. Their markup, although odd
in places, is that of upstream's pages, which agents read.
"""

# ruff: noqa: E501 (a line of markup is one line)

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from string import Template
from urllib.parse import quote_plus

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
        return SEARCH.substitute(instruction=told, url=_url(session))
    if session.page == PageKind.DONE:
        return _done(session)
    return FRAME.substitute(
        instruction="" if instruction is None else f"Instruction:<br>{escape(instruction)}",
        back=_url(session),
        body=_body(session),
        script=_script(session),
    )


def escape(text: object) -> str:
    """Return ``text`` escaped for markup."""
    return str(text).translate(_ESCAPES)


def script_json(value: object) -> str:
    """Return ``value`` as JSON, with sorted keys, escaped for a script."""
    return json.dumps(value, sort_keys=True).translate(_SCRIPT_ESCAPES)


def _url(session: Session, **params: object) -> str:
    """Return the address with ``params``; ``keywords=...`` inserts the session's own keywords."""
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
        return PREVIOUS.substitute(url=back) + _item(session, session.product)
    back = _url(session, asin=asin, keywords=..., page=session.page_number, options=options)
    return PREVIOUS.substitute(url=back) + _sub_page(session)


def _results(session: Session) -> str:
    number = session.page_number
    previous = NO_BUTTON
    if number > 1:
        url = _url(session, keywords=..., page=number - 1)
        previous = BUTTON.substitute(url=url, name="&lt; Prev")
    url = _url(session, keywords=..., page=number + 1)
    return RESULTS.substitute(
        page=number,
        total=len(session.hits),
        buttons=previous + BUTTON.substitute(url=url, name="Next &gt;"),
        products="".join(_result(session, i, p) for i, p in enumerate(session.shown)),
    )


def _result(session: Session, position: int, product: Product) -> str:
    return RESULT.substitute(
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
    return ITEM.substitute(
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
        OPTION.substitute(
            name=escape(name),
            number=i,
            value=escape(value),
            url=_url(session, **where, options={**session.options, name: value}),
        )
        for i, value in enumerate(values)
    )
    return OPTION_GROUP.substitute(name=escape(name), values="".join(radios))


def _script(session: Session) -> str:
    if session.page != PageKind.ITEM or session.product is None:
        return ""
    return ITEM_SCRIPT.substitute(
        options=script_json(session.options),
        images=script_json(dict(session.product.option_images)),
    )


def _sub_page(session: Session) -> str:
    texts = sub_page_texts(session)
    if session.sub_page == "Description":
        content = f'<p class="product-info">{escape(texts[0])}</p>'
    elif session.sub_page == "Features":
        features = (FEATURE.substitute(text=escape(t)) for t in texts)
        content = f"<ul>\n                  {''.join(features)}\n                </ul>"
    else:
        content = ""
    name = _SUB_PAGE_NAMES[session.sub_page]
    return SUB_PAGE.substitute(name=name, content=content)


def _done(session: Session) -> str:
    assert session.product is not None
    assert session.outcome is not None
    return DONE.substitute(
        asin=session.product.asin,
        options=script_json(session.options),
        reward=session.outcome.reward,
    )


class Markup(Template):
    """A template with values as ``§{name}``, because scripts contain many dollar signs."""

    delimiter = "§"

    def __init__(self, template: str) -> None:
        # Editors strip trailing spaces, so the source has a sign for them.
        super().__init__(template.replace("␠", " "))


FRAME = Markup(
    """<!DOCTYPE html>
<html>
  <head>
    <link rel="stylesheet" href="/static/style.css">
    <link rel="stylesheet" href="https://maxcdn.bootstrapcdn.com/bootstrap/3.4.1/css/bootstrap.min.css">
    <link rel="stylesheet" href="https://cdnjs.cloudflare.com/ajax/libs/font-awesome/4.0.3/css/font-awesome.css\t">
    <script src="https://ajax.googleapis.com/ajax/libs/jquery/3.5.1/jquery.min.js"></script>
    <script src="https://stackpath.bootstrapcdn.com/bootstrap/4.3.1/js/bootstrap.bundle.min.js"></script>
    <link rel="icon" href="data:,">
  </head>
  <body>
    <div class="container py-5">
      <div class="row top-buffer">
        <div class="col-sm-6">
          <div id="instruction-text" class="text-center">
            <h4>§{instruction}</h4>
          </div>
        </div>
      </div>
      <div class="row top-buffer">
        <form method="post" action="§{back}">
          <button type="submit" class="btn btn-success">Back to Search</button>
        </form>
      </div>
§{body}    </div>
  </body>
§{script}</html>"""
)

PLAIN_HEAD = """<!DOCTYPE html>
<html>
  <head>
    <link rel="stylesheet" href="/static/style.css">
    <link rel="stylesheet" href="https://cdnjs.cloudflare.com/ajax/libs/font-awesome/4.7.0/css/font-awesome.min.css">
    <link rel="stylesheet" href="https://maxcdn.bootstrapcdn.com/bootstrap/3.4.1/css/bootstrap.min.css">
    <link rel="icon" href="data:,">
  </head>
  <body>
    <!-- Code reference: https://bootsnipp.com/snippets/m13mN -->
    <div class="container" style="margin-top: 8%;">
"""

SEARCH = Markup(
    PLAIN_HEAD
    + """      <div class="col-md-6 col-md-offset-3">    ␠
        <div class="row">
          <div id="logo" class="text-center">
            <h2>WebShop</h2>
          </div>
          <div id="instruction-text" class="text-center">
            <h4>§{instruction}</h4>
          </div>
          <form role="form" id="form-buscar" method="post" action="§{url}">
            <div class="form-group">
              <div class="input-group">
                <input id="search_input" class="form-control" type="text" name="search_query" placeholder="Search..." required/>
                <span class="input-group-btn">
                  <button class="btn btn-success" type="submit"><i class="glyphicon glyphicon-search" aria-hidden="true"></i>Search</button>
                </span>
              </div>
            </div>
          </form>
        </div>           ␠
      </div>
    </div>
  </body>
</html>"""
)

RESULTS = Markup(
    """      <div class="row top-buffer">
        <div class="col-sm-8">
          <div class="display-4">
            <h3>Page §{page} (Total results: §{total})</h3>
          </div>
         ␠
§{buttons}         ␠
        </div>
      </div>

      <div class="row top-buffer">
        §{products}
      </div>
"""
)

NO_BUTTON = """            <div class="col-sm-2">
            </div>
"""

BUTTON = Markup(
    """            <div class="col-sm-2">
              <form method="post" action="§{url}">
                <button type="submit" class="btn btn-primary">§{name}</button>
              </form>
            </div>
"""
)

RESULT = Markup(
    """
        <div class="col-lg-12 mx-auto list-group-item">
          <div class="col-lg-4">
            <img src="§{image}" class="result-img">
          </div>
          <div class="col-lg-8">
            <ul class="list-group shadow">
                <div class="media align-items-lg-center flex-column flex-lg-row p-3">
                  <div class="media-body order-2 order-lg-1 searched-product">
                   ␠
                    <h4 class="mt-0 font-weight-bold mb-2 product-asin"><a class="product-link" href="§{url}">§{link}</a></h5>
                    <h4 class="mt-0 font-weight-bold mb-2 product-title">§{title}</h5>
                    <div class="d-flex align-items-center justify-content-between mt-1">
                      <h5 class="font-weight-bold my-2 product-price">§{price}</h6>
                    </div>
<!--
                    <div class="d-flex align-items-center justify-content-between mt-1">
                      <h5 class="font-weight-bold my-2 product-category">§{category}</h5>
                    </div>
                    <div class="d-flex align-items-center justify-content-between mt-1">
                      <h5 class="font-weight-bold my-2 product-query">§{query}</h5>
                    </div>
                    <div class="d-flex align-items-center justify-content-between mt-1">
                      <h5 class="font-weight-bold my-2 product-product_category">§{path}</h5>
                    </div>
-->
                  </div>
                </div>
            </ul>
          </div>
        </div>
        """
)

PREVIOUS = Markup(
    """      <div class="row top-buffer">
        <form method="post" action="§{url}">
          <button type="submit" class="btn btn-primary">&lt; Prev</button>
        </form>
      </div>
"""
)

ITEM = Markup(
    """      <div class="row top-buffer">
        <div class="col-md-4 mb-4 mb-md-0">
          <div class="row top-buffer">
            <img id="product-image" src="§{image}" class="item-page-img">
          </div>
          §{options}
        </div>
        <div class="col-md-6">
          <h2>§{title}</h2>
          <h4>Price: §{price}</h4>
          <h4>Rating: §{rating}</h4>
          <div class="row top-buffer">
            <div class="col-sm-3" name="description">
              <form method="post" action="§{description}">
                <button class="btn btn-primary" type="submit">Description</button>
              </form>
            </div>
            <div class="col-sm-3" name="bulletpoints">
              <form method="post" action="§{features}">
                <button class="btn btn-primary" type="submit">Features</button>
              </form>
            </div>
            <div class="col-sm-3" name="reviews">
              <form method="post" action="§{reviews}">
                <button class="btn btn-primary" type="submit">Reviews</button>
              </form>
            </div>
           ␠
          </div>
        </div>
        <div class="col-sm-2">
          <div class="row top-buffer">
            <form method="post" action="§{buy}">
              <button type="submit" class="btn btn-lg purchase">Buy Now</button>
            </form>
          </div>
        </div>
      </div>
"""
)

OPTION_GROUP = Markup(
    """
            <div class="row top-buffer">
              <h4>§{name}</h4>
              <div class="radio-toolbar">
                §{values}
              </div>
            </div>
          """
)

OPTION = Markup(
    """
                 ␠
                 ␠
                 ␠
                  <input type="radio" id="radio_§{name}§{number}" name="§{name}" value="§{value}" data-url="§{url}">
                  <label for="radio_§{name}§{number}">§{value}</label>
                """
)

ITEM_SCRIPT = Markup(
    """  <script>
    $(document).ready(function() {
      $('input:radio').each(function() {
        //console.log($(this).val());
        let options = JSON.parse(`§{options}`);
        let optionValues = $.map(options, function(value, key) { return value });
        //console.log(optionValues);
        if (optionValues.includes($(this).val())) {
          $(this).prop('checked', true);

          let option_to_image = JSON.parse(`§{images}`);
//          console.log($(this).val());
//          console.log(options);
//          console.log(option_to_image);
          let image_url = option_to_image[$(this).val()];

          //console.log(image_url);
          if (image_url) {
            $("#product-image").attr("src", image_url);
          }
        }
       ␠
        // reload with updated options
        this.addEventListener("click", function() {
          window.location.href = this.dataset.url;
        });

      });
    });
  </script>
"""
)

SUB_PAGE = Markup(
    """      <div class="row top-buffer">
        <div class="col-md-12">
          <div class="row top-buffer">
            <div class="col-sm-6" name="§{name}">
              <div class="card card-body">
                §{content}
              </div>
            </div>
          </div>
        </div>
      </div>
"""
)

FEATURE = Markup(
    """
                  <li><p class="product-info"> §{text}</p></li>
                  """
)

DONE = Markup(
    PLAIN_HEAD
    + """      <div class="col-md-6 col-md-offset-3">    ␠
        <div class="row">
          <div id="thankyou" class="text-center">
            <h1>Thank you for shopping with us!</h1>
          </div>
          <div id="stats" class="text-center">
            <h3 align="mturk_code">Your code: </h3>
            <p><pre>None</pre> (Paste it in your MTurk interface.)</p>
            <div style="display:none">
              <h2 align="left">Purchased</h2>
              <hr class="solid">
              <h4 id="asin">asin<pre>§{asin}</pre></p>
              <h4 id="options">options<pre>§{options}</pre></h4>
              <h4 id="purchased_attrs">attrs<pre>None</pre></h4>
              <h4 id="purchased-category">category<pre>None</pre></h4>
              <h4 id="purchased-query">query<pre>None</pre></h4>
              <h4 id="purchased-pc">product category<pre>None</pre></h4>
              <h2 align="left">Target</h2>
              <hr class="solid">
              <h4 id="goal-asin">asin<pre></pre></p>
              <h4 id="goal-options">options<pre></pre></h4>
              <h4 id="goal-attrs">attrs<pre></pre></h4>
              <h4 id="goal-price">price upper<pre></pre></h4>
              <h4 id="goal-instruction-text">instuction text<pre></pre></h4>
              <h4 id="goal-category">category<pre></pre></h4>
              <h4 id="goal-pc">product category<pre></pre></h4>
              <h4 id="goal-query">query<pre></pre></h4>
              <h4>Goal <div id="goal"><pre>None</pre></div></h4>
              <h2 align="left">Reward</h2>
            </div>
            <hr class="solid">
      \t\t\t<h3   id="reward">Your score (min 0.0, max 1.0)<pre>§{reward}</pre></h3>
            <h4 hidden>Reward Details <div id="reward_info"><pre>None</pre></div></h4>
          </div>
        </div>           ␠
      </div>
    </div>
  </body>
</html>"""
)
