#!/usr/bin/env python3
"""Parse messages with the tool-call parsers of another project.

    PYTHON scripts/tool_format_oracle.py sglang|vllm|renderers < cases.json > answers.json

PYTHON is an interpreter that has the project. scripts/tool_formats.py writes the cases and starts
this script. An answer is the calls and, if the parser returns it, the reasoning; or an error.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

Case = dict[str, Any]
Answer = dict[str, Any]

SGLANG = {
    **{"hermes": "qwen25", "qwen3_coder": "qwen3_coder", "glm45": "glm45", "llama3": "llama3"},
    **{"minimax_m2": "minimax-m2", "llama4": "pythonic", "lfm2": "lfm2", "gemma4": "gemma4"},
    **{"mistral": "mistral", "deepseek_v3": "deepseekv3", "deepseek_v31": "deepseekv31"},
    **{"kimi_k2": "kimi_k2", "harmony": "gpt-oss"},
}
VLLM = {
    **{"hermes": "hermes", "qwen3_coder": "qwen3_coder", "glm45": "glm45", "llama3": "llama3_json"},
    **{"minimax_m2": "minimax_m2", "llama4": "llama4_pythonic", "lfm2": "lfm2", "olmo3": "olmo3"},
    **{"gemma4": "gemma4", "mistral": "mistral", "deepseek_v3": "deepseek_v3"},
    **{"deepseek_v31": "deepseek_v31", "kimi_k2": "kimi_k2", "phi4": "phi4_mini_json"},
}
RENDERERS = {
    **{"hermes": "qwen3.Qwen3Renderer", "qwen3_coder": "qwen35.Qwen35Renderer"},
    **{"nemotron": "nemotron3.Nemotron3Renderer", "glm45": "glm45.GLM45Renderer"},
    **{"minimax_m2": "minimax_m2.MiniMaxM2Renderer", "llama3": "llama_3.Llama3Renderer"},
    **{"gemma4": "gemma4.Gemma4Renderer", "kimi_k2": "kimi_k2.KimiK2Renderer"},
    **{"harmony": "gpt_oss.GptOssRenderer", "deepseek_v3": "deepseek_v3.DeepSeekV3Renderer"},
}

DEEPSEEK = [
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>"),
    "<｜tool▁output▁end｜>",
]
"""Tokens that the package renderers composes."""


def main() -> None:
    """Answer the cases of stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the projects print
    make = {"sglang": sglang, "vllm": vllm, "renderers": renderers}[sys.argv[1]]
    parsers: dict[str, Callable[[Case], Answer] | None] = {}
    found: list[Answer | None] = []
    for case in json.load(sys.stdin):
        key = case["family"]
        if key not in parsers:
            try:
                parsers[key] = make(case)
            except Exception as e:
                print(f"no parser for {key}: {type(e).__name__}: {e}", file=sys.stderr)
                parsers[key] = None
        parse = parsers[key]
        found.append(answered(parse, case) if parse else None)
    json.dump(found, answers)


def answered(parse: Callable[[Case], Answer], case: Case) -> Answer:
    """Return the answer of a parser, or its exception."""
    try:
        return parse(case)
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}


def without_thought(case: Case) -> str:
    """Return the text after the reasoning: other parsers take that away before."""
    text: str = case["text"]
    if case["reasoning"] and case["alias"] != "harmony":
        for mark in ("</think>", "[/THINK]", "<channel|>"):
            before, found, after = text.partition(mark)
            text = after.lstrip() if found and case["reasoning"] in before else text
    return text


def sglang(case: Case) -> Callable[[Case], Answer] | None:
    """Return SGLang's parser of a family."""
    if case["alias"] not in SGLANG:
        return None
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    detector = FunctionCallParser.ToolCallParserEnum[SGLANG[case["alias"]]]

    def parse(case: Case) -> Answer:
        tools = [Tool.model_validate(tool) for tool in case["tools"]]
        text = without_thought(case)
        if case["alias"] == "harmony" and case["kind"] != "broken":
            text = f"<|start|>assistant{text}<|call|>"  # it reads the prompt and the end, too
        found = detector().detect_and_parse(text, tools)
        return {"calls": [[call.name, call.parameters] for call in found.calls]}

    return parse


def vllm(case: Case) -> Callable[[Case], Answer] | None:
    """Return vLLM's parser of a family."""
    if case["alias"] not in VLLM:
        return None
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    parser = ToolParserManager.get_tool_parser(VLLM[case["alias"]])
    tokenizer = tokenizer_of(case["marks"])

    def parse(case: Case) -> Answer:
        messages = [{"role": "user", "content": "?"}]
        request = ChatCompletionRequest(messages=messages, model="m", tools=case["tools"])
        found = parser(tokenizer, request.tools).extract_tool_calls(without_thought(case), request)
        return {"calls": [[c.function.name, c.function.arguments] for c in found.tool_calls]}

    return parse


def renderers(case: Case) -> Callable[[Case], Answer] | None:
    """Return the parser of the package renderers for a family."""
    alias = "nemotron" if "Nemotron" in case["family"] else case["alias"]
    if alias not in RENDERERS:
        return None
    module_name, class_name = RENDERERS[alias].split(".")
    module = importlib.import_module(f"renderers.{module_name}")
    source = inspect.getsource(module)
    tags = re.findall(r'"([<\[\]][^"\s]*[>\[\]])"', source)
    tokenizer = tokenizer_of([*case["marks"], *tags, *DEEPSEEK, '<|"|>'])
    renderer = getattr(module, class_name)(tokenizer)

    def parse(case: Case) -> Answer:
        ids = tokenizer.encode(case["text"], add_special_tokens=False)
        prompt = tokenizer.encode(case["prompt"], add_special_tokens=False)
        found = renderer.parse_response(ids, tools=case["tools"], prompt_ids=prompt or None)
        good = [call for call in found.tool_calls if call.status.name == "OK"]
        calls = [[call.name, as_text(call.arguments)] for call in good]
        return {"calls": calls, "reasoning": (found.reasoning_content or "").strip()}

    return parse


def as_text(arguments: Any) -> str:
    """Return arguments as JSON."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def tokenizer_of(marks: list[str]) -> Any:
    """Return a tokenizer of bytes with special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(dict.fromkeys([*marks, "<unk>", "<eos>"])))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", name_or_path="bytes"
    )


if __name__ == "__main__":
    main()
