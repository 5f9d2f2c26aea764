"""The agents of a run: the gateway they ask, and what their episodes are made of.

Takes: a resolved run, its env workers and its engine. Gives: the parts of each agent's episodes.
Never: listens before it is opened, or past ``close``; a run without agents has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rollart_core.config.resolve import ResolvedEnv
from rollart_core.config.run import RunConfig
from rollart_core.models.tokenizer import ChatTokenizer, byte_tokenizer, load_tokenizer
from rollart_core.rewards.service import Scorer
from rollart_core.rollout.agent_episode import AgentDependencies, run_agent_episode
from rollart_core.rollout.baseline import BaselineName, DrawsWords
from rollart_core.rollout.env_pool import EnvPool
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.rollout.episode import EpisodeLimits, Generator
from rollart_core.types import Ticket, Trajectory

if TYPE_CHECKING:
    from rollart_core.gateway.gateway import Gateway

_BYTES_A_TOKEN: Final = 8
"""Of a page: more than tokenizers of models come to, so that no page is too long for a draw."""


class RunAgents:
    """See the module.

    Args:
        config: The run's config.
        workers: The env workers of the run.
        engine: Who generates; None: nobody does, and only baselines can play.
        model_path: Where the tokenizer lies.
    """

    def __init__(
        self, config: RunConfig, workers: EnvPool, engine: Generator | None, model_path: str
    ) -> None:
        self._config = config
        self._workers = workers
        self._gateway: Gateway | None = None
        if engine:
            tokenizer = load_tokenizer(model_path)
            self._gateway = _gateway(config, engine, tokenizer, port=config.gateway.port)
        self._drawing: Gateway | None = None
        self._opens = asyncio.Lock()
        self._parts: dict[str, AgentDependencies] = {}

    def add(self, env: ResolvedEnv, ref: EnvRef, limits: EpisodeLimits, score: Scorer) -> None:
        """Make the parts of one agent's episodes."""
        self._parts[env.name] = AgentDependencies(
            env=ref,
            envs=self._workers,
            gateway=self._gateway,
            score=score,
            limits=limits,
        )

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: When aiohttp is missing, or the address is taken.
        """
        if self._gateway is not None:
            await self._gateway.start()

    async def close(self) -> None:
        """Stop listening; may be called twice."""
        for gateway in (self._gateway, self._drawing):
            if gateway is not None:
                await gateway.close()

    def has(self, name: str) -> bool:
        """Whether an environment of the run is an agent."""
        return name in self._parts

    async def run_episode(
        self,
        ticket: Ticket,
        start_version: int,
        *,
        temperature: float | None,
        on_cancel: Callable[[Trajectory], None] | None,
    ) -> Trajectory:
        """Execute one attempt of a ticket of an agent."""
        parts = self._parts[ticket.task.env_id]
        return await run_agent_episode(
            ticket, start_version, parts, temperature=temperature, on_cancel=on_cancel
        )

    async def play_baseline(self, ticket: Ticket, name: BaselineName) -> Trajectory:
        """Have a baseline execute a ticket of an agent.

        Raises:
            ConfigError: When aiohttp is missing, which its program is answered with.
        """
        parts = self._parts[ticket.task.env_id]
        if name == "random":
            parts = replace(parts, gateway=await self._answers_at_random())
        else:
            parts = replace(parts, acts="expert" if name == "oracle" else "nobody")
        return await run_agent_episode(ticket, 0, parts)

    async def _answers_at_random(self) -> Gateway:
        async with self._opens:
            if self._drawing is None:
                tokenizer = byte_tokenizer()
                draws = DrawsWords(tokenizer)
                self._drawing = _gateway(self._config, draws, tokenizer, tokens_more=_BYTES_A_TOKEN)
                await self._drawing.start()
            return self._drawing


def _gateway(
    config: RunConfig,
    engine: Generator,
    tokenizer: ChatTokenizer,
    *,
    port: int = 0,
    tokens_more: int = 1,
) -> Gateway:
    """Return a gateway of the run, not open yet, with ``tokens_more`` times its longest row."""
    from rollart_core.gateway.gateway import Gateway, GatewaySettings

    settings = GatewaySettings(
        max_context_tokens=tokens_more * config.rollout.max_context_tokens,
        seed=config.seed,
        host=config.gateway.host,
        port=port,
    )
    return Gateway(engine, tokenizer, settings)
