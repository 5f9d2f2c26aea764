"""The gateway over real HTTP, in front of an engine that answers from a script."""

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
from support.gateways import TICKET, Http, at_gateway
from support.pace import scaled
from support.talks import result

from rollart_core.errors import InferenceFailure
from rollart_core.gateway.gateway import Gateway, GatewaySettings
from rollart_core.gateway.session import HEAVY_CHARS, KEPT_SESSIONS


def user(text):
    return {"role": "user", "content": text}


def test_a_conversation_that_grows_is_one_row_and_its_answers_are_its_samples():
    async def main():
        async with at_gateway(answers=["one", "two"]) as (_, engine, gateway_session, http):
            first = await http.say("hello")
            talk = [user("hello"), first, user("again")]
            second = await http.chat(talk, model="anything")
            assert second["choices"][0]["finish_reason"] == "stop"
            return engine, gateway_session, first, second

    engine, gateway_session, first, second = asyncio.run(main())
    assert (first["role"], first["content"]) == ("assistant", "one")
    (sample,) = gateway_session.samples()
    asked = engine.requests[1]
    assert sample.token_ids[: len(asked.token_ids)].tolist() == asked.token_ids
    assert set(sample.turn_ids.tolist()) == {-1, 0, 1}
    assert second["usage"]["prompt_tokens"] == len(asked.token_ids)
    assert [t.action for t in gateway_session.turns] == ["one", "two"]
    assert [t.observation for t in gateway_session.turns] == ["hello", "again"]
    assert [m["content"] for m in gateway_session.messages] == ["hello", "one", "again", "two"]
    assert (gateway_session.truncated, gateway_session.failure) == (False, None)
    assert engine.released == ["g0.0#0"]


def test_a_wrong_key_is_401_and_that_of_an_ended_episode_410():
    async def main():
        async with at_gateway() as (gateway, _, gateway_session, http):
            body = {"messages": [user("hi")]}
            async with gateway.episode(TICKET, gateway_session.limits) as other:
                elsewhere = await http.post("chat/completions", body, base_url=other.base_url)
                dead = other.api_key
            answers = [elsewhere]
            for key in ("", "sk-no", dead):
                answers.append(await http.post("chat/completions", body, key=key))
            shared = f"{gateway.url}/v1"
            assert (await http.post("chat/completions", body, base_url=shared))[0] == 200
            return answers

    answers = asyncio.run(main())
    assert [status for status, _ in answers] == [401, 401, 401, 410]
    assert [a["error"]["code"] for _, a in answers] == [*["invalid_api_key"] * 3, "episode_over"]


def test_a_spent_budget_is_429_and_the_episode_truncated():
    async def main():
        async with at_gateway(max_turns=1) as (_, engine, gateway_session, http):
            await http.say("hi")
            assert not gateway_session.truncated
            status, answer = await http.post("chat/completions", {"messages": [user("more")]})
            assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
            assert gateway_session.truncated
            assert len(engine.requests) == len(gateway_session.turns) == 1

    asyncio.run(main())


