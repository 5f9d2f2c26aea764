"""Any conversation: through the gateway, over HTTP, it gives the rows of the native path."""

import asyncio
from dataclasses import replace

import aiohttp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import TEMPLATES, tokenizer_with
from support.gateways import LIMITS, TICKET, Http, Scripted
from support.talks import result
from support.tool_templates import ADD, TOOL_TEMPLATES, call_text, tool_tokenizer

from rollart_core.gateway.gateway import Gateway, GatewaySettings
from rollart_core.gateway.transcript import Transcript
from rollart_core.rollout.conversation import Conversation
from rollart_core.types import Message

NAMES = sorted([*TEMPLATES, *TOOL_TEMPLATES])
WORDS = ["red", " ", "\n", "[", "é", "漢", "😀", "4", "<think>", "</think>", "\u202e", "ok."]
texts = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
call_json = st.builds(lambda a, b: f'{{"a": {a},  "b": {b}}}', *[st.integers(-9, 99)] * 2)


def the_tokenizer(name):
    return tokenizer_with(name) if name in TEMPLATES else tool_tokenizer(name)


@st.composite
def answers(draw, name):
    """What the policy samples in one turn: tokens of any kind, a text, calls, or nothing."""
    tokenizer = the_tokenizer(name)
    stop = tokenizer.stop_token_ids[0]
    kind = draw(st.sampled_from(["tokens", "text", "call" if name in TOOL_TEMPLATES else "text"]))
    if kind == "tokens":
        return draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6))
    if kind == "text":
        return [*tokenizer.encode(draw(texts)), stop][: draw(st.integers(0, 9))]
    num = 1 if name == "llama3" else draw(st.integers(1, 2))
    calls = [("add", draw(call_json)) for _ in range(num)]
    return [*tokenizer.encode(draw(texts) + call_text(name, *calls)), stop]


def turns_for(name, min_size=0):
    return st.lists(st.tuples(texts, answers(name)), min_size=min_size, max_size=4)


def shown(said, text):
    """Return what follows an answer: results of its calls, or the user."""
    calls = (said or {}).get("tool_calls")
    if not calls:
        return [Message(role="user", content=text)]
    return [Message(role="tool", content=text, tool_call_id=call["id"]) for call in calls]


class Native:
    """The native path: observations in, one row after another."""

    def __init__(self, name):
        tools = [ADD] if name in TOOL_TEMPLATES else None
        self.talk = Conversation(the_tokenizer(name), max_context_tokens=10_000, tools=tools)
        self.said = None

    def turn(self, text, token_ids, version):
        self.talk.observe(shown(self.said, text))
        self.talk.record(result(token_ids, version))
        self.said = self.talk.newest


class Program:
    """The same over HTTP: all messages in, one answer out."""

    def __init__(self, name, http):
        self.tools = {"tools": [ADD]} if name in TOOL_TEMPLATES else {}
        self.http = http
        self.messages = []

    async def turn(self, text):
        self.messages += shown(self.messages[-1] if self.messages else None, text)
        self.messages.append(await self.http.say(self.messages, **self.tools))


def at_program(name, sampled, play):
    """Run ``play(program)`` at a gateway whose engine samples what is given; return the samples."""

    async def main():
        tokenizer = the_tokenizer(name)
        engine = Scripted(tokenizer, [result(ids, i) for i, ids in enumerate(sampled)])
        gateway = Gateway(engine, tokenizer, GatewaySettings(max_context_tokens=10_000))
        await gateway.start()
        try:
            async with (
                aiohttp.ClientSession() as session,
                gateway.episode(TICKET, replace(LIMITS, max_turns=99)) as gateway_session,
            ):
                await play(Program(name, Http(session, gateway_session)))
                return gateway_session.samples()
        finally:
            await gateway.close()

    return asyncio.run(main())


def same(ours, native):
    assert len(ours) == len(native)
    for one, other in zip(ours, native, strict=True):
        for field in ("token_ids", "loss_mask", "inference_logprobs", "policy_versions"):
            assert np.array_equal(getattr(one, field), getattr(other, field)), field
        assert np.array_equal(one.turn_ids, other.turn_ids)


@given(st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), turns_for(name))))
@settings(max_examples=15, deadline=None)
def test_a_conversation_gives_the_rows_of_the_native_path(case):
    name, turns = case
    native = Native(name)
    for turn, (text, ids) in enumerate(turns):
        native.turn(text, ids, turn)

    async def play(program):
        for text, _ in turns:
            await program.turn(text)

    same(at_program(name, [ids for _, ids in turns], play), native.talk.samples())


