import asyncio
from dataclasses import replace

import pytest

from rollart_core.config.model import NewModel
from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.contracts.reward import RewardRequest, RewardResult
from rollart_core.errors import RewardFailure
from rollart_core.models.new import new_model
from rollart_core.models.tokenizer import load_tokenizer
from rollart_core.rollout.conversation import Conversation
from rollart_core.rollout.env_pool import EnvPool, LocalWorker, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_core.rollout.episode import EpisodeDependencies, EpisodeLimits, run_episode
from rollart_core.types import FailureKind, Task, Ticket, TokenSpan
from rollart_testing.envs import FakeEnv

FAKE = "rollart_testing.envs:FakeEnv"
TICKET = Ticket("g0.0", Task(FAKE, "train", 3, 7), "g0", 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    spec = NewModel(kind="new", num_layers=1, width=16, ffn_width=16, vocab_size=300)
    return load_tokenizer(new_model(path, spec, FakeEnv().corpus(), seed=0))


class Parrot:
    """Says the word it was asked for, and keeps the requests it saw."""

    def __init__(self, tokenizer, *, delay_s: float = 0.0, finish: str = "stop") -> None:
        self.tokenizer = tokenizer
        self.requests: list[GenerateRequest] = []
        self.released: list[str] = []
        self.delay_s = delay_s
        self.finish = finish

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        word = self.tokenizer.decode(request.token_ids).split("say ")[-1].split("<")[0]
        ids = [*self.tokenizer.encode(word), self.tokenizer.stop_token_ids[0]]
        span = TokenSpan(0, len(ids), 5)
        return GenerateResult(ids, [-0.5] * len(ids), (span,), self.finish)

    async def release(self, session_id: str) -> None:
        self.released.append(session_id)


async def env_return(request: RewardRequest) -> RewardResult:
    return RewardResult(request.env_return)


def make_parts(tokenizer, engine, *, score=env_return, **limits: object) -> tuple:
    async def start() -> LocalWorker:
        return LocalWorker(EnvWorker())

    options = limits.pop("options", {})
    pool = EnvPool(start, num_workers=1)
    full = EpisodeLimits(
        max_turns=8,
        max_new_tokens=8,
        temperature=1.0,
        timeouts=PhaseTimeouts(60, 60),
        generate_s=60,
        episode_s=60,
    )
    context = limits.pop("max_context_tokens", 512)
    return pool, EpisodeDependencies(
        env=EnvRef(FAKE, options),
        envs=pool,
        engine=engine,
        new_conversation=lambda: Conversation(tokenizer, max_context_tokens=context),
        score=score,
        stop_token_ids=tuple(tokenizer.stop_token_ids),
        limits=replace(full, **limits),
        seed=1,
    )


def play(tokenizer, engine=None, ticket=TICKET, **options: object):
    engine = engine or Parrot(tokenizer)

    async def main():
        pool, parts = make_parts(tokenizer, engine, **options)
        await pool.start()
        try:
            return await run_episode(ticket, 4, parts)
        finally:
            await pool.close()

    return asyncio.run(main())


def test_a_whole_episode_is_recorded_to_the_token(tokenizer):
    engine = Parrot(tokenizer)
    trajectory = play(tokenizer, engine)
    assert (trajectory.status, trajectory.reward, trajectory.success) == ("finished", 1.0, True)
    assert len(trajectory.turns) == 3
    (sample,) = trajectory.samples
    assert sample.num_loss_tokens == sum(t.num_new_tokens for t in trajectory.turns)
    assert set(sample.policy_versions[sample.loss_mask]) == {5}
    assert trajectory.oldest_version == 5
    last = engine.requests[-1]
    assert list(sample.token_ids[: len(last.token_ids)]) == list(last.token_ids)
    assert engine.released == ["g0.0#0"]


def test_each_turn_draws_from_its_own_key_and_the_same_one_again(tokenizer):
    first, second = Parrot(tokenizer), Parrot(tokenizer)
    play(tokenizer, first)
    play(tokenizer, second)
    keys = [r.sampling_key for r in first.requests]
    assert len(set(keys)) == 3
    assert keys == [r.sampling_key for r in second.requests]


def test_an_episode_out_of_turns_is_truncated_and_scored(tokenizer):
    trajectory = play(tokenizer, max_turns=2)
    assert trajectory.status == "truncated"
    assert trajectory.reward == pytest.approx(2 / 3)


def test_an_episode_out_of_context_is_truncated_and_keeps_what_it_has(tokenizer):
    whole = play(tokenizer).samples[0].num_tokens
    trajectory = play(tokenizer, max_context_tokens=whole - 6)
    assert trajectory.status == "truncated"
    assert trajectory.failure is None
    assert 1 <= len(trajectory.turns) < 3
    assert trajectory.samples[0].num_tokens <= whole - 6


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        ({"options": {"trouble": "raise", "at": 1}}, FailureKind.ENVIRONMENT),
        ({"options": {"trouble": "nan", "at": 1}}, FailureKind.ENVIRONMENT),
        ({"options": {"trouble": "hang", "at": 1}, "timeouts": PhaseTimeouts(60, 0.05)}, "timeout"),
        ({"options": {"trouble": "hang", "at": 1}, "episode_s": 0.1}, FailureKind.TIMEOUT),
    ],
)
def test_a_failed_episode_has_a_type_and_no_reward(tokenizer, limits, kind):
    before = FakeEnv.num_open()
    trajectory = play(tokenizer, **limits)
    assert trajectory.status == "failed"
    assert trajectory.failure is not None
    assert trajectory.failure.kind == kind
    assert trajectory.reward is None
    assert FakeEnv.num_open() == before


