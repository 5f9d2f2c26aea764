"""Admission: a box is entered in the ledger when the machine has room for it, in turn.

The decision (:func:`decide`) looks at nothing by itself:

Memory: what is available on the machine, less what live boxes are expected to use and do not use
yet, less a tenth of all memory (a gigabyte at most) that stays free. What a box uses is read from
its cgroup; without one it counts in full until it has lived for a while, and then as seen by all.
What a box is allowed to use says nothing: limits are wide.
Processors: a start costs processor time, so only so many boxes start at once, and on a machine that
is busy a box waits a moment; then it starts, since a slow box is better than none.

Takes: what a box needs. Gives: its line in the ledger, which is its room. Never: lets one process
overtake another that waits, or a small box a large one: processes take turns, the boxes of one come
in their order, and so nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rollart_core.config.sandbox_options import PoolOptions
from rollart_core.errors import SandboxFailure
from rollart_sandboxes.pool.live import Line, LiveSandboxes, SandboxRecord, new_record
from rollart_sandboxes.pool.machine import Machine, look

_POLL_S: Final = 0.03
_WAIT_S: Final = 60.0
_BOXES_A_CPU: Final = 32
_MEND: Final = (
    "lower rollout.max_concurrent, or env.pool.reserve_bytes if boxes use less, or free the "
    "machine (`rollart sandbox list` shows whose boxes there are)"
)

SETTLE_S: Final = 10.0
"""Seconds after which a box without a cgroup has taken what it takes."""
BUSY_A_CPU: Final = 8
"""Threads that want to run, for each processor, above which a machine is busy."""
BUSY_WAIT_S: Final = 3.0
"""Longest time that a box waits for a busy machine."""
_KEEP_SHARE: Final = 0.1
_KEEP_BYTES: Final = 1 << 30


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


@dataclass(frozen=True, slots=True)
class SandboxNeeds:
    """What one more box needs."""

    reserve_bytes: int
    max_boxes: int
    """Of all live boxes on the machine."""
    concurrent_starts: int


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """The figures of a decision."""

    needs: SandboxNeeds
    machine: Machine
    num_boxes: int
    num_starting: int
    held_bytes: int
    """Expected by live boxes, and not used yet."""

    @property
    def kept_bytes(self) -> int:
        """What stays free."""
        return min(int(self.machine.memory_bytes * _KEEP_SHARE), _KEEP_BYTES)

    @property
    def free_bytes(self) -> int:
        """What one more box may have."""
        return max(0, self.machine.available_bytes - self.kept_bytes - self.held_bytes)

    @property
    def never_fits(self) -> bool:
        """True when it would not fit if there were no other box, nor anything else."""
        return self.needs.reserve_bytes > self.machine.memory_bytes - self.kept_bytes

    def obstacle(self, waited_s: float) -> str:
        """Return why the box has to wait; empty when it need not.

        Args:
            waited_s: How long it has waited at the head of the queue.
        """
        needs, machine = self.needs, self.machine
        if self.num_boxes >= needs.max_boxes:
            return f"there are {self.num_boxes} boxes, of at most {needs.max_boxes}"
        if self.num_starting >= needs.concurrent_starts:
            most = needs.concurrent_starts
            return f"{self.num_starting} boxes are starting, of at most {most} at once"
        if needs.reserve_bytes > self.free_bytes:
            return f"it needs {_size(needs.reserve_bytes)} of memory"
        is_busy = machine.num_running > BUSY_A_CPU * machine.num_cpus
        if is_busy and self.num_boxes and waited_s < BUSY_WAIT_S:
            return f"{machine.num_running} threads want to run on {machine.num_cpus:g} processors"
        return ""

    def figures(self) -> str:
        """Return what was looked at, for a message."""
        where = f" in {self.machine.held_by}" if self.machine.held_by else ""
        return (
            f"memory {_size(self.machine.available_bytes)} available of "
            f"{_size(self.machine.memory_bytes)}{where}, of which {_size(self.kept_bytes)} stay "
            f"free and {_size(self.held_bytes)} are promised to boxes; {self.num_boxes} boxes "
            f"live, {self.num_starting} of them starting"
        )


def decide(
    needs: SandboxNeeds, machine: Machine, boxes: Sequence[SandboxRecord], now: float
) -> AdmissionDecision:
    """Return the figures for one more box.

    Args:
        needs: What it needs.
        machine: What there is.
        boxes: All boxes of the ledger; those of killed owners do not count.
        now: Unix seconds.
    """
    alive = [box for box in boxes if not box.is_orphan]
    starting = sum(box.ready_at is None for box in alive)
    held = sum(_held(box, now) for box in alive)
    return AdmissionDecision(needs, machine, len(alive), starting, held)


def _held(box: SandboxRecord, now: float) -> int:
    """Return what a box is expected to use and does not use yet."""
    used = box.used_bytes
    if used is not None:
        return max(0, box.reserve_bytes - used)
    has_settled = box.ready_at is not None and now - box.ready_at > SETTLE_S
    return 0 if has_settled else box.reserve_bytes


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
