"""Admission control: a sandbox is entered in the ledger when the machine has capacity for it.

The decision (:func:`decide`) depends only on its arguments:

Memory: the available memory of the machine, minus what live sandboxes are expected to use but do
not use yet, minus a reserve that stays free (a tenth of all memory, at most a gigabyte). The use of
a sandbox is read from its cgroup. Without a cgroup, it counts in full until it has run for a while;
after that, its use is part of the machine's. Memory limits of sandboxes do not count.
CPU: a start costs CPU time, so the number of concurrent starts is limited. On a busy machine, a
sandbox waits for a short time and then starts, because a slow sandbox is better than none.

Takes: the needs of a sandbox. Gives: its line in the ledger, which reserves its capacity. Never:
lets a process overtake another that waits, or a small sandbox a large one. Processes take turns,
and the requests of one process are served in order, so no request waits forever.
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
_SANDBOXES_PER_CPU: Final = 32
_MEND: Final = (
    "lower rollout.max_concurrent, or env.pool.reserve_bytes if sandboxes use less, or free "
    "memory on the machine (`rollart sandbox list` shows all sandboxes)"
)

SETTLE_S: Final = 10.0
"""Seconds after which a sandbox without a cgroup has reached its memory use."""
BUSY_A_CPU: Final = 8
"""Runnable threads per CPU above which a machine is busy."""
BUSY_WAIT_S: Final = 3.0
"""Maximum seconds that a sandbox waits for a busy machine."""
_KEEP_SHARE: Final = 0.1
_KEEP_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a sandbox."""

    sandbox: str
    """Id of its sandbox type."""
    options: PoolOptions
    ttl_s: float | None


class Admission:
    """Admission control of this process; see the module.

    Args:
        ledger: The ledger of live sandboxes.
        look_at_machine: Returns the resources of the machine.
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
        """Wait for capacity and reserve it.

        Args:
            request: The sandbox.
            reserve: Called while there is no capacity; closes a sandbox that is not needed.

        Raises:
            SandboxFailure: If there is no capacity in time, with the figures.
        """
        given = request.options.wait_s
        wait_s = _WAIT_S if given is None else given
        try:
            # asyncio's lock serves its waiters in order.
            async with asyncio.timeout(wait_s), self._head:
                return await self.admit_at_once(request) or await self._wait(request, reserve)
        except TimeoutError as e:
            seen = self._seen or "the ledger of sandboxes is locked by another process"
            message = f"no capacity for a sandbox within {wait_s:g} s: {seen}; {_MEND}"
            raise SandboxFailure(message, boundary="sandbox.admission") from e

    async def admit_at_once(self, request: Request) -> Line | None:
        """Reserve capacity if there is some and no process waits for it."""
        async with self.ledger.locked():
            return None if self.ledger.someone_waits() else self._enter(request, 0.0)

    def look_again(self) -> None:
        """Wake the waiting requests: a sandbox of this process has started or ended."""
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
        """Enter a sandbox if there is capacity; the ledger must be locked."""
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
        max_sandboxes=options.max_sandboxes or max(1, int(_SANDBOXES_PER_CPU * machine.num_cpus)),
        concurrent_starts=options.concurrent_starts or max(2, int(machine.num_cpus)),
    )


def _never(found: AdmissionDecision) -> SandboxFailure:
    message = f"a sandbox never fits this machine: {found.figures()}; lower env.pool.reserve_bytes"
    failure = SandboxFailure(message, boundary="sandbox.admission")
    failure.retryable = False
    return failure


@dataclass(frozen=True, slots=True)
class SandboxNeeds:
    """The needs of one more sandbox."""

    reserve_bytes: int
    max_sandboxes: int
    """Limit of all live sandboxes on the machine."""
    concurrent_starts: int


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """The figures of a decision."""

    needs: SandboxNeeds
    machine: Machine
    num_sandboxes: int
    num_starting: int
    held_bytes: int
    """Memory that live sandboxes are expected to use, and do not use yet."""

    @property
    def kept_bytes(self) -> int:
        """Memory that stays free."""
        return min(int(self.machine.memory_bytes * _KEEP_SHARE), _KEEP_BYTES)

    @property
    def free_bytes(self) -> int:
        """Memory that one more sandbox can use."""
        return max(0, self.machine.available_bytes - self.kept_bytes - self.held_bytes)

    @property
    def never_fits(self) -> bool:
        """True if it would not fit on an otherwise empty machine."""
        return self.needs.reserve_bytes > self.machine.memory_bytes - self.kept_bytes

    def obstacle(self, waited_s: float) -> str:
        """Return why the sandbox must wait; empty if it need not.

        Args:
            waited_s: Seconds that it has waited at the head of the queue.
        """
        needs, machine = self.needs, self.machine
        if self.num_sandboxes >= needs.max_sandboxes:
            return f"there are {self.num_sandboxes} sandboxes, of at most {needs.max_sandboxes}"
        if self.num_starting >= needs.concurrent_starts:
            most = needs.concurrent_starts
            return f"{self.num_starting} sandboxes are starting, of at most {most} starts"
        if needs.reserve_bytes > self.free_bytes:
            return f"it needs {_size(needs.reserve_bytes)} of memory"
        is_busy = machine.num_running > BUSY_A_CPU * machine.num_cpus
        if is_busy and self.num_sandboxes and waited_s < BUSY_WAIT_S:
            return f"{machine.num_running} threads are ready to run on {machine.num_cpus:g} CPUs"
        return ""

    def figures(self) -> str:
        """Return the figures of the decision, for a message."""
        where = f" in {self.machine.held_by}" if self.machine.held_by else ""
        return (
            f"memory {_size(self.machine.available_bytes)} available of "
            f"{_size(self.machine.memory_bytes)}{where}, of which {_size(self.kept_bytes)} stay "
            f"free and {_size(self.held_bytes)} are reserved for sandboxes; "
            f"{self.num_sandboxes} live sandboxes, {self.num_starting} of them starting"
        )


def decide(
    needs: SandboxNeeds, machine: Machine, sandboxes: Sequence[SandboxRecord], now: float
) -> AdmissionDecision:
    """Return the figures for one more sandbox.

    Args:
        needs: Its needs.
        machine: The resources of the machine.
        sandboxes: All sandboxes of the ledger; those of killed owners do not count.
        now: Unix seconds.
    """
    alive = [sandbox for sandbox in sandboxes if not sandbox.is_orphan]
    starting = sum(sandbox.ready_at is None for sandbox in alive)
    held = sum(_held(sandbox, now) for sandbox in alive)
    return AdmissionDecision(needs, machine, len(alive), starting, held)


def _held(sandbox: SandboxRecord, now: float) -> int:
    """Return the memory that a sandbox is expected to use and does not use yet."""
    used = sandbox.used_bytes
    if used is not None:
        return max(0, sandbox.reserve_bytes - used)
    has_settled = sandbox.ready_at is not None and now - sandbox.ready_at > SETTLE_S
    return 0 if has_settled else sandbox.reserve_bytes


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
