from dataclasses import replace

import pytest
from support.chat_templates import TEMPLATES, tokenizer_with
from support.talks import result, said, talk

from rollart_core.contracts.inference import GenerateResult
from rollart_core.errors import EnvironmentFailure, InferenceFailure
from rollart_core.models.thinking import History
from rollart_core.rollout.conversation import Conversation
from rollart_core.types import Message, TokenSpan

NAMES = sorted(TEMPLATES.keys() - {"opens"})


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


def test_the_limit_of_a_turn_counts_down_to_zero_and_samples_end_with_the_last_action():
    tokenizer = tokenizer_with("ours")
    conversation = Conversation(tokenizer, max_context_tokens=12)
    conversation.observe("red")
    assert conversation.turn_limit() == 12 - conversation.num_tokens
    assert conversation.turn_limit(2) == 2
    conversation.record(said(tokenizer, "red"))
    num_tokens = conversation.num_tokens
    conversation.observe("[1][2][3][4]")
    assert conversation.turn_limit(2) == conversation.turn_limit() == 0
    assert conversation.num_tokens > 12
    assert conversation.samples()[0].num_tokens == num_tokens


def test_the_prompt_given_out_is_not_changed_afterwards():
    tokenizer = tokenizer_with("ours")
    conversation = Conversation(tokenizer, max_context_tokens=100)
    conversation.observe("red")
    prompt = conversation.prompt
    kept = prompt[:]
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


def thoughts(n, answers="abc"):
    return [f"<think>\nhm {i}\n</think>\n\n{answers[i]}" for i in range(n)]


def test_a_thought_is_apart_from_the_action_and_stays_in_the_row():
    tokenizer, conversation, prompts, actions = talk(
        "thinks", ["one", "two", "three"], thoughts(3), History("tool")
    )
    assert actions == ["a", "b", "c"]
    assert conversation.newest == {
        "role": "assistant",
        "content": "c",
        "reasoning_content": "hm 2",
    }
    (row,) = conversation.samples()
    text = tokenizer.decode(prompts[2])
    assert "<think>\nhm 0\n</think>\n\na<|im_end|>\n<|im_start|>user\n[two]<|im_end|>" in text
    assert text.startswith("<|im_start|>user\none<|im_end|>")
    assert set(row.turn_ids.tolist()) == {-1, 0, 1, 2}


def test_user_messages_begin_a_row_in_each_turn_without_earlier_thoughts():
    tokenizer, conversation, prompts, _ = talk("thinks", ["one", "two", "three"], thoughts(3))
    assert len(conversation.samples()) == 3
    assert "hm" not in tokenizer.decode(prompts[2])


@pytest.mark.parametrize("name", ["thinks", "forgets_thinking", "opens"])
def test_kept_thinking_keeps_every_turn_as_it_was_sampled(name):
    answers = [" <think>odd  spaces </think> a", "no thought", *thoughts(3)[2:]]
    if name == "opens":
        answers = [answer.replace("<think>", "").replace("no", "</think>no") for answer in answers]
    tokenizer, conversation, prompts, _ = talk(
        name, ["one", "two", "three"], answers, History(keeps_thinking=True)
    )
    (row,) = conversation.samples()
    texts = [tokenizer.decode(row.token_ids[row.turn_ids == turn].tolist()) for turn in range(3)]
    assert texts == [f"{answer}<|im_end|>" for answer in answers]
    start = "<think>\n" if name == "opens" else ""
    between = f"\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n{start}"
    assert prompts[1][len(prompts[0]) :] == tokenizer.encode(f"{texts[0]}{between}")


def test_without_thinking_the_empty_thought_of_each_prompt_is_kept():
    off = {"enable_thinking": False}
    kept = History(keeps_thinking=True)
    tokenizer, conversation, prompts, _ = talk("thinks", ["one", "two"], ["a", "b"], kept, **off)
    assert len(conversation.samples()) == 1
    assert tokenizer.decode(prompts[1]).count("<think>\n\n</think>\n\n") == 2
    _, conversation, prompts, _ = talk("thinks", ["one", "two"], ["a", "b"], **off)
    assert len(conversation.samples()) == 2
    assert tokenizer.decode(prompts[1]).count("<think>\n\n</think>\n\n") == 1


def test_chat_messages_of_an_observation_keep_their_roles():
    more = [Message(role="user", content="two")]
    tokenizer, _, prompts, _ = talk("thinks", ["one", more], thoughts(2)[:2], History("tool"))
    assert "[two]" not in tokenizer.decode(prompts[1])


def test_a_cut_thought_is_no_action():
    _, conversation, _, actions = talk("opens", ["one", "two"], ["never ends", "x</think>b"])
    assert actions == ["", "b"]
    assert len(conversation.samples()) == 2


def test_tokens_inserted_into_a_turn_are_not_trained():
    def limited(tokenizer):
        ids = tokenizer.encode("<think>hm</think>a<|im_end|>")
        mark = ids.index(tokenizer.encode("</think>")[0])
        return replace(result(ids), inserted=(mark, mark + 1))

    tokenizer, conversation, _, actions = talk("thinks", ["one"], [limited])
    assert actions == ["a"]
    (row,) = conversation.samples()
    (mark,) = [i for i, t in enumerate(row.token_ids) if t == tokenizer.encode("</think>")[0]]
    around = slice(mark - 1, mark + 2)
    assert row.loss_mask[around].tolist() == [True, False, True]
    assert row.turn_ids[around].tolist() == [0, -1, 0]
    assert row.policy_versions[around].tolist() == [0, -1, 0]
    assert row.inference_logprobs[mark - 1] != 0
