"""What programs do with the `openai` package; run by an interpreter that has it, prints JSON."""

import json

import openai

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def agent(client):
    """A loop with a tool, until the policy says something."""
    messages = [{"role": "user", "content": "what is 2 + 3?"}]
    while True:
        answer = client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            total = sum(json.loads(call.function.arguments).values())
            result = {"role": "tool", "tool_call_id": call.id, "content": str(total)}
            messages.append(result)


def streamed(client):
    """The text and the usage of a stream."""
    stream = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "tell me"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return [text, chunks[-1].usage.completion_tokens]


def shapes(client):
    """One answer of each other kind."""
    chat = client.chat.completions.create(
        model="m", messages=[{"role": "developer", "content": "a"}], logprobs=True, max_tokens=4
    )
    text = client.completions.create(model="m", prompt="a red", logprobs=1)
    first = client.responses.create(model="m", input="hello", instructions="be kind")
    more = client.responses.create(
        model="m", input="again", instructions="be kind", previous_response_id=first.id
    )
    with client.responses.stream(model="m", input="streamed") as stream:
        told = stream.get_final_response()
    return {
        "logprobs": [each.logprob for each in chat.choices[0].logprobs.content],
        "text": text.choices[0].text,
        "responses": [first.output_text, more.output_text, told.output_text],
        "models": [model.id for model in client.models.list()],
    }


def refused(ask):
    """The class of the error, its code, and what came of it."""
    try:
        ask()
    except openai.APIStatusError as e:
        return [type(e).__name__, e.status_code, e.code]
    return None


def main():
    """Ask everything in turn."""
    client = openai.OpenAI()
    hi = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    told = {"agent": agent(client), "stream": streamed(client), **shapes(client)}
    chat = client.chat.completions
    wrong = openai.OpenAI(api_key="sk-wrong").chat.completions
    told["refused"] = {
        "key": refused(lambda: wrong.create(**hi)),
        "n": refused(lambda: chat.create(**hi, n=2)),
        "long": refused(
            lambda: chat.create(
                model="m", messages=[{"role": "user", "content": "red shirt " * 2000}]
            )
        ),
        "path": refused(lambda: client.embeddings.create(model="m", input="a")),
        "engine": refused(lambda: client.with_options(max_retries=0).chat.completions.create(**hi)),
        "retried": refused(lambda: chat.create(**hi)),
        "turns": refused(lambda: [chat.create(**hi) for _ in range(50)]),
    }
    print(json.dumps(told))


main()
