"""Messages that chat templates of model families render are parsed into what was rendered."""

import random
import zlib

import pytest
from support.tool_cases import FAMILIES, KINDS, broken, cases, plain

from rollart_core.models.tool_calls import parse_message

NUM_CASES = 20


@pytest.fixture
def templates(shared_dir):
    folder = shared_dir / "data" / "chat_templates"
    if not folder.is_dir():
        pytest.skip(f"no chat templates at {folder}")
    return folder


def parsed_as(family, case):
    parsed = parse_message(case.text, family.format, tools=case.tools, prompt=case.prompt)
    assert not parsed.errors, (case.text, parsed.errors)
    assert plain(parsed) == plain(case.wanted), case.text
    assert parsed.content.strip() == case.wanted.content.strip(), case.text
    assert parsed.reasoning == case.wanted.reasoning, case.text


OF_TEMPLATES = [family for family in FAMILIES if family.template]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "broken"])
@pytest.mark.parametrize("family", OF_TEMPLATES, ids=lambda family: family.template)
def test_what_a_template_renders_is_parsed(family, kind, templates):
    for case in cases(family, kind, NUM_CASES, templates):
        parsed_as(family, case)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "broken"])
@pytest.mark.parametrize("family", {f.alias: f for f in FAMILIES}.values(), ids=lambda f: f.alias)
def test_what_a_formatter_writes_is_parsed(family, kind):
    for case in cases(family, kind, NUM_CASES, None):
        parsed_as(family, case)


@pytest.mark.parametrize("family", {f.alias: f for f in FAMILIES}.values(), ids=lambda f: f.alias)
def test_a_cut_call_is_an_error_that_shows_the_right_form(family):
    for case in cases(family, "calls", NUM_CASES, None):
        text = broken(case, random.Random(zlib.crc32(case.text.encode())))
        parsed = parse_message(text, family.format, tools=case.tools)
        if parsed.calls:  # only the marks after the call are missing
            assert plain(parsed) == plain(case.wanted), text
            continue
        (error,) = parsed.errors
        assert "Write " in error.reason, text
        assert "\n" not in error.reason
