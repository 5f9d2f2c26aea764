"""Random messages with reasoning and tool calls, and the texts that models write for them.

Tests and ``scripts/tool_formats.py`` use the same cases.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rollart_core.contracts.tool_format import ParsedMessage, ToolFormat, tool_call
from rollart_core.models.chat_template import ChatTemplate
from rollart_core.models.tool_calls import call_id
from rollart_core.plugins import registry
from rollart_core.types import Message, ToolSpec

KINDS = ("calls", "reasoning", "broken", "parallel", "unicode", "marks")


@dataclass(frozen=True)
class Family:
    """A family of models, and what its chat template can write."""

    name: str
    alias: str
    """The tool format."""
    template: str = ""
    """File of the chat template, without its suffix. Empty: there is none here."""
    stop: str = "<|im_end|>"
    thinks: str = "reasoning_content"
    """The key of reasoning in messages for the template. ``content``: in the content, between
    marks. Empty: the template omits it."""
    most_calls: int = 3
    """The most calls that the template writes in one message."""
    says: bool = True
    """Whether the template writes text before calls."""
    writes_calls: bool = True
    """Whether the template writes calls. If not, they are part of the content."""
    lossy: str = ""
    """A pattern of strings that the template does not write unambiguously."""

    @property
    def format(self) -> ToolFormat:
        """The tool format."""
        return _format(self.alias)


@cache
def _format(alias: str) -> ToolFormat:
    made: ToolFormat = registry.build("tool_formats", alias)
    return made


_NOT_ESCAPED = r"[\\\n]|'|<\|"
FAMILIES = (
    Family("Qwen2.5", "hermes", "qwen2_5", thinks=""),
    Family("Qwen3", "hermes", "qwen3"),
    Family("Qwen3 2507", "hermes", "qwen3_instruct_2507", thinks=""),
    Family("Qwen3-VL", "hermes", "qwen3_vl", thinks=""),
    Family("Qwen3.5 (thinking)", "qwen3_coder", "qwen3_5_think"),
    Family("Qwen3.5 (no thinking)", "qwen3_coder", "qwen3_5_nothink"),
    Family("Qwen3.6", "qwen3_coder", "qwen3_6"),
    Family("Nemotron 3 Nano", "qwen3_coder", "nemotron_3_nano"),
    Family("Nemotron 3 Super", "qwen3_coder", "nemotron_3_super"),
    Family("Nemotron 3 Ultra", "qwen3_coder", "nemotron_3_ultra"),
    Family("GLM-4.5", "glm45", "glm4moe", "<|user|>"),
    Family("gpt-oss", "harmony", "gptoss", "<|return|>", "thinking", most_calls=1, says=False),
    Family("LFM2", "lfm2", "lfm2", thinks="content", writes_calls=False),
    Family("LFM2.5", "lfm2", "lfm2_2_5", thinks="thinking", lossy=_NOT_ESCAPED),
    Family("Llama 3.1", "llama3", "llama3_1", "<|eot_id|>", "", most_calls=1, says=False),
    Family("Llama 3.2", "llama3", "llama3_2", "<|eot_id|>", "", most_calls=1, says=False),
    Family("DeepSeek V3", "deepseek_v3", "deepseekv3", "<｜end▁of▁sentence｜>", "content"),
    Family("Gemma 3", "gemma3", "gemma3", "<end_of_turn>", "content", writes_calls=False),
    Family("Gemma 4", "gemma4", "diffusion_gemma", "<turn|>", lossy=r'<\|"\|>'),
    Family("Qwen3-Coder", "qwen3_coder"),
    Family("Llama 4", "llama4"),
    Family("Mistral", "mistral"),
    Family("DeepSeek V3.1", "deepseek_v31"),
    Family("Kimi K2", "kimi_k2"),
    Family("MiniMax M2", "minimax_m2"),
    Family("Phi-4-mini", "phi4"),
    Family("OLMo 3", "olmo3"),
)


@dataclass(frozen=True)
class Case:
    """One message, and the text that a model writes for it."""

    tools: list[ToolSpec]
    wanted: ParsedMessage
    prompt: str
    text: str
    by_template: bool
    """Whether the chat template wrote the text, and not the formatter."""


def cases(family: Family, kind: str, num_cases: int, templates: Path | None) -> Iterator[Case]:
    """Yield cases of a kind. Families without a template have texts of their formatter."""
    template = None
    if templates is not None and family.template:
        template = template_of(family, templates)
    for seed in range(num_cases):
        rng = random.Random(f"{family.name}/{kind}/{seed}")
        yield _case(family, kind, rng, template)


@cache
def template_of(family: Family, templates: Path) -> ChatTemplate:
    """Return the chat template of a family."""
    source = (templates / f"{family.template}.jinja").read_text()
    template = ChatTemplate(source, {"bos_token": "<bos>", "eos_token": family.stop})
    if not family.writes_calls:
        template.write_calls = family.format.render
    return template


def _case(family: Family, kind: str, rng: random.Random, template: ChatTemplate | None) -> Case:
    tools = [_tool(rng, f"{rng.choice(_VERBS)}_{i}") for i in range(rng.randint(1, 4))]
    strings = {"unicode": _UNICODE, "marks": _marks(family)}.get(kind, _ASCII)
    lossy = re.compile(family.lossy or r"(?!)") if template else re.compile(r'<\|"\|>')
    draw = _Draw(rng, [s for s in strings if not lossy.search(s)] or ["x"])
    num_calls = {"parallel": rng.randint(2, 3), "reasoning": rng.randint(0, 1)}.get(kind, 1)
    calls = [_call(draw, rng.choice(tools)) for _ in range(num_calls)]
    content = rng.choice(_SAID) if not calls or rng.random() < 0.4 else ""
    reasoning = rng.choice(_THOUGHTS) if kind == "reasoning" else ""
    if kind == "unicode":
        content = rng.choice(_UNICODE).strip() if content else ""
    message = ParsedMessage(content, reasoning, tuple(calls))
    text = prompt = None
    if template is not None and _fits(family, message):
        if calls and not family.says:
            message = replace(message, content="")
        prompt, text = _rendered(family, message, tools, template, rng)
    if text is None:
        return Case(tools, message, "", family.format.render(message), by_template=False)
    return Case(tools, message, prompt or "", text, by_template=True)


def _fits(family: Family, message: ParsedMessage) -> bool:
    """Return whether the template can write the message."""
    if family.thinks == "content" and family.writes_calls and not message.calls:
        return not message.reasoning  # the template removes the marks
    return len(message.calls) <= family.most_calls and bool(family.thinks or not message.reasoning)


def _rendered(
    family: Family,
    message: ParsedMessage,
    tools: list[ToolSpec],
    template: ChatTemplate,
    rng: random.Random,
) -> tuple[str, str]:
    """Return the prompt and the message as the template writes them."""
    history: list[Message] = [Message(role="user", content=rng.choice(_SAID))]
    if rng.random() < 0.3 and family.writes_calls:
        earlier = {**_call(_Draw(rng, ["red"]), tools[0]), "id": call_id(0, 0)}
        answer = Message(role="tool", content="4 found", tool_call_id=call_id(0, 0))
        history += [Message(role="assistant", content="", tool_calls=[earlier]), answer]  # type: ignore[list-item]
    said: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning and family.thinks == "content" and family.writes_calls:
        said["content"] = f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"
    elif message.reasoning:
        key = "reasoning_content" if family.thinks == "content" else family.thinks
        said[key] = message.reasoning
    if message.calls:
        calls = [{**call, "id": call_id(1, i)} for i, call in enumerate(message.calls)]
        said["tool_calls"] = calls
    elif not family.writes_calls:
        said["content"] = family.format.render(message)
    for asked in (history, history[:1]):  # some templates rewrite the end of the prompt
        whole = template.render([*asked, said], tools=tools)  # type: ignore[list-item]
        prompt = template.render(asked, add_generation_prompt=True, tools=tools)
        common = prompt
        if not whole.startswith(prompt):
            common = _common(whole, prompt)
            while common.rfind("<") > common.rfind(">"):  # inside a mark
                common = common[: common.rfind("<")]
        begun = len(common) >= len(template.render(asked, tools=tools))
        if begun and not whole.startswith("<|turn>", len(common)):
            break
    else:
        raise AssertionError(f"{family.template} rewrites the prompt")
    text = whole[len(common) :]
    end = max(text.rfind(stop) for stop in (family.stop, "<|call|>", "<|tool_response>"))
    return common, text[:end] if end >= 0 else text


def _common(one: str, two: str) -> str:
    """Return the common start of two texts."""
    num_same = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(two))
    return one[:num_same]


def broken(case: Case, rng: random.Random) -> str:
    """Return the text of a case with a call, cut inside the call."""
    name = case.wanted.calls[0]["function"]["name"]
    start = case.text.index(name) + len(name) + 1
    return case.text[: rng.randint(start, max(start, len(case.text.rstrip()) - 1))]


def plain(message: ParsedMessage) -> list[tuple[str, Any]]:
    """Return the names and arguments of the calls, with types that compare as in JSON."""
    functions = [call["function"] for call in message.calls]
    return [(each["name"], same(json.loads(each["arguments"]))) for each in functions]


def same(value: Any) -> str:
    """Return a text that is equal for equal JSON values: 1 is not true, and not 1.0."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


