"""Chat templates of the kinds found in the wild, and tokenizers that bear them, for tests."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from rollart_core.models.new import CHAT_TEMPLATE, train_tokenizer
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content
+ '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
FORGETS_THINKING = """{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and not loop.last and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
TRIMS = """{{- bos_token }}
{%- for message in messages %}
{%- if (message['role'] == 'assistant') and loop.first %}
{{- raise_exception('the user speaks first') }}{%- endif %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
ALTERNATES = """{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user, assistant') }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + ':' + message['content'] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant:' }}{%- endif %}"""
THINKS = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}
{%- if m.reasoning_content and (preserve_thinking or loop.index0 > ns.last) %}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- ('[' + m.content + ']' if m.role == 'tool' else m.content) + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
OPENS = THINKS.replace("'<|im_start|>assistant\n' }}\n", "'<|im_start|>assistant\n<think>\n' }}\n")
TEMPLATES = {
    "ours": (CHAT_TEMPLATE, "<|end|>"),
    "chatml": (CHATML, "<|im_end|>"),
    "forgets_thinking": (FORGETS_THINKING, "<|im_end|>"),
    "trims": (TRIMS, "<|eot_id|>"),
    "alternates": (ALTERNATES, "<|im_end|>"),
    "thinks": (THINKS, "<|im_end|>"),
    "opens": (OPENS, "<|im_end|>"),
}
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"]
SPECIALS += ["<|end_header_id|>", "<|eot_id|>"]
THOUGHT_MARKS = ["<think>", "</think>"]
"""Tokens, but not special ones, as in Qwen3."""
TEXTS = ["a red shirt, [red] [large] for $40.99", "click[red]", "search[red shirt]", "ok\n[b] c"]


@cache
def tokenizer_with(name: str, **kwargs: object) -> ChatTokenizer:
    template, stop = TEMPLATES[name]
    backend = train_tokenizer(TEXTS, 400)
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens(THOUGHT_MARKS)
    with TemporaryDirectory(prefix="rollart-test-") as folder:
        path = write_tokenizer(Path(folder), backend.to_str(), template, stop)
        return load_tokenizer(path, kwargs)


def write_tokenizer(folder: Path, backend: str, template: str | None, stop: str) -> Path:
    (folder / "tokenizer.json").write_text(backend)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    config = {"eos_token": {"content": stop}, "bos_token": "<|begin_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
