"""Chat templates with tools, after the documented formats of three families, for tests."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from rollart_core.contracts.tool_format import ParsedMessage
from rollart_core.models.new import TOOL_CHAT_TEMPLATE, train_tokenizer
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer
from rollart_core.models.tool_calls import parse_message
from rollart_core.plugins import registry
from rollart_core.types import ToolSpec
from support.chat_templates import TEXTS, write_tokenizer

HERMES = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nCalls go in <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = """{{- bos_token }}
{%- set head = '<|start_header_id|>' %}{%- set neck = '<|end_header_id|>\\n\\n' %}
{%- for message in messages %}
{%- if message.role in ('system', 'user') %}
{{- head + message.role + neck }}
{%- if message.role == 'user' and loop.index0 == (1 if messages[0].role == 'system' else 0) %}
{%- for tool in tools or [] %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- head + 'assistant' + neck + '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif message.role == 'assistant' %}
{{- head + 'assistant' + neck + message.content | trim + '<|eot_id|>' }}
{%- else %}
{{- head + 'ipython' + neck + message.content | tojson + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- head + 'assistant' + neck }}{%- endif %}"""
MISTRAL = """{{- bos_token }}
{%- set ns = namespace(turn=0, last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.turn % 2 == 0) %}
{{- raise_exception('user and assistant must alternate') }}{%- endif %}
{%- set ns.turn = ns.turn + 1 %}
{%- endif %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}
{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have length 9') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception('ids have length 9') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' }}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('only user, assistant and tool') }}{%- endif %}
{%- endfor %}"""
TOOL_TEMPLATES = {
    "new": (TOOL_CHAT_TEMPLATE, "<|end|>"),
    "hermes": (HERMES, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
}
TOOL_FORMATS = ("hermes", "llama3", "mistral")
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|python_tag|>"]
SPECIALS += ["<|start_header_id|>", "<|end_header_id|>", "</s>", "[INST]", "[/INST]"]
SPECIALS += ["[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"]
SPECIALS += ["[/TOOL_RESULTS]", "[ARGS]", "[CALL_ID]"]
ADD = ToolSpec(
    type="function",
    function={
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
)


@cache
def tool_tokenizer(name: str) -> ChatTokenizer:
    template, stop = TOOL_TEMPLATES[name]
    texts = [*TEXTS, '{"name": "add", "arguments": {"a": 1, "b": 2}}']
    backend = train_tokenizer(texts, 400, tools=name == "new")
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    with TemporaryDirectory(prefix="rollart-test-") as folder:
        return load_tokenizer(write_tokenizer(Path(folder), backend.to_str(), template, stop))


def parse(text: str, name: str, turn: int = 0, prompt: str = "") -> ParsedMessage:
    """Parse a message in the tool format of this alias."""
    return parse_message(text, registry.build("tool_formats", name), turn=turn, prompt=prompt)


def call_text(name: str, *calls: tuple[str, str]) -> str:
    """Return calls of (tool, arguments as JSON) as a model of that family writes them."""
    if name in ("hermes", "new"):
        block = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
        return "\n".join(block.format(*c) for c in calls)
    if name == "llama3":
        return "; ".join('{{"name": "{}", "parameters": {}}}'.format(*c) for c in calls)
    objects = ", ".join('{{"name": "{}", "arguments": {}}}'.format(*c) for c in calls)
    return f"[TOOL_CALLS][{objects}]"
