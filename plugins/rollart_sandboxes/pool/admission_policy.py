"""Whether there is room for one more box: a decision, without looking at anything by itself.

Takes: what the box needs, the machine's figures, the boxes that live. Gives: why it has to wait, or
that it need not. Never: takes what a box is *allowed* to use for what it uses: limits are wide.

Memory: what is available on the machine, less what live boxes are expected to use and do not use
yet, less a tenth of all memory (a gigabyte at most) that stays free. What a box uses is read from
its cgroup; without one it counts in full until it has lived for a while, and then as seen by all.
Processors: a start costs processor time, so only so many boxes start at once, and on a machine that
is busy a box waits a moment; then it starts, since a slow box is better than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollart_sandboxes.pool.live import SandboxRecord
from rollart_sandboxes.pool.machine import Machine

SETTLE_S: Final = 10.0
"""Seconds after which a box without a cgroup has taken what it takes."""
BUSY_A_CPU: Final = 8
"""Threads that want to run, for each processor, above which a machine is busy."""
BUSY_WAIT_S: Final = 3.0
"""Longest time that a box waits for a busy machine."""
_KEEP_SHARE: Final = 0.1
_KEEP_BYTES: Final = 1 << 30


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
