"""Conversations parse the calls of each model family, with the templates of the models."""

import json

import pytest
from support.chat_templates import TEXTS, write_tokenizer
from support.tool_cases import FAMILIES
from support.tool_templates import ADD

from rollart_core.contracts.inference import GenerateResult
from rollart_core.contracts.tool_format import ParsedMessage, tool_call
from rollart_core.models.new import train_tokenizer
from rollart_core.models.tokenizer import load_tokenizer
from rollart_core.rollout.conversation import Conversation
from rollart_core.types import Message, TokenSpan

SHOWN = [family for family in FAMILIES if family.template not in ("", "gemma3", "deepseekv3")]
NUM_TURNS = 3


@pytest.mark.parametrize("reasoning", ["", "I think."])
@pytest.mark.parametrize("family", SHOWN, ids=lambda family: family.template)
def test_calls_of_several_turns_are_parsed(family, reasoning, shared_dir, tmp_path):
    source = (shared_dir / "data" / "chat_templates" / f"{family.template}.jinja").read_text()
    tool_format = family.format
    backend = train_tokenizer(TEXTS, 400)
    stops = tool_format.stops if family.alias in ("harmony", "gemma4", "glm45") else (family.stop,)
    backend.add_special_tokens([*tool_format.marks, family.stop, *stops])
    folder = write_tokenizer(tmp_path, backend.to_str(), source, family.stop)
    tokenizer = load_tokenizer(folder)
    conversation = Conversation(tokenizer, max_context_tokens=100_000)
    conversation.offer([ADD])
    conversation.observe("1 + 2?")
    for turn in range(NUM_TURNS):
        call = tool_call("add", json.dumps({"a": 1, "b": turn}))
        text = tool_format.render(ParsedMessage("", reasoning, (call,)))
        prompt = tokenizer.decode(conversation.prompt)
        if tool_format.thought and prompt.rstrip().endswith(tool_format.thought):
            closing = "" if reasoning else "\n</think>\n\n"
            text = closing + text.removeprefix(f"{tool_format.thought}\n")
        ids = tokenizer.encode(text + stops[0])
        assert ids[-1] in tokenizer.stop_token_ids
        span = TokenSpan(0, len(ids), 0)
        conversation.record(GenerateResult(tuple(ids), (0.0,) * len(ids), (span,), "stop"))
        parsed = conversation.parsed
        assert parsed is not None
        assert (parsed.content, parsed.reasoning, parsed.errors) == ("", reasoning, ())
        (made,) = parsed.calls
        assert json.loads(made["function"]["arguments"]) == {"a": 1, "b": turn}
        answer = Message(role="tool", content=f"sum {turn}", tool_call_id=made["id"], name="add")
        conversation.observe([answer])
        assert f"sum {turn}" in tokenizer.decode(conversation.prompt)
