import numpy as np
import pytest
from chat_templates import TEMPLATES, tokenizer_with
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart_core.contracts.inference import GenerateResult
from rollart_core.errors import EnvironmentFailure, InferenceFailure
from rollart_core.rollout.conversation import Conversation
from rollart_core.types import Message, TokenSpan

NAMES = sorted(TEMPLATES)
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


def result(token_ids, version=0, finish_reason="stop"):
    n = len(token_ids)
    spans = (TokenSpan(0, n, version),) if n else ()
    logprobs = [-0.5 - 0.25 * i for i in range(n)]
    return GenerateResult(list(token_ids), logprobs, spans, finish_reason)


def said(tokenizer, text, version=0):
    return result([*tokenizer.encode(text), tokenizer.stop_token_ids[0]], version)


def talk(name, observations, answers):
    """Play the turns; return tokenizer, conversation, prompts and action texts."""
    tokenizer = tokenizer_with(name)
    conversation = Conversation(tokenizer, max_context_tokens=10_000)
    prompts, actions = [], []
    for turn, (observation, answer) in enumerate(zip(observations, answers, strict=True)):
        conversation.observe(observation)
        prompts.append(conversation.prompt)
        answer = answer(tokenizer) if callable(answer) else answer
        sampled = said(tokenizer, answer, turn) if isinstance(answer, str) else answer
        actions.append(conversation.record(sampled))
    return tokenizer, conversation, prompts, actions


@given(st.sampled_from(NAMES), st.data())
@settings(max_examples=40, deadline=None)
def test_what_was_sampled_is_in_the_rows_as_it_was_and_marked(name, data):
    tokenizer = tokenizer_with(name)
    ids = st.integers(0, tokenizer.vocab_size - 1)
    turns = data.draw(st.lists(st.tuples(plain_texts, st.lists(ids, max_size=6)), max_size=5))
    conversation = Conversation(tokenizer, max_context_tokens=10_000)
    for turn, (observation, token_ids) in enumerate(turns):
        conversation.observe(observation)
        before = conversation.prompt
        conversation.record(result(token_ids, version=10 + turn))
        assert conversation.prompt == before + token_ids
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
    st.sampled_from(NAMES), st.lists(st.tuples(plain_texts, plain_texts), min_size=1, max_size=4)
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


@pytest.mark.parametrize("name", NAMES)
def test_a_later_turn_extends_the_row(name):
    _, conversation, prompts, _ = talk(name, ["one", "two", "three"], ["a", "b", "c"])
    first, second, third = prompts
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert len(conversation.samples()) == 1


def test_our_template_takes_two_tokens_a_turn_besides_the_stop_token():
    tokenizer, _, (first, second), _ = talk("ours", ["red", "red"], ["red", "red"])
    red = tokenizer.encode("red")
    assert len(first) == len(red) + 2
    assert len(second) == len(first) + len(red) + 1 + len(red) + 1


def test_a_template_that_forgets_thinking_begins_a_new_sample():
    thought = "<think>\nhm\n</think>\n\nclick[red]"
    tokenizer, conversation, prompts, _ = talk(
        "forgets_thinking", ["one", "two", "three"], [thought, "plain", "c"]
    )
    assert "hm" not in tokenizer.decode(prompts[1])
    assert prompts[2][: len(prompts[1])] == prompts[1]
    first, second = conversation.samples()
    kept = first.token_ids[first.loss_mask].tolist()
    assert tokenizer.decode(kept) == thought + "<|im_end|>"
    assert set(second.turn_ids.tolist()) == {-1, 1, 2}
    assert set(second.policy_versions.tolist()) == {-1, 1, 2}


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_cut_off_is_closed_by_tokens_that_are_not_trained(name):
    tokenizer, conversation, prompts, actions = talk(
        name, ["one", "two"], [lambda t: result(t.encode("click"), finish_reason="length"), "b"]
    )
    assert actions[0] == "click"
    (row,) = conversation.samples()
    closing = len(prompts[0]) + len(tokenizer.encode("click"))
    assert row.token_ids[closing] == tokenizer.stop_token_ids[0]
    assert not row.loss_mask[closing]


def test_an_empty_completion_leaves_a_turn_without_tokens():
    tokenizer, conversation, prompts, actions = talk("ours", ["one", "two"], [result([]), "b"])
    assert actions[0] == ""
    text = "<|user|>one<|assistant|><|end|>two<|assistant|>"
    assert tokenizer.decode(prompts[1]) == text
    (row,) = conversation.samples()
    assert set(row.turn_ids.tolist()) == {-1, 1}


def test_text_that_only_looks_like_a_special_token_is_never_encoded_again():
    tokenizer = tokenizer_with("ours")
    spelled = [i for piece in ("<|", "end", "|>") for i in tokenizer.encode(piece)]
    stop = tokenizer.stop_token_ids[0]
    _, _, prompts, actions = talk("ours", ["one", "two"], [result([*spelled, stop]), "b"])
    assert actions[0] == "<|end|>"
    assert prompts[1][: len(prompts[0]) + len(spelled) + 1] == [*prompts[0], *spelled, stop]


