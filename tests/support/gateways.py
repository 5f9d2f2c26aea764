"""A gateway with an engine that answers from a script, and a plain HTTP client, for tests."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp

from rollart_core.contracts.reward import RewardResult
from rollart_core.gateway.gateway import Gateway, GatewaySettings
from rollart_core.rollout.agent_episode import AgentDependencies
from rollart_core.rollout.env_pool import EnvPool, LocalWorker, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_core.rollout.episode import EpisodeLimits
from rollart_core.types import Task, Ticket
from support.chat_templates import TEMPLATES, tokenizer_with
from support.talks import result
from support.tool_templates import tool_tokenizer

TICKET = Ticket("g0.0", Task("some/Agent-v0", "train", 3, 7), "g0", 0)
LIMITS = EpisodeLimits(
    max_turns=50,
    max_new_tokens=64,
    temperature=1.0,
    timeouts=PhaseTimeouts(60, 60),
    generate_s=60,
    episode_s=120,
)


class Scripted:
    """Answers with given texts (or results, or errors) in turn, then with ``ok``.

    Keeps the requests, the sessions given back, and how many answers were not waited for.
    """

    def __init__(self, tokenizer, answers=(), delay_s=0.0):
        self.tokenizer = tokenizer
        self.answers = list(answers)
        self.delay_s = delay_s
        self.requests, self.released, self.num_cancelled = [], [], 0
        self.gate: asyncio.Event | None = None

    async def generate(self, request):
        self.requests.append(replace(request, token_ids=list(request.token_ids)))
        turn = len(self.requests) - 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        answer = self.answers[turn] if turn < len(self.answers) else "ok"
        if isinstance(answer, Exception):
            raise answer
        if not isinstance(answer, str):
            return answer
        ids = [*self.tokenizer.encode(answer), self.tokenizer.stop_token_ids[0]]
        short = ids[: request.max_new_tokens]
        return result(short, turn, "stop" if short == ids else "length")

    async def release(self, session_id):
        self.released.append(session_id)


class Http:
    """Asks one episode with plain HTTP."""

    def __init__(self, session, gateway_session):
        self.session, self.gateway_session = session, gateway_session

    async def post(self, path, body, *, key=None, base_url=None):
        """Return status and JSON; a ``bytes`` body is sent as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        key = self.gateway_session.api_key if key is None else key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{base_url or self.gateway_session.base_url}/{path}"
        async with self.session.post(url, data=io.BytesIO(data), headers=headers) as response:
            return response.status, await response.json()

    async def chat(self, messages, **more):
        """Return the whole answer; a str is one message of the user."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        status, answer = await self.post("chat/completions", {"messages": messages, **more})
        assert status == 200, answer
        return answer

    async def say(self, messages, **more):
        """Return the message of the answer."""
        return (await self.chat(messages, **more))["choices"][0]["message"]

    async def events(self, path, body):
        """Return the events of a stream, but for the last."""
        headers = {"Authorization": f"Bearer {self.gateway_session.api_key}"}
        url = f"{self.gateway_session.base_url}/{path}"
        async with self.session.post(url, json={**body, "stream": True}, headers=headers) as r:
            assert r.status == 200, await r.text()
            assert r.content_type == "text/event-stream"
            lines = (await r.text()).split("\n\n")
        assert lines.pop() == ""
        if path != "responses":
            assert lines.pop() == "data: [DONE]"
        return [json.loads(line.partition("data: ")[2]) for line in lines]


@asynccontextmanager
async def at_gateway(
    name="ours",
    answers=(),
    *,
    delay_s=0.0,
    max_context_tokens=2000,
    stall_s=5.0,
    ticket=TICKET,
    **limits,
) -> AsyncIterator[tuple]:
    """Give gateway, engine, session and client of one episode."""
    tokenizer = tokenizer_with(name) if name in TEMPLATES else tool_tokenizer(name)
    engine = Scripted(tokenizer, answers, delay_s)
    settings = GatewaySettings(max_context_tokens=max_context_tokens, seed=1, stall_s=stall_s)
    gateway = Gateway(engine, tokenizer, settings)
    await gateway.start()
    try:
        async with (
            aiohttp.ClientSession() as session,
            gateway.episode(ticket, replace(LIMITS, **limits)) as gateway_session,
        ):
            yield gateway, engine, gateway_session, Http(session, gateway_session)
    finally:
        await gateway.close()


async def env_return(request):
    """Return the reward of the environment."""
    return RewardResult(request.env_return)


@asynccontextmanager
async def agent_parts(
    env: EnvRef, engine, limits: EpisodeLimits, *, max_context_tokens: int, score=env_return
) -> AsyncIterator[AgentDependencies]:
    """Give the parts of episodes of an agent task: one env worker here, and the real gateway."""
    settings = GatewaySettings(max_context_tokens=max_context_tokens, seed=1)
    gateway = Gateway(engine, engine.tokenizer, settings)

    async def start():
        return LocalWorker(EnvWorker())

    pool = EnvPool(start, num_workers=1)
    await gateway.start()
    await pool.start()
    try:
        yield AgentDependencies(env, pool, gateway, score, limits)
    finally:
        await pool.close()
        await gateway.close()
