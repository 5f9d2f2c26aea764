#!/usr/bin/env python3
"""Count the token rows and tokens of an episode of 25 turns with stored chat templates.

    scripts/template_rows.py FOLDER            print the table of docs/reference/chat-templates.md
    scripts/template_rows.py FOLDER --write    replace the table in that page

Takes: a folder of ``NAME.jinja`` files. Gives: a Markdown table. Each template gets a tokenizer
with its own special tokens. All templates get the same words, so their counts are comparable.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from rollart_core.contracts.inference import GenerateResult
from rollart_core.models.chat_template import with_thought
from rollart_core.models.thinking import History, observation_role, why_rows
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer
from rollart_core.models.tool_calls import call_id
from rollart_core.rollout.conversation import Conversation
from rollart_core.types import Message, TokenSpan, ToolCall, ToolSpec

NUM_TURNS = 25
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "chat-templates.md"
BEGIN, END = "<!-- template rows -->", "<!-- end -->"
KEPT = History(keeps_thinking=True)
WORDS = "the shirt is red and large so I search for a blue one with price below forty dollars"
STOPS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "deepseekv3": ["<｜end▁of▁sentence｜>"],
    "diffusion_gemma": ["<turn|>", "<|tool_response>"],
    "gemma": ["<end_of_turn>"],
    "gemma3": ["<end_of_turn>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "idefics3": ["<end_of_utterance>"],
    "llama3": ["<|eot_id|>"],
    "llama3_1": ["<|eot_id|>"],
    "llama3_2": ["<|eot_id|>"],
    "llava_next": ["</s>"],
    "phi3": ["<|end|>"],
    "phi3_5": ["<|end|>"],
}
"""Tokens that end a message, as in the generation configs. The others use ``<|im_end|>``."""
MORE_SPECIALS = {"lfm2": ["<|tool_call_start|>", "<|tool_call_end|>"]}
"""Marks of calls that a template leaves to the caller."""
PRICE = ToolSpec(
    type="function",
    function={
        "name": "price",
        "description": "Return the price of an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
)


@dataclass(frozen=True)
class Count:
    """The rows of one episode."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows} / {self.tokens:,}"


@dataclass(frozen=True)
class Counts:
    """The counts of one template. Counts are None where they do not apply."""

    name: str
    thinks: bool
    user: Count
    """Text observations as user messages."""
    default: Count
    """Text observations with the default options."""
    chosen: Count
    """Text observations with ``options``."""
    tools: Count | None
    """Tool calls with the default options."""
    tools_chosen: Count | None
    """Tool calls with ``options``."""
    role: str
    options: str
    why: str


def measure(path: Path) -> Counts:
    """Return the counts of one template."""
    tokenizer = tokenizer_of(path)
    template = tokenizer.template
    asked = History(observation_role(template, "auto", keeps=False))
    why = why_rows(template, asked)
    chosen, history, options = tokenizer, asked, "none"
    if why is not None or (_has_tools(tokenizer) and _count(tokenizer, asked, True).rows > 1):
        found = re.search(r"chat_template_kwargs\.(\w+)=(\w+)", why or "")
        if found:
            kwargs = {found[1]: json.loads(found[2])}
            options = f"`{found[1]}: {found[2]}`"
            chosen = tokenizer_of(path, tuple(kwargs.items()))
            history = History(observation_role(chosen.template, "auto", keeps=False))
        elif tokenizer.thinking:
            history, options = KEPT, "`keep_thinking: true`"
    has_tools = _has_tools(tokenizer)
    return Counts(
        path.stem,
        tokenizer.thinking is not None,
        _count(tokenizer, History()),
        _count(tokenizer, asked),
        _count(chosen, history),
        _count(tokenizer, asked, True) if has_tools else None,
        _count(chosen, history, True) if has_tools else None,
        asked.observation_role,
        options,
        why or "",
    )


def _has_tools(tokenizer: ChatTokenizer) -> bool:
    return tokenizer.template.shows_tools and tokenizer.tool_format is not None


def _count(tokenizer: ChatTokenizer, history: History, tools: bool = False) -> Count:
    conversation = Conversation(tokenizer, max_context_tokens=10**9, history=history)
    if tools:
        conversation.offer([PRICE])
    for turn, said in enumerate(_actions(tokenizer, tools)):
        conversation.observe(_observation(turn, tools))
        ids = [*tokenizer.encode(said), tokenizer.stop_token_ids[_stop(tokenizer, tools, turn)]]
        spans = (TokenSpan(0, len(ids), 0),)
        conversation.record(GenerateResult(ids, [0.0] * len(ids), spans, "stop"))
    samples = conversation.samples()
    assert sum(s.num_loss_tokens for s in samples) == sum(
        len(tokenizer.encode(said)) + 1 for said in _actions(tokenizer, tools)
    ), "each sampled token is trained exactly once"
    return Count(len(samples), sum(s.num_tokens for s in samples))


