"""Weights that change while the engine decodes: what is exact, what goes on, what is refused."""

import asyncio
import threading

import pytest
import torch
from support.engine_models import VOCAB, make_model, prompt, save, serve
from support.pace import scaled
from support.weight_ends import CHANNELS, end

from rollart_core.contracts.inference import GenerateRequest
from rollart_core.runtime.factories import RestartInFlight
from rollart_plugins.engines.config import EmbeddedConfig
from rollart_plugins.engines.embedded import EmbeddedEngine
from rollart_testing import FakeWeightChannel

IDS = prompt(1, 20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of each family: the one an engine begins with, and another of its form."""
    made = {}
    for family in ("qwen3", "llama", "gpt2"):
        models = [make_model(family, seed) for seed in (0, 1)]
        made[family] = [
            (model, save(model, tmp_path_factory.mktemp(f"{family}{i}")))
            for i, model in enumerate(models)
        ]
    return made


def engine(folder, *, buffers=2, decoder="auto", **options) -> EmbeddedEngine:
    config = EmbeddedConfig(weight_buffers=buffers, decoder=decoder)
    return EmbeddedEngine(config, model_path=folder, max_context_tokens=700, **options)


def tensors(model, dtype=torch.float32):
    """As the trainer publishes them: a tied head is left out."""
    return [(n, p.detach().to(dtype)) for n, p in model.named_parameters()]


def request(name="r", ids=IDS, count=12) -> GenerateRequest:
    return GenerateRequest(name, ids, count, sampling_key=7)


async def until(made, num_tokens: int) -> None:
    while (await made.stats()).decode_tokens < num_tokens:
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "bfloat16") for kind in CHANNELS), ("disk", "float32"), ("delta", "float32")],
)
def test_after_a_swap_it_is_an_engine_of_those_weights(folders, tmp_path, kind, dtype):
    """Bit for bit, over every channel, with a request under way meanwhile."""
    (_, folder), (new, new_folder) = folders["qwen3"]
    writer = end(kind, tmp_path / "w")
    options = {"dtype": dtype, "deterministic": True, "device": "cpu"}

    async def work(made):
        running = asyncio.create_task(made.generate(request("long", count=600)))
        for version in (1, 2):
            writer.publish(version, tensors(new, getattr(torch, dtype)))
            await until(made, 10 * version)
            swap = await made.load_weights(version)
        return await running, swap, await made.generate(request())

    channel = end(kind, tmp_path / "w")
    under_way, swap, result = serve(engine(folder, channel=channel, **options), work)
    writer.close()
    versions = [s.policy_version for s in under_way.spans]
    assert versions == [0, 1, 2]
    assert [s.start for s in under_way.spans] == [0, *(s.stop for s in under_way.spans[:-1])]
    assert swap.moved_bytes > 0
    fresh = serve(engine(new_folder, **options), lambda made: made.generate(request()))
    assert result.token_ids == fresh.token_ids
    assert result.inference_logprobs == fresh.inference_logprobs


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize(
    ("family", "decoder"), [("qwen3", "own"), ("llama", "own"), ("gpt2", "transformers")]
)
def test_one_set_or_two_tied_or_not(folders, family, decoder, buffers):
    (_, folder), (new, new_folder) = folders[family]
    channel = FakeWeightChannel(f"{family}{buffers}")
    channel.publish(1, tensors(new))
    channel.publish(2, tensors(folders[family][0][0]))

    async def work(made):
        results = [await made.generate(request("0"))]
        for version in (1, 2, 1):
            await made.load_weights(version)
            results.append(await made.generate(request(str(len(results)))))
        return [r.inference_logprobs for r in results]

    made = engine(folder, buffers=buffers, decoder=decoder, channel=channel)
    first, second, third, fourth = serve(made, work)
    fresh = engine(new_folder, decoder=decoder)
    wanted = serve(fresh, lambda made: made.generate(request())).inference_logprobs
    assert second == fourth == wanted
    assert first == third != second


class Slow(FakeWeightChannel):
    """Yields its tensors when it is let."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def fetch(self, policy_version):
        for name, tensor in super().fetch(policy_version):
            yield name, tensor
            self.begun.set()
            assert self.go_on.wait(scaled(60))


def test_tokens_are_generated_while_weights_are_fetched(folders):
    (_, folder), (new, _) = folders["qwen3"]
    channel = Slow("slow")
    channel.publish(1, tensors(new))

    async def work(made):
        running = asyncio.create_task(made.generate(request("long", count=600)))
        loading = asyncio.create_task(made.load_weights(1))
        await asyncio.to_thread(channel.begun.wait, scaled(60))
        before = (await made.stats()).decode_tokens
        await until(made, before + 50)
        assert (await made.stats()).policy_version == 0
        channel.go_on.set()
        swap, result = await loading, await running
        return swap, result, before

    swap, result, before = serve(engine(folder, channel=channel), work)
    assert result.spans[0].stop >= before + 50
    assert swap.stall_s < swap.fetch_s


@pytest.mark.parametrize(("family", "decoder"), [("qwen3", "own"), ("gpt2", "transformers")])
@pytest.mark.parametrize("buffers", [1, 2])
def test_weights_of_another_model_are_refused_by_name_and_the_old_ones_stay(
    folders, family, decoder, buffers
):
    (_, folder), (new, _) = folders[family]
    good = tensors(new)
    name, last = good[-1]
    half = good[len(good) // 2][0]
    wrong = {
        rf"'{half}' is \(3,\), the model wants": [
            (n, torch.zeros(3) if n == half else t) for n, t in good
        ],
        "weights hold 'stranger', which this model has not": [*good, ("stranger", last)],
        f"weights lack 1 tensors, such as '{name}'": good[:-1],
    }
    channel = FakeWeightChannel(f"{family}{buffers}", keep=9)
    for version, bad in enumerate(wrong.values()):
        channel.publish(version, bad)
    channel.publish(5, good)

    async def work(made):
        before = await made.generate(request("before"))
        for version, said in enumerate(wrong):
            with pytest.raises(ValueError, match=said):
                await made.load_weights(version)
        after = await made.generate(request("after"))
        assert (await made.stats()).policy_version == 0
        await made.load_weights(5)
        return before, after, await made.generate(request("new"))

    made = engine(folder, decoder=decoder, buffers=buffers, channel=channel)
    before, after, new_result = serve(made, work)
    assert after.inference_logprobs == before.inference_logprobs
    assert new_result.inference_logprobs != before.inference_logprobs


def test_a_version_that_is_gone_is_the_newest(folders):
    (_, folder), (new, _) = folders["qwen3"]
    channel = FakeWeightChannel("gone")
    for version in (1, 2, 3):
        channel.publish(version, tensors(new))

    async def work(made):
        swap = await made.load_weights(1)
        with pytest.raises(LookupError):
            channel.publish(0, tensors(new))
            FakeWeightChannel._stores["gone"].clear()
            await made.load_weights(4)
        return swap, await made.stats()

    swap, stats = serve(engine(folder, channel=channel), work)
    assert (swap.policy_version, stats.policy_version) == (3, 3)


def test_a_load_that_is_cancelled_spoils_no_later_one(folders):
    """Its thread goes on; the next one waits for it."""
    (old, folder), (new, new_folder) = folders["qwen3"]
    channel = Slow("cancelled")
    channel.publish(1, tensors(old))
    channel.publish(2, tensors(new))

    async def work(made):
        first = asyncio.create_task(made.load_weights(1))
        await asyncio.to_thread(channel.begun.wait, scaled(60))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(made.load_weights(2))
        await asyncio.sleep(0)
        channel.go_on.set()
        await second
        return await made.generate(request())

    result = serve(engine(folder, channel=channel), work)
    fresh = serve(engine(new_folder), lambda made: made.generate(request()))
    assert result.inference_logprobs == fresh.inference_logprobs


@pytest.mark.parametrize("kv_on_swap", ["recompute", "keep"])
def test_a_restarted_turn_is_that_of_the_new_weights(folders, kv_on_swap):
    (_, folder), (new, new_folder) = folders["qwen3"]
    channel = FakeWeightChannel(f"restart-{kv_on_swap}")
    channel.publish(1, tensors(new))
    options = {"deterministic": True, "device": "cpu"}

    async def work(made):
        wrapped = RestartInFlight(made)
        asked = GenerateRequest("long", IDS, 300, "session", sampling_key=7)
        running = asyncio.create_task(wrapped.generate(asked))
        await until(made, 20)
        swap = await wrapped.load_weights(1)
        return swap, await running, await wrapped.stats()

    made = engine(folder, channel=channel, kv_on_swap=kv_on_swap, **options)
    swap, result, stats = serve(made, work)
    fresh = serve(engine(new_folder, **options), lambda m: m.generate(request(count=300)))
    assert swap.num_restarted == stats.extra["restarted"] == 1
    assert stats.extra["dropped_tokens"] >= 20
    assert [s.policy_version for s in result.spans] == [1]
    assert (len(result.token_ids), max(result.token_ids) < VOCAB) == (300, True)
    same = result.inference_logprobs == fresh.inference_logprobs
    assert same == (kv_on_swap == "recompute"), "a kept cache is of the old weights, and says so"
    assert result.spans[0].kv == ("fresh" if kv_on_swap == "recompute" else "kept")
