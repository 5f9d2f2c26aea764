"""What the backends share that ask a platform through its SDK: one client, in threads.

Takes: a function that speaks with the client. Gives: what it returns, from a thread. Never: imports
an SDK before the first call.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from rollart_core.errors import BackendFailure, ConfigError
from rollart_core.rollout.threads import DaemonThreads
from rollart_plugins.serverless.config import FcConfig, LambdaConfig
from rollart_plugins.serverless.remote import RemoteBackend

_T = TypeVar("_T")
SdkConfigT = TypeVar("SdkConfigT", LambdaConfig, FcConfig)


class SdkBackend(RemoteBackend[SdkConfigT]):
    """Base of the backends whose SDK blocks."""

    def prepare(self) -> None:
        """Set up the threads; the client comes later."""
        self._threads = DaemonThreads(self.config.max_concurrent, name=self.name)
        self._making = asyncio.Lock()
        self._client: Any = None

    @abstractmethod
    def new_client(self) -> Any:
        """Return a client of the SDK; called once, in a thread.

        Raises:
            ConfigError: When there is no SDK, or the options do not suit it.
        """

    async def open(self) -> None:
        """Ask the function to score nothing.

        Raises:
            ConfigError: When there is no SDK, no such function, no key that may call it, or it
                serves another reward.
        """
        await self._made()
        if self.config.check:
            await self.probe()

    async def close(self) -> None:
        """Take no more calls; may be called twice."""
        await super().close()
        self._threads.close()

    async def in_thread(self, ask: Callable[[Any], _T]) -> _T:
        """Return what a function makes of the client, in a thread.

        Raises:
            BackendFailure: When there is no client to ask.
        """
        try:
            client = await self._made()
        except ConfigError as e:
            raise BackendFailure(str(e), again=False) from e
        return await self._threads.run(partial(ask, client))

    async def _made(self) -> Any:
        async with self._making:
            if self._client is None:
                self._client = await self._threads.run(self.new_client)
            return self._client
