"""What servers say when they refuse, and when to ask again: without a server."""

import pytest
from tenacity import RetryCallState, Retrying

from rollart_plugins.engines.endpoint import (
    LONGEST_WAIT_S,
    EndpointServer,
    backoff,
    fault,
    requested_wait_s,
)

NOON_S = 1_700_000_000.0


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({}, None),
        ({"Retry-After": "3"}, 3.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"Retry-After": "9", "retry-after-ms": "250"}, 0.25),
        ({"Retry-After": "Tue, 14 Nov 2023 22:13:50 GMT"}, 30.0),
        ({"Retry-After": "Tue, 14 Nov 2023 22:13:10 GMT"}, 0.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-1"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
    ],
)
def test_a_server_says_how_long_in_several_ways(headers, wanted):
    assert requested_wait_s(headers, now_s=NOON_S) == wanted


def test_without_advice_waits_grow_to_a_limit_and_are_spread(monkeypatch):
    def waits(spread, *attempts):
        monkeypatch.setattr("random.uniform", lambda least, most: least + spread * (most - least))
        states = [RetryCallState(Retrying(), None, (), {}) for _ in attempts]
        for state, attempt in zip(states, attempts, strict=True):
            state.attempt_number = attempt
        return [backoff()(state) for state in states]

    assert waits(1.0, 1, 2) == [0.5, 1.0]
    assert waits(0.0, 1, 2, 3) == [0.25, 0.5, 1.0]
    assert waits(1.0, 10_000) == [LONGEST_WAIT_S]


@pytest.mark.parametrize(
    ("status", "body", "kind", "again"),
    [
        (400, b'{"error": {"message": "x", "code": "context_length_exceeded"}}', "overflow", False),
        (400, b'{"object": "error", "message": "exceeds max_model_len"}', "overflow", False),
        (413, b"prompt is too long", "overflow", False),
        (500, b"maximum context length", "server", True),
        (400, b'{"detail": [{"loc": ["body"]}]}', "refused", False),
        (401, b"", "key", False),
        (403, b"{}", "key", False),
        (404, b"[]", "missing", False),
        (402, b"", "quota", False),
        (429, b'{"error": {"code": "insufficient_quota"}}', "quota", False),
        (429, b'{"error": "slow"}', "rate", True),
        (503, b"<html><h1>Bad gateway</h1></html>", "server", True),
        (529, b"\xff\xfe", "server", True),
    ],
)
def test_errors_of_all_shapes_have_a_kind(status, body, kind, again):
    error = fault(status, body, where="http://h/v1/x")
    assert (error.kind, error.retryable, error.status) == (kind, again, status)
    assert str(error).startswith(f"http://h/v1/x returned {status}")
    assert "<" not in str(error)


def test_a_key_that_comes_back_is_not_shown():
    error = fault(401, b'{"error": {"message": "bad key sk-1"}}', where="u", secret="sk-1")
    assert str(error) == "u returned 401: bad key ***"
    assert "sk-1" not in repr(EndpointServer("http://h/v1", api_key="sk-1"))


def test_paths_lie_below_the_url_or_beside_it():
    server = EndpointServer("https://h:8000/api/v1/")
    assert server.url("chat/completions") == "https://h:8000/api/v1/chat/completions"
    assert server.url("/tokenize") == "https://h:8000/tokenize"
