"""The embedded engine beside transformers, and what it promises."""

import asyncio
import random

import pytest
import torch
from support.engine_models import VOCAB, make_model, prompt, save, serve

from rollart_core.contracts.inference import GenerateRequest
from rollart_core.errors import InferenceFailure
from rollart_core.types import TokenSpan
from rollart_cpu.inference.kernels import load_kernels
from rollart_plugins.engines.config import EmbeddedConfig
from rollart_plugins.engines.embedded import EmbeddedEngine
from rollart_testing import FakeWeightChannel, check_inference_engine


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    model = make_model("qwen3")
    return model, save(model, tmp_path_factory.mktemp("qwen3"))


NUM_TOKENS = 600
"""Long enough for a swap to arrive while they are generated, on a busy machine too."""


def engine(folder: str, config: dict | None = None, **options) -> EmbeddedEngine:
    options = {"max_context_tokens": 200} | options
    return EmbeddedEngine(EmbeddedConfig(**(config or {})), model_path=folder, **options)


def true_logprobs(model, ids: list[int], start: int, temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0] / temperature
    return logits.log_softmax(-1)[range(start - 1, len(ids) - 1), ids[start:]]


def assert_logprobs(model, ids, result, temperature=1.0):
    want = true_logprobs(model, [*ids, *result.token_ids], len(ids), temperature)
    assert torch.allclose(torch.tensor(result.inference_logprobs), want, atol=1e-4)


def kernels(name: str) -> dict[str, str]:
    if name == "native" and load_kernels() is None:
        pytest.skip("no C compiler")
    return {"kernels": name}


def test_it_keeps_the_contract(qwen3):
    results = check_inference_engine(lambda: engine(qwen3[1]))
    assert [r for r in results if r.outcome != "PASS"] == []


