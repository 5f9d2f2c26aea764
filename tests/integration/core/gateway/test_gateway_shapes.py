"""What the gateway's answers look like: tools, streams, logprobs, and its two other APIs."""

import asyncio
import json

import pytest
from support.gateways import at_gateway
from support.tool_templates import ADD, call_text

from rollart_core.gateway.errors import RequestError
from rollart_core.gateway.formats import response_request, text_request

FAMILIES = ["hermes", "llama3", "mistral"]


def user(text):
    return {"role": "user", "content": text}


def tool_answer(call, content):
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def meet(name, answers, talk, **more):
    """Play ``talk(http)`` at a gateway; return the engine, the session, and what it returned."""

    async def main():
        async with at_gateway(name, answers, **more) as (_, engine, gateway_session, http):
            told = await talk(http)
        return engine, gateway_session, told

    return asyncio.run(main())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_call_is_shown_as_one_and_its_answer_extends_the_row(name):
    async def talk(http):
        first = await http.chat("what is 2 + 3", tools=[ADD])
        said = first["choices"][0]["message"]
        (call,) = said["tool_calls"]
        # programs read arguments and write them anew
        spelled = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
        again = {
            **said,
            "tool_calls": [{**call, "function": {"name": "add", "arguments": spelled}}],
        }
        messages = [user("what is 2 + 3"), again, tool_answer(call, "5")]
        return first, await http.chat(messages, tools=[ADD])

    written = call_text(name, ("add", '{"a": 2,  "b": 3}'))
    engine, gateway_session, (first, second) = meet(name, [written, "5"], talk)
    choice = first["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    function = choice["message"]["tool_calls"][0]["function"]
    assert function["name"] == "add"
    assert json.loads(function["arguments"]) == {"a": 2, "b": 3}
    assert second["choices"][0]["message"]["content"] == "5"
    (sample,) = gateway_session.samples()
    assert set(sample.turn_ids.tolist()) == {-1, 0, 1}
    assert sample.token_ids[: len(engine.requests[1].token_ids)].tolist() == (
        engine.requests[1].token_ids
    )
    assert engine.tokenizer.decode(engine.requests[1].token_ids).count('"b": 3') == 1


def test_a_tool_call_that_is_no_json_stays_text():
    async def talk(http):
        return await http.chat("add", tools=[ADD])

    broken = '<tool_call>\n{"name": "add", "arguments": {"a": }\n</tool_call>'
    _, gateway_session, answer = meet("hermes", [broken], talk)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == broken
    assert "tool_calls" not in choice["message"]
    assert gateway_session.failure is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_malformed_tools_are_400(fields, param):
    async def talk(http):
        return await http.post("chat/completions", {"messages": [user("hi")], **fields})

    _, _, (status, answer) = meet("hermes", [], talk)
    assert (status, answer["error"]["param"]) == (400, param)


def test_tools_that_the_template_cannot_show_are_refused_not_dropped():
    async def talk(http):
        return await http.post("chat/completions", {"messages": [user("hi")], "tools": [ADD]})

    engine, _, (status, answer) = meet("chatml", [], talk)
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert not engine.requests


def test_a_stream_says_what_the_whole_answer_says():
    async def talk(http):
        messages = [user("hi")]
        wanted = {"messages": messages, "stream_options": {"include_usage": True}}
        told = await http.events("chat/completions", {**wanted, "logprobs": True})
        called = await http.events("chat/completions", {**wanted, "tools": [ADD]})
        return told, called

    call = call_text("hermes", ("add", '{"a": 1, "b": 2}'))
    _, gateway_session, (told, called) = meet("hermes", ["a red shirt", f"let me see {call}"], talk)
    deltas = [e["choices"][0]["delta"] for e in told if e["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d.get("content") or "" for d in deltas) == "a red shirt"
    assert told[-2]["choices"][0]["finish_reason"] == "stop"
    assert told[-1]["choices"] == []
    assert told[-1]["usage"]["completion_tokens"] == gateway_session.turns[0].num_new_tokens
    logprobs = [
        p for e in told[:-1] for p in (e["choices"][0]["logprobs"] or {}).get("content", [])
    ]
    assert len(logprobs) == gateway_session.turns[0].num_new_tokens
    (part,) = [c for e in called[:-1] for c in e["choices"][0]["delta"].get("tool_calls", [])]
    assert (part["index"], part["function"]["name"]) == (0, "add")
    assert called[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_logprobs_and_tokens_are_those_that_are_recorded():
    async def talk(http):
        return await http.chat("hi", logprobs=True, return_token_ids=True)

    engine, gateway_session, answer = meet("ours", ["a red shirt"], talk)
    choice = answer["choices"][0]
    (sample,) = gateway_session.samples()
    assert answer["prompt_token_ids"] == engine.requests[0].token_ids
    assert answer["prompt_token_ids"] + choice["token_ids"] == sample.token_ids.tolist()
    said = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert said == sample.inference_logprobs[sample.loss_mask].tolist()


def test_a_stop_text_ends_the_answer_and_the_row():
    async def talk(http):
        return await http.chat("hi", stop=["red"])

    _, gateway_session, answer = meet("ours", ["a red shirt"], talk)
    assert answer["choices"][0]["message"]["content"] == "a "
    assert answer["usage"]["completion_tokens"] == gateway_session.samples()[0].num_loss_tokens < 4


@pytest.mark.parametrize("stop", ["Observation:", "</tool_call>"])
def test_a_stop_text_leaves_the_calls_before_it(stop):
    async def talk(http):
        first = await http.chat("what is 2 + 3", tools=[ADD], stop=[stop])
        said = first["choices"][0]["message"]
        messages = [user("what is 2 + 3"), said, tool_answer(said["tool_calls"][0], "5")]
        await http.chat(messages, tools=[ADD])
        return first["choices"][0]

    written = call_text("hermes", ("add", '{"a": 2, "b": 3}'))
    _, gateway_session, choice = meet(
        "hermes", [f"let me see {written}\nObservation: 6", "5"], talk
    )
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"].strip() == "let me see"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "a": 2,
        "b": 3,
    }
    (sample,) = gateway_session.samples()
    assert set(sample.turn_ids.tolist()) == {-1, 0, 1}


def test_a_stream_of_nothing_but_calls_holds_their_tokens():
    async def talk(http):
        wanted = {"messages": [user("hi")], "tools": [ADD], "return_token_ids": True}
        return await http.events("chat/completions", wanted)

    call = call_text("hermes", ("add", '{"a": 1, "b": 2}'))
    _, gateway_session, events = meet("hermes", [call], talk)
    (sample,) = gateway_session.samples()
    told = [i for e in events for c in e["choices"] for i in c.get("token_ids", [])]
    assert told == sample.token_ids[sample.loss_mask].tolist()


def test_what_the_episode_samples_otherwise_is_said():
    async def talk(http):
        return await http.chat("hi", temperature=0.1, top_p=0.5, presence_penalty=0, seed=3)

    engine, _, answer = meet("ours", [], talk, temperature=0.7)
    assert engine.requests[0].temperature == 0.7
    assert answer["rollart"]["ignored"] == ["temperature", "top_p", "seed"]


def test_the_longest_answer_is_the_least_of_what_was_asked_the_limit_and_the_capacity():
    async def talk(http):
        for more in ({}, {"max_tokens": 3}, {"max_completion_tokens": 999}):
            await http.chat("hi", **more)
        return await http.chat("red shirt " * 10)

    engine, _, answer = meet("ours", ["ok", "ok", "ok", "red " * 9], talk, max_context_tokens=30)
    capacity = [30 - len(r.token_ids) for r in engine.requests]
    assert [r.max_new_tokens for r in engine.requests] == [capacity[0], 3, capacity[2], capacity[3]]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_completions_go_on_with_a_text_or_with_tokens():
    async def talk(http):
        body = {"prompt": "a red", "logprobs": 1, "return_token_ids": True, "max_tokens": 8}
        _, first = await http.post("completions", body)
        text = first["choices"][0]["text"]
        _, second = await http.post("completions", {**body, "prompt": [f"a red{text} shirt"]})
        tokens = second["choices"][0]["prompt_token_ids"] + second["choices"][0]["token_ids"]
        _, third = await http.post("completions", {**body, "prompt": tokens})
        events = await http.events("completions", {"prompt": "other"})
        return first, third, events

    engine, gateway_session, (first, third, events) = meet("ours", [" [red]", "b", "c", "d"], talk)
    choice = first["choices"][0]
    assert engine.requests[0].token_ids == choice["prompt_token_ids"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    assert engine.requests[3].max_new_tokens == 16
    assert events[0]["choices"][0]["text"] == "d"
    grown, other = gateway_session.samples()
    assert grown.token_ids.tolist() == (
        engine.requests[2].token_ids + third["choices"][0]["token_ids"]
    )
    assert set(grown.turn_ids.tolist()) == {-1, 0, 1, 2}
    assert set(other.turn_ids.tolist()) == {-1, 3}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 5}, "logprobs"),
    ],
)
def test_malformed_completions_are_refused(body, param):
    with pytest.raises(RequestError) as refused:
        text_request(body, 400)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0]"),
        ({"input": "a", "previous_response_id": "resp_9"}, "previous_response_id"),
        ({"input": "a", "previous_response_id": [1]}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "text": 5}, "text"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format"),
    ],
)
def test_malformed_responses_are_refused(body, param):
    with pytest.raises(RequestError) as refused:
        response_request(body, {})
    assert refused.value.param == param


