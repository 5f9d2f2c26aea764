"""The wire protocol: calls to a function that scores, and its answers, as JSON. Version 2.

    call    {"version": 2, "reward": ID, "options": DIGEST, "group": bool, "key": str,
             "deadline_s": number, "requests": [{"id": str, ...fields of the request...}, ...]}
    answer  {"version": 2, "key": str, "run_s": number, "cold": bool, "num_hung": int,
             "results": [{"id": str, "value": number, "components": {...}}
                         | {"id": str, "failure": {...}}, ...]}
    refusal {"version": 2, "error": {"kind": str, "message": str}}

Results are in the order of the requests. A result without the id of its request is invalid.

Takes: calls and answers, or untrusted bytes. Gives: bytes, or calls and answers with every field
validated. Never: sends a reward's options (both sides compare a digest), or accepts a non-finite
number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, NoReturn

from rollart_core.contracts.reward import RewardRef, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import is_number, result_problem
from rollart_core.errors import BackendFailure, DeadlineFailure, RewardFailure, first_line

VERSION: Final = 2
MAX_DETAIL: Final = 4000
"""Maximum number of characters of a traceback."""

Outcome = RewardResult | RewardFailure | DeadlineFailure


class Refused(Exception):
    """A function rejects a call.

    Args:
        kind: One of ``STATUS``.
        message: The reason, for the user.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def body(self) -> bytes:
        """Return the refusal as bytes of the wire."""
        return dumps({"version": VERSION, "error": {"kind": self.kind, "message": str(self)}})


STATUS: Final[Mapping[str, int]] = {
    "malformed": 400,
    "version": 400,
    "token": 401,
    "mismatch": 409,
    "too_large": 413,
    "broken": 500,
}
"""Reason for a refusal -> HTTP status. A retry does not help for any of them."""


@dataclass(frozen=True, slots=True)
class WireCall:
    """One call, as a function receives it."""

    reward: str
    options: str
    """Digest of the caller's options for this reward."""
    group: bool
    key: str
    """The same for every attempt of these requests."""
    deadline_s: float
    ids: tuple[str, ...]
    """Id of each request, which its result repeats."""
    requests: tuple[RewardRequest, ...]


@dataclass(frozen=True, slots=True)
class WireAnswer:
    """One answer, as its caller receives it."""

    key: str
    """Key of the call."""
    ids: tuple[str, ...]
    """Ids of the requests, in the order of their results."""
    results: tuple[Outcome, ...]
    run_s: float = 0.0
    cold: bool = False
    num_hung: int = 0
    """Number of the function's threads that a timed-out reward still occupies."""


def dumps(value: object) -> bytes:
    """Return compact JSON in ASCII, without line breaks.

    Raises:
        ValueError: If a value is not valid JSON, such as NaN, an object or a cycle.
    """
    try:
        return _ENCODER.encode(value).encode()
    except (TypeError, RecursionError) as e:
        raise ValueError(str(e)) from e


