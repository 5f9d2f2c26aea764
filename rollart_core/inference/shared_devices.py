"""Devices that trainer and engines use in turns (``runtime.colocate``).

    the engines have them          engines sleep  -->  the trainer's tensors move back
          ^                                                          |
          |  the trainer's tensors move to host memory  <--  the trainer has them
          +--  engines wake: weights, load, KV cache

A call of the other side waits until the calls in progress have ended, then the devices change
sides. So whatever needs an engine (training, a validation, an evaluation) wakes the engines.

Takes: the router and the trainer. Gives: the blocks in which each of them may use the devices.
Never: lets both use them, or interrupts a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

from rollart_core.contracts.inference import WeightSwap
from rollart_core.errors import TrainerLost

Devices = Callable[[], AbstractAsyncContextManager[list[WeightSwap] | None]]
"""Returns a block in which engines may use their devices; see :meth:`SharedDevices.for_engines`."""
T = TypeVar("T")


class SleepingEngines(Protocol):
    """The engines, behind the router."""

    async def sleep(self) -> None:
        """Release the devices' memory."""

    async def wake(self) -> list[WeightSwap]:
        """Allocate it again, with the newest weights."""


class OffloadedTrainer(Protocol):
    """The trainer."""

    async def offload(self) -> object:
        """Move its tensors to host memory."""

    async def reload(self) -> None:
        """Move them back."""


class SharedDevices:
    """Gives the devices to the engines or to the trainer; at first, the engines have them."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._with_engines = asyncio.Event()
        self._with_engines.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_calls = 0  # of engines, in progress

    def connect(self, engines: SleepingEngines, trainer: OffloadedTrainer) -> None:
        """Set both sides, before the first block."""
        self._engines, self._trainer = engines, trainer

    @asynccontextmanager
    async def for_engines(self) -> AsyncIterator[list[WeightSwap] | None]:
        """Let engines use the devices within the block.

        Yields:
            The swaps of the engines, if this call woke them; else None.
        """
        async with self._lock:
            swaps = None
            if not self._with_engines.is_set():
                swaps = await _whole(self._to_engines())
            self._begin()
        try:
            yield swaps
        finally:
            self._end()

    @asynccontextmanager
    async def for_restart(self) -> AsyncIterator[None]:
        """Wait until the engines have the devices, and let one of them start within the block.

        It does not take the devices from the trainer, because only requests need an engine.
        """
        while not self._with_engines.is_set():
            await self._with_engines.wait()
        self._begin()
        try:
            yield
        finally:
            self._end()

    @asynccontextmanager
    async def for_trainer(self) -> AsyncIterator[None]:
        """Let the trainer use the devices within the block, after the requests in progress."""
        async with self._lock:
            if self._with_engines.is_set():
                while self._num_calls:
                    await self._idle.wait()
                self._with_engines.clear()
                await _whole(self._to_trainer())
            yield

    async def _to_engines(self) -> list[WeightSwap]:
        with suppress(TrainerLost):  # the next call of the trainer raises it
            await self._trainer.offload()
        swaps = await self._engines.wake()
        self._with_engines.set()
        return swaps

    async def _to_trainer(self) -> None:
        await self._engines.sleep()
        with suppress(TrainerLost):
            await self._trainer.reload()

    def _begin(self) -> None:
        self._num_calls += 1
        self._idle.clear()

    def _end(self) -> None:
        self._num_calls -= 1
        if not self._num_calls:
            self._idle.set()


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """Do work to its end, also if the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
