"""Common code of the backends that use the SDK of a platform: one client, in threads.

Takes: a function that uses the client. Gives: its result, from a thread. Never: imports an SDK
before the first call.
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
    """Base class of the backends with a blocking SDK."""

    def prepare(self) -> None:
        """Create the threads; the client is created later."""
        self._threads = DaemonThreads(self.config.max_concurrent, name=self.name)
        self._making = asyncio.Lock()
        self._client: Any = None

    @abstractmethod
    def new_client(self) -> Any:
        """Return a client of the SDK; called once, in a thread.

        Raises:
            ConfigError: If the SDK is missing, or the options are invalid for it.
        """

    async def open(self) -> None:
        """Send a call without requests to the function.

        Raises:
            ConfigError: If the SDK or the function is missing, no key is allowed to call it, or it
                serves another reward.
        """
        await self._made()
        if self.config.check:
            await self.probe()

    async def close(self) -> None:
        """Accept no more calls; can be called twice."""
        await super().close()
        self._threads.close()

    async def in_thread(self, ask: Callable[[Any], _T]) -> _T:
        """Return the result of a function that uses the client, in a thread.

        Raises:
            BackendFailure: If no client can be created.
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