def test_a_character_cut_in_two_is_replaced_in_the_action_only():
    tokenizer = tokenizer_with("ours")
    half = tokenizer.encode("漢")[:-1]
    _, _, prompts, actions = talk("ours", ["one", "two"], [result(half), "b"])
    assert "�" in actions[0]
    assert prompts[1][len(prompts[0]) : len(prompts[0]) + len(half)] == half


def test_special_tokens_inside_an_answer_stay_in_the_row_but_not_in_the_action():
    tokenizer = tokenizer_with("ours")
    user = tokenizer.encode("<|user|>")
    ids = [*tokenizer.encode("red"), *user, *tokenizer.encode("red"), tokenizer.stop_token_ids[0]]
    _, _, prompts, actions = talk("ours", ["one", "two"], [result(ids), "b"])
    assert "<|user|>" not in actions[0]
    assert prompts[1][len(prompts[0]) :][: len(ids)] == ids


def test_white_space_the_template_trims_stays_as_it_was_sampled():
    tokenizer, conversation, prompts, actions = talk("trims", ["one", "two"], [" red\n", "b"])
    assert actions[0] == " red\n"
    assert len(conversation.samples()) == 1
    assert tokenizer.decode(prompts[1]).count("red\n<|eot_id|>") == 1


def test_messages_with_a_system_prompt_are_shown():
    system = [Message(role="system", content="be brief"), Message(role="user", content="one")]
    tokenizer, _, prompts, _ = talk("ours", [system, "two"], ["a", "b"])
    assert tokenizer.decode(prompts[0]) == "<|system|>be brief<|user|>one<|assistant|>"
    assert prompts[1][: len(prompts[0])] == prompts[0]


def test_messages_are_folded_for_a_template_that_wants_alternation():
    system = [Message(role="system", content="be brief"), Message(role="user", content="one")]
    twice = [Message(role="user", content="two"), Message(role="user", content="three")]
    tokenizer, conversation, prompts, _ = talk("alternates", [system, twice], ["a", "b"])
    assert (
        tokenizer.decode(prompts[0])
        == "<|im_start|>user:be brief\n\none<|im_end|><|im_start|>assistant:"
    )
    assert "user:two\n\nthree<|im_end|>" in tokenizer.decode(prompts[1])
    assert len(conversation.samples()) == 1


def test_messages_no_folding_helps_are_the_environments_fault():
    conversation = Conversation(tokenizer_with("alternates"), max_context_tokens=100)
    with pytest.raises(EnvironmentFailure, match="refuses the messages"):
        conversation.observe([Message(role="assistant", content="me first")])


def test_two_observations_in_a_row_begin_a_fresh_row():
    tokenizer = tokenizer_with("ours")
    conversation = Conversation(tokenizer, max_context_tokens=100)
    conversation.observe("one")
    conversation.observe("two")
    assert tokenizer.decode(conversation.prompt) == "<|user|>one<|user|>two<|assistant|>"
    assert conversation.samples() == ()


def test_room_counts_down_to_zero_and_samples_end_with_the_last_action():
    tokenizer = tokenizer_with("ours")
    conversation = Conversation(tokenizer, max_context_tokens=12)
    conversation.observe("red")
    assert conversation.room() == 12 - conversation.num_tokens
    conversation.record(said(tokenizer, "red"))
    num_tokens = conversation.num_tokens
    conversation.observe("[1][2][3][4]")
    assert conversation.room() == 0
    assert conversation.num_tokens > 12
    assert conversation.samples()[0].num_tokens == num_tokens


def test_the_prompt_given_out_is_not_changed_afterwards():
    tokenizer = tokenizer_with("ours")
    conversation = Conversation(tokenizer, max_context_tokens=100)
    conversation.observe("red")
    prompt = conversation.prompt
    kept = list(prompt)
    conversation.record(said(tokenizer, "red"))
    assert prompt == kept


@pytest.mark.parametrize(
    "bad",
    [
        GenerateResult([5, 6], [0.0], (TokenSpan(0, 2, 0),), "stop"),
        GenerateResult([5, 6], [0.0, 0.0], (TokenSpan(0, 1, 0),), "stop"),
        GenerateResult([5, 6], [0.0, 0.0], (), "stop"),
    ],
)
def test_an_engine_that_does_not_account_for_all_tokens_is_refused(bad):
    conversation = Conversation(tokenizer_with("ours"), max_context_tokens=100)
    conversation.observe("red")
    with pytest.raises(InferenceFailure, match="generate"):
        conversation.record(bad)


@pytest.mark.parametrize(("name", "num_renderings"), [("ours", 0), ("chatml", 0), ("trims", 4)])
def test_a_plain_template_is_rendered_once_for_all_episodes(name, num_renderings, monkeypatch):
    tokenizer, *_ = talk(name, ["one", "two", "three"], ["a", "b", "c"])
    calls = []
    render = tokenizer.template.render
    monkeypatch.setattr(
        tokenizer.template,
        "render",
        lambda *args, **kwargs: calls.append(1) or render(*args, **kwargs),
    )
    _, _, prompts, _ = talk(name, ["four", "five", "six"], ["d", "e", "f"])
    assert len(calls) - 1 <= num_renderings
    assert "six" in tokenizer.decode(prompts[2])
