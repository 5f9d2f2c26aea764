import asyncio

import pytest
from support.talks import result, said
from support.tool_clerk import Adding
from support.tool_templates import TOOL_TEMPLATES, call_text, tool_tokenizer

from rollart_core.contracts.inference import GenerateResult, TextAnswer
from rollart_core.contracts.reward import RewardResult
from rollart_core.errors import ConfigError
from rollart_core.models.tool_calls import call_id
from rollart_core.rollout.conversation import Conversation
from rollart_core.rollout.env_pool import EnvPool, LocalWorker, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_core.rollout.episode import EpisodeDependencies, EpisodeLimits, run_episode
from rollart_core.rollout.text_conversation import TextConversation
from rollart_core.training.warm_start import demonstrations
from rollart_core.types import FailureKind, Task, Ticket
from rollart_view.conversations import turn_messages

ENV = "support.tool_clerk:Adding"
TICKET = Ticket("g0.0", Task(ENV, "train", 0, 7), "g0", 0)


class Scripted:
    """Says what it was told to, turn by turn."""

    def __init__(self, results):
        self.results = list(results)
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        return self.results[len(self.requests) - 1]

    async def release(self, session_id):
        pass


def _run(engine, new_conversation, **options):
    scored = []

    async def score(request):
        scored.append(request)
        return RewardResult(request.env_return)

    async def start():
        return LocalWorker(EnvWorker())

    async def run():
        envs = EnvPool(start, num_workers=1)
        await envs.start()
        try:
            parts = EpisodeDependencies(
                env=EnvRef(ENV, options),
                envs=envs,
                engine=engine,
                new_conversation=new_conversation,
                score=score,
                stop_token_ids=(),
                limits=EpisodeLimits(8, 200, 1.0, PhaseTimeouts(60, 60, 60), 60, 60),
                seed=0,
            )
            return await run_episode(TICKET, 0, parts)
        finally:
            await envs.close()

    return asyncio.run(run()), scored


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_errors_are_fed_back_and_the_row_is_what_was_sampled(name):
    tokenizer = tool_tokenizer(name)
    texts = [
        call_text(name, ("add", '{"a": 1, "b": ')),
        call_text(name, ("sum", '{"a": 1, "b": 2}')),
        call_text(name, ("add", '{"a": 1, "b": "two"}')),
        call_text(name, ("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3}')),
        "3",
    ]
    engine = Scripted([said(tokenizer, text, turn) for turn, text in enumerate(texts)])
    trajectory, (request,) = _run(
        engine, lambda: Conversation(tokenizer, max_context_tokens=10_000)
    )
    assert (trajectory.status, trajectory.reward, trajectory.success) == ("finished", 1.0, True)
    assert [turn.action for turn in trajectory.turns] == texts
    (sample,) = trajectory.samples
    assert sample.token_ids[: len(engine.requests[-1].token_ids)].tolist() == (
        list(engine.requests[-1].token_ids)
    )
    for turn, answer in enumerate(engine.results):
        assert sample.token_ids[sample.turn_ids == turn].tolist() == answer.token_ids
    told = [m["content"] for m in request.messages if m["role"] == "tool"]
    assert len(told) == 5
    assert "not valid JSON" in told[0]
    assert "no tool 'sum'; there are: add" in told[1]
    assert "'two' is not of type 'integer'" in told[2]
    assert told[3] == "3"
    assert "'b' is a required property" in told[4]
    shown = tokenizer.decode(engine.requests[-1].token_ids)
    assert all(text.splitlines()[0].split('"')[0] in shown for text in told)
    (call,) = request.messages[3]["tool_calls"]
    assert call["function"]["name"] == "sum"
    recorded = [message for turn in trajectory.turns for message in turn_messages(turn)]
    assert recorded == list(request.messages)
    assert [len(turn.tools) for turn in trajectory.turns] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("terse", [False, True])
@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_a_demonstration_is_the_row_of_an_episode_that_says_the_same(name, terse):
    tokenizer = tool_tokenizer(name)
    shown_by = demonstrations(
        lambda: Adding(terse=terse),
        tokenizer,
        [TICKET.task],
        max_turns=4,
        max_context_tokens=10_000,
    )
    if name == "llama3" and not terse:
        with pytest.raises(ConfigError, match="one call at a time"):
            next(shown_by)
        return
    (shown,) = shown_by
    turns = [shown.token_ids[shown.turn_ids == turn].tolist() for turn in (0, 1)]
    engine = Scripted([result(ids) for ids in turns])
    trajectory, _ = _run(
        engine, lambda: Conversation(tokenizer, max_context_tokens=10_000), terse=terse
    )
    assert trajectory.reward == 1.0
    (sample,) = trajectory.samples
    assert sample.token_ids.tolist() == shown.token_ids.tolist()
    assert sample.loss_mask.tolist() == shown.loss_mask.tolist()
    assert '"add"' in trajectory.turns[0].action


def test_an_environment_that_leaves_calls_unanswered_fails_the_episode():
    tokenizer = tool_tokenizer("hermes")
    engine = Scripted([said(tokenizer, call_text("hermes", ("add", '{"a": 1, "b": 2}')))])
    trajectory, _ = _run(
        engine, lambda: Conversation(tokenizer, max_context_tokens=10_000), rude=True
    )
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert "which was not called" in trajectory.failure.message


def test_a_server_that_takes_text_is_given_the_tools_and_told_its_errors():
    def answer(content, *calls):
        wire = [
            {"id": i, "type": "function", "function": {"name": "add", "arguments": a}}
            for i, a in calls
        ]
        return GenerateResult([], [], (), "stop", text=TextAnswer(content, tool_calls=tuple(wire)))

    engine = Scripted([answer("", ("x", '{"a": 1, "b": 2}'), ("y", "{")), answer("3")])
    trajectory, _ = _run(engine, TextConversation)
    assert (trajectory.reward, trajectory.samples) == (1.0, ())
    assert trajectory.turns[0].action == 'add({"a": 1, "b": 2})\nunreadable({"text": "{"})'
    first, second = engine.requests
    assert [t["function"]["name"] for t in first.tools] == ["add"]
    assert [m["role"] for m in second.messages] == ["user", "assistant", "tool", "tool"]
    ids = [call["id"] for call in second.messages[1]["tool_calls"]]
    assert ids == ["x", call_id(0, 1)]
    assert [m["tool_call_id"] for m in second.messages[2:]] == ids
    assert second.messages[2]["content"] == "3"
