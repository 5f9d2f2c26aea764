import pytest
from support.chat_templates import tokenizer_with
from support.talks import result, said

from rollart_core.errors import InferenceFailure
from rollart_core.gateway.transcript import Transcript
from rollart_core.models.thinking import FOLLOWED, History
from rollart_core.types import Message


def user(text):
    return Message(role="user", content=text)


def assistant(text):
    return Message(role="assistant", content=text)


class Talk:
    """A program and its policy, in one."""

    def __init__(self, name="chatml", history=FOLLOWED):
        self.tokenizer = tokenizer_with(name)
        self.transcript = Transcript(self.tokenizer, max_context_tokens=10_000, history=history)

    def ask(self, *messages):
        return self.transcript.ask(messages)

    def answer(self, ask, text, **more):
        return self.transcript.record(ask, said(self.tokenizer, text), **more)

    def say(self, *messages, answer):
        """Ask and answer; return the prompt and the message."""
        ask = self.ask(*messages)
        return list(ask.token_ids), self.answer(ask, answer).message

    def samples(self):
        return self.transcript.samples()


def turns_of(sample):
    return sorted(set(sample.turn_ids.tolist()) - {-1})


def test_what_follows_a_recorded_conversation_extends_its_row():
    talk = Talk()
    first, one = talk.say(user("a"), answer="red")
    second, two = talk.say(user("a"), one, user("b"), answer="large")
    assert second[: len(first)] == first
    (sample,) = talk.samples()
    assert turns_of(sample) == [0, 1]
    assert talk.transcript.messages == [user("a"), one, user("b"), two]


def test_history_rewritten_at_its_end_branches_from_the_tokens_before():
    talk = Talk()
    _, one = talk.say(user("a"), answer="red")
    second, _ = talk.say(user("a"), one, user("b"), answer="large")
    third, _ = talk.say(user("a"), one, user("c"), answer="ok")
    whole, branch = talk.samples()
    assert turns_of(whole) == [0, 1]
    assert turns_of(branch) == [2]  # what both begin with is trained once
    assert branch.token_ids[: len(third)].tolist() == third
    num_common = next(i for i, (a, b) in enumerate(zip(second, third, strict=False)) if a != b)
    assert whole.token_ids[:num_common].tolist() == third[:num_common]


def test_a_branch_keeps_what_was_sampled_token_for_token():
    talk = Talk()
    odd = [i for letter in "red" for i in talk.tokenizer.encode(letter)]
    assert odd != talk.tokenizer.encode("red")
    ask = talk.ask(user("a"))
    sampled = [*odd, talk.tokenizer.stop_token_ids[0]]
    one = talk.transcript.record(ask, result(sampled)).message
    row = [*ask.token_ids, *sampled]
    for text in ("b", "c"):
        prompt, _ = talk.say(user("a"), one, user(text), answer="ok")
        assert list(prompt[: len(row)]) == row


def test_an_edited_answer_begins_a_new_sample_that_is_rendered_afresh():
    talk = Talk()
    talk.say(user("a"), answer="red")
    messages = [user("a"), assistant("large"), user("b")]
    prompt, _ = talk.say(*messages, answer="ok")
    assert talk.tokenizer.decode(prompt) == talk.tokenizer.render(messages, True)
    assert [turns_of(s) for s in talk.samples()] == [[0], [1]]


def test_the_same_asked_twice_at_once_is_two_samples():
    talk = Talk()
    _, one = talk.say(user("a"), answer="red")
    more = [user("a"), one, user("b")]
    first, second = talk.ask(*more), talk.ask(*more)
    assert first.token_ids == second.token_ids
    assert first.session != second.session
    two = talk.answer(second, "large").message
    talk.answer(first, "small")
    talk.say(*more, two, user("c"), answer="ok")
    assert [turns_of(s) for s in talk.samples()] == [[0, 2], [1, 3]]


def test_equal_answers_of_two_branches_are_gone_on_with_in_turn():
    talk = Talk()
    asks = [talk.ask(user("a")), talk.ask(user("a"))]
    one, same = [talk.answer(ask, "red").message for ask in asks]
    assert one == same
    again = [talk.ask(user("a"), one, user(t)) for t in "bcd"]
    assert [a.session for a in again] == [0, 1, 2]


def test_a_dropped_request_leaves_no_trace():
    talk = Talk()
    _, one = talk.say(user("a"), answer="red")
    ask = talk.ask(user("a"), one, user("b"))
    talk.transcript.drop(ask)
    talk.transcript.drop(talk.ask(user("other")))
    again = talk.ask(user("a"), one, user("b"))
    assert (again.token_ids, again.session) == (ask.token_ids, ask.session)
    talk.answer(again, "ok")
    assert [turns_of(s) for s in talk.samples()] == [[0, 1]]


def test_an_answer_that_does_not_add_up_is_dropped():
    talk = Talk()
    ask = talk.ask(user("a"))
    bad = result(talk.tokenizer.encode("red"))
    bad.inference_logprobs.pop()
    with pytest.raises(InferenceFailure):
        talk.transcript.record(ask, bad)
    assert (talk.samples(), talk.transcript.num_turns) == ((), 0)
    talk.say(user("a"), answer="ok")