def test_a_response_goes_on_from_another_by_its_id_or_by_its_items():
    call = call_text("hermes", ("add", '{"a": 2, "b": 3}'))
    flat = {"type": "function", **ADD["function"]}
    base = {"instructions": "be exact", "tools": [flat]}

    async def talk(http):
        _, first = await http.post("responses", {**base, "input": "2 + 3"})
        call_id = first["output"][-1]["call_id"]
        output = {"type": "function_call_output", "call_id": call_id, "output": "5"}
        more = {**base, "input": [output], "previous_response_id": first["id"]}
        _, second = await http.post("responses", more)
        items = [{"role": "user", "content": "2 + 3"}, *first["output"], output]
        items += [*second["output"], {"role": "user", "content": "thanks"}]
        return first, second, await http.events("responses", {**base, "input": items})

    answers = [f"let me see\n{call}", "it is 5", "ok"]
    _, gateway_session, (first, second, events) = meet("hermes", answers, talk)
    assert [item["type"] for item in first["output"]] == ["message", "function_call"]
    assert second["output"][0]["content"][0]["text"] == "it is 5"
    (sample,) = gateway_session.samples()
    assert set(sample.turn_ids.tolist()) == {-1, 0, 1, 2}
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert "".join(e["delta"] for e in events if e["type"].endswith("text.delta")) == "ok"
    assert events[-1]["type"] == "response.completed"
    assert (
        events[-1]["response"]["usage"]["output_tokens"] == gateway_session.turns[2].num_new_tokens
    )


