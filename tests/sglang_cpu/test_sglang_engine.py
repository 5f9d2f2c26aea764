"""The engine on real SGLang servers: tokens, logprobs, spans, weights by every road, bad input."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cpu_servers import MAX_TOKENS, SERVER_ARGS, Versions, command, make_model, request

from rollart_core.contracts.inference import GenerateRequest
from rollart_core.errors import ConfigError, EngineDied, InferenceFailure
from rollart_core.models.tokenizer import load_tokenizer
from rollart_plugins.engines.sglang import SGLangEngine
from rollart_plugins.engines.sglang_config import SGLangConfig
from rollart_plugins.engines.sglang_server import (
    SGLangServer,
    free_port,
    group_members,
    launch_argv,
    launch_environment,
)
from rollart_plugins.weights.shared_memory import SharedMemoryChannel

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

EXACT = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def url(model) -> str:
    """A server that somebody else has started, with its tokenizer."""
    config = SGLangConfig(command=command(), server_args=SERVER_ARGS)
    port = free_port()
    options = {"model_path": model, "dtype": "float32", "context_length": str(MAX_TOKENS + 8)}
    argv = launch_argv(config, port=port, first_gpu=None, model=options)
    argv.remove("--skip-tokenizer-init")
    server = SGLangServer(argv, launch_environment(config, on_cpu=True))
    server.start()
    yield f"http://127.0.0.1:{port}"
    asyncio.run(server.close())


@asynccontextmanager
async def engine_at(url: str, model: str, **settings):
    engine = SGLangEngine(
        model_path=model, device="cpu", max_context_tokens=MAX_TOKENS, url=[url], **settings
    )
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def channel_of(folder: Path, versions: Versions):
    """The engine's end of a channel that holds all these versions."""
    ours = SharedMemoryChannel(str(folder), keep=10)
    theirs = SharedMemoryChannel(str(folder))
    for v, weights in enumerate(versions.weights):
        ours.publish(v, weights.items())
    try:
        yield theirs
    finally:
        ours.close()