def test_messages_beyond_the_context_are_400_and_the_episode_truncated():
    async def main():
        async with at_gateway(max_context_tokens=40) as (_, engine, gateway_session, http):
            status, answer = await http.post(
                "chat/completions", {"messages": [user("red shirt " * 40)]}
            )
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert gateway_session.truncated
            assert gateway_session.failure is None
            assert not engine.requests
            assert (await http.say("red"))["content"] == "ok"  # it may go on with what fits
            assert not gateway_session.truncated

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"\xff\xfe{}", None),
        (b"[]", None),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', None),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "messages[0].content[0]"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
        ({"messages": [user("hi")], "n": 2}, "n"),
        ({"messages": [user("hi")], "max_tokens": 0}, "max_tokens"),
        ({"messages": [user("hi")], "max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"messages": [user("hi")], "stop": [1]}, "stop"),
        ({"messages": [user("hi")], "stream": "yes"}, "stream"),
        ({"messages": [user("hi")], "temperature": "hot"}, "temperature"),
        ({"messages": [user("hi")], "top_logprobs": 5, "logprobs": True}, "top_logprobs"),
        ({"messages": [user("hi")], "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_malformed_body_is_400_and_names_its_field(body, param):
    async def main():
        async with at_gateway() as (_, engine, gateway_session, http):
            status, answer = await http.post("chat/completions", body)
            assert (status, answer["error"]["param"]) == (400, param)
            assert answer["error"]["type"] == "invalid_request_error"
            assert not engine.requests
            assert (gateway_session.turns, gateway_session.truncated, gateway_session.failure) == (
                [],
                False,
                None,
            )

    asyncio.run(main())


def test_a_client_that_hangs_up_ends_its_generation_and_leaves_no_trace():
    async def main():
        async with at_gateway() as (_, engine, gateway_session, http):
            engine.gate = asyncio.Event()
            task = asyncio.ensure_future(http.say("hi"))
            while not engine.requests:
                await asyncio.sleep(0)
            task.cancel()
            while not engine.num_cancelled:
                await asyncio.sleep(0.001)
            engine.gate.set()
            await http.say("hi")
            assert gateway_session.num_hung_up == 1
            assert (
                len(gateway_session.turns),
                len(gateway_session.samples()),
                gateway_session.failure,
            ) == (1, 1, None)

    asyncio.run(main())


def test_an_engine_that_fails_is_503_and_the_episode_failed_until_asked_again():
    async def main():
        answers = [InferenceFailure("gone", boundary="generate"), "well"]
        async with at_gateway(answers=answers) as (_, _, gateway_session, http):
            status, answer = await http.post("chat/completions", {"messages": [user("hi")]})
            assert (status, answer["error"]["type"]) == (503, "server_error")
            assert gateway_session.failure is not None
            assert gateway_session.failure.message == "gone"
            assert (await http.say("hi"))["content"] == "well"
            assert gateway_session.failure is None

    asyncio.run(main())


def test_an_engine_that_is_late_is_504_and_the_failure_a_timeout():
    async def main():
        async with at_gateway(generate_s=0.05) as (_, engine, gateway_session, http):
            engine.gate = asyncio.Event()
            status, answer = await http.post("chat/completions", {"messages": [user("hi")]})
            assert (status, answer["error"]["code"]) == (504, "engine_error")
            assert engine.num_cancelled == 1
            assert gateway_session.num_hung_up == 0
            assert gateway_session.failure is not None
            assert gateway_session.failure.kind == "timeout"

    asyncio.run(main())


def test_an_answer_that_was_aborted_is_none():
    async def main():
        async with at_gateway(answers=[result([1], finish_reason="abort")]) as (
            _,
            _,
            gateway_session,
            http,
        ):
            status, _ = await http.post("chat/completions", {"messages": [user("hi")]})
            assert status == 503
            assert gateway_session.failure is not None
            assert gateway_session.failure.kind == "cancelled"
            assert not gateway_session.samples()

    asyncio.run(main())


def test_a_fault_of_the_gateway_itself_is_500_and_the_episode_failed():
    async def main():
        async with at_gateway(answers=[result([1, 2])]) as (_, _, gateway_session, http):
            gateway_session.limits = None  # as if the code were wrong
            status, answer = await http.post("chat/completions", {"messages": [user("hi")]})
            assert (status, answer["error"]["type"]) == (500, "server_error")
            assert gateway_session.failure is not None
            assert gateway_session.failure.boundary == "gateway"

    asyncio.run(main())


def test_only_so_many_sessions_are_kept():
    async def main():
        async with at_gateway() as (_, engine, _, http):
            for number in range(KEPT_SESSIONS + 2):
                await http.say(f"summary {number}")
            assert engine.released == ["g0.0#0", "g0.0#0~1"]
            await http.say("summary 2")
        assert len(engine.released) == len(set(engine.released)) == KEPT_SESSIONS + 3

    asyncio.run(main())


def test_no_more_is_answered_than_there_are_turns_while_sessions_are_released():
    async def main():
        async with at_gateway(max_turns=KEPT_SESSIONS + 2) as (_, engine, gateway_session, http):
            for number in range(KEPT_SESSIONS):
                await http.say(f"summary {number}")
            at_once = [{"messages": [user(f"more {number}")]} for number in range(6)]
            release, gate = engine.release, asyncio.Event()

            async def slowly(session_id):
                await gate.wait()
                await release(session_id)

            engine.release = slowly
            asked = [asyncio.ensure_future(http.post("chat/completions", b)) for b in at_once]
            await asyncio.wait(asked, timeout=scaled(60), return_when=asyncio.FIRST_COMPLETED)
            gate.set()
            statuses = sorted(status for status, _ in await asyncio.gather(*asked))
            assert statuses == [200, 200, 429, 429, 429, 429]
            assert len(gateway_session.turns) == len(engine.requests) == KEPT_SESSIONS + 2

    asyncio.run(main())


def test_what_waits_for_a_session_when_the_episode_ends_is_not_generated():
    async def main():
        async with at_gateway() as (_, engine, gateway_session, http):
            for number in range(KEPT_SESSIONS):
                await http.say(f"summary {number}")
            waits, gate = asyncio.Event(), asyncio.Event()

            async def slowly(session_id):
                waits.set()
                await gate.wait()

            engine.release = slowly
            asked = http.post("chat/completions", {"messages": [user("more")]})
            asked = asyncio.ensure_future(asked)
            await waits.wait()
            closing = asyncio.ensure_future(gateway_session.close())
            await asyncio.sleep(0)
            gate.set()
            status, answer = await asked
            await closing
            assert (status, answer["error"]["code"]) == (410, "episode_over")
            assert len(gateway_session.turns) == len(engine.requests) == KEPT_SESSIONS

    asyncio.run(main())


def test_the_end_of_an_episode_ends_what_is_in_flight():
    async def main():
        async with at_gateway() as (gateway, engine, gateway_session, http):
            engine.gate = asyncio.Event()
            async with gateway.episode(TICKET, gateway_session.limits) as other:
                body, key = {"messages": [user("hi")]}, other.api_key
                asked = http.post("chat/completions", body, key=key, base_url=other.base_url)
                task = asyncio.ensure_future(asked)
                while not engine.requests:
                    await asyncio.sleep(0)
            status, answer = await task
            assert (status, answer["error"]["code"]) == (410, "episode_over")
            assert engine.num_cancelled == 1
            assert other.failure is None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        ("Content-Encoding: gzip\r\nContent-Length: 4", b"junk", 400),
        ("Transfer-Encoding: chunked", b"zz\r\n", 400),
        ("Content-Length: 0", b"", 400),
        ("Content-Length: 99999999999", b"{", 413),
        ("no header", b"", 400),
    ],
)
def test_what_is_hardly_http_is_refused_and_is_no_failure(head, body, status):
    async def main():
        async with at_gateway() as (gateway, engine, gateway_session, _):
            port = int(gateway.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            path = gateway_session.base_url.removeprefix(gateway.url)
            lines = f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\n"
            lines += f"Authorization: Bearer {gateway_session.api_key}\r\n{head}\r\n\r\n"
            writer.write(lines.encode() + body)
            try:
                async with asyncio.timeout(scaled(60)):
                    answered = await reader.readline()
            finally:
                writer.close()
            assert int(answered.split()[1]) == status
            assert (engine.requests, gateway_session.failure) == ([], None)

    asyncio.run(main())


def test_a_gateway_on_all_addresses_names_one_that_leads_to_it():
    async def main():
        async with at_gateway() as (gateway, engine, _, http):
            settings = GatewaySettings(max_context_tokens=100, host="0.0.0.0")
            wide = Gateway(engine, gateway.tokenizer, settings)
            await wide.start()
            try:
                assert "0.0.0.0" not in wide.url
                async with http.session.get(f"{wide.url}/health") as response:
                    assert await response.json() == {"status": "ok", "episodes": 0}
            finally:
                await wide.close()

    asyncio.run(main())


def test_other_paths_are_404_and_the_model_says_what_it_is():
    async def main():
        async with at_gateway() as (gateway, _, gateway_session, http):
            status, answer = await http.post("embeddings", {})
            assert (status, answer["error"]["code"]) == (404, "unknown_url")
            headers = {"Authorization": f"Bearer {gateway_session.api_key}"}
            async with http.session.get(
                f"{gateway_session.base_url}/models", headers=headers
            ) as response:
                (model,) = (await response.json())["data"]
            assert model["tokenizer_fingerprint"] == gateway.tokenizer.fingerprint

    asyncio.run(main())


def test_an_address_that_is_taken_is_said_in_one_line():
    async def main():
        async with at_gateway() as (gateway, engine, _, _):
            port = int(gateway.url.rpartition(":")[2])
            settings = GatewaySettings(max_context_tokens=10, port=port)
            with pytest.raises(ValueError, match="cannot listen on 127"):
                await Gateway(engine, gateway.tokenizer, settings).start()

    asyncio.run(main())


def test_a_long_message_is_refused_before_it_is_tokenized(monkeypatch):
    async def main():
        async with at_gateway(max_context_tokens=2000) as (gateway, engine, gateway_session, http):
            encoded = []
            monkeypatch.setattr(gateway.tokenizer, "encode", lambda text: encoded.append(len(text)))
            long = "x" * (30 * 2**20)
            for path, body in (
                ("chat/completions", {"messages": [user(long)]}),
                ("responses", {"input": long}),
                ("completions", {"prompt": long}),
            ):
                status, answer = await http.post(path, body)
                assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert (encoded, engine.requests, gateway_session.failure) == ([], [], None)
            assert gateway_session.truncated

    asyncio.run(main())


@pytest.mark.parametrize("path", ["chat/completions", "responses", "completions"])
def test_a_long_prompt_does_not_keep_other_requests_waiting(path, monkeypatch):
    """The tokenizer waits for another answer of the gateway: on the loop it would never come."""
    answered = threading.Event()

    async def main():
        async with at_gateway(max_context_tokens=2000) as (gateway, _, gateway_session, http):
            encode = gateway.tokenizer.encode

            def slow(text):
                if len(text) >= HEAVY_CHARS:
                    assert answered.wait(scaled(60))
                return encode(text)

            monkeypatch.setattr(gateway.tokenizer, "encode", slow)
            long = "a b " * HEAVY_CHARS
            body = {"messages": [user(long)], "input": long, "prompt": long}
            keys = {"chat/completions": "messages", "responses": "input", "completions": "prompt"}
            asked = asyncio.create_task(http.post(path, {keys[path]: body[keys[path]]}))
            async with gateway.episode(
                replace(TICKET, ticket_id="g1.0"), gateway_session.limits
            ) as other:
                said = await Http(http.session, other).say("hello")
                assert said["content"] == "ok"
            answered.set()
            status, answer = await asked
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    asyncio.run(main())


def test_a_client_that_hangs_up_while_it_is_tokenized_leaves_the_transcript_sound(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    async def main():
        async with at_gateway(max_context_tokens=2000) as (gateway, _, gateway_session, http):
            encode = gateway.tokenizer.encode

            def slow(text):
                if len(text) >= HEAVY_CHARS:
                    begun.set()
                    assert go_on.wait(scaled(60))
                return encode(text)

            monkeypatch.setattr(gateway.tokenizer, "encode", slow)
            long = {"messages": [user("a b " * HEAVY_CHARS)]}
            asked = asyncio.create_task(http.post("chat/completions", long))
            assert await asyncio.to_thread(begun.wait, scaled(60))
            asked.cancel()
            after = asyncio.create_task(http.say("hello"))
            go_on.set()
            assert (await after)["content"] == "ok"
            assert len(gateway_session.turns) == len(gateway_session.samples()) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
        "POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        'Content-Length: 99\r\n\r\n{{"messages"',
        "POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        "Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
    ],
    ids=["nothing", "head", "body", "chunks"],
)
def test_a_request_whose_rest_does_not_come_is_closed(sent):
    async def main():
        async with at_gateway(stall_s=0.2) as (gateway, engine, gateway_session, http):
            port = int(gateway.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            path = gateway_session.base_url.removeprefix(gateway.url)
            writer.write(sent.format(path=path, key=gateway_session.api_key).encode())
            async with asyncio.timeout(scaled(60)):
                with suppress(ConnectionResetError):
                    await reader.read()
            writer.close()
            assert (engine.requests, gateway_session.failure) == ([], None)
            assert (await http.say("hello"))["content"] == "ok"

    asyncio.run(main())


def test_a_second_request_whose_head_does_not_end_is_closed():
    async def main():
        async with at_gateway(stall_s=0.2) as (gateway, _, _, _):
            port = int(gateway.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(scaled(60)):
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await reader.readline()).split()[1] == b"200"
                await reader.readuntil(b"}")
                writer.write(b"GET /health HTTP/1.1\r\n")
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


def test_a_connection_that_waits_for_its_answer_or_its_next_request_stays():
    async def main():
        async with at_gateway(stall_s=0.2, delay_s=0.5) as (_, _, _, http):
            for _ in range(2):
                assert (await http.say("hello"))["content"] == "ok"
                await asyncio.sleep(0.5)
            assert len(http.session.connector._conns) == 1

    asyncio.run(main())