class _Draw:
    """Draws values for JSON schemas."""

    def __init__(self, rng: random.Random, strings: list[str]) -> None:
        self.rng, self.strings = rng, strings

    def value(self, schema: dict[str, Any]) -> Any:
        rng = self.rng
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "anyOf" in schema:
            return self.value(rng.choice(schema["anyOf"]))
        match schema["type"]:
            case "string":
                return rng.choice(self.strings)
            case "integer":
                return rng.choice([0, 1, -7, 42, 10**12])
            case "number":
                return rng.choice([0.5, -2.25, 3, 1e-07, 12345.678])
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case "array":
                return [self.value(schema["items"]) for _ in range(rng.randint(0, 3))]
        return {key: self.value(each) for key, each in schema["properties"].items()}


def _tool(rng: random.Random, name: str) -> ToolSpec:
    names = rng.sample(_KEYS, rng.randint(1, 4))
    properties = {key: _schema(rng, 0) for key in names}
    schema = {"type": "object", "properties": properties, "required": names[:1]}
    described = "Do one thing with the arguments."
    return ToolSpec(
        type="function", function={"name": name, "description": described, "parameters": schema}
    )


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "string", "integer", "number", "boolean", "enum", "nullable"]
    kind = rng.choice(kinds + ["array", "object"] * (depth < 2))
    if kind == "enum":
        return {"type": "string", "enum": ["1", "two", "on"]}
    if kind == "nullable":
        return {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    if kind == "array":
        return {"type": "array", "items": _schema(rng, depth + 1)}
    if kind == "object":
        keys = rng.sample(_KEYS, rng.randint(1, 3))
        return {"type": "object", "properties": {key: _schema(rng, depth + 1) for key in keys}}
    return {"type": kind}


def _call(draw: _Draw, tool: ToolSpec) -> Any:
    function = tool["function"]
    schema = function["parameters"]
    given = [
        key for key in schema["properties"] if key in schema["required"] or draw.rng.random() < 0.7
    ]
    arguments = {key: draw.value(schema["properties"][key]) for key in given}
    return tool_call(function["name"], json.dumps(arguments, ensure_ascii=False))


def _marks(family: Family) -> list[str]:
    """Return strings with the marks of the family."""
    known = ["</tool_call>", "</arg_value>", "</parameter>", "<tool_call>", "</think>", "[/TOOL]"]
    if family.alias == "gemma3":
        known.append("```")
    return [f"a {mark} b" for mark in [*family.format.marks, *known]]


_VERBS = ["get_weather", "search", "send", "add-item", "run"]
_KEYS = ["city", "query", "limit", "unit", "options", "text", "is_new", "path"]
_SAID = [
    "Let me look that up.",
    "First line.\n\nSecond line.",
    "I use a tool: now",
    "4 > 3, so yes",
]
_THOUGHTS = [
    "The user wants one thing.",
    "Step 1: look.\nStep 2: call.\n\nDone.",
    "漢字 and emoji 🙂.",
    'Maybe {"name": "x"} or f(a=1)?',
]
_ASCII = [
    *("Paris", "two words", "it's", 'a "quoted" word', "line one\nline two", "C:\\new\\dir"),
    *('{"json": 1}', "007", "3", "true", "null", "None", "", " spaced ", "[1, 2]", "a=b, c=d"),
    *("<b>bold</b>", "a;b", "if x:\n    print('hi')\n", "100%", "#tag", "a\tb", "{", "f(a='x')"),
]
_UNICODE = [
    *(
        "漢字かな",
        "naïve café",
        "🙂👩\u200d👩\u200d👧",
        "שלום",
        "a\u2028b",
        "e\u0301",
        "ａｂｃ",
        "𝒳²",
    ),
    *("«guillemets»", "a\u00a0b", "Ω≈ç√", "“curly”", "…—"),
]
