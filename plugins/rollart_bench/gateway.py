"""`rollart bench gateway`: the gateway's overhead on an engine's time, in an open loop.

    client process: request k is due at k / rate, independent of the other requests
         | HTTP, keep-alive, one of 128 growing conversations each
    server process: gateway (or, as the peer, a handler that records nothing) -> engine of 300 ms

A conversation sends a request, waits for the answer, and has its next turn at its next time in the
order, so it never has two open requests. After its last turn, another episode starts in its slot.

Takes: ``rate``, ``conversations``, ``seconds``, ``rounds``, ``short``. Gives: the median and the
99th percentile of the time from when a request was due until its answer was read, less the median
of the engine's own time (300 ms and the delay of its timer).
Never: omits late requests, or counts a run in which a request was not recorded.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.sides import in_fresh_process
from rollart_bench.skip import require
from rollart_core.config.model import NewModel
from rollart_core.contracts.inference import GenerateRequest, GenerateResult
from rollart_core.errors import RollartError
from rollart_core.gateway.gateway import Gateway, GatewaySettings
from rollart_core.models.new import new_model
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer
from rollart_core.rollout.env_pool import PhaseTimeouts
from rollart_core.rollout.episode import EpisodeLimits
from rollart_core.runtime.garbage_collection import short_gc_pauses
from rollart_core.types import Task, Ticket
from rollart_testing import FakeEnv
from rollart_testing.engine import ScriptedEngine

TAKES: Final = ("rate", "conversations", "seconds", "rounds", "short")

MARK_MS = 3.0
ENGINE_S = 0.3
TURNS = 10
"""Requests of an episode. Each contains the whole conversation so far."""
SYSTEM = "You are a careful agent. Read the page, think about what is asked, then act. " * 5
PAGE = "The shop shows twenty products, each with a price, a colour and a button to see more. " * 6
ANSWER = "I look at the second product on this page, since its price is below what was asked. " * 2
MODEL = NewModel(kind="new", num_layers=1, width=16, ffn_width=16, vocab_size=512)
SIDES = ("gateway", "bare")


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """The load of one measurement."""

    rate: float
    """Requests per second."""
    conversations: int
    seconds: float
    engine_s: float = ENGINE_S
    """The engine's time per answer, in seconds."""

    @property
    def num_requests(self) -> int:
        """A number for whole conversations, so that each episode is complete."""
        rounds = max(1, round(self.rate * self.seconds / (self.conversations * TURNS)))
        return rounds * self.conversations * TURNS

    @property
    def num_episodes(self) -> int:
        """The number of consecutive episodes in each conversation's slot."""
        return self.num_requests // TURNS


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``rate`` (200 requests/s), ``conversations`` (128), ``seconds`` (30), ``rounds``
            (3), or ``short``: one round, 10 conversations, 50 requests/s for two seconds, an engine
            of 100 ms.

    Returns:
        The object of ``rollart bench --json``.
    """
    asked = Options("gateway", options)
    require("tokenizers", extra="train")
    require("aiohttp", extra="gateway")
    load = GatewayLoad(
        rate=asked.number("rate", 50 if asked.short else 200),
        conversations=asked.integer("conversations", 10 if asked.short else 128),
        seconds=asked.number("seconds", 2 if asked.short else 30),
        engine_s=0.1 if asked.short else ENGINE_S,
    )
    rounds = asked.integer("rounds", 1 if asked.short else 3)
    got: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        corpus = [*FakeEnv().corpus(), SYSTEM, PAGE, ANSWER]
        path = str(new_model(Path(folder) / "model", MODEL, corpus, seed=0))
        for number in range(1, rounds + 1):
            for side, results in got.items():
                work = {"side": side, "model": path, "load": asdict(load)}
                results.append(in_fresh_process(f"{__name__}:measure", work))
                ms = results[-1]["p50_ms"]
                echo(f"round {number} of {rounds}: {side}: {ms:.2f} ms over the engine's own")
    return result("gateway", _rows(got, load))


def _rows(got: Mapping[str, list[dict[str, Any]]], load: GatewayLoad) -> list[dict[str, object]]:
    def of(side: str, name: str) -> float:
        return float(median(result[name] for result in got[side]))

    case = f"{load.rate:g} requests/s, {load.conversations} conversations of {TURNS} turns"
    name = "bare aiohttp"
    p50 = of("gateway", "p50_ms")
    rows = [
        row(
            f"{case}: p50 over the engine's own time (about {load.engine_s * 1000:g} ms)",
            p50,
            of("bare", "p50_ms"),
            name,
            "ms",
            mark=f"< {MARK_MS:g}",
            meets_mark=p50 < MARK_MS,
        ),
        row("the same, p99", of("gateway", "p99_ms"), of("bare", "p99_ms"), name, "ms"),
    ]
    for what, unit in (("requests_per_s", "requests/s"), ("cpu_ms", "ms CPU a request")):
        rows.append(row(f"the same, {unit}", of("gateway", what), of("bare", what), name, unit))
    rows.append(row("most at once", of("gateway", "most"), of("bare", "most"), name, "requests"))
    return rows


def measure(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Serve, in this process, a client in another process.

    Args:
        asked: ``side`` (one of ``SIDES``), ``model``, ``load``.

    Returns:
        ``p50_ms`` and ``p99_ms`` less ``engine_ms``, the engine's own time; ``requests_per_s``;
        ``most``, the maximum of concurrent requests; and ``cpu_ms`` of this process.

    Raises:
        RollartError: If a request was not recorded completely.
    """
    return asyncio.run(_measure(asked["side"], load_tokenizer(asked["model"]), _load(asked)))