def test_a_slow_engine_is_a_timeout(tokenizer):
    trajectory = play(tokenizer, Parrot(tokenizer, delay_s=3600.0), generate_s=0.05)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == FailureKind.TIMEOUT
    assert "generate took longer than 0.05 s" in trajectory.failure.message


def test_an_aborted_generation_is_cancelled_and_not_retried(tokenizer):
    trajectory = play(tokenizer, Parrot(tokenizer, finish="abort"))
    assert trajectory.failure is not None
    assert trajectory.failure.kind == FailureKind.CANCELLED
    assert not trajectory.failure.retryable


def test_an_engine_that_raises_anything_is_an_inference_failure(tokenizer):
    class Broken(Parrot):
        async def generate(self, request):
            raise ZeroDivisionError("inside")

    trajectory = play(tokenizer, Broken(tokenizer))
    assert trajectory.failure is not None
    assert trajectory.failure.kind == FailureKind.INFERENCE
    assert "ZeroDivisionError" in trajectory.failure.message


def test_a_reward_that_fails_is_a_failure_and_never_zero(tokenizer):
    async def broken(request: RewardRequest) -> RewardResult:
        raise RewardFailure("no verdict", boundary="reward.score")

    trajectory = play(tokenizer, score=broken)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == FailureKind.REWARD
    assert trajectory.reward is None


def test_a_reward_is_told_what_the_environment_hands_it_and_the_policy_is_not(
    tokenizer, monkeypatch
):
    info, told = FakeEnv._info, []

    def with_context(env):
        return {**info(env), "reward_context": {"turn": env._turn, f"at {env._turn}": "secret"}}

    async def score(request: RewardRequest) -> RewardResult:
        told.append(request)
        return await env_return(request)

    monkeypatch.setattr(FakeEnv, "_info", with_context)
    engine = Parrot(tokenizer)
    assert play(tokenizer, engine, score=score).reward == 1.0
    (request,) = told
    assert request.context == {"turn": 3, **{f"at {turn}": "secret" for turn in range(4)}}
    assert request.answer == request.messages[-1]["content"]
    assert not any("secret" in tokenizer.decode(r.token_ids) for r in engine.requests)


def test_a_huge_observation_ends_the_episode_in_order(tokenizer):
    trajectory = play(tokenizer, options={"trouble": "huge", "at": 1})
    assert trajectory.status == "truncated"
    assert trajectory.failure is None
    assert trajectory.samples[0].num_tokens <= 512


def test_a_retry_draws_what_the_attempt_before_it_drew(tokenizer):
    """Or attempts that failed would be made again with other actions, which fail less often."""
    keys = []
    for attempt in (0, 1):
        engine = Parrot(tokenizer)
        play(tokenizer, engine, replace(TICKET, attempt=attempt))
        keys.append([r.sampling_key for r in engine.requests])
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 3
    other = Parrot(tokenizer)
    play(tokenizer, other, replace(TICKET, ticket_id="g0.1", index=1))
    assert not {r.sampling_key for r in other.requests} & set(keys[0])


def test_a_return_outside_the_declared_range_is_an_environment_failure(tokenizer):
    trajectory = play(tokenizer, reward_range=(0.0, 0.5))
    assert (trajectory.status, trajectory.reward) == ("failed", None)
    failure = trajectory.failure
    assert (failure.kind, failure.boundary) == (FailureKind.ENVIRONMENT, "env.step")
    assert failure.message == "env.step: the return 1 is outside its spec's reward_range, 0 to 0.5"
