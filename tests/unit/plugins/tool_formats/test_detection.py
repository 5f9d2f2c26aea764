"""Which tool format the chat templates of model families have."""

import json
from types import SimpleNamespace

import pytest
from support.chat_templates import TEXTS, write_tokenizer
from support.tool_cases import FAMILIES

from rollart_core.contracts.tool_format import (
    ParsedMessage,
    ToolFormat,
    ToolFormatSpec,
    tool_call,
)
from rollart_core.models.chat_template import ChatTemplate
from rollart_core.models.new import train_tokenizer
from rollart_core.models.tokenizer import load_tokenizer
from rollart_core.models.tool_calls import detect_tool_format
from rollart_core.plugins import manager, registry
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.types import Message

NO_TOOLS = ("cohere", "cohere2", "gemma", "gemma3", "idefics3", "llama3", "llava_next", "phi3")
NO_TOOLS += ("phi3_5", "qwen2_5_vl")
SHOWN = [family for family in FAMILIES if family.template not in ("", "gemma3", "deepseekv3")]


@pytest.fixture
def templates(shared_dir):
    folder = shared_dir / "data" / "chat_templates"
    if not folder.is_dir():
        pytest.skip(f"no chat templates at {folder}")
    return folder


def tokenizer_of(folder, template, marks, stop):
    """Return a tokenizer with the special tokens of a family."""
    backend = train_tokenizer(TEXTS, 400)
    backend.add_special_tokens([*marks, stop])
    return load_tokenizer(write_tokenizer(folder, backend.to_str(), template, stop))


@pytest.mark.parametrize("family", SHOWN, ids=lambda family: family.template)
def test_a_template_has_the_format_of_its_family(family, templates, tmp_path):
    source = (templates / f"{family.template}.jinja").read_text()
    tokenizer = tokenizer_of(tmp_path, source, family.format.marks, family.stop)
    assert type(tokenizer.tool_format) is type(family.format)


@pytest.mark.parametrize("name", NO_TOOLS)
def test_a_template_without_tools_has_no_format(name, templates, tmp_path):
    source = (templates / f"{name}.jinja").read_text()
    marks = registry.build("tool_formats", "lfm2").marks
    tokenizer = tokenizer_of(tmp_path, source, marks, "<|im_end|>")
    assert tokenizer.tool_format is None
    assert tokenizer.stop_token_ids == (tokenizer.encode("<|im_end|>")[0],)


def test_deepseek_v3_gets_arguments_as_text(templates):
    template = ChatTemplate((templates / "deepseekv3.jinja").read_text(), {"bos_token": "<bos>"})
    found = detect_tool_format(template, ["<｜end▁of▁sentence｜>"], bool)
    assert type(found) is registry.resolve("tool_formats", "deepseek_v3")
    assert not template.shows_tools


def test_a_template_that_omits_calls_needs_the_marks_of_one_format_as_tokens(templates, tmp_path):
    source = (templates / "lfm2.jinja").read_text()
    (tmp_path / "other").mkdir()
    assert tokenizer_of(tmp_path / "other", source, [], "<|im_end|>").tool_format is None
    qwen = registry.build("tool_formats", "hermes").marks  # of several formats
    assert tokenizer_of(tmp_path / "other", source, qwen, "<|im_end|>").tool_format is None


def test_lfm2_gets_its_earlier_calls_as_text(templates, tmp_path):
    source = (templates / "lfm2.jinja").read_text()
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    tokenizer = tokenizer_of(tmp_path, source, marks, "<|im_end|>")
    assert tokenizer.tool_format is not None
    call = tool_call("find", json.dumps({"text": "it's", "limit": 3}))
    messages = [
        Message(role="user", content="?"),
        Message(role="assistant", content="so", tool_calls=[call]),
    ]
    said = 'so<|tool_call_start|>[find(text="it\'s", limit=3)]<|tool_call_end|><|im_end|>'
    assert said in tokenizer.render(messages)


def test_the_token_that_ends_a_call_of_gpt_oss_ends_a_turn(templates, tmp_path):
    source = (templates / "gptoss.jinja").read_text()
    marks = registry.build("tool_formats", "harmony").marks
    tokenizer = tokenizer_of(tmp_path, source, marks, "<|return|>")
    assert [tokenizer.decode([i]) for i in tokenizer.stop_token_ids] == ["<|return|>", "<|call|>"]


def test_a_format_that_writes_ids_instead_of_names_is_found():
    source = (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}"
        "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"
        "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    found = detect_tool_format(ChatTemplate(source, {}), ["<|im_end|>"], bool)
    assert found is not None
    assert found.call_id("f", 3) == "functions.f:3"
    parsed = found.parse(found.render(ParsedMessage("", "", (tool_call("f", "{}"),))))
    assert parsed.calls[0]["function"]["name"] == "f"


class Acme(ToolFormat):
    """A format of a family that RollArt does not know."""

    marks = ("<call>", "</call>")

    def parse(self, text, tools=()):
        content, mark, call = text.partition("<call>")
        if not mark:
            return ParsedMessage(text)
        name, _, arguments = call.partition("</call>")[0].partition(" ")
        return ParsedMessage(content, "", (tool_call(name, arguments),))

    def render(self, message):
        function = message.calls[0]["function"]
        return f"{message.content}<call>{function['name']} {function['arguments']}</call>"


def test_a_plugin_adds_a_family(monkeypatch):
    source = (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    template = ChatTemplate(source, {})
    assert template.shows_tools
    assert detect_tool_format(template, ["<|im_end|>"], bool) is None
    spec = ToolFormatSpec(id="acme/Acme-v1", entry_point=f"{__name__}:Acme")
    acme = SimpleNamespace(rollart_tool_formats=hookimpl(lambda: [spec]))
    acme.rollart_tool_formats.__name__ = "rollart_tool_formats"
    monkeypatch.setattr(manager, "_current", manager.load({"acme": acme}))
    assert isinstance(detect_tool_format(template, ["<|im_end|>"], bool), Acme)
