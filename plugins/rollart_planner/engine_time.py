"""When an engine would answer: continuous batching on one device, by the roofline, step by step.

    waiting --room in the batch and in the cache--> prefill step --> running --decode steps--> done
       ^                                                                |
       +------------------------ the next prompt comes in between ------+

A step is either a prefill of all prompts that are admitted together, or a decode of all running
rows; prompts go first. A step once begun is finished; what comes meanwhile waits for its end.

Takes: requests and the time now. Gives: when the next of them is done, and which are. Never: reads
a clock, waits, or looks at tokens; a real engine of the same figures would make them up meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rollart_core.contracts.hardware import ModelShape, Pool
from rollart_planner.roofline import KV_SHARE, MAX_BATCH, decode_bounds, prefill_bounds


@dataclass(slots=True)
class _Row:
    """A request, and how far it is."""

    key: str
    num_prompt: int
    num_cached: int
    num_new: int
    num_done: int = 0

    @property
    def context(self) -> int:
        return self.num_prompt + self.num_done


@dataclass(slots=True)
class _Phase:
    """Steps of one kind, all alike, that end in time if nothing comes."""

    began_s: float
    step_s: float
    num_steps: int
    admitted: list[_Row] = field(default_factory=list)
    """Rows of a prefill; none: decode."""

    @property
    def ends_s(self) -> float:
        return self.began_s + self.num_steps * self.step_s


class EngineTime:
    """The time of one engine; calls come with a ``now_s`` that never goes back.

    Args:
        model: What it runs.
        pool: What it runs on: the figures of one device.
        max_batch: Most rows at once.
    """

    def __init__(self, model: ModelShape, pool: Pool, *, max_batch: int = MAX_BATCH) -> None:
        self._model = model
        self._pool = pool
        self._max_batch = max_batch
        room = KV_SHARE * pool.memory_bytes - model.weight_bytes
        self._room_tokens = room / model.kv_bytes_per_token if pool.memory_bytes else math.inf
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._done: list[tuple[str, float]] = []
        self._phase: _Phase | None = None
        self.busy_s = 0.0
        """Of steps that are over."""

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batch or in prefill."""
        return len(self._running) + (len(self._phase.admitted) if self._phase else 0)

    @property
    def kv_used(self) -> float:
        """Share of the cache that running requests hold or will hold."""
        return 0.0 if math.isinf(self._room_tokens) else self._held() / self._room_tokens

    def submit(self, now_s: float, key: str, *, prompt: int, cached: int, new: int) -> bool:
        """Take a request.

        Args:
            now_s: When it comes.
            key: What ``advance`` calls it.
            prompt: Tokens of the prompt.
            cached: How many of them are in the cache already.
            new: Tokens it will answer, 1 at least.

        Returns:
            False when it would not fit even alone.
        """
        if prompt + new > self._room_tokens:
            return False
        self._run_until(now_s)
        self._waiting.append(_Row(key, prompt, min(cached, prompt - 1), max(1, new)))
        self._interrupt(now_s)
        return True

    def cancel(self, now_s: float, key: str) -> int:
        """Forget a request and return how many tokens it has answered; 0 for an unknown one."""
        self._run_until(now_s)
        self._interrupt(now_s)
        rows = [*self._waiting, *self._running, *(self._phase.admitted if self._phase else [])]
        found = next((row for row in rows if row.key == key), None)
        self._waiting = deque(row for row in self._waiting if row.key != key)
        self._running = [row for row in self._running if row.key != key]
        if self._phase is not None and self._phase.admitted:
            self._phase.admitted = [r for r in self._phase.admitted if r.key != key]
        return found.num_done if found else 0

    def next_s(self) -> float | None:
        """Return when to call ``advance`` again; None: when something is submitted."""
        if self._done:
            return self._done[0][1]
        return self._phase.ends_s if self._phase else None

    def advance(self, now_s: float) -> list[tuple[str, float]]:
        """Return who is done by now, and since when."""
        self._run_until(now_s)
        done, self._done = self._done, []
        return done

    def _run_until(self, now_s: float) -> None:
        while self._phase is not None and self._phase.ends_s <= now_s:
            at_s = self._phase.ends_s
            self._finish(self._phase, self._phase.num_steps)
            self._begin(at_s)

    def _interrupt(self, now_s: float) -> None:
        """End a run of decode steps early, so that a prompt gets in between, or begin at once."""
        phase = self._phase
        if phase is None:
            self._begin(now_s)
        elif not phase.admitted and self._waiting:
            over = math.ceil((now_s - phase.began_s) / phase.step_s) if phase.step_s else 0
            phase.num_steps = max(1, min(phase.num_steps, over))

    def _finish(self, phase: _Phase, num_steps: int) -> None:
        """Take the phase's steps as done; prefill gives a first token."""
        self.busy_s += num_steps * phase.step_s
        self._running += phase.admitted
        for row in phase.admitted or self._running:
            row.num_done += num_steps
        at_s = phase.began_s + num_steps * phase.step_s
        self._done += [(row.key, at_s) for row in self._running if row.num_done >= row.num_new]
        self._running = [row for row in self._running if row.num_done < row.num_new]
        self._phase = None

    def _begin(self, at_s: float) -> None:
        admitted = self._admit()
        if admitted:
            self._phase = _Phase(at_s, self._prefill_s(admitted), 1, admitted)
        elif self._running:
            num_steps = min(row.num_new - row.num_done for row in self._running)
            # All steps up to the next end take what the middle one takes.
            contexts = [row.context + num_steps / 2 for row in self._running]
            step_s = max(decode_bounds(self._model, self._pool, contexts)) + self._pool.step_s
            self._phase = _Phase(at_s, step_s, num_steps)

    def _admit(self) -> list[_Row]:
        admitted: list[_Row] = []
        held = self._held()
        while self._waiting and len(self._running) + len(admitted) < self._max_batch:
            row = self._waiting[0]
            held += row.num_prompt + row.num_new
            if held > self._room_tokens:
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill_s(self, rows: list[_Row]) -> float:
        parts = [
            prefill_bounds(
                self._model,
                self._pool,
                row.num_prompt - row.num_cached,
                row.num_cached,
                prompts=len(rows),
            )
            for row in rows
        ]
        longer = max(sum(part[0] for part in parts), sum(part[1] for part in parts))
        return longer + self._pool.step_s

    def _held(self) -> int:
        rows = [*self._running, *(self._phase.admitted if self._phase else [])]
        return sum(row.num_prompt + row.num_new for row in rows)
