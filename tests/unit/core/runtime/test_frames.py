"""Messages between the processes of a run arrive as they were sent."""

from __future__ import annotations

from dataclasses import fields

import pytest

from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.rollout.env_answers import Observed
from rollart_core.runtime.frames import Answer, Call, FrameProtocol, encode
from rollart_core.types import TokenSpan

REQUEST = GenerateRequest(
    request_id="t#0/1",
    token_ids=(1, 2, 3),
    max_new_tokens=4,
    session_id="t#0",
    group_id="g",
    temperature=0.5,
    stop_token_ids=(7,),
    sampling_key=11,
    env_id="toy/Env-v1",
    messages=({"role": "user", "content": "?"},),
    tools=({"type": "function", "function": {"name": "sum"}},),
    template_kwargs={"enable_thinking": False},
)
RESULT = GenerateResult(
    [5, 7], [-0.5, -1.0], (TokenSpan(0, 2, 3, "kept"),), "stop", 2, "hi", inserted=(1, 2)
)
TOOLS = ({"type": "function", "function": {"name": "add"}},)
OBSERVED = Observed("a page", 0.5, True, True, True, {"price": 1.0}, True, 3, TOOLS)


@pytest.mark.parametrize(
    "message",
    [
        Call(1, "generate", (REQUEST,)),
        Call(2, "step", ("t#0",), {"timeout_s": 3.0}),
        Answer(3, RESULT),
        Answer(4, OBSERVED),
        Answer(5),
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_messages_arrive_as_they_were_sent_in_whatever_pieces(
    message: Call | Answer, piece: int
) -> None:
    taken: list[Call | Answer] = []
    stream = FrameProtocol(taken.append, taken.clear)
    data = encode(message) + encode(Answer(6)) + encode(message)
    for begin in range(0, len(data), piece):
        stream.data_received(data[begin : begin + piece])
    assert taken == [message, Answer(6), message]
    stream.data_received(data[:20])
    assert len(taken) == 3
    stream.connection_lost(None)
    assert taken == []


@pytest.mark.parametrize("record", [REQUEST, RESULT, RESULT.spans[0], OBSERVED])
def test_no_field_of_these_records_is_a_default(record: object) -> None:
    """Else the test above would not see a field that is lost on the way."""
    blank = {f.name: f.default for f in fields(record)}  # type: ignore[arg-type]
    assert not [n for n, default in blank.items() if getattr(record, n) == default]
