"""Thoughts end at their limit, and the answer follows in the same turn."""

import asyncio

import pytest
from support.chat_templates import tokenizer_with
from support.talks import result

from rollart_core.contracts.inference import GenerateRequest
from rollart_core.rollout.conversation import Conversation
from rollart_core.rollout.episode import ThoughtLimit


class Writes:
    """Continues a fixed text, then writes ``click`` and the stop token."""

    def __init__(self, tokenizer, text):
        self.ids = tokenizer.encode(text)
        self.rest = [*tokenizer.encode("click"), tokenizer.stop_token_ids[0]]
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        ids = self.ids if len(self.requests) == 1 else self.rest
        cut = ids[: request.max_new_tokens]
        return result(cut, len(self.requests), "stop" if cut == ids else "length")

    async def release(self, session_id):
        self.released = session_id


def turn(text, *, name="thinks", limit=6, most=40):
    tokenizer = tokenizer_with(name)
    conversation = Conversation(tokenizer, max_context_tokens=1000)
    conversation.observe("one")
    engine = Writes(tokenizer, text)
    limited = ThoughtLimit(engine, tokenizer, tokenizer.thinking, limit)
    request = GenerateRequest("r", conversation.prompt, most, session_id="s", sampling_key=7)
    answer = asyncio.run(limited.generate(request))
    action = conversation.record(answer)
    return tokenizer, engine.requests, answer, action, conversation


@pytest.mark.parametrize("name", ["thinks", "opens"])
def test_a_long_thought_is_ended_by_the_marks_of_the_template(name):
    opening = "<think>\n" if name == "thinks" else ""
    tokenizer, requests, answer, action, conversation = turn(opening + "[1] " * 30, name=name)
    assert action == "click"
    start, stop = answer.inserted
    assert start == 6
    assert tokenizer.decode(answer.token_ids[start:stop]) == "\n</think>\n\n"
    assert conversation.newest["reasoning_content"].startswith("[1]")
    first, second = requests
    assert list(second.token_ids) == [*first.token_ids, *answer.token_ids[:stop]]
    assert first.max_new_tokens == 6
    assert second.max_new_tokens == 40 - stop
    assert second.session_id == "s"
    assert second.sampling_key != first.sampling_key
    assert second.request_id != first.request_id
    (row,) = conversation.samples()
    assert row.num_loss_tokens == len(answer.token_ids) - (stop - start)
    assert set(row.policy_versions[row.loss_mask].tolist()) == {1, 2}


def test_a_thought_that_ended_by_itself_is_not_touched():
    text = "<think>a</think>" + "[1] " * 30
    tokenizer, requests, answer, action, _ = turn(text)
    assert len(requests) == 2  # the answer is longer than the limit of the thought
    assert answer.inserted[0] == answer.inserted[1]
    assert tokenizer.decode(answer.token_ids[:6]) == tokenizer.decode(tokenizer.encode(text)[:6])
    assert action.endswith("click")


def test_a_short_turn_is_one_request():
    _, requests, answer, action, _ = turn("<think>a</think>b<|im_end|>", limit=20)
    assert len(requests) == 1
    assert answer.inserted == (0, 0)
    assert action == "b"


def test_an_answer_without_a_thought_is_continued_without_a_mark():
    _, requests, answer, _, _ = turn("[1] " * 30)
    assert len(requests) == 2
    assert answer.inserted[0] == answer.inserted[1]


def test_without_space_for_an_answer_the_turn_is_cut():
    _, requests, answer, action, _ = turn("<think>" + "[1] " * 30, limit=6, most=8)
    assert len(requests) == 1
    assert (answer.finish_reason, action) == ("length", "")


def test_a_turn_shorter_than_the_limit_is_not_split():
    _, (request,), _, _, _ = turn("<think>" + "[1] " * 30, limit=6, most=5)
    assert request.max_new_tokens == 5