def test_attention_may_come_with_its_rows_before_its_heads(qwen3, monkeypatch):
    plain = torch.nn.functional.scaled_dot_product_attention

    def transposed(*args, **kwargs):
        return plain(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", transposed)
    model, folder = qwen3
    ids = prompt(3, 40)
    request = GenerateRequest("a", ids, 12, temperature=0.0)
    result = serve(engine(folder, kernels("torch"), device="cpu"), lambda e: e.generate(request))
    assert_logprobs(model, ids, result)


CASES = [(f, w) for f in ("qwen3", "qwen2", "llama") for w in ("native", "torch")]


@pytest.mark.parametrize(
    ("family", "way"), [*CASES, ("qwen3", "transformers"), ("gpt2", "transformers")]
)
def test_greedy_tokens_are_those_of_transformers(tmp_path, family, way):
    model = make_model(family)
    config = {"decoder": way} if way == "transformers" else kernels(way)
    prompts = [prompt(i, n) for i, n in enumerate((1, 5, 16, 33, 70))]

    async def work(made):
        requests = [GenerateRequest(str(i), p, 24, temperature=0) for i, p in enumerate(prompts)]
        return await asyncio.gather(*map(made.generate, requests))

    for ids, result in zip(
        prompts, serve(engine(save(model, tmp_path), config), work), strict=True
    ):
        want = model.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert result.token_ids == want[0, len(ids) :].tolist()
        assert_logprobs(model, ids, result)
        assert result.spans == (TokenSpan(0, 24, 0),)
        assert result.finish_reason == "length"


@pytest.mark.parametrize("way", ["native", "torch", "transformers"])
def test_turns_compute_only_what_is_new_and_stay_exact(qwen3, way):
    model, folder = qwen3
    config = {"decoder": way} if way == "transformers" else kernels(way)

    async def talk(made, name):
        ids = prompt(len(name), 20)
        for turn in range(3):
            request = GenerateRequest(
                f"{name}.{turn}", ids, 6, session_id=name, temperature=0.8, sampling_key=turn
            )
            result = await made.generate(request)
            assert_logprobs(model, ids, result, 0.8)
            assert result.num_cached_tokens == (len(ids) - 11 if turn else 0)
            ids = [*ids, *result.token_ids, *prompt(turn, 10)]

    async def work(made):
        await asyncio.gather(*(talk(made, f"s{i}") for i in range(4)))
        stats = await made.stats()
        assert stats.num_sessions == 4
        for i in range(4):
            await made.release(f"s{i}")
        return stats, await made.stats()

    before, after = serve(engine(folder, config), work)
    assert before.decode_tokens == 4 * 3 * 6
    assert before.prefill_tokens == 4 * (20 + 11 + 11)
    assert (after.num_sessions, after.kv_used) == (0, 0)


def test_a_shared_prompt_is_computed_once(qwen3):
    ids = prompt(0, 60)

    async def work(made):
        requests = [
            GenerateRequest(f"{i}", ids, 5, f"s{i}", "group", sampling_key=i) for i in range(8)
        ]
        results = await asyncio.gather(*map(made.generate, requests))
        return results, await made.stats()

    results, stats = serve(engine(qwen3[1], {"max_batch_tokens": 16, "max_sessions": 16}), work)
    assert stats.prefill_tokens == 60 + 7
    assert sorted(r.num_cached_tokens for r in results) == [0, *[59] * 7]
    assert len({tuple(r.token_ids) for r in results}) > 1
    for result in results:
        assert_logprobs(qwen3[0], ids, result)


def test_more_sessions_than_slots_wait_and_are_evicted(qwen3):
    async def talk(made, i):
        ids = prompt(i, 12)
        for turn in range(2):
            result = await made.generate(GenerateRequest(f"{i}.{turn}", ids, 4, f"s{i}"))
            assert_logprobs(qwen3[0], ids, result)
            ids = [*ids, *result.token_ids, 7]

    async def work(made):
        await asyncio.gather(*(talk(made, i) for i in range(7)))
        return await made.stats()

    assert serve(engine(qwen3[1], {"max_sessions": 2}), work).num_sessions == 2


@pytest.mark.parametrize("way", ["native", "torch"])
def test_deterministic_answers_depend_on_nothing_else(qwen3, way):
    """Twenty requests: orders, delays, sharing, slots and chunks differ; the bits do not."""
    groups = {f"g{g}": prompt(g, 30 + g) for g in range(3)}
    plan = [(f"g{i % 3}", i) for i in range(10)]

    async def talk(made, group, i, delays):
        ids, answers = list(groups[group]), []
        for turn in range(2):
            for _ in range(delays.randrange(12)):
                await asyncio.sleep(0)
            request = GenerateRequest(
                f"{i}.{turn}", ids, 9 + i, f"s{i}", group, sampling_key=1000 * i + turn
            )
            result = await made.generate(request)
            answers.append((result.token_ids, result.inference_logprobs))
            ids = [*ids, *result.token_ids, *prompt(i, 5)]
        return i, answers

    def outcome(seed):
        order, delays = random.Random(seed), random.Random(seed)
        config = kernels(way) | {
            "max_sessions": (16, 4, 9)[seed],
            "max_batch_tokens": (64, 200, 17)[seed],
            "share_prefixes": seed != 1,
        }
        jobs = order.sample(plan, len(plan))

        async def work(made):
            return dict(await asyncio.gather(*(talk(made, g, i, delays) for g, i in jobs)))

        return serve(engine(qwen3[1], config, deterministic=True), work)

    first = outcome(0)
    assert outcome(1) == first
    assert outcome(2) == first


@pytest.mark.parametrize(("policy", "kv"), [("recompute", "recomputed"), ("keep", "kept")])
@pytest.mark.parametrize("way", ["native", "transformers"])
def test_weights_change_between_two_tokens(qwen3, policy, kv, way):
    old, folder = qwen3
    new = make_model("qwen3", seed=9)
    channel = FakeWeightChannel(f"{policy}-{way}")
    channel.publish(1, new.named_parameters())
    config = {"decoder": way} if way == "transformers" else kernels(way)
    ids = prompt(3, 25)

    async def work(made):
        idle = await made.generate(GenerateRequest("idle", ids, 3, "idle"))
        running = asyncio.create_task(
            made.generate(GenerateRequest("run", ids[::-1], NUM_TOKENS, "run", sampling_key=5))
        )
        while (await made.stats()).decode_tokens < 3 + 10:
            await asyncio.sleep(0)
        swap = await made.load_weights(1)
        result = await running
        more = [*ids, *idle.token_ids, 5]
        return swap, result, more, await made.generate(GenerateRequest("again", more, 4, "idle"))

    made = engine(folder, config, channel=channel, kv_on_swap=policy, max_context_tokens=700)
    swap, result, more, again = serve(made, work)
    channel.close()
    assert swap.policy_version == 1
    assert swap.num_bytes == sum(p.nbytes for p in new.parameters())
    assert [(s.policy_version, s.kv) for s in result.spans] == [(0, "fresh"), (1, kv)]
    assert [(s.policy_version, s.kv) for s in again.spans] == [(1, kv)]
    cut = result.spans[0].stop
    ends = (result.spans[0].start, result.spans[1].start, result.spans[1].stop)
    assert ends == (0, cut, NUM_TOKENS)
    whole = [*ids[::-1], *result.token_ids]
    before = true_logprobs(old, whole, 25)[:cut]
    after = true_logprobs(new, whole, 25)[cut:]
    got = torch.tensor(result.inference_logprobs)
    assert torch.allclose(got[:cut], before, atol=1e-4)
    if policy == "recompute":
        assert torch.allclose(got[cut:], after, atol=1e-4)
        assert swap.num_recomputed_tokens >= 25 + cut - 1
        assert_logprobs(new, more, again)
    else:
        assert not torch.allclose(got[cut:], after, atol=1e-3)
        assert (swap.num_recomputed_tokens, again.num_cached_tokens) == (0, 27)


def test_abort_pause_and_cancel(qwen3):
    async def work(made):
        tasks = [
            asyncio.create_task(made.generate(GenerateRequest(str(i), prompt(i, 9), 150, f"s{i}")))
            for i in range(4)
        ]
        while (await made.stats()).decode_tokens < 20:
            await asyncio.sleep(0)
        await made.pause()
        count = (await made.stats()).decode_tokens
        for _ in range(20):
            await asyncio.sleep(0)
        assert (await made.stats()).decode_tokens == count
        tasks[1].cancel()
        await made.abort(["0", "3", "unknown"])
        first, waited = await tasks[0], await tasks[3]
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert {s.num_running for s in [await made.stats()]} == {1}
        await made.resume()
        return first, waited, await tasks[2]

    config = {"max_sessions": 3}
    first, waited, whole = serve(engine(qwen3[1], config), work)
    assert first.finish_reason == waited.finish_reason == "abort"
    assert 0 < len(first.token_ids) == first.spans[-1].stop < 150
    assert (waited.token_ids, waited.spans) == ([], ())
    assert len(whole.token_ids) == 150


def test_stop_tokens_and_the_end_of_the_context(qwen3):
    async def work(made):
        full = await made.generate(GenerateRequest("a", prompt(0, 190), 50, temperature=0))
        ids = prompt(1, 10)
        free = await made.generate(GenerateRequest("b", ids, 20, temperature=0))
        stop = free.token_ids[7]
        ended = await made.generate(
            GenerateRequest("c", ids, 20, temperature=0, stop_token_ids=[stop])
        )
        return full, free, ended, stop

    full, free, ended, stop = serve(engine(qwen3[1]), work)
    assert (len(full.token_ids), full.finish_reason) == (10, "length")
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": []}, "empty"),
        ({"token_ids": [1, VOCAB]}, f"token id {VOCAB}"),
        ({"token_ids": [-1]}, "token id -1"),
        ({"token_ids": [1] * 200}, "no space"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_what_cannot_be_answered_is_refused_for_good(qwen3, change, said):
    fields = {"request_id": "r", "token_ids": [1], "max_new_tokens": 1} | change

    async def work(made):
        with pytest.raises(InferenceFailure, match=said) as caught:
            await made.generate(GenerateRequest(**fields))
        return caught.value

    assert not serve(engine(qwen3[1]), work).failure().retryable


@pytest.mark.parametrize("way", ["native", "torch"])
def test_weights_that_are_not_finite_fail_the_request_and_heal(qwen3, way):
    channel = FakeWeightChannel(f"nan-{way}")
    good = [(n, p.detach()) for n, p in qwen3[0].named_parameters()]
    channel.publish(1, [(n, p * float("nan")) for n, p in good])
    channel.publish(2, good)
    ids = prompt(4, 30)

    async def work(made):
        await made.load_weights(1)
        with pytest.raises(InferenceFailure, match="finite"):
            await made.generate(GenerateRequest("a", ids, 5, "s"))
        await made.load_weights(2)
        results = await asyncio.gather(
            *(made.generate(GenerateRequest(f"b{i}", ids[i:], 5, f"s{i}")) for i in range(3))
        )
        for i, result in enumerate(results):
            assert_logprobs(qwen3[0], ids[i:], result)

    serve(engine(qwen3[1], kernels(way) | {"max_sessions": 2}, channel=channel), work)
    channel.close()


def test_an_engine_that_is_not_running_says_so(qwen3):
    made = engine(qwen3[1])
    with pytest.raises(InferenceFailure, match="not running"):
        asyncio.run(made.generate(GenerateRequest("a", [1], 1)))

    async def close_with_work():
        await made.start()
        task = asyncio.create_task(made.generate(GenerateRequest("a", [1], 100)))
        await asyncio.sleep(0)
        with pytest.raises(InferenceFailure, match="weight channel"):
            await made.load_weights(1)
        await made.close()
        with pytest.raises(InferenceFailure, match="closed"):
            await task
        await made.close()

    asyncio.run(close_with_work())


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(qwen3, monkeypatch):
    async def work(made):
        runner = made._runner
        forward = type(runner).forward
        monkeypatch.setattr(type(runner), "forward", lambda *a: 1 / 0)
        with pytest.raises(InferenceFailure, match="ZeroDivisionError"):
            await made.generate(GenerateRequest("a", prompt(0, 20), 5, "s"))
        monkeypatch.setattr(type(runner), "forward", forward)
        return await made.generate(GenerateRequest("b", prompt(0, 20), 5, "s"))

    assert_logprobs(qwen3[0], prompt(0, 20), serve(engine(qwen3[1]), work))
