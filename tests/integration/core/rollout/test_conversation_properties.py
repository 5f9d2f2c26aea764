"""Any conversation: what was sampled stays as it was, and prompts read as the template renders."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import TEMPLATES, tokenizer_with
from support.talks import result, talk

from rollart_core.models.thinking import History
from rollart_core.rollout.conversation import Conversation
from rollart_core.types import Message

NAMES = sorted(TEMPLATES)
WITHOUT_THOUGHTS = [name for name in NAMES if tokenizer_with(name).thinking is None]
WORDS = [
    "red",
    " ",
    "\n",
    "[",
    "]",
    "click",
    "é",
    "漢",
    "4",
    "<think>",
    "</think>",
    "<|end|>",
    "ok.",
]
plain_texts = st.lists(st.sampled_from([w for w in WORDS if w != "<|end|>"]), max_size=6).map(
    "".join
)


@given(st.sampled_from(NAMES), st.data())
@settings(max_examples=40, deadline=None)
def test_what_was_sampled_is_in_the_rows_as_it_was_and_marked(name, data):
    tokenizer = tokenizer_with(name)
    ids = st.integers(0, tokenizer.vocab_size - 1)
    turns = data.draw(st.lists(st.tuples(plain_texts, st.lists(ids, max_size=6)), max_size=5))
    history = data.draw(st.builds(History, st.sampled_from(["user", "tool"]), st.booleans()))
    if name == "alternates":  # it refuses tool messages
        history = History()
    conversation = Conversation(tokenizer, max_context_tokens=10_000, history=history)
    for turn, (observation, token_ids) in enumerate(turns):
        conversation.observe(observation)
        before = list(conversation.prompt)
        conversation.record(result(token_ids, version=10 + turn))
        assert list(conversation.prompt) == before + token_ids
    samples = conversation.samples()
    for turn, (_, token_ids) in enumerate(turns):
        rows = [s for s in samples if turn in s.turn_ids]
        assert len(rows) == bool(token_ids)
        for row in rows:
            at = row.turn_ids == turn
            assert row.token_ids[at].tolist() == token_ids
            assert np.ptp(np.flatnonzero(at)) == len(token_ids) - 1
            assert set(row.policy_versions[at].tolist()) == {10 + turn}
            expected = np.array(result(token_ids).inference_logprobs, np.float32)
            assert (row.inference_logprobs[at] == expected).all()
    for row in samples:
        assert ((row.turn_ids >= 0) == row.loss_mask).all()
        assert ((row.policy_versions >= 0) == row.loss_mask).all()
        assert (row.inference_logprobs[~row.loss_mask] == 0).all()
        assert row.loss_mask[-1]


@given(
    st.sampled_from(WITHOUT_THOUGHTS),
    st.lists(st.tuples(plain_texts, plain_texts), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_prompts_read_as_the_template_renders(name, turns):
    turns = [(observation, action.strip()) for observation, action in turns]
    tokenizer, _, prompts, actions = talk(name, *zip(*turns, strict=True))
    assert actions == [action for _, action in turns]
    messages: list[Message] = []
    for (observation, action), prompt in zip(turns, prompts, strict=True):
        messages.append(Message(role="user", content=observation))
        text = tokenizer.render(messages, add_generation_prompt=True)
        assert tokenizer.decode(prompt) == text
        if name == "ours":
            assert prompt == tokenizer.encode(text)
        messages.append(Message(role="assistant", content=action))