def _load(asked: Mapping[str, Any]) -> GatewayLoad:
    return GatewayLoad(**asked["load"])


async def _measure(side: str, tokenizer: ChatTokenizer, load: GatewayLoad) -> dict[str, Any]:
    words = tokenizer.encode(ANSWER)
    engine = ScriptedEngine(lambda request: words, latency_s=load.engine_s, record=False)
    await engine.start()
    serve = _through_gateway if side == "gateway" else _bare
    timed = _TimedEngine(engine)
    with short_gc_pauses():  # as in a run
        result = await serve(timed, tokenizer, load)
    engine_ms = 1000 * median(timed.own_s)
    late = {name: result[name] - engine_ms for name in ("p50_ms", "p99_ms")}
    return result | late | {"engine_ms": engine_ms}


class _TimedEngine:
    """Records the engine's own time per answer, because a timer of 300 ms is late too."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.own_s: list[float] = []
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        began = time.perf_counter()
        result = await self._engine.generate(request)
        self.own_s.append(time.perf_counter() - began)
        return result

    async def release(self, session_id: str) -> None:
        await self._engine.release(session_id)


async def _through_gateway(
    engine: _TimedEngine, tokenizer: ChatTokenizer, load: GatewayLoad
) -> dict[str, Any]:
    gateway = Gateway(engine, tokenizer, GatewaySettings(max_context_tokens=16_384))
    limits = EpisodeLimits(
        max_turns=TURNS,
        max_new_tokens=256,
        temperature=1.0,
        timeouts=PhaseTimeouts(60, 60),
        generate_s=60,
        episode_s=3600,
    )
    await gateway.start()
    async with AsyncExitStack() as episodes:
        episodes.push_async_callback(gateway.close)
        sessions = [
            await episodes.enter_async_context(gateway.episode(_ticket(n), limits))
            for n in range(load.num_episodes)
        ]
        result = await _asked(
            load,
            [(gateway_session.base_url, gateway_session.api_key) for gateway_session in sessions],
        )
        for gateway_session in sessions:
            samples, num = (
                gateway_session.samples(),
                sum(turn.num_new_tokens for turn in gateway_session.turns),
            )
            recorded = sum(sample.num_loss_tokens for sample in samples)
            if len(gateway_session.turns) != TURNS or len(samples) != 1 or recorded != num:
                raise RollartError(
                    f"an episode of {TURNS} requests has {len(gateway_session.turns)} turns, "
                    f"{len(samples)} samples and {recorded} of {num} sampled tokens"
                )
    return result


async def _bare(
    engine: _TimedEngine, tokenizer: ChatTokenizer, load: GatewayLoad
) -> dict[str, Any]:
    """Serve with the same library, with JSON requests and answers of the same size."""
    from aiohttp import web

    prompt, count = tokenizer.encode(PAGE), iter(range(10**9))

    async def chat(request: web.Request) -> web.Response:
        await request.json()
        await engine.generate(GenerateRequest(str(next(count)), prompt, 256))
        choice = {"index": 0, "message": {"role": "assistant", "content": ANSWER}}
        return web.json_response({"id": "x", "choices": [{**choice, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return await _asked(load, [(url, "none")] * load.num_episodes)
    finally:
        await runner.cleanup()


async def _asked(load: GatewayLoad, endpoints: list[tuple[str, str]]) -> dict[str, Any]:
    """Start the client; return its measurements, and this process's CPU time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "endpoints.json"
        path.write_text(json.dumps(endpoints))
        cpu_s = time.process_time()
        asked = {"endpoints": str(path), "load": asdict(load)}
        result = await asyncio.to_thread(in_fresh_process, f"{__name__}:ask", asked)
        return result | {"cpu_ms": 1000 * (time.process_time() - cpu_s) / load.num_requests}


