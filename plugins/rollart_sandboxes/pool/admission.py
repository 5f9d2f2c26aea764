"""Admission: a box is entered in the ledger when the machine has room for it, in turn.

Takes: what a box needs. Gives: its line in the ledger, which is its room. Never: lets one process
overtake another that waits, or a small box a large one: processes take turns, the boxes of one come
in their order, and so nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from rollart_core.config.sandbox_options import PoolOptions
from rollart_core.errors import SandboxFailure
from rollart_sandboxes.pool.admission_policy import AdmissionDecision, SandboxNeeds, decide
from rollart_sandboxes.pool.live import Line, LiveSandboxes, new_record
from rollart_sandboxes.pool.machine import Machine, look

_POLL_S: Final = 0.03
_WAIT_S: Final = 60.0
_BOXES_A_CPU: Final = 32
_MEND: Final = (
    "lower rollout.max_concurrent, or env.pool.reserve_bytes if boxes use less, or free the "
    "machine (`rollart sandbox list` shows whose boxes there are)"
)


@dataclass(frozen=True, slots=True)
class Request:
    """A box that wants to be."""

    sandbox: str
    """Id of its wall."""
    options: PoolOptions
    ttl_s: float | None


class Admission:
    """The way to a box, for all of this process; see the module.

    Args:
        ledger: Where live boxes are entered.
        look_at_machine: Returns what the machine has.
    """

    def __init__(
        self, ledger: LiveSandboxes, look_at_machine: Callable[[], Machine] = look
    ) -> None:
        self.ledger = ledger
        self._look = look_at_machine
        self._head = asyncio.Lock()
        self._changed = asyncio.Event()
        self._seen = ""

    async def admit(self, request: Request, reserve: Callable[[], Awaitable[object]]) -> Line:
        """Wait for room and take it.

        Args:
            request: The box.
            reserve: Called while there is none: closes what this process can do without.

        Raises:
            SandboxFailure: When there is no room in time, saying the figures.
        """
        given = request.options.wait_s
        wait_s = _WAIT_S if given is None else given
        try:
            # Its waiters get asyncio's lock in their order.
            async with asyncio.timeout(wait_s), self._head:
                return await self.admit_at_once(request) or await self._wait(request, reserve)
        except TimeoutError as e:
            seen = self._seen or "the ledger of boxes is locked by another process"
            message = f"no room for a box within {wait_s:g} s: {seen}; {_MEND}"
            raise SandboxFailure(message, boundary="sandbox.admission") from e

    async def admit_at_once(self, request: Request) -> Line | None:
        """Take room if there is some and no process waits for it."""
        async with self.ledger.locked():
            return None if self.ledger.someone_waits() else self._enter(request, 0.0)

    def look_again(self) -> None:
        """Wake who waits: a box of this process is up, or gone."""
        self._changed.set()

    async def _wait(self, request: Request, reserve: Callable[[], Awaitable[object]]) -> Line:
        began = time.monotonic()
        async with self.ledger.queued() as turn:
            while True:
                self._changed.clear()
                async with self.ledger.locked():
                    if turn.has_come():
                        line = self._enter(request, time.monotonic() - began)
                        if line is not None:
                            return line
                await reserve()
                with contextlib.suppress(TimeoutError):  # other processes cannot wake this one
                    async with asyncio.timeout(_POLL_S):
                        await self._changed.wait()

    def _enter(self, request: Request, waited_s: float) -> Line | None:
        """Enter a box if there is room; the ledger is locked."""
        machine = self._look()
        found = decide(
            _needs(request.options, machine), machine, self.ledger.records(), time.time()
        )
        obstacle = found.obstacle(waited_s)
        if obstacle:
            self._seen = f"{obstacle}; {found.figures()}"
            if found.never_fits:
                raise _never(found)
            return None
        reserve = request.options.reserve_bytes
        return self.ledger.add(
            new_record(request.sandbox, ttl_s=request.ttl_s, reserve_bytes=reserve)
        )


def _needs(options: PoolOptions, machine: Machine) -> SandboxNeeds:
    return SandboxNeeds(
        reserve_bytes=options.reserve_bytes,
        max_boxes=options.max_boxes or max(1, int(_BOXES_A_CPU * machine.num_cpus)),
        concurrent_starts=options.concurrent_starts or max(2, int(machine.num_cpus)),
    )


def _never(found: AdmissionDecision) -> SandboxFailure:
    message = f"a box never fits this machine: {found.figures()}; lower env.pool.reserve_bytes"
    failure = SandboxFailure(message, boundary="sandbox.admission")
    failure.retryable = False
    return failure
