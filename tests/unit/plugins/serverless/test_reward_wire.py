import json
from dataclasses import fields, replace

import pytest

from rollart_core.contracts.reward import RewardRef, RewardRequest, RewardResult
from rollart_core.errors import BackendFailure, DeadlineFailure, RewardFailure
from rollart_plugins.serverless import wire
from rollart_plugins.serverless.wire import Refused, WireAnswer
from rollart_testing import example_request

REF = RewardRef("acme/R-v1", {"weight": 2.0, "key_env": "SECRET_KEY"})
RANGE = (0.0, 1.0)
GOOD = {"value": 1.0, "components": {}}


def call(*requests, **changes):
    body = wire.call_bytes(
        REF, [wire.request_bytes(r) for r in requests], group=False, key="k", deadline_s=3.0
    )
    return json.dumps(json.loads(body) | changes).encode()


def answer(**changes):
    said = {"version": 2, "key": "k", "results": [], "run_s": 0.5, "cold": True, "num_hung": 0}
    said |= changes
    ids = (f"t{number}" for number in range(10))
    said["results"] = [
        {"id": one, **result} if isinstance(result, dict) else result
        for one, result in zip(ids, said["results"], strict=False)
    ]
    return json.dumps(said).encode()


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
        (b"<html>", "is not valid JSON"),
        (b"[1]", "is a list, not an object"),
        (b'{"version": NaN}', "NaN is not valid JSON"),
        (call(version=1), "a call of version 1; this function supports 2"),
        (call(requests="x"), "'requests' is a text"),
        (call(requests=[{"id": "t0"}]), "'ticket_id' is missing"),
        (call(requests=[{}]), "'id' is missing"),
        (call(requests=["x"]), "a request is a text"),
        (call(deadline_s=0), "'deadline_s' is 0"),
        (call(deadline_s=True), "'deadline_s' is True"),
        (call(group="yes"), "'group' is a text"),
        (call(requests=[{"id": "t0", "os": 1}]), "unknown field 'os'"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_what_is_no_call_is_refused(body, reason):
    with pytest.raises(Refused, match=reason):
        wire.read_call(body)


def test_an_answer_comes_back_as_it_was():
    late = DeadlineFailure("too long", boundary="reward.score")
    failed = RewardFailure("no judge", boundary="reward.score", detail="trace")
    failed.retryable = False
    results, ids = (RewardResult(0.5, {"a": 1}), failed, late), ("a", "b", "c")
    given = WireAnswer("k", ids, results, run_s=0.25, num_hung=2)
    got = wire.read_answer(wire.answer_bytes(given), "k", ids, RANGE)
    assert got.results[0] == RewardResult(0.5, {"a": 1.0})
    assert [(type(r), str(r), r.detail, r.retryable) for r in got.results[1:]] == [
        (RewardFailure, "no judge", "trace", False),
        (DeadlineFailure, "too long", "", True),
    ]
    assert (got.run_s, got.num_hung, got.cold) == (0.25, 2, False)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"Internal Server Error", "is not valid JSON"),
        (answer(results=[{"value": 1.0}]), "'components' is missing"),
        (answer(results=[{"value": "1", "components": {}}]), "'value' is '1'|'value' is a text"),
        (answer(results=[{"value": True, "components": {}}]), "'value' is True"),
        (answer(results=[{"value": 10**400, "components": {}}]), "'value' is"),
        (answer(results=[{"value": 1, "components": {"a": None}}]), "'a' is null"),
        (answer(results=[{"value": 1, "components": {}}] * 2), "2 results for 1 requests"),
        (answer(results=[0.5]), r"a result is 0\.5"),
        (answer(results=[{"failure": {"kind": "x"}}]), "'message' is missing"),
        (answer(version=7), "version 7, not 2"),
        (answer(key="other"), "'key' belongs to another call"),
        (answer(key=None), "'key' is null"),
        (answer(results=[{"id": "t1", **GOOD}]), "the id 't1' instead of 't0'"),
        (answer(results=[{"id": None, **GOOD}]), "'id' is null"),
        (answer(results=[{"value": float("nan"), "components": {}}]), "NaN is not valid JSON"),
    ],
)
def test_garbage_is_a_failure_of_the_backend_that_may_pass(body, reason):
    with pytest.raises(BackendFailure, match=reason) as caught:
        wire.read_answer(body, "k", ("t0",), RANGE)
    assert caught.value.again


def test_an_answer_that_permutes_its_results_is_garbage():
    results = [{"id": f"t{i}", "value": i / 10, "components": {}} for i in range(4)]
    ids = [one["id"] for one in results]
    assert wire.read_answer(answer(results=results), "k", ids, RANGE).results[3].value == 0.3
    for order in ([1, 0, 2, 3], [0, 0, 2, 3], [3, 2, 1, 0]):
        with pytest.raises(BackendFailure, match="instead of") as caught:
            wire.read_answer(answer(results=[results[i] for i in order]), "k", ids, RANGE)
        assert caught.value.again


def test_a_value_out_of_range_is_the_rewards_own_failure():
    got = wire.read_answer(answer(results=[{"value": 1.5, "components": {}}]), "k", ("t0",), RANGE)
    assert isinstance(got.results[0], RewardFailure)
    assert "1.5, outside its range 0 to 1" in str(got.results[0])


@pytest.mark.parametrize(("kind", "again"), [("mismatch", False), ("internal", True)])
def test_a_refusal_says_whether_to_try_again(kind, again):
    with pytest.raises(BackendFailure, match="it rejected the call: why") as caught:
        wire.read_answer(Refused(kind, "why").body(), "k", ("t0",), RANGE)
    assert caught.value.again is again


@pytest.mark.parametrize("wrong", [{"context": {"a": object()}}, {"env_return": float("inf")}])
def test_a_request_that_is_no_json_is_refused_before_it_is_sent(wrong):
    with pytest.raises(ValueError, match="JSON"):
        wire.request_bytes(replace(example_request(), **wrong))
