"""The agents of a run: the gateway they ask, and what their episodes are made of.

Takes: a resolved run, its env workers and its engine. Gives: the parts of each agent's episodes.
Never: listens before it is opened, or past ``close``; a run without agents has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rollart_core.config import RunConfig
from rollart_core.resolve import ResolvedEnv
from rollart_core.rollout.agent_episode import AgentParts, run_agent_episode
from rollart_core.rollout.env_pool import EnvPool
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.rollout.episode import EpisodeLimits, Generator
from rollart_core.scoring.room import Scorer
from rollart_core.types import Ticket, Trajectory

if TYPE_CHECKING:
    from rollart_core.rollout.gateway import Gateway


class RunAgents:
    """See the module.

    Args:
        config: The run's config.
        workers: The env workers of the run.
        engine: Who generates.
        model_path: Where the tokenizer lies.
    """

    def __init__(
        self, config: RunConfig, workers: EnvPool, engine: Generator, model_path: str
    ) -> None:
        self._workers = workers
        self._gateway = _gateway(config, engine, model_path)
        self._parts: dict[str, AgentParts] = {}

    def add(self, env: ResolvedEnv, ref: EnvRef, limits: EpisodeLimits, score: Scorer) -> None:
        """Make the parts of one agent's episodes."""
        self._parts[env.name] = AgentParts(
            env=ref,
            envs=self._workers,
            gateway=self._gateway,
            score=score,
            limits=limits,
            model=self._gateway.settings.model,
        )

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: When aiohttp is missing, or the address is taken.
        """
        await self._gateway.start()

    async def close(self) -> None:
        """Stop listening; may be called twice."""
        await self._gateway.close()

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


def _gateway(config: RunConfig, engine: Generator, model_path: str) -> Gateway:
    from rollart_core.models.tokenizer import load_tokenizer
    from rollart_core.rollout.gateway import Gateway, GatewaySettings

    settings = GatewaySettings(
        max_context_tokens=config.rollout.max_context_tokens,
        seed=config.seed,
        host=config.gateway.host,
        port=config.gateway.port,
    )
    return Gateway(engine, load_tokenizer(model_path), settings)
