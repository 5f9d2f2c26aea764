"""Search: stems, tokens, lengths and ranking, each against figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollart_envs.webshop.products import load_products
from rollart_envs.webshop.search import SearchIndex, analyze, document, quantised_length, stem


@pytest.mark.parametrize(
    ("word", "expected"),
    # The examples of Porter's paper, and the two departures of step 2.
    [
        line.split()
        for line in """
        caresses caress|ponies poni|ties ti|caress caress|cats cat|feed feed|agreed agre
        plastered plaster|bled bled|motoring motor|sing sing|conflated conflat|troubled troubl
        sized size|hopping hop|tanned tan|falling fall|hissing hiss|fizzed fizz|failing fail
        filing file|happy happi|sky sky|relational relat|conditional condit|rational ration
        digitizer digit|vietnamization vietnam|operator oper|feudalism feudal
        decisiveness decis|hopefulness hope|callousness callous|formaliti formal
        sensitiviti sensit|sensibiliti sensibl|triplicate triplic|formative form
        formalize formal|electrical electr|hopeful hope|goodness good|revival reviv
        allowance allow|inference infer|airliner airlin|adjustable adjust|defensible defens
        irritant irrit|replacement replac|adjustment adjust|dependent depend|adoption adopt
        communism commun|activate activ|effective effect|bowdlerize bowdler|probate probat
        rate rate|cease ceas|controll control|roll roll|conformably conform
        archaeology archaeolog|geology geologi|as as|by by
        """.replace("\n", "|").split("|")
        if line.strip()
    ],
)
def test_stems(word, expected):
    assert stem(word) == expected


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("The Men's 3.5-inch T-Shirts", ["men", "3.5", "inch", "t", "shirt"]),
        ("u.s.a. 1,000 a:b 12:30", ["u.s.a", "1,000", "a:b", "12", "30"]),
        ("snake_case _ __", ["snake_cas"]),
        ("❤❤️ 🌈fun 零食 ½ m²", ["❤", "❤", "🌈", "fun", "零", "食", "m"]),
        ("1-1⁄2 café", ["1", "1⁄2", "café"]),
        ("to be or not to be", []),
    ],
)
def test_tokens(text, terms):
    assert analyze(text) == terms


def test_a_length_is_kept_in_a_byte():
    assert [quantised_length(n) for n in range(40)] == list(range(40))
    assert [quantised_length(n) for n in (40, 41, 42, 107, 279, 1919)] == [
        40, 40, 42, 104, 264, 1816,
    ]  # fmt: skip


def rows(*titles: str) -> list[dict]:
    return [
        {
            "asin": f"B{(7 * i + 1) % 10}", "name": title,
            "full_description": "", "small_description": [""],
            "pricing": "", "images": [""], "product_category": "", "category": "", "query": "",
            "customization_options": "",
        }
        for i, title in enumerate(titles)
    ]  # fmt: skip


def test_scores_follow_the_formula():
    index = SearchIndex(load_products(rows("red boots", "red red hat box", "lamp"), {}, {}))
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    average = 7 / 3
    expected = [
        idf * f / (f + 0.9 * (0.6 + 0.4 * length / average)) for f, length in ((1, 2), (2, 4))
    ]
    np.testing.assert_allclose(index.scores("red"), [*expected, 0], rtol=1e-6)
    np.testing.assert_allclose(index.scores("red RED"), [2 * e for e in [*expected, 0]], rtol=1e-6)


def test_ties_go_by_asin_and_misses_are_left_out():
    index = SearchIndex(load_products(rows("boots", "boots", "lamp", "boots"), {}, {}))
    assert index.search("boot") == (0, 3, 1)
    assert index.search("nothing of the kind") == ()


def test_at_most_fifty_are_found():
    index = SearchIndex(load_products(rows(*["boots"] * 9), {}, {}) * 8)
    assert len(index.search("boots")) == 50


def test_a_document_is_title_description_first_bullet_and_options():
    row = rows("Warm Hat")[0] | {
        "full_description": "For Heads.",
        "small_description": ["Wool", "never seen"],
        "customization_options": {"Color": [{"value": "Red/Blue"}, {"value": "tan"}], "Fit": None},
    }
    (product,) = load_products([row], {}, {})
    assert document(product) == "warm hat for heads. wool color: red | blue, tan"