def digest(options: Mapping[str, Any]) -> str:
    """Return the digest that two sides compare to check that their options are equal."""
    text = json.dumps(dict(options), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def request_id(request: RewardRequest) -> str:
    """Return the id of a request, which its result repeats: its ticket and attempt."""
    return f"{request.ticket_id}#{request.attempt}"


def request_bytes(request: RewardRequest) -> bytes:
    """Return one request with its id; fields with their default value are omitted.

    Raises:
        ValueError: If it contains a value that is not valid JSON.
    """
    sent: dict[str, object] = {"id": request_id(request)}
    for name, default in _DEFAULTS:
        value = getattr(request, name)
        if value != default:
            sent[name] = dict(value) if isinstance(value, Mapping) else value
    return dumps(sent)


def call_bytes(
    reward: RewardRef, requests: Sequence[bytes], *, group: bool, key: str, deadline_s: float
) -> bytes:
    """Return a call.

    Args:
        reward: The reward.
        requests: Requests from :func:`request_bytes`.
        group: Whether they are one group, for ``score_group``.
        key: The idempotency key.
        deadline_s: Seconds after which the caller does not wait for the answer.
    """
    head = {
        "version": VERSION,
        "reward": reward.id,
        "options": digest(reward.options),
        "group": group,
        "key": key,
        "deadline_s": deadline_s,
    }
    return dumps(head)[:-1] + b',"requests":[' + b",".join(requests) + b"]}"


def answer_bytes(answer: WireAnswer) -> bytes:
    """Return an answer; its results are already validated."""
    return dumps(
        {
            "version": VERSION,
            "key": answer.key,
            "results": [
                {"id": one, **_outcome(result)}
                for one, result in zip(answer.ids, answer.results, strict=True)
            ],
            "run_s": round(answer.run_s, 6),
            "cold": answer.cold,
            "num_hung": answer.num_hung,
        }
    )


def read_call(body: bytes | Mapping[str, Any]) -> WireCall:
    """Read a call.

    Args:
        body: The bytes, or the object that a platform has parsed.

    Raises:
        Refused: If it is not a call, or has another version.
    """
    raw = _object(body) if isinstance(body, bytes) else dict(body)
    if raw.get("version") != VERSION:
        said = first_line(repr(raw.get("version")), 40)
        raise Refused("version", f"a call of version {said}; this function supports {VERSION}")
    try:
        requests = _get(raw, "requests", list)
        return WireCall(
            reward=_get(raw, "reward", str),
            options=_get(raw, "options", str),
            group=_get(raw, "group", bool),
            key=_get(raw, "key", str),
            deadline_s=_positive(raw, "deadline_s"),
            ids=tuple(_id(one, "a request") for one in requests),
            requests=tuple(map(_request, requests)),
        )
    except _Wrong as e:
        raise Refused("malformed", f"the call is invalid: {e}") from e


def read_answer(
    body: bytes, key: str, ids: Sequence[str], reward_range: tuple[float, float]
) -> WireAnswer:
    """Read an answer to the call with this key, whose requests have these ids.

    Raises:
        BackendFailure: If it is not an answer, or is a refusal. Only a refusal is not retryable.
    """
    try:
        raw = _object(body)
    except Refused as e:
        raise BackendFailure(f"its answer {e}: {_shown(body)}") from e
    if "error" in raw:
        raise refusal(raw)
    try:
        if raw.get("version") != VERSION:
            raise _Wrong(f"version {first_line(repr(raw.get('version')), 40)}, not {VERSION}")
        if _get(raw, "key", str) != key:
            raise _Wrong("'key' belongs to another call")
        results = _get(raw, "results", list)
        if len(results) != len(ids):
            raise _Wrong(f"{len(results)} results for {len(ids)} requests")
        for result, wanted in zip(results, ids, strict=True):
            if (found := _id(result, "a result")) != wanted:
                raise _Wrong(f"the id {first_line(repr(found), 40)} instead of {wanted!r}")
        return WireAnswer(
            key,
            tuple(ids),
            tuple(_read_outcome(one, reward_range) for one in results),
            run_s=_number(raw, "run_s"),
            cold=_get(raw, "cold", bool),
            num_hung=_get(raw, "num_hung", int),
        )
    except _Wrong as e:
        message = f"its answer has the wrong format: {e}: {_shown(body)}"
        raise BackendFailure(message) from e


def refusal(raw: Mapping[str, Any]) -> BackendFailure:
    """Return the error of the caller for a function's refusal."""
    error = raw.get("error")
    error = error if isinstance(error, Mapping) else {"message": error}
    kind, message = str(error.get("kind", "")), first_line(str(error.get("message", "")))
    return BackendFailure(f"it rejected the call: {message}", again=kind not in STATUS)


class _Wrong(Exception):
    """A part of a message is invalid; the text names it."""


def _outcome(result: Outcome) -> dict[str, object]:
    if isinstance(result, RewardResult):
        components = {str(name): float(value) for name, value in result.components.items()}
        return {"value": float(result.value), "components": components}
    failure = {
        "kind": result.kind.value,
        "message": first_line(str(result)),
        "detail": result.detail[-MAX_DETAIL:],
        "retryable": bool(result.retryable),
    }
    return {"failure": failure}


def _read_outcome(raw: object, reward_range: tuple[float, float]) -> Outcome:
    if not isinstance(raw, dict):
        raise _Wrong(f"a result is {_name(raw)}")
    if "failure" in raw:
        return _read_failure(_get(raw, "failure", dict))
    components = _get(raw, "components", dict)
    result = RewardResult(
        _number(raw, "value"), {name: _number(components, name) for name in components}
    )
    if problem := result_problem(result, reward_range):
        return RewardFailure(f"reward.score answered {problem}", boundary="reward.score")
    return result


def _read_failure(raw: dict[str, Any]) -> RewardFailure | DeadlineFailure:
    message = first_line(_get(raw, "message", str))
    detail = _get(raw, "detail", str)[-MAX_DETAIL:]
    kind = _get(raw, "kind", str)
    failure: RewardFailure | DeadlineFailure
    if kind == "reward":
        failure = RewardFailure(message, boundary="reward.score", detail=detail)
    elif kind == "timeout":
        failure = DeadlineFailure(message, boundary="reward.score", detail=detail)
    else:
        raise _Wrong(f"a failure of kind {first_line(repr(kind), 40)}")
    failure.retryable = _get(raw, "retryable", bool)
    return failure


def _id(raw: object, what: str) -> str:
    if not isinstance(raw, dict):
        raise _Wrong(f"{what} is {_name(raw)}")
    found: str = _get(raw, "id", str)
    return found


def _request(raw: dict[str, Any]) -> RewardRequest:
    unknown = raw.keys() - REQUEST.keys() - {"id"}
    if unknown:
        raise _Wrong(f"a request has the unknown field {sorted(map(str, unknown))[0]!r}")
    return RewardRequest(
        ticket_id=_get(raw, "ticket_id", str),
        env_id=_get(raw, "env_id", str),
        split=_get(raw, "split", str),
        task_index=_get(raw, "task_index", int),
        messages=tuple(_message(one) for one in _get(raw, "messages", list)),
        env_return=_number(raw, "env_return"),
        **{name: _get(raw, name, REQUEST[name]) for name in _OPTIONAL if name in raw},
        success=None if raw.get("success") is None else _get(raw, "success", bool),
    )


def _message(raw: object) -> Any:
    if not isinstance(raw, dict):
        raise _Wrong(f"a message is {_name(raw)}")
    _get(raw, "role", str)
    _get(raw, "content", str)
    return raw


REQUEST: Final[Mapping[str, type]] = {
    "ticket_id": str,
    "env_id": str,
    "split": str,
    "task_index": int,
    "messages": list,
    "env_return": float,
    "success": bool,
    "components": dict,
    "truncated": bool,
    "num_turns": int,
    "num_loss_tokens": int,
    "context": dict,
    "attempt": int,
}
"""Field of a request -> its type. A test compares it with the contract."""
_DEFAULTS: Final = tuple(
    (one.name, {} if one.default_factory is not MISSING else one.default)
    for one in fields(RewardRequest)
)
"""Field of a request -> the default value that is not sent; a unique object without a default."""
_OPTIONAL: Final = (
    *("components", "truncated", "num_turns", "num_loss_tokens", "context", "attempt"),
)


def _object(body: bytes) -> dict[str, Any]:
    try:
        raw = _DECODER.decode(body.decode())
    except (ValueError, RecursionError) as e:
        raise Refused("malformed", f"is not valid JSON ({first_line(str(e), 80)})") from e
    if not isinstance(raw, dict):
        raise Refused("malformed", f"is {_name(raw)}, not an object")
    return raw


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


# Created once: the functions of the json module create one for each call with options.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)


def _get(raw: Mapping[str, Any], name: str, kind: type) -> Any:
    if name not in raw:
        raise _Wrong(f"{name!r} is missing")
    value = raw[name]
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        raise _Wrong(f"{name!r} is {_name(value)}")
    return value


def _number(raw: Mapping[str, Any], name: str) -> float:
    if name not in raw:
        raise _Wrong(f"{name!r} is missing")
    if not is_number(raw[name]):
        raise _Wrong(f"{name!r} is {_name(raw[name])}")
    return float(raw[name])


def _positive(raw: Mapping[str, Any], name: str) -> float:
    value = _number(raw, name)
    if value <= 0:
        raise _Wrong(f"{name!r} is {value:g}")
    return value


def _name(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
    return names.get(type(value), first_line(repr(value), 40))


def _shown(body: bytes) -> str:
    return repr(first_line(body[:400].decode(errors="replace"), 80))
