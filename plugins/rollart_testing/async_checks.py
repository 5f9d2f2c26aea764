"""Contract checks of the asynchronous kinds: inference engine, sandbox, reward backend.

Takes: a factory. Gives: check results. Never: leaves an object running.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial

from rollart_core.contracts.inference import (
    SCORE_BOUNDARY,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    ScoreRequest,
)
from rollart_core.contracts.reward import RewardBackend
from rollart_core.contracts.sandbox import Sandbox
from rollart_core.errors import InferenceFailure
from rollart_testing.results import CheckResult, SkipCheck, expect, run_async_checks
from rollart_testing.reward_checks import example_request

_LONG_S = 60.0


def check_inference_engine(
    make: Callable[[], InferenceEngine], *, prompt: Sequence[int] = (1, 2, 3, 4)
) -> list[CheckResult]:
    """Check an inference engine; it is started, and closed at the end.

    Args:
        make: Creates a new engine.
        prompt: Token ids that its model knows.
    """
    return asyncio.run(_engine_checks(make, list(prompt)))


def check_sandbox(make: Callable[[], Sandbox]) -> list[CheckResult]:
    """Check a sandbox that has the commands ``cat``, ``echo``, ``false`` and ``sleep``.

    Args:
        make: Creates a new sandbox.
    """
    return asyncio.run(_sandbox_checks(make))


def check_reward_backend(make: Callable[[], RewardBackend]) -> list[CheckResult]:
    """Check a reward backend that runs a reward with range 0 to 1.

    Args:
        make: Creates a new backend.
    """
    return asyncio.run(_backend_checks(make))


async def _engine_checks(
    make: Callable[[], InferenceEngine], prompt: list[int]
) -> list[CheckResult]:
    engine = make()
    try:
        return await run_async_checks(
            {
                "start": engine.start,
                "generate": partial(_check_generate, engine, prompt),
                "at_once": partial(_check_at_once, engine, prompt),
                "greedy_repeats": partial(_check_repeats, engine, prompt, 0.0),
                "sampling_key_repeats": partial(_check_repeats, engine, prompt, 1.0),
                "stop_tokens": partial(_check_stop_tokens, engine, prompt),
                "session": partial(_check_session, engine, prompt),
                "pause_abort_resume": partial(_check_pause, engine, prompt),
                "score": partial(_check_score, engine, prompt),
                "stats": partial(_check_stats, engine),
                "close_twice": partial(_close_twice, engine),
            }
        )
    finally:
        await engine.close()


async def _generate(
    engine: InferenceEngine,
    request_id: str,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 6,
    temperature: float = 1.0,
    session_id: str = "",
    stop_token_ids: Sequence[int] = (),
) -> GenerateResult:
    request = GenerateRequest(
        request_id=request_id,
        token_ids=array("i", prompt),  # as a run sends them
        max_new_tokens=max_new_tokens,
        session_id=session_id,
        temperature=temperature,
        stop_token_ids=stop_token_ids,
        sampling_key=7,
    )
    result = await asyncio.wait_for(engine.generate(request), _LONG_S)
    _expect_whole(result, max_new_tokens)
    return result


def _expect_whole(result: GenerateResult, max_new_tokens: int) -> None:
    num_tokens = len(result.token_ids)
    expect(num_tokens <= max_new_tokens, f"{num_tokens} tokens, more than {max_new_tokens}")
    expect(
        len(result.inference_logprobs) == num_tokens,
        f"{len(result.inference_logprobs)} logprobs for {num_tokens} tokens",
    )
    for logprob in result.inference_logprobs:
        expect(math.isfinite(logprob) and logprob <= 1e-4, f"a logprob of {logprob}")
    at = 0
    for span in result.spans:
        expect(span.start == at and span.stop > at, f"spans are not consecutive: {result.spans}")
        at = span.stop
    expect(at == num_tokens, f"spans cover {at} of {num_tokens} tokens")
    reasons = ("stop", "length", "abort")
    expect(result.finish_reason in reasons, f"finish_reason is {result.finish_reason!r}")


async def _check_generate(engine: InferenceEngine, prompt: list[int]) -> None:
    result = await _generate(engine, "one", prompt)
    expect(result.token_ids, "no token was generated")
    result = await _generate(engine, "short", prompt, max_new_tokens=1)
    expect(result.finish_reason == "length", f"1 token gives {result.finish_reason!r}")


async def _check_at_once(engine: InferenceEngine, prompt: list[int]) -> None:
    alone = await _generate(engine, "alone", prompt, temperature=0.0)
    requests = [_generate(engine, f"many-{i}", prompt, temperature=0.0) for i in range(5)]
    together = await asyncio.gather(*requests)
    same = all(result.token_ids == alone.token_ids for result in together)
    expect(same, "greedy outputs change with concurrent requests")


async def _check_score(engine: InferenceEngine, prompt: list[int]) -> None:
    """Scores of sampled tokens equal the logprobs from sampling."""
    result = await _generate(engine, "judged", prompt)
    row = [*prompt, *result.token_ids]
    places = list(range(len(prompt), len(row)))
    try:
        scores = await asyncio.wait_for(engine.score(ScoreRequest("score", row, places)), _LONG_S)
    except InferenceFailure as e:
        if e.boundary == SCORE_BOUNDARY and "cannot score" in str(e):
            raise SkipCheck("it does not score given tokens") from e
        raise
    expect(len(scores) == len(places), f"{len(scores)} logprobs for {len(places)} tokens")
    for said, scored in zip(result.inference_logprobs, scores, strict=True):
        expect(abs(said - scored) < 1e-2, f"sampled with logprob {said:.4f}, scored {scored:.4f}")
    nothing = await asyncio.wait_for(engine.score(ScoreRequest("none", row, [])), _LONG_S)
    expect(nothing == [], f"for no tokens it returns {nothing}")


async def _check_repeats(engine: InferenceEngine, prompt: list[int], temperature: float) -> None:
    first = await _generate(engine, "first", prompt, temperature=temperature)
    second = await _generate(engine, "second", prompt, temperature=temperature)
    expect(first.token_ids == second.token_ids, "the same request gives different tokens")


async def _check_stop_tokens(engine: InferenceEngine, prompt: list[int]) -> None:
    free = await _generate(engine, "free", prompt, temperature=0.0)
    stop = free.token_ids[len(free.token_ids) // 2]
    wanted = free.token_ids[: free.token_ids.index(stop) + 1]
    result = await _generate(engine, "stopped", prompt, temperature=0.0, stop_token_ids=[stop])
    expect(result.token_ids == wanted, f"{result.token_ids} does not end with the first {stop}")
    expect(result.finish_reason == "stop", f"finish_reason is {result.finish_reason!r}")


async def _check_session(engine: InferenceEngine, prompt: list[int]) -> None:
    first = await _generate(engine, "turn-0", prompt, temperature=0.0, session_id="s")
    longer = [*prompt, *first.token_ids, *prompt]
    kept = await _generate(engine, "turn-1", longer, temperature=0.0, session_id="s")
    fresh = await _generate(engine, "fresh", longer, temperature=0.0)
    expect(kept.token_ids == fresh.token_ids, "a kept session differs from a new one")
    expect(kept.num_cached_tokens < len(longer), "it reports that the whole prompt was cached")
    await engine.release("s")
    await engine.release("s")
    await engine.release("never heard of")
    stats = await engine.stats()
    expect(stats.num_sessions == 0, f"{stats.num_sessions} sessions are left after release")


async def _check_pause(engine: InferenceEngine, prompt: list[int]) -> None:
    await engine.pause()
    held = asyncio.create_task(_generate(engine, "held", prompt))
    ended = asyncio.create_task(_generate(engine, "ended", prompt))
    done, _ = await asyncio.wait((held, ended), timeout=0.05)
    await engine.abort(["ended", "never heard of"])
    aborted = await asyncio.wait_for(ended, _LONG_S)
    await engine.resume()
    result = await asyncio.wait_for(held, _LONG_S)
    expect(not done, "it generated while paused")
    expect(aborted.finish_reason == "abort", f"after abort it is {aborted.finish_reason!r}")
    expect(result.finish_reason != "abort", "abort ended another request too")


async def _check_stats(engine: InferenceEngine) -> None:
    stats = await engine.stats()
    expect(stats.decode_tokens > 0, "decode_tokens is 0 after generation")
    expect(stats.num_running == 0, f"num_running is {stats.num_running}, but nothing runs")
    expect(0 <= stats.kv_used <= 1, f"kv_used is {stats.kv_used}")


async def _close_twice(part: InferenceEngine | Sandbox | RewardBackend) -> None:
    await part.close()
    await part.close()


async def _sandbox_checks(make: Callable[[], Sandbox]) -> list[CheckResult]:
    sandbox = make()
    try:
        return await run_async_checks(
            {
                "start": sandbox.start,
                "exec": partial(_check_exec, sandbox),
                "timeout": partial(_check_timeout, sandbox),
                "output_cap": partial(_check_output_cap, sandbox),
                "files": partial(_check_files, sandbox),
                "snapshot": partial(_check_snapshot, sandbox),
                "close_twice": partial(_close_twice, sandbox),
            }
        )
    finally:
        await sandbox.close()


async def _check_exec(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["echo", "a b"], timeout_s=10)
    expect((result.exit_code, result.stdout) == (0, b"a b\n"), f"echo gave {result}")
    result = await sandbox.exec(["false"], timeout_s=10)
    expect(result.exit_code == 1, f"false gave {result.exit_code}")
    result = await sandbox.exec(["cat"], timeout_s=10, stdin=b"through")
    expect(result.stdout == b"through", f"cat did not get its stdin: {result}")
    result = await sandbox.exec(["no-such-command"], timeout_s=10)
    expect(result.exit_code != 0, "a command that does not exist ended with 0")


async def _check_timeout(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["sleep", "30"], timeout_s=0.2)
    expect(result.timed_out, f"sleep 30 in 0.2 s gave {result}")
    expect(result.wall_s < 10, f"it took {result.wall_s} s to end a command with a 0.2 s limit")


async def _check_output_cap(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["echo", "x" * 100], timeout_s=10, max_output_bytes=10)
    expect(result.truncated and len(result.stdout) <= 10, f"{len(result.stdout)} bytes, cap 10")


async def _check_files(sandbox: Sandbox) -> None:
    content = bytes(range(256))
    await sandbox.write_file("deep/er/file.bin", content)
    got = await sandbox.read_file("deep/er/file.bin")
    expect(got == content, "a file that was read differs from the one written")
    try:
        await sandbox.read_file("no/such/file")
    except OSError:
        return
    expect(False, "reading a file that does not exist raises no OSError")


async def _check_snapshot(sandbox: Sandbox) -> None:
    await sandbox.write_file("kept", b"before")
    name = await sandbox.snapshot()
    await sandbox.write_file("kept", b"after")
    await sandbox.restore(name)
    expect(await sandbox.read_file("kept") == b"before", "restore did not bring the file back")


async def _backend_checks(make: Callable[[], RewardBackend]) -> list[CheckResult]:
    backend = make()
    try:
        return await run_async_checks(
            {
                "score": partial(_check_backend_score, backend),
                "nothing_to_score": partial(_check_backend_empty, backend),
                "close_twice": partial(_close_twice, backend),
            }
        )
    finally:
        await backend.close()


async def _check_backend_score(backend: RewardBackend) -> None:
    requests = [example_request(i / 10, index=i) for i in range(10)]
    results = await backend.score(requests)
    expect(len(results) == len(requests), f"{len(results)} results for {len(requests)} requests")
    again = await backend.score(requests[::-1])
    expect(again == results[::-1], "results do not follow the order of the requests")


async def _check_backend_empty(backend: RewardBackend) -> None:
    expect(await backend.score([]) == [], "no requests, but results")
