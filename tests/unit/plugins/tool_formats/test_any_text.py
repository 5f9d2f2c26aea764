"""Tool formats take any text, and their readers of values any literal."""

import json
import random

import pytest
from support.tool_cases import FAMILIES, cases

from rollart_core.contracts.tool_format import ParsedMessage
from rollart_plugins.tool_formats.values import Reader, literal, typed

ALIASES = {family.alias: family for family in FAMILIES}
PIECES = [
    '{"name": "f", "arguments": {"a": 1}}',
    "f(a=1)",
    "[",
    "]",
    "{",
    "}",
    '"',
    "'",
    "\\",
    "\n",
]
PIECES += ["<think>", "</think>", "call:f", "to=functions.f", "a", " ", ",", "=", ":", "\\ud83d"]
PIECES += [
    "<function=f>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "<arg_key>",
    "</arg_key>",
]
PIECES += ["<arg_value>", "</arg_value>", '<invoke name="f">', "functions.f:0", "```json\n", "NaN"]
PIECES += ["9" * 5000, "\ud83d", "(", ")"]


@pytest.mark.parametrize("family", ALIASES.values(), ids=lambda family: family.alias)
def test_no_text_raises(family):
    tool_format = family.format
    (case,) = cases(family, "calls", 1, None)
    pieces = [*PIECES, *tool_format.marks, *tool_format.marks]
    for seed in range(400):
        rng = random.Random(seed)
        text = "".join(rng.choices(pieces, k=rng.randint(1, 25)))
        parsed = tool_format.parse(text, case.tools)
        assert isinstance(parsed, ParsedMessage)
        for call in parsed.calls:
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        assert all("\n" not in error.reason for error in parsed.errors)


@pytest.mark.parametrize("family", ALIASES.values(), ids=lambda family: family.alias)
@pytest.mark.parametrize("num", [100_000, 950, 480, 320, 240])
@pytest.mark.parametrize("opens", ["[", '{"a":'])
def test_deeply_nested_values_do_not_raise(family, num, opens):
    deep = opens * num + "1" + {"[": "]"}.get(opens, "}") * num
    for case in cases(family, "calls", 3, None):
        for value in ("1", '"two"', "true", "null", "42"):
            family.format.parse(case.text.replace(value, deep), case.tools)
        family.format.parse(case.text + deep, case.tools)


ESCAPED = r"""['\u00e9\x41\n\'', '''it's "so"''', "\ud83d\ude00"]"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1, -2.5, 1e3, 'a', \"b\", True, None, (1,)]", [1, -2.5, 1e3, "a", "b", True, None, [1]]),
        ("{'a': {\"b\": [null, true]}}", {"a": {"b": [None, True]}}),
        (ESCAPED, ["éA\n'", 'it\'s "so"', "😀"]),
        ("True", True),
        ("007", "007"),
        ("[1, x]", "[1, x]"),
        ("NaN", "NaN"),
    ],
)
def test_literals_of_python_and_json(text, value):
    assert literal(text) == value


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "string"}, "7"),
        ('"7"', {"type": "string"}, '"7"'),
        ("7", {"type": "integer"}, 7),
        ("7", {}, 7),
        ("seven", {"type": "integer"}, "seven"),
        ("null", {"type": ["string", "null"]}, None),
        ("7", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "7"),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("True", {"$ref": "#/$defs/Flag"}, True),
        ("{'a': 1}", {"type": "object"}, {"a": 1}),
    ],
)
def test_values_without_quotes_have_the_type_of_the_schema(text, schema, value):
    root = {"properties": {"x": schema}, "$defs": {"Flag": {"type": "boolean"}}}
    found = typed(text, "x", root)
    assert (type(found), found) == (type(value), value)


def test_a_quote_inside_a_string_is_not_its_end():
    assert Reader("""['it's', "b"]""").value() == ["it's", "b"]
