import pytest
from support.talks import result, said
from support.tool_templates import ADD, TOOL_TEMPLATES, call_text, tool_tokenizer

from rollart_core.errors import EnvironmentFailure
from rollart_core.models.new import CHAT_TEMPLATE
from rollart_core.models.tool_calls import call_id
from rollart_core.rollout.conversation import Conversation
from rollart_core.types import Message


def _conversation(name):
    conversation = Conversation(tool_tokenizer(name), max_context_tokens=10_000)
    conversation.offer([ADD])
    return conversation


def _answer(turn, content):
    return [Message(role="tool", content=content, tool_call_id=call_id(turn, 0), name="add")]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_turns_with_calls_extend_one_row_token_for_token(name):
    tokenizer, conversation = tool_tokenizer(name), _conversation(name)
    observations = [[Message(role="user", content="1 + 2?")], _answer(0, "3"), _answer(1, "é漢")]
    actions = [
        call_text(name, ("add", '{"b":2,   "a": 1}')),  # not as the template would write it
        call_text(name, ("add", '{"a": }')),
        "It is 3.",
    ]
    row, sampled = [], []
    for turn, (observation, action) in enumerate(zip(observations, actions, strict=True)):
        conversation.observe(observation)
        assert list(conversation.prompt[: len(row)]) == row
        answer = said(tokenizer, action, turn)
        conversation.record(answer)
        sampled.append(answer.token_ids)
        row = list(conversation.prompt)
    (sample,) = conversation.samples()
    assert sample.token_ids[sample.loss_mask].tolist() == [i for ids in sampled for i in ids]
    for turn, ids in enumerate(sampled):
        assert sample.token_ids[sample.turn_ids == turn].tolist() == ids
        assert set(sample.policy_versions[sample.turn_ids == turn].tolist()) == {turn}
    text = tokenizer.decode(sample.token_ids.tolist())
    assert text.count("Add two whole numbers.") == 1
    assert all(observation[0]["content"] in text for observation in observations)


@pytest.mark.parametrize("before", ["", "I add. "])
@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_after_calls_and_their_results_the_user_has_the_word_again(name, before):
    tokenizer, conversation = tool_tokenizer(name), _conversation(name)
    action = before + call_text(name, ("add", '{"a": 1, "b": 2}'))
    for turn in (0, 2):
        conversation.observe("1 + 2?")
        conversation.record(said(tokenizer, action, turn))
        conversation.observe(_answer(turn, "3"))
        conversation.record(said(tokenizer, "It is 3." if turn else "", turn + 1))
    samples = conversation.samples()
    # Mistral's template moves the tools on to the last user: its history is rewritten there
    assert len(samples) == (2 if name == "mistral" else 1)
    assert sorted({t for s in samples for t in s.turn_ids.tolist()}) == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_what_stands_between_two_turns_is_what_the_template_puts_there(name):
    tokenizer, conversation = tool_tokenizer(name), _conversation(name)
    action = call_text(name, ("add", '{"a": 1, "b": 2}'))
    conversation.observe("1 + 2?")
    conversation.record(said(tokenizer, action))
    called = conversation.newest
    before = conversation.num_tokens
    conversation.observe(_answer(0, "3"))
    user = Message(role="user", content="1 + 2?")
    text = tokenizer.render([user, called, *_answer(0, "3")], True, [ADD])
    between = tokenizer.decode(conversation.prompt[before:])
    assert between
    assert text.endswith(between)
    assert "3" in between


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_the_newest_message_is_the_call_unless_it_cannot_be_read(name):
    tokenizer, conversation = tool_tokenizer(name), _conversation(name)
    conversation.observe("1 + 2?")
    conversation.record(said(tokenizer, call_text(name, ("add", '{"a": 1, "b": 2}'))))
    (call,) = conversation.newest["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    conversation.observe(_answer(0, "3"))
    bad = call_text(name, ("add", '{"a": 1'))
    action = conversation.record(said(tokenizer, bad))
    assert conversation.newest == {"role": "assistant", "content": action}
    assert bad == action
    assert len(conversation.parsed.errors) == 1


def test_a_cut_off_call_is_closed_by_tokens_that_are_not_trained():
    tokenizer, conversation = tool_tokenizer("hermes"), _conversation("hermes")
    conversation.observe("1 + 2?")
    conversation.record(result(tokenizer.encode('<tool_call>{"name'), finish_reason="length"))
    before = conversation.num_tokens
    conversation.observe(_answer(0, "not JSON"))
    stop = tokenizer.stop_token_ids[0]
    assert conversation.prompt[before] == stop
    (sample,) = conversation.samples()
    assert sample.num_tokens == before


def test_tools_without_a_template_that_shows_them_are_refused():
    source, stop = CHAT_TEMPLATE, "<|im_end|>"
    TOOL_TEMPLATES["plain"] = (source, stop)
    try:
        conversation = Conversation(tool_tokenizer("plain"), max_context_tokens=100)
        with pytest.raises(EnvironmentFailure, match="chat template does not write tools"):
            conversation.offer([ADD])
        conversation.offer([])
    finally:
        del TOOL_TEMPLATES["plain"]
