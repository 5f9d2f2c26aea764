"""The engine on real vLLM servers: tokens, logprobs, spans, new weights, bad input, a death."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest
from cpu_vllm import SERVER_ARGS, command
from support.engine_servers import (
    EXACT,
    MAX_TOKENS,
    Versions,
    begun,
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
from rollart_plugins.engines import vllm
from rollart_plugins.engines.server_process import ServerProcess, free_port, group_members
from rollart_plugins.engines.vllm import VllmEngine
from rollart_plugins.weights.shared_memory import SharedMemoryChannel

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def url(model) -> str:
    """A server that somebody else has started."""
    launched = {"command": command(), "server_args": SERVER_ARGS}
    engine = VllmEngine(model_path=model, max_context_tokens=MAX_TOKENS, **launched)
    port = free_port()
    server = ServerProcess(*engine._command_line(port, None))
    server.start()
    yield f"http://127.0.0.1:{port}"
    asyncio.run(server.close())


@asynccontextmanager
async def engine_at(url: str, model: str, **settings):
    settings = {"max_context_tokens": MAX_TOKENS, **settings}
    engine = VllmEngine(model_path=model, device="cpu", url=[url], **settings)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def test_new_weights_come_during_turns_and_every_token_is_of_the_version_its_span_says(
    url, model, tmp_path
):
    versions = Versions(model, 4, same_kv=False)

    async def main():
        folder = tmp_path / "written"
        async with (
            channel_of(tmp_path / "channel", versions) as channel,
            engine_at(url, model, channel=channel, weights_folder=str(folder)) as engine,
        ):
            results = await swapped_under(engine, [1, 2, 3])
            check_spans(results, versions, [1, 2, 3], "recomputed")
            swap = await engine.load_weights(99)  # gone: the newest comes instead
            assert swap.policy_version == 3
            assert swap.num_bytes == sum(t.nbytes for t in versions.weights[3].values())
        assert list(folder.iterdir()) == []

    asyncio.run(main())


def test_requests_end_when_they_are_aborted_or_cancelled(url, model, monkeypatch):
    async def main():
        async with engine_at(url, model) as engine:
            ended: list[GenerateResult] = []
            while "abort" not in {turn.finish_reason for turn in ended}:
                turns = await begun(engine, 0, 6)
                await engine.abort([*(request(i).request_id for i in range(4)), "unknown"])
                ended = [await turn for turn in turns]
            assert {turn.finish_reason for turn in ended[4:]} == {"length"}
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
            wanted = (vllm.ABORT, {"request_ids": [vllm.ID_PREFIX + flight.rid]})
            await until(lambda: wanted in asked, "its abort")

    asyncio.run(main())


def test_requests_wait_for_a_paused_server_and_are_aborted_without_it(url, model):
    async def main():
        async with engine_at(url, model) as engine:
            turns = await begun(engine, 20, 6)
            await engine.pause()
            waiting = asyncio.create_task(engine.generate(request(30, 4)))
            held = [turn for turn in turns if not turn.done()]
            assert held, "400 tokens are sampled in seconds, and the pause comes before"
            await asyncio.sleep(0.2)
            assert not any(turn.done() for turn in held)
            assert not waiting.done()
            assert await engine._is_alive(engine._client)
            await engine.abort([request(20 + i).request_id for i in range(6)])
            ended = [await turn for turn in held]
            assert {turn.finish_reason for turn in ended} == {"abort"}
            assert not waiting.done()
            await engine.resume()
            assert len((await waiting).token_ids) == 4
            assert not engine._flights

    asyncio.run(main())


def test_a_turn_is_sampled_as_it_was_asked_and_its_prefix_is_not_computed_again(
    url, model, tmp_path
):
    versions = Versions(model, 1, same_kv=True)

    async def main():
        async with (
            channel_of(tmp_path, versions) as channel,
            engine_at(url, model, channel=channel) as engine,
        ):
            await engine.load_weights(0)
            long = [5 + i % 90 for i in range(300)]
            greedy = GenerateRequest("g/0", long, 12, temperature=0.0)
            one, other = await asyncio.gather(  # greedy and sampled rows in one batch
                engine.generate(greedy), engine.generate(request(2, 60, temperature=0.5))
            )
            again = await engine.generate(greedy)
            assert one.token_ids == again.token_ids
            assert again.num_cached_tokens == 256
            assert versions.off(long, one, 1.0) < EXACT  # temperature 0: as of temperature 1
            assert versions.off(list(request(2).token_ids), other, 0.5) < EXACT
            stop = one.token_ids[3]
            stopped = await engine.generate(
                GenerateRequest("g/1", long, 12, temperature=0.0, stop_token_ids=(stop,))
            )
            end = one.token_ids.index(stop) + 1
            assert stopped.token_ids == one.token_ids[:end]
            assert stopped.finish_reason == "stop"
            full = await engine.generate(GenerateRequest("r/0", [5] * (MAX_TOKENS - 3), 50))
            assert (len(full.token_ids), full.finish_reason) == (3, "length")

    asyncio.run(main())


def test_what_cannot_be_answered_is_refused_and_the_server_lives_on(url, model, tmp_path):
    async def main():
        async with engine_at(url, model) as engine:
            for tokens in ([], [-1], [10**6], [5] * MAX_TOKENS, ["a"]):
                with pytest.raises(InferenceFailure) as caught:
                    await engine.generate(GenerateRequest("bad/0", tokens, 4))
                assert not caught.value.retryable
            # another run brings its weights to the same server: whose tokens are these?
            versions = Versions(model, 2, same_kv=True)
            async with (
                channel_of(tmp_path, versions) as channel,
                engine_at(url, model, channel=channel) as other,
            ):
                await other.load_weights(1)
                with pytest.raises(InferenceFailure, match="are not of this run"):
                    await engine.generate(request(2))
                await engine._is_alive(engine._client)
                with pytest.raises(EngineDied, match="another run uses it"):
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

    async def refused(match: str, **settings):
        settings = {"model_path": model, "device": "cpu", "url": [url], **settings}
        engine = VllmEngine(**{"max_context_tokens": MAX_TOKENS, **settings})
        with pytest.raises(ConfigError, match=match) as caught:
            await engine.start()
        assert "\n" not in str(caught.value)

    async def main():
        await refused("tokenizer", model_path=odd)
        await refused(r"version 0\.32.* accepts at most 512 tokens", max_context_tokens=100_000)

    asyncio.run(main())


def test_a_launched_server_keeps_its_cache_over_a_swap_and_dies_loudly(model, tmp_path):
    versions = Versions(model, 4, same_kv=True)

    async def main():
        async with channel_of(tmp_path, versions) as channel:
            engine = VllmEngine(
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