def _ticket(number: int) -> Ticket:
    return Ticket(
        f"g{number}.0", Task("bench/Gateway-v1", "train", number, number), f"g{number}", 0
    )


def ask(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Send the requests, in this process, in an open loop.

    Args:
        asked: ``endpoints`` (a file of pairs of base URL and key, one per episode), ``load``.

    Returns:
        ``p50_ms`` and ``p99_ms`` from the due time to the answer, ``requests_per_s``, and ``most``:
        the maximum of concurrent requests.
    """
    endpoints = json.loads(Path(asked["endpoints"]).read_text())
    return asyncio.run(_Client(_load(asked), endpoints).run())


class _Client:
    def __init__(self, load: GatewayLoad, endpoints: list[tuple[str, str]]) -> None:
        self._load, self._endpoints = load, endpoints
        self._took_s: list[float] = []
        self._num_open = self._most = 0

    async def run(self) -> dict[str, Any]:
        import aiohttp

        loop, load = asyncio.get_running_loop(), self._load
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._http:
            self._began_s = loop.time() + 0.2
            async with asyncio.TaskGroup() as group:
                for place in range(load.conversations):
                    group.create_task(self._converse(place))
            took_s = loop.time() - self._began_s
        took_ms = sorted(1000 * s for s in self._took_s)
        return {
            "p50_ms": median(took_ms),
            "p99_ms": took_ms[int(0.99 * len(took_ms))],
            "requests_per_s": len(took_ms) / took_s,
            "most": self._most,
        }

    async def _converse(self, place: int) -> None:
        """Send every n-th request, from the first to the last."""
        load, messages = self._load, []
        for nth in range(load.num_requests // load.conversations):
            number = nth * load.conversations + place
            episode, turn = divmod(nth, TURNS)
            if turn == 0:
                messages = [{"role": "system", "content": SYSTEM}]
            messages.append({"role": "user", "content": f"Page {turn}. {PAGE}"})
            endpoint = self._endpoints[episode * load.conversations + place]
            content = await self._request(endpoint, messages, number / load.rate)
            messages.append({"role": "assistant", "content": content})

    async def _request(
        self, endpoint: tuple[str, str], messages: list[dict[str, str]], due_s: float
    ) -> str:
        loop = asyncio.get_running_loop()
        due_s += self._began_s
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        url, key = endpoint
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        await asyncio.sleep(due_s - loop.time())
        self._num_open += 1
        self._most = max(self._most, self._num_open)
        async with self._http.post(f"{url}/chat/completions", data=body, headers=headers) as got:
            answer = await got.json()
        self._took_s.append(loop.time() - due_s)
        self._num_open -= 1
        if got.status != 200:
            raise RollartError(f"status {got.status}: {answer}")
        content: str = answer["choices"][0]["message"]["content"]
        return content
