"""The teacher's word: on every sampled token, or the episode has failed."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rollart_core.errors import EngineDied, InferenceFailure
from rollart_core.inference import teacher as module
from rollart_core.inference.teacher import TeacherEngines
from rollart_core.types import Failure, FailureKind
from rollart_testing import ScriptedEngine, example_group

MEMBER = example_group([1.0], num_tokens=9).trajectories[0]


class Scoring(ScriptedEngine):
    """Scores a token by its number, after some trouble."""

    def __init__(self, *trouble):
        super().__init__(lambda request: [0])
        self.trouble, self.requests = list(trouble), []

    async def score(self, request):
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.trouble:
            answer = self.trouble.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return [-float(request.token_ids[i]) for i in request.positions]


def judge(*engines, trajectories=(MEMBER,), limit_s=30.0):
    teacher = TeacherEngines(engines, temperature=0.7, limit_s=limit_s)

    async def all_of_them():
        return await asyncio.gather(*map(teacher.judge, trajectories))

    return teacher, asyncio.run(all_of_them())


def test_each_sampled_token_gets_the_teachers_logprob():
    engine = Scoring()
    _, (judged,) = judge(engine)
    (sample,) = judged.samples
    assert sample.signals["teacher_logprobs"].tolist() == [0, -1, -2, 0, -4, -5, 0, -7, -8]
    assert sample.signals["teacher_logprobs"].dtype == np.float32
    (request,) = engine.requests
    assert (list(request.positions), request.temperature) == ([1, 2, 4, 5, 7, 8], 0.7)


def test_trajectories_take_turns_on_the_engines():
    first, second = Scoring(), Scoring()
    judge(first, second, trajectories=[MEMBER] * 4)
    assert len(first.requests) == len(second.requests) == 2


def test_a_failed_episode_is_not_judged():
    failure = Failure(FailureKind.ENVIRONMENT, "env.step", "boom")
    failed = replace(MEMBER, status="failed", reward=None, failure=failure)
    engine = Scoring()
    assert judge(engine, trajectories=[failed])[1] == [failed]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (InferenceFailure("no room"), "no room"),
        ([-1.0], "returned 1 logprobs"),
        ([-1.0, float("nan"), -1.0, -1.0, -1.0, -1.0], "not finite"),
    ],
)
def test_a_teacher_that_cannot_answer_fails_the_episode(trouble, said):
    _, (judged,) = judge(Scoring(trouble))
    assert judged.status == "failed"
    assert judged.reward is None
    assert judged.failure.kind is FailureKind.INFERENCE
    assert said in judged.failure.message


def test_it_waits_for_an_engine_that_is_started_again(monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    engine = Scoring(EngineDied("gone"), EngineDied("still gone"))
    _, (judged,) = judge(engine)
    assert judged.failure is None
    lost = Scoring(EngineDied("gone for good"))
    lost.health = "lost"
    assert judge(lost)[1][0].failure.message == "gone for good"
