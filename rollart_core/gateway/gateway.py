"""The gateway: an OpenAI-compatible endpoint for programs that own their loop.

    program --HTTP--> http -> session -> transcript -> prompt -> engine (the router)
                                        <- answer, recorded to the token <-

Takes: an engine, a tokenizer, settings. Gives: for each running episode a base URL and a key of its
own, and what was asked there as turns and samples. Never: answers without a key of an episode that
runs, or samples otherwise than the episode says.

It lives in the controller's loop. aiohttp is imported when it starts.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rollart_core.errors import ConfigError
from rollart_core.gateway.errors import episode_over, wrong_key
from rollart_core.gateway.session import GatewaySession, GatewaySessionDependencies
from rollart_core.gateway.transcript import Transcript
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.rollout.episode import EpisodeLimits, Generator
from rollart_core.rollout.threads import DaemonThreads
from rollart_core.types import Ticket

if TYPE_CHECKING:
    from rollart_core.gateway.http import GatewayServer

_NUM_THREADS = 2
_REMEMBERED_KEYS = 100_000
"""Keys of ended episodes that are told so; older ones are merely wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """How a gateway is set up."""

    max_context_tokens: int
    """Longest row, answer included."""
    seed: int = 0
    """Of the run; see :func:`rollart_core.types.sampling_key`."""
    model: str = "policy"
    """What the model is called in answers; requests may name any."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0: any that is free."""
    stall_s: float = 5.0
    """A connection is closed when the rest of a request does not come for so long."""
    max_body_bytes: int = 32 * 2**20
    """Larger requests are refused with status 413."""


class Gateway:
    """See the module.

    Args:
        engine: Who generates: the router, or one engine.
        tokenizer: The policy's.
        settings: See :class:`GatewaySettings`.
    """

    def __init__(
        self, engine: Generator, tokenizer: ChatTokenizer, settings: GatewaySettings
    ) -> None:
        self._engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self._sessions: dict[str, GatewaySession] = {}
        self._ended: OrderedDict[str, Literal[True]] = OrderedDict()
        self._server: GatewayServer | None = None
        self.threads = DaemonThreads(_NUM_THREADS, name="gateway")
        """For what would keep other requests waiting: long bodies and prompts."""

    @property
    def url(self) -> str:
        """Such as ``http://127.0.0.1:41235``; each episode has its own base URL below it."""
        assert self._server is not None, "start the gateway first"
        return self._server.url

    @property
    def num_episodes(self) -> int:
        """How many episodes run."""
        return len(self._sessions)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: When aiohttp is missing, or the address is taken.
        """
        try:
            from rollart_core.gateway.http import GatewayServer
        except ModuleNotFoundError as e:
            raise ConfigError(
                "programs that own their loop need aiohttp: pip install 'rollart[gateway]'"
            ) from e
        settings = self.settings
        server = GatewayServer(self)
        try:
            await server.start(settings.host, settings.port)
        except OSError as e:
            await server.close()
            address = f"{settings.host}:{settings.port}"
            raise ConfigError(f"the gateway cannot listen on {address}: {e.strerror}") from e
        self._server = server

    async def close(self) -> None:
        """End all episodes and stop listening; may be called twice."""
        for gateway_session in list(self._sessions.values()):
            await self._end(gateway_session)
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        self.threads.close()

    @asynccontextmanager
    async def episode(
        self,
        ticket: Ticket,
        limits: EpisodeLimits,
        *,
        start_version: int = 0,
        temperature: float | None = None,
    ) -> AsyncIterator[GatewaySession]:
        """Open the endpoint of one episode; after the block its key is dead.

        Args:
            ticket: Whose it is.
            limits: Of these: turns, tokens and seconds a turn, temperature.
            start_version: Policy version the engines hold now.
            temperature: Other than the limits', for evaluation.
        """
        if temperature is not None:
            limits = replace(limits, temperature=temperature)
        gateway_session = self._gateway_session(ticket, limits)
        gateway_session.start_version = start_version
        self._sessions[gateway_session.api_key] = gateway_session
        try:
            yield gateway_session
        finally:
            await self._end(gateway_session)

    def session_of(self, api_key: str, slug: str = "") -> GatewaySession:
        """Return the episode of a key.

        Args:
            api_key: What the program shows.
            slug: The episode that its URL names; none: any.

        Raises:
            RequestError: When the key is wrong, or its episode has ended.
        """
        gateway_session = self._sessions.get(api_key)
        if gateway_session is None:
            if api_key in self._ended:
                raise episode_over()
            raise wrong_key("the API key is wrong" if api_key else "there is no API key")
        if slug and slug != _slug(api_key):
            raise wrong_key("the API key is that of another episode")
        return gateway_session

    def _gateway_session(self, ticket: Ticket, limits: EpisodeLimits) -> GatewaySession:
        settings, tokenizer = self.settings, self.tokenizer
        transcript = Transcript(tokenizer, max_context_tokens=settings.max_context_tokens)
        parts = GatewaySessionDependencies(
            engine=self._engine,
            transcript=transcript,
            stop_token_ids=tuple(tokenizer.stop_token_ids),
            seed=settings.seed,
            max_context_tokens=settings.max_context_tokens,
            threads=self.threads,
        )
        api_key = f"sk-{secrets.token_hex(24)}"
        base_url = f"{self.url}/episodes/{_slug(api_key)}/v1"
        return GatewaySession(ticket, limits, parts, api_key, base_url)

    async def _end(self, gateway_session: GatewaySession) -> None:
        if self._sessions.pop(gateway_session.api_key, None) is None:
            return
        self._ended[gateway_session.api_key] = True
        while len(self._ended) > _REMEMBERED_KEYS:
            self._ended.popitem(last=False)
        await gateway_session.close()


def _slug(api_key: str) -> str:
    """Return what stands for the episode in its URL; it gives nothing of the rest of the key."""
    return api_key[3:15]