def _stop(tokenizer: ChatTokenizer, tools: bool, turn: int) -> int:
    """Return which stop token the model writes: some families have another one after a call."""
    special = {"<|call|>", "<|observation|>", "<|tool_response>"}
    after_call = [i for i, text in enumerate(tokenizer.stop_texts) if text in special]
    if tools and turn < NUM_TURNS - 1 and after_call:
        return after_call[0]
    return 1 if tokenizer.stop_texts[0] == "<|endoftext|>" else 0


def _observation(turn: int, tools: bool) -> str | list[Message]:
    text = f"observation {turn}: {_words(turn, 30)}"
    if not tools or turn == 0:
        return text
    return [Message(role="tool", content=text, tool_call_id=call_id(turn - 1, 0), name="price")]


def _actions(tokenizer: ChatTokenizer, tools: bool) -> Iterator[str]:
    """Yield what the model writes in each turn, without the stop token."""
    thinking = tokenizer.thinking
    for turn in range(NUM_TURNS):
        thinks = thinking is not None and thinking.state != "closed"
        thought = _words(turn + 100, 60) if thinks else ""
        if tools and turn < NUM_TURNS - 1:
            yield _call(tokenizer, thought, turn)
            continue
        answer = f"answer {turn}: {_words(turn + 200, 10)}"
        if not thinks or thinking is None:
            yield (thinking.bare if thinking and thinking.state == "free" else "") + answer
            continue
        opening = "" if thinking.state == "opened" else f"{thinking.opening}\n"
        yield f"{opening}{thought}{thinking.closing}{answer}"


def _call(tokenizer: ChatTokenizer, thought: str, turn: int) -> str:
    """Return a message with a call as the template writes it after its prompt."""
    call = ToolCall(
        id=call_id(turn, 0),
        type="function",
        function={"name": "price", "arguments": json.dumps({"item": f"shirt {turn}"})},
    )
    message = with_thought(Message(role="assistant", content="", tool_calls=[call]), thought)
    return tokenizer.write(message)


def _words(seed: int, n: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS.split(), k=n))


PARTS = """{%- set all = namespace(of=[]) -%}
{%- for m in messages -%}
{%- set all.of = all.of + [dict(m, content=[{'type': 'text', 'text': m.content}])] -%}
{%- endfor -%}{%- set messages = all.of -%}
"""
"""Makes the contents lists of parts, for image models. RollArt itself gives them text."""
OF_PARTS = ("idefics3", "llava_next")


@cache
def tokenizer_of(path: Path, kwargs: tuple[tuple[str, object], ...] = ()) -> ChatTokenizer:
    """Return a tokenizer for a template, with the special tokens of its family."""
    source = path.read_text(encoding="utf-8")
    if path.stem in OF_PARTS:
        source = PARTS + source
    stops = STOPS.get(path.stem, ["<|im_end|>"])
    backend = _backend((*stops, *specials_in(source), *MORE_SPECIALS.get(path.stem, ())))
    if "date_string" in source:  # today's date may have another number of tokens
        kwargs = (*kwargs, ("date_string", "26 Jul 2024"))
    config = {"eos_token": stops[0], "bos_token": "<s>"}
    generation = {"eos_token_id": [backend.token_to_id(stop) for stop in stops]}
    with TemporaryDirectory(prefix="rollart-rows-") as name:
        folder = Path(name)
        (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
        return load_tokenizer(folder, dict(kwargs))


def specials_in(source: str) -> list[str]:
    """Return the marks in a template that are tokens in the tokenizers of its family."""
    marks = re.findall(r"<[|｜][^<>|｜\s]+[|｜]?>|<[a-z_]+[|]>|</?[a-z_]+>|\[/?[A-Z_]+\]", source)
    return sorted(set(marks) - {"<s>"})


def _backend(specials: tuple[str, ...]):  # type: ignore[no-untyped-def]
    """Return a byte-level BPE tokenizer trained on the words of the episodes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator([_words(seed, 40) for seed in range(50)], trainer)
    backend.add_special_tokens(["<s>", *(s for s in specials if s[1] != "/" and "think" not in s)])
    backend.add_tokens([AddedToken(s, normalized=False) for s in specials])
    return backend


def table_of(counts: Sequence[Counts]) -> str:
    """Return the table of the page."""
    head = (
        "| template | thinks | as `user` | default | role | options | with options | tools | "
        "tools, with options |"
    )
    lines = [head, "|---" * 9 + "|"]
    for one in counts:
        tools = [str(count) if count else "-" for count in (one.tools, one.tools_chosen)]
        cells = (f"`{one.name}`", "yes" if one.thinks else "no", one.user, one.default)
        more = (f"`{one.role}`", one.options, one.chosen, *tools)
        lines.append("| " + " | ".join(map(str, (*cells, *more))) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print or write the table."""
    text = table_of([measure(path) for path in sorted(Path(arguments[0]).glob("*.jinja"))])
    if "--write" not in arguments:
        print(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
