"""The gateway: an OpenAI-compatible endpoint for programs that have their own loop.

    program --HTTP--> http -> session -> transcript -> prompt -> engine (the router)
                                        <- answer, recorded as tokens <--

Takes: an engine, a tokenizer, settings. Gives: for each running episode its own base URL and API
key, and the requests to them as turns and samples. Never: answers without the key of a running
episode, or samples with other parameters than those of the episode.

It runs in the controller's event loop. aiohttp is imported at its start.
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
from rollart_core.models.thinking import FOLLOWED, History
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.rollout.episode import EpisodeLimits, Generator
from rollart_core.rollout.threads import DaemonThreads
from rollart_core.types import Ticket

if TYPE_CHECKING:
    from rollart_core.gateway.http import GatewayServer

_NUM_THREADS = 2
_REMEMBERED_KEYS = 100_000
"""Number of remembered keys of ended episodes. Older keys are reported as wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The settings of a gateway."""

    max_context_tokens: int
    """Maximum number of tokens of a row, including the answer."""
    history: History = FOLLOWED
    """How earlier turns appear in later prompts."""
    seed: int = 0
    """Seed of the run. See :func:`rollart_core.types.sampling_key`."""
    model: str = "policy"
    """Name of the model in responses. Requests may use any name."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on. 0 means any free port."""
    stall_s: float = 5.0
    """A connection is closed if no more data of a request arrives for this time."""
    max_body_bytes: int = 32 * 2**20
    """Maximum size of a request. Larger requests get status 413."""


class Gateway:
    """Serves the endpoints of all running episodes. See the module docstring.

    Args:
        engine: Generates the answers: the router, or one engine.
        tokenizer: The policy's tokenizer.
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
        """Threads for long bodies and prompts, which would block other requests."""

    @property
    def url(self) -> str:
        """The URL, such as ``http://127.0.0.1:41235``. Each episode has a base URL below it."""
        assert self._server is not None, "start the gateway first"
        return self._server.url

    @property
    def num_episodes(self) -> int:
        """Number of running episodes."""
        return len(self._sessions)

    async def start(self) -> None:
        """Start to listen.

        Raises:
            ConfigError: If aiohttp is missing, or the address is in use.
        """
        try:
            from rollart_core.gateway.http import GatewayServer
        except ModuleNotFoundError as e:
            raise ConfigError(
                "programs with their own loop need aiohttp: pip install 'rollart[gateway]'"
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
        """End all episodes and stop listening. May be called twice."""
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
        """Open the endpoint of one episode. After the block, its key is invalid.

        Args:
            ticket: The ticket of the episode.
            limits: Uses turns, tokens per turn, seconds per turn and temperature.
            start_version: Current policy version of the engines.
            temperature: Replaces the temperature of the limits, for evaluation.
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
            api_key: The key in the request.
            slug: The episode in the URL. If empty, any episode.

        Raises:
            RequestError: If the key is wrong, or its episode has ended.
        """
        gateway_session = self._sessions.get(api_key)
        if gateway_session is None:
            if api_key in self._ended:
                raise episode_over()
            raise wrong_key("the API key is wrong" if api_key else "there is no API key")
        if slug and slug != _slug(api_key):
            raise wrong_key("the API key belongs to another episode")
        return gateway_session

    def _gateway_session(self, ticket: Ticket, limits: EpisodeLimits) -> GatewaySession:
        settings, tokenizer = self.settings, self.tokenizer
        transcript = Transcript(
            tokenizer, max_context_tokens=settings.max_context_tokens, history=settings.history
        )
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
    """Return the part of the key that identifies the episode in its URL."""
    return api_key[3:15]