@given(
    st.sampled_from(NAMES).flatmap(
        lambda name: st.tuples(st.just(name), turns_for(name, 1), st.integers(0, 3), answers(name))
    ),
    texts,
)
@settings(max_examples=15, deadline=None)
def test_history_taken_back_gives_the_row_of_the_native_path_to_there(case, text):
    name, turns, kept, last = case
    kept = min(kept, len(turns) - 1)
    native = Native(name)
    for turn, (said, ids) in enumerate(turns[:kept]):
        native.turn(said, ids, turn)
    native.turn(text, last, len(turns))

    async def play(program):
        lengths = []
        for said, _ in turns:
            lengths.append(len(program.messages))
            await program.turn(said)
        del program.messages[lengths[kept] :]
        await program.turn(text)

    samples = at_program(name, [*(ids for _, ids in turns), last], play)
    branch = [s for s in samples if len(turns) in s.turn_ids]
    assert len(branch) == bool(last)
    for row in branch:
        expected = native.talk.samples()[-1]
        own = expected.turn_ids == kept
        assert np.array_equal(row.token_ids, expected.token_ids)
        # with the same words after the same history it may be the row itself that goes on
        assert np.array_equal(row.turn_ids == len(turns), own)
        assert np.array_equal(row.inference_logprobs[own], expected.inference_logprobs[own])
    sampled = [ids for _, ids in turns] + [last]
    for turn, ids in enumerate(sampled):  # every token is trained once, as it was sampled
        rows = [s.token_ids[s.turn_ids == turn].tolist() for s in samples if turn in s.turn_ids]
        assert rows == ([ids] if ids else [])


@given(
    st.sampled_from(NAMES).flatmap(
        lambda name: st.tuples(st.just(name), turns_for(name, 1), answers(name))
    ),
    texts,
)
@settings(max_examples=10, deadline=None)
def test_a_summary_gives_the_row_of_a_native_conversation_that_begins_with_it(case, text):
    name, turns, last = case
    messages = [Message(role="user", content=f"summary: {text}")]
    native = Native(name)
    native.talk.observe(messages)
    native.talk.record(result(last, len(turns)), turn=len(turns))

    async def play(program):
        for said, _ in turns:
            await program.turn(said)
        program.messages = list(messages)
        program.messages.append(await program.http.say(program.messages, **program.tools))

    samples = at_program(name, [*(ids for _, ids in turns), last], play)
    same([s for s in samples if len(turns) in s.turn_ids], native.talk.samples())


@given(st.sampled_from(NAMES), st.data())
@settings(max_examples=25, deadline=None)
def test_asked_and_answered_in_any_order_every_token_is_trained_once_behind_its_prompt(name, data):
    """Programs that go on from any recorded point, several at once, some never answered."""
    tokenizer = the_tokenizer(name)
    transcript = Transcript(tokenizer, max_context_tokens=10_000)
    tools = [ADD] if name in TOOL_TEMPLATES else []
    known, open_asks, recorded = [[]], [], []
    for _ in range(data.draw(st.integers(1, 10))):
        what = data.draw(st.sampled_from(["ask", "answer", "answer", "drop"]))
        if what == "ask" or not open_asks:
            before = data.draw(st.sampled_from(known))
            text = data.draw(st.sampled_from(["a", "b", "red"]))
            messages = [*before, *shown(before[-1] if before else None, text)]
            open_asks.append(transcript.ask(messages, tools))
            continue
        ask = open_asks.pop(data.draw(st.integers(0, len(open_asks) - 1)))
        if what == "drop":
            transcript.drop(ask)
            continue
        ids = data.draw(answers(name))
        answer = transcript.record(ask, result(ids, len(recorded)))
        recorded.append((ask.token_ids, ids))
        known.append([*ask.messages, answer.message])
    samples = transcript.samples()
    for turn, (prompt, ids) in enumerate(recorded):
        rows = [s for s in samples if turn in s.turn_ids]
        assert len(rows) == bool(ids)
        for row in rows:
            assert row.token_ids[: len(prompt) + len(ids)].tolist() == [*prompt, *ids]
            at = np.flatnonzero(row.turn_ids == turn)
            assert at.tolist() == list(range(len(prompt), len(prompt) + len(ids)))
            assert set(row.policy_versions[at].tolist()) == {turn}
    assert sum(s.num_loss_tokens for s in samples) == sum(len(ids) for _, ids in recorded)