async def until(condition, limit_s: float = 30.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


async def swapped_under(engine: SGLangEngine, num: int, versions: list[int]) -> list:
    """Turns that begin with the first version, and see all the others come."""
    await engine.load_weights(versions[0])
    tasks = [asyncio.create_task(engine.generate(request(i, 150))) for i in range(num)]
    for version in versions[1:]:
        while not (await engine.stats()).num_running:
            assert engine._flights, "the turns ended before the weights came"
        await asyncio.sleep(0.3)  # some tokens
        await engine.load_weights(version)
    return await asyncio.gather(*tasks)


def check_spans(results, versions: Versions, expected: list[int], kv: str) -> None:
    crossed = 0
    for i, result in enumerate(results):
        bounds = [0, *(span.stop for span in result.spans)]
        assert [span.start for span in result.spans] == bounds[:-1]
        assert bounds[-1] == len(result.token_ids)
        came = [span.policy_version for span in result.spans]
        assert came == [version for version in expected if version in came]
        assert [span.kv for span in result.spans] == ["fresh", *[kv] * (len(came) - 1)]
        assert versions.off(list(request(i).token_ids), result, 0.8) < EXACT
        crossed += len(came) > 1
    assert crossed > 1


@pytest.mark.parametrize("road", ["tensor", "disk", "distributed"])
def test_weights_come_by_each_road_and_every_token_is_of_the_version_its_span_says(
    url, model, tmp_path, road
):
    versions = Versions(model, 4, same_kv=False)

    async def main():
        async with channel_of(tmp_path, versions) as channel:
            more = {} if road == "disk" else {"bucket_bytes": 200_000}  # several buckets
            settings = {"channel": channel, "weight_road": road, **more}
            async with engine_at(url, model, **settings) as engine:
                results = await swapped_under(engine, 8, [1, 2, 3])  # some end soon
                check_spans(results, versions, [1, 2, 3], "recomputed")
                swap = await engine.load_weights(99)  # gone: the newest comes instead
                assert swap.policy_version == 3
                assert swap.num_bytes == sum(t.nbytes for t in versions.weights[3].values())

    asyncio.run(main())


def test_requests_end_when_they_are_aborted_cancelled_or_wait_for_a_paused_server(url, model):
    async def main():
        async with engine_at(url, model) as engine:
            # any of them may come to its own end meanwhile
            long = [asyncio.create_task(engine.generate(request(i, 400))) for i in range(12)]
            await until(lambda: len(engine._flights) == 12)
            await asyncio.sleep(0.3)
            running = [i for i, turn in enumerate(long) if not turn.done()]
            aborted, cancelled, held = running[:4], running[4], running[5:]
            long[cancelled].cancel()
            with pytest.raises(asyncio.CancelledError):
                await long[cancelled]
            await engine.abort([*(request(i).request_id for i in aborted), "unknown"])
            ended = [await long[i] for i in aborted]
            assert "abort" in {turn.finish_reason for turn in ended}
            for turn in ended:
                assert len(turn.token_ids) == len(turn.inference_logprobs) < 400

            await engine.pause()
            waiting = asyncio.create_task(engine.generate(request(20, 4)))
            await asyncio.sleep(0.3)  # what had ended before arrives
            held = [i for i in held if not long[i].done()]
            assert held
            await asyncio.sleep(0.3)
            assert not any(turn.done() for turn in (waiting, *(long[i] for i in held)))
            await engine.abort([request(i).request_id for i in held])
            assert {(await long[i]).finish_reason for i in held} == {"abort"}
            await engine.resume()
            assert len((await waiting).token_ids) <= 4
            load = await engine.stats()
            while load.num_running:  # what was cancelled is aborted at the server too
                load = await engine.stats()
            assert not engine._flights

    asyncio.run(main())


def test_a_turn_is_sampled_as_it_was_asked_and_its_prefix_is_not_computed_again(url, model):
    async def main():
        async with engine_at(url, model) as engine:
            greedy = request(11, 12, temperature=0.0)
            one = await engine.generate(greedy)
            again = await engine.generate(greedy)
            assert one.token_ids == again.token_ids
            assert again.num_cached_tokens == len(greedy.token_ids) - 1
            assert (
                max(map(abs, map(float.__sub__, one.inference_logprobs, again.inference_logprobs)))
                < EXACT
            )
            stop = one.token_ids[3]
            stopped = await engine.generate(request(11, 12, 0.0, stop_token_ids=(stop,)))
            end = one.token_ids.index(stop) + 1
            assert stopped.token_ids == one.token_ids[:end]
            assert stopped.finish_reason == "stop"
            room = GenerateRequest("r/0", [5] * (MAX_TOKENS - 3), 50)
            full = await engine.generate(room)
            assert (len(full.token_ids), full.finish_reason) in {
                (3, "length"),
                (1, "stop"),
                (2, "stop"),
            }

    asyncio.run(main())


def test_what_cannot_be_answered_is_refused_and_the_server_lives_on(url, model, tmp_path):
    async def main():
        async with engine_at(url, model) as engine:
            for tokens in ([], [-1], [10**6], [5] * MAX_TOKENS, ["a"]):
                with pytest.raises(InferenceFailure) as caught:
                    await engine.generate(GenerateRequest("bad/0", tokens, 4))
                assert not caught.value.retryable
            twice = asyncio.create_task(engine.generate(request(1, 40)))
            await until(lambda: engine._flights)
            with pytest.raises(InferenceFailure, match="in flight already"):
                await engine.generate(request(1, 40))
            assert (await twice).token_ids
            # another run brings its weights to the same server: whose tokens are these?
            versions = Versions(model, 2, same_kv=True)
            async with (
                channel_of(tmp_path, versions) as channel,
                engine_at(url, model, channel=channel) as other,
            ):
                await other.load_weights(1)
                with pytest.raises(InferenceFailure, match="did not come from this run"):
                    await engine.generate(request(2))
                wrong = {k: v.T if v.ndim == 2 else v for k, v in versions.weights[0].items()}
                publisher = SharedMemoryChannel(str(tmp_path), keep=10)
                publisher.publish(5, wrong.items())
                with pytest.raises(ValueError, match="the model's is"):
                    await other.load_weights(5)
                assert (await other.generate(request(3))).spans[0].policy_version == 1

    asyncio.run(main())


def test_a_server_that_is_not_the_right_one_is_refused_in_one_line(url, model, tmp_path):
    odd = make_model(tmp_path / "odd", seed=3)
    long = {"max_context_tokens": 100_000}

    async def refused(match: str, **settings):
        settings = {"model_path": model, "device": "cpu", "url": [url], **settings}
        engine = SGLangEngine(**{"max_context_tokens": MAX_TOKENS, **settings})
        with pytest.raises(ConfigError, match=match) as caught:
            await engine.start()
        assert "\n" not in str(caught.value)

    assert load_tokenizer(odd).fingerprint != load_tokenizer(model).fingerprint

    async def main():
        await refused("tokenizer", model_path=odd)
        await refused("takes at most", **long)
        await refused("--disable-overlap-schedule", kv_on_swap="keep")
        await refused("no SGLang server answers", url=["http://127.0.0.1:9"], start_s=0.5)
        with pytest.raises(ConfigError, match="this is engine 2"):
            SGLangEngine(model_path=model, url=[url], engine_index=1)

    asyncio.run(main())


def test_a_launched_server_keeps_its_cache_over_a_swap_and_dies_loudly(model, tmp_path):
    versions = Versions(model, 4, same_kv=True)

    async def main():
        async with channel_of(tmp_path, versions) as channel:
            engine = SGLangEngine(
                model_path=model,
                device="cpu",
                channel=channel,
                kv_on_swap="keep",
                max_context_tokens=MAX_TOKENS,
                command=command(),
                server_args=SERVER_ARGS,
            )
            await engine.start()
            pid = engine._server.pid
            results = await swapped_under(engine, 8, [1, 2, 3])  # some end soon
            check_spans(results, versions, [1, 2, 3], "kept")

            waiting = asyncio.create_task(engine.generate(request(1, 400)))
            await until(lambda: engine._flights)
            assert len(group_members(pid)) > 1  # it has spawned others
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(EngineDied):
                await waiting
            assert time.monotonic() - began < 5
            for call in (engine.generate(request(2)), engine.stats(), engine.load_weights(1)):
                with pytest.raises(EngineDied):
                    await call
            await engine.close()
            assert group_members(pid) == []

    asyncio.run(main())