def test_a_template_that_forgets_thinking_is_gone_back_to_before_it_did():
    talk = Talk("forgets_thinking")
    _, one = talk.say(user("a"), answer="<think>hm</think>red")
    second, two = talk.say(user("a"), one, user("b"), answer="ok")
    assert "hm" not in talk.tokenizer.decode(second)
    third, _ = talk.say(user("a"), one, user("c"), answer="large")
    assert talk.tokenizer.decode(third) == talk.tokenizer.render([user("a"), one, user("c")], True)
    talk.say(user("a"), one, user("b"), two, user("d"), answer="ok")
    assert [turns_of(s) for s in talk.samples()] == [[0], [1, 3], [2]]


def test_tools_are_part_of_what_a_conversation_is():
    talk = Talk()
    _, one = talk.say(user("a"), answer="red")
    tool = {"type": "function", "function": {"name": "add"}}
    ask = talk.transcript.ask([user("a"), one, user("b")], [tool])
    assert (ask.num_known, ask.session) == (0, 1)


@pytest.mark.parametrize(
    ("text", "stop", "shown", "kept"),
    [
        ("click red shirt", ["red"], "click ", "click red"),
        ("click[red][large]", ["[", "]"], "click", "click["),
        ("click", ["red"], "click", "click"),
        ("red", ["red"], "", "red"),
    ],
)
def test_a_stop_text_cuts_the_row_after_the_token_that_completes_it(text, stop, shown, kept):
    talk = Talk()
    ask = talk.ask(user("a"))
    answer = talk.answer(ask, text, stop=stop)
    assert answer.message["content"] == shown
    (sample,) = talk.samples()
    sampled = sample.token_ids[len(ask.token_ids) :].tolist()
    assert talk.tokenizer.decode(sampled, True) == kept
    assert len(answer.result.inference_logprobs) == len(sampled)
    assert answer.result.spans[-1].stop == len(sampled)
    follow = talk.ask(user("a"), answer.message, user("b"))
    assert list(follow.token_ids[: sample.num_tokens]) == sample.token_ids.tolist()


def test_raw_completions_go_on_from_their_tokens():
    talk = Talk()
    ask = talk.transcript.ask_text("a red ")
    odd = [i for letter in "red" for i in talk.tokenizer.encode(letter)]
    answer = talk.transcript.record(ask, result(odd, finish_reason="length"))
    assert talk.transcript.messages == [user("a red "), assistant(answer.text)]
    more = talk.transcript.ask_text(f"a red {answer.text} [large]")
    assert list(more.token_ids) == [*ask.token_ids, *odd, *talk.tokenizer.encode(" [large]")]
    other = talk.transcript.ask_text("a large")
    assert list(other.token_ids) == talk.tokenizer.encode("a large")
    tokens = talk.transcript.ask_text(ask.token_ids)
    assert tokens.token_ids == ask.token_ids


def test_a_raw_completion_goes_on_from_the_text_that_its_tokens_are_of():
    talk = Talk()
    asks = [talk.transcript.ask_text("a ") for _ in range(2)]
    (r,), (e,) = talk.tokenizer.encode("red"), talk.tokenizer.encode("]")
    talk.transcript.record(asks[0], result([r, talk.tokenizer.stop_token_ids[0]]))
    talk.transcript.record(asks[1], result([r, e], finish_reason="length"))
    talk.answer(talk.transcript.ask_text("a red[large]"), "ok")
    more = talk.transcript.ask_text("a red] [large]")
    assert list(more.token_ids) == [*asks[1].token_ids, r, e, *talk.tokenizer.encode(" [large]")]


def test_an_answer_sent_back_without_its_reasoning_continues_its_row():
    talk = Talk("thinks", History(keeps_thinking=True))
    first, one = talk.say(user("a"), answer="<think>\nhm\n</think>\n\nred")
    assert one == {"role": "assistant", "content": "red", "reasoning_content": "hm"}
    second, _ = talk.say(user("a"), assistant("red"), user("b"), answer="large")
    assert second[: len(first)] == first
    third, _ = talk.say(user("a"), one, user("b"), assistant("large"), user("c"), answer="ok")
    assert third[: len(second)] == second
    (sample,) = talk.samples()
    assert turns_of(sample) == [0, 1, 2]


def test_other_reasoning_is_another_conversation():
    talk = Talk("thinks", History(keeps_thinking=True))
    _, one = talk.say(user("a"), answer="<think>\nhm\n</think>\n\nred")
    talk.say(user("a"), {**one, "reasoning_content": "other"}, user("b"), answer="large")
    assert len(talk.samples()) == 2


def test_the_template_decides_over_thoughts_that_a_program_sends():
    talk = Talk("thinks")
    thought = {**assistant("red"), "reasoning_content": "hm"}
    prompt, _ = talk.say(user("a"), thought, {"role": "tool", "content": "b"}, answer="ok")
    assert "<think>\nhm\n</think>" in talk.tokenizer.decode(prompt)
    prompt, _ = talk.say(user("a"), thought, user("b"), answer="ok")
    assert "hm" not in talk.tokenizer.decode(prompt)


def test_a_stop_text_cuts_the_answer_and_keeps_the_reasoning():
    talk = Talk("thinks")
    ask = talk.ask(user("a"))
    answer = talk.answer(ask, "<think>hm</think>red STOP large", stop=["STOP"])
    assert (answer.message["content"], answer.text) == ("red ", "red ")
    assert answer.message["reasoning_content"] == "hm"


def test_a_raw_completion_is_not_taken_apart():
    talk = Talk("thinks")
    ask = talk.transcript.ask_text("a")
    answer = talk.answer(ask, "<think>hm</think>red")
    assert answer.message == assistant("<think>hm</think>red")
