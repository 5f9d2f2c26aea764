"""The engine on real SGLang servers: tokens, logprobs, spans, weights by every road, bad input."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest
from cpu_servers import SERVER_ARGS, command
from support.engine_servers import (
    EXACT,
    MAX_TOKENS,
    Versions,
    begun,
    broadcast_with_a_death,
    channel_of,
    check_spans,
    make_model,
    recorded,
    request,
    swapped_under,
)
from support.pace import scaled, until

from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.errors import ConfigError, EngineDied, InferenceFailure
from rollart_core.models.tokenizer import load_tokenizer
from rollart_plugins.engines import sglang_dialect as dialect
from rollart_plugins.engines.server_process import ServerProcess, free_port, group_members
from rollart_plugins.engines.sglang import SGLangEngine
from rollart_plugins.weights.collective import CollectiveChannel
from rollart_plugins.weights.shared_memory import SharedMemoryChannel

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def url(model) -> str:
    """A server that somebody else has started, with its tokenizer."""
    launched = {"command": command(), "server_args": SERVER_ARGS}
    engine = SGLangEngine(model_path=model, max_context_tokens=MAX_TOKENS, **launched)
    port = free_port()
    argv, environment = engine._command_line(port, None)
    argv.remove("--skip-tokenizer-init")
    server = ServerProcess(argv, environment)
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


@pytest.mark.parametrize("transport", ["requests", "folder", "broadcast"])
def test_weights_come_by_each_transport_and_every_token_is_of_the_version_its_span_says(
    url, model, tmp_path, transport
):
    versions = Versions(model, 4, same_kv=False)
    kind = CollectiveChannel if transport == "broadcast" else SharedMemoryChannel
    folder = {"weights_folder": str(tmp_path / "served")} if transport == "folder" else {}

    async def main():
        # several buckets
        async with channel_of(tmp_path / "w", versions, kind, bucket_bytes=200_000) as channel:
            settings = {"channel": channel, "bucket_bytes": 200_000, **folder}
            async with engine_at(url, model, **settings) as engine:
                results = await swapped_under(engine, [1, 2, 3])
                check_spans(results, versions, [1, 2, 3], "recomputed")
                swap = await engine.load_weights(99)  # gone: the newest comes instead
                assert swap.policy_version == 3
                assert swap.num_bytes == sum(t.nbytes for t in versions.weights[3].values())
                if transport == "broadcast":  # the engine's process received nothing
                    assert channel.moved_bytes == swap.moved_bytes == 0

    asyncio.run(main())


def test_servers_receive_one_broadcast_and_one_that_dies_in_it_costs_the_other_nothing(
    model, tmp_path
):
    launched = {"command": command(), "server_args": SERVER_ARGS}
    received, num_bytes = asyncio.run(
        broadcast_with_a_death(SGLangEngine, launched, model, tmp_path)
    )
    assert 0 < received < num_bytes  # the rest came in requests


def test_requests_end_when_they_are_aborted_or_cancelled(url, model, monkeypatch):
    async def main():
        async with engine_at(url, model) as engine:
            ended: list[GenerateResult] = []
            while "abort" not in {turn.finish_reason for turn in ended}:
                turns = await begun(engine, 0, 6)
                await engine.abort([*(request(i).request_id for i in range(4)), "unknown"])
                ended = [await turn for turn in turns]
            for turn in ended:
                assert len(turn.token_ids) == len(turn.inference_logprobs)
                assert turn.finish_reason != "abort" or len(turn.token_ids) < 400

            cancelled = asyncio.create_task(engine.generate(request(7, 400)))
            await until(lambda: engine._flights, "a turn")
            (flight,) = engine._flights.values()
            asked = recorded(monkeypatch, engine)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert not engine._flights
            await until(lambda: (dialect.ABORT, {"rid": flight.rid}) in asked, "its abort")
            while (await engine.stats()).num_running:
                await asyncio.sleep(0.005)

    asyncio.run(main())


def test_requests_wait_for_a_paused_server_and_are_aborted_without_it(url, model):
    async def main():
        async with engine_at(url, model) as engine:
            num_held, turns = 0, []
            while num_held < 2:
                await asyncio.gather(*turns)  # their ids come again
                turns = await begun(engine, 20, 6)
                await engine.pause()
                num_held = (await engine.stats()).num_running
                if num_held < 2:  # the others had ended, or were still on their way to the server
                    await engine.resume()
            waiting = asyncio.create_task(engine.generate(request(30, 4)))
            for _ in range(20):
                await asyncio.sleep(0.01)
                # What the server still holds afterwards cannot have ended before; those that were
                # on their way when it paused may be among them, the one that waits is not.
                num_open = sum(not turn.done() for turn in turns)
                assert (await engine.stats()).num_running <= num_open
                assert not waiting.done()
            await engine.abort([request(20 + i).request_id for i in range(6)])
            ended = [(await turn).finish_reason for turn in turns]
            # A last token that was sampled before the pause may be delivered after it.
            assert "abort" in ended
            assert set(ended) <= {"abort", "stop", "length"}
            assert not waiting.done()
            await engine.resume()
            assert len((await waiting).token_ids) <= 4
            while (await engine.stats()).num_running:
                await asyncio.sleep(0.005)
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
            capacity = GenerateRequest("r/0", [5] * (MAX_TOKENS - 3), 50)
            full = await engine.generate(capacity)
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
            await until(lambda: engine._flights, "a turn")
            with pytest.raises(InferenceFailure, match="already in flight"):
                await engine.generate(request(1, 40))
            assert (await twice).token_ids
            # another run brings its weights to the same server: whose tokens are these?
            versions = Versions(model, 2, same_kv=True)
            async with (
                channel_of(tmp_path, versions) as channel,
                engine_at(url, model, channel=channel) as other,
            ):
                await other.load_weights(1)
                with pytest.raises(InferenceFailure, match="are not of this run"):
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
        await refused("accepts at most", **long)
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
            pid = engine._process.pid
            results = await swapped_under(engine, [1, 2, 3])
            check_spans(results, versions, [1, 2, 3], "kept")

            spawned = [member for member in group_members(pid) if member != pid]
            assert spawned
            for member in spawned:  # so that no turn can end
                os.kill(member, signal.SIGSTOP)
            waiting = asyncio.create_task(engine.generate(request(1, 400)))
            await until(lambda: engine._flights, "a turn")
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(scaled(60)):
                with pytest.raises(EngineDied):
                    await waiting
            for call in (engine.generate(request(2)), engine.stats(), engine.load_weights(1)):
                with pytest.raises(EngineDied):
                    await call
            await engine.close()
            assert group_members(pid) == []

    asyncio.run(main())
