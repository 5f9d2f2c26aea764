import json
from dataclasses import fields, replace

import pytest

from rollart_core.contracts.reward import RewardRef, RewardRequest, RewardResult
from rollart_core.errors import BackendFailure, DeadlineFailure, RewardFailure
from rollart_core.testing import example_request
from rollart_plugins.serverless import wire
from rollart_plugins.serverless.wire import Refused, WireAnswer

REF = RewardRef("acme/R-v1", {"weight": 2.0, "key_env": "SECRET_KEY"})
RANGE = (0.0, 1.0)


def call(*requests, **changes):
    body = wire.call_bytes(
        REF, [wire.request_bytes(r) for r in requests], group=False, key="k", deadline_s=3.0
    )
    return json.dumps(json.loads(body) | changes).encode()


def answer(**changes):
    said = {"version": 1, "results": [], "run_s": 0.5, "cold": True, "num_hung": 0}
    return json.dumps(said | changes).encode()


def test_a_request_comes_back_as_it_was():
    request = replace(
        example_request(0.3, index=2),
        context={"reference": "4 \u2028 \ud800", "deep": [1, {"a": None}]},
        attempt=3,
        truncated=True,
    )
    got = wire.read_call(call(request, example_request()))
    assert got.requests == (request, example_request())
    assert (got.reward, got.key, got.deadline_s, got.group) == ("acme/R-v1", "k", 3.0, False)
    assert b"\n" not in call(request)


def test_every_field_of_a_request_travels():
    assert set(wire.REQUEST) == {field.name for field in fields(RewardRequest)}


def test_options_never_travel():
    assert b"SECRET_KEY" not in call(example_request())
    assert wire.digest({"a": 1, "b": 2}) == wire.digest({"b": 2, "a": 1}) != wire.digest({"a": 1})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>", "is no JSON"),
        (b"[1]", "is a list, not an object"),
        (b'{"version": NaN}', "NaN is no JSON"),
        (call(version=2), "a call of version 2; this function speaks 1"),
        (call(requests="x"), "'requests' is a text"),
        (call(requests=[{}]), "'ticket_id' is missing"),
        (call(deadline_s=0), "'deadline_s' is 0"),
        (call(deadline_s=True), "'deadline_s' is True"),
        (call(group="yes"), "'group' is a text"),
        (call(requests=[{"os": 1}]), "'os', which nobody knows"),
        (b"[" * 100_000, "is no JSON"),
    ],
)
def test_what_is_no_call_is_refused(body, reason):
    with pytest.raises(Refused, match=reason):
        wire.read_call(body)


def test_an_answer_comes_back_as_it_was():
    late = DeadlineFailure("too long", boundary="reward.score")
    failed = RewardFailure("no judge", boundary="reward.score", detail="trace")
    failed.retryable = False
    given = WireAnswer((RewardResult(0.5, {"a": 1}), failed, late), run_s=0.25, num_hung=2)
    got = wire.read_answer(wire.answer_bytes(given), 3, RANGE)
    assert got.results[0] == RewardResult(0.5, {"a": 1.0})
    assert [(type(r), str(r), r.detail, r.retryable) for r in got.results[1:]] == [
        (RewardFailure, "no judge", "trace", False),
        (DeadlineFailure, "too long", "", True),
    ]
    assert (got.run_s, got.num_hung, got.cold) == (0.25, 2, False)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"Internal Server Error", "is no JSON"),
        (answer(results=[{"value": 1.0}]), "'components' is missing"),
        (answer(results=[{"value": "1", "components": {}}]), "'value' is '1'|'value' is a text"),
        (answer(results=[{"value": True, "components": {}}]), "'value' is True"),
        (answer(results=[{"value": 10**400, "components": {}}]), "'value' is"),
        (answer(results=[{"value": 1, "components": {"a": None}}]), "'a' is null"),
        (answer(results=[{"value": 1, "components": {}}] * 2), "2 results for 1 requests"),
        (answer(results=[0.5]), r"a result is 0\.5"),
        (answer(results=[{"failure": {"kind": "x"}}]), "'message' is missing"),
        (answer(version=7), "version 7, not 1"),
        (answer(results=[{"value": float("nan"), "components": {}}]), "NaN is no JSON"),
    ],
)
def test_garbage_is_a_failure_of_the_backend_that_may_pass(body, reason):
    with pytest.raises(BackendFailure, match=reason) as caught:
        wire.read_answer(body, 1, RANGE)
    assert caught.value.again


def test_a_value_out_of_range_is_the_rewards_own_failure():
    got = wire.read_answer(answer(results=[{"value": 1.5, "components": {}}]), 1, RANGE)
    assert isinstance(got.results[0], RewardFailure)
    assert "1.5, outside its range 0 to 1" in str(got.results[0])


@pytest.mark.parametrize(("kind", "again"), [("mismatch", False), ("internal", True)])
def test_a_refusal_says_whether_to_try_again(kind, again):
    with pytest.raises(BackendFailure, match="it refuses: why") as caught:
        wire.read_answer(Refused(kind, "why").body(), 1, RANGE)
    assert caught.value.again is again


@pytest.mark.parametrize("wrong", [{"context": {"a": object()}}, {"env_return": float("inf")}])
def test_a_request_that_is_no_json_is_refused_before_it_is_sent(wrong):
    with pytest.raises(ValueError, match="JSON"):
        wire.request_bytes(replace(example_request(), **wrong))