THOUGHT = "<think>\nhm\n</think>\n\nred"


def test_reasoning_is_a_field_of_its_own_in_chat_answers_and_streams():
    async def talk(http):
        whole = await http.say("a")
        messages = [user("a"), whole, user("b")]
        return whole, await http.events("chat/completions", {"messages": messages})

    _, gateway_session, (whole, chunks) = meet("thinks", [THOUGHT, THOUGHT], talk)
    assert (whole["reasoning_content"], whole["content"]) == ("hm", "red")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[1:3] == [{"reasoning_content": "hm"}, {"content": "red"}]
    assert [turn.reasoning for turn in gateway_session.turns] == ["hm", "hm"]
    assert [turn.action for turn in gateway_session.turns] == ["red", "red"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_in_a_request_is_shown_if_the_template_shows_it(name):
    async def talk(http):
        said = {"role": "assistant", "content": "red", name: "hm"}
        results = [user("a"), said, {"role": "tool", "content": "b", "tool_call_id": "c"}]
        await http.say(results)
        await http.say([user("a"), {**said, name: ""}, user("b")])

    engine, _, _ = meet("thinks", [], talk)
    first, second = [engine.tokenizer.decode(request.token_ids) for request in engine.requests]
    assert "<think>\nhm\n</think>" in first
    assert "<think>" not in second


def test_reasoning_is_an_item_of_a_response():
    async def talk(http):
        status, answer = await http.post("responses", {"input": "a"})
        assert status == 200
        return answer, await http.events("responses", {"input": "a"})

    _, _, (answer, events) = meet("thinks", [THOUGHT, THOUGHT], talk)
    thought, message = answer["output"]
    assert thought["type"] == "reasoning"
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "red"
    kinds = [event["type"] for event in events]
    assert "response.reasoning_text.delta" in kinds
    assert kinds.count("response.output_item.done") == 2
