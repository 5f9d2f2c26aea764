import json

import pytest
from support.tool_templates import (
    ADD,
    TOOL_FORMATS,
    TOOL_TEMPLATES,
    call_text,
    parse,
    tool_tokenizer,
)

from rollart_core.models.chat_template import ChatTemplate
from rollart_core.models.new import CHAT_TEMPLATE
from rollart_core.models.tool_calls import call_id, detect_tool_format
from rollart_core.plugins import registry
from rollart_core.types import Message


def _calls(parsed):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parsed.calls]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_come_out_in_order_with_ids_that_templates_take(name):
    parsed = parse(
        call_text(name, ("add", '{"a": 1, "b": 2}'), ("say", '{"text": "é漢 {}"}')), name, turn=3
    )
    assert _calls(parsed) == [("add", {"a": 1, "b": 2}), ("say", {"text": "é漢 {}"})]
    assert parsed.content == ""
    assert not parsed.errors
    ids = [c["id"] for c in parsed.calls]
    assert ids == [call_id(3, 0), call_id(3, 1)]
    assert all(len(i) == 9 and i.isalnum() for i in ids)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("text", ["", "ok", ' {"answer": 3}', "a <b> [c] {d}\n"])
def test_a_message_without_calls_is_left_as_it_is(name, text):
    parsed = parse(text, name)
    assert (parsed.content, parsed.calls, parsed.errors) == (text, (), ())


THINKS = '{"text": "a</think>b"}'


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content", "num_calls"),
    [
        ("hermes", 'so: <tool_call>{"name": "f"}</tool_call> done', "", "so:  done", 1),
        ("hermes", 'cut off: <tool_call>{"name": "f", "arguments": {}}', "", "cut off:", 1),
        ("hermes", '<think>\n<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name"', "", 0),
        ("hermes", '<think>no <tool_call></think><tool_call>{"name": "f"}', "no <t", "", 1),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', "", "", 1),
        ("llama3", '{"type": "function", "name": "f", "parameters": {"a": ";"}}', "", "", 1),
        ("mistral", 'so [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x[ARGS]{}', "", "so", 2),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": "{}"}] so', "", "so", 1),
        ("hermes", 'hm <tool_call>{"name": "f"}</tool_call></think>so', "hm <t", "so", 0),
        ("hermes", f"so {call_text('hermes', ('f', THINKS))}", "", "so", 1),
        ("hermes", f"<think>a</think> {call_text('hermes', ('f', THINKS))}", "a", "", 1),
        ("llama3", call_text("llama3", ("f", THINKS)), "", "", 1),
        ("llama3", f"<|python_tag|>{call_text('llama3', ('f', THINKS))}", "", "", 1),
        ("mistral", f"so {call_text('mistral', ('f', THINKS))}", "", "so", 1),
        ("mistral", f"[THINK]hm[/THINK]so {call_text('mistral', ('f', THINKS))}", "hm", "so", 1),
    ],
)
def test_what_models_write_in_the_wild(name, text, reasoning, content, num_calls):
    parsed = parse(text, name)
    assert (len(parsed.calls), parsed.errors) == (num_calls, ())
    assert parsed.content == content
    assert parsed.reasoning.startswith(reasoning)
    assert bool(parsed.reasoning) == bool(reasoning)


def test_a_thought_that_the_prompt_opens_is_reasoning_until_it_is_closed():
    call = call_text("hermes", ("f", THINKS))
    prompt = "<|im_start|>assistant\n<think>\n"
    assert parse(f"hm\n</think>\n\nso {call}", "hermes", prompt=prompt).reasoning == "hm"
    assert len(parse(f"hm\n</think>\n\nso {call}", "hermes", prompt=prompt).calls) == 1
    assert parse(f"hm {call}", "hermes", prompt=prompt).calls == ()


NO_ARGUMENTS = {
    "a hole": '{"a": }',
    "a list": "[1]",
    "text": '"x"',
    "Python": "{'a': 1}",
    "NaN": '{"a": NaN}',
    "infinity": '{"a": 1e999}',
    "half a character": '{"a": "\\ud800"}',
    "a number": "3",
    "cut off": "{",
    "too deep": "[" * 100_000,
    "too long a number": "9" * 5000,
}


@pytest.mark.parametrize("arguments", NO_ARGUMENTS.values(), ids=NO_ARGUMENTS)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_is_no_call_is_an_error_that_says_why(name, arguments):
    parsed = parse(call_text(name, ("add", arguments)), name)
    assert not parsed.calls
    (error,) = parsed.errors
    assert "JSON" in error.reason
    assert "\n" not in error.reason
    assert "add" in error.text


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_templates_show_tools_and_calls_and_notify_their_format(name):
    tokenizer = tool_tokenizer(name)
    template = tokenizer.template
    assert template.shows_tools
    assert type(tokenizer.tool_format) is registry.resolve("tool_formats", name)
    call = parse(call_text(name, ("add", '{"a": 1, "b": 2}')), name).calls[0]
    messages = [
        Message(role="user", content="1 + 2?"),
        Message(role="assistant", content="", tool_calls=[call]),
        Message(role="tool", content="3", tool_call_id=call["id"], name="add"),
    ]
    text = template.render(messages, True, [ADD])
    assert "Add two whole numbers." in text
    assert '{"a": 1, "b": 2}' in text, "arguments are an object, not text in quotes"
    assert "Add two" not in template.render(messages, True)


def test_new_models_write_calls_as_hermes_does():
    assert type(tool_tokenizer("new").tool_format) is registry.resolve("tool_formats", "hermes")


def test_a_template_without_tools_has_no_format():
    assert not ChatTemplate(CHAT_TEMPLATE, {}).shows_tools
    assert detect_tool_format(ChatTemplate(CHAT_TEMPLATE, {}), ["<|end|>"], bool) is None


@pytest.mark.parametrize("other", ["<call>", '<tool_call>"'])
def test_a_template_in_an_unknown_format_has_no_format(other):
    source, stop = TOOL_TEMPLATES["hermes"]
    unknown = ChatTemplate(source.replace("<tool_call>", other), {})
    assert unknown.shows_tools
    assert detect_tool_format(ChatTemplate(source, {}), [stop], bool) is not None
    assert detect_tool_format(unknown, [stop], bool) is None
