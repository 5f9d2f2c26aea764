"""The journal of a run: SQLite, one writer thread, group commit.

    any thread --call--> queue --> writer thread: BEGIN, up to 256 calls or 50 ms, COMMIT
                                        |  a trajectory: summary row + compressed blob
                                        +--> a full shard: Parquet beside, rename, blobs deleted

Takes: the records of a run, as they happen. Gives: ``journal.db`` and ``trajectories/*.parquet``.
Never: loses an error. What is committed survives a kill at any instant; when a write fails (disk
full, locked) every later call raises :class:`JournalError` and ``on_error`` hears of it at once.
:class:`rollart_core.store.journal_reader.JournalReader` reads it, also while it is written.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from rollart_core.errors import JournalError, first_line
from rollart_core.scheduling.events import AbortEpisode, DropGroup, LoseTicket, StopRun
from rollart_core.store.journal_store import JournalStore
from rollart_core.types import Group, Ticket, Trajectory

_Call: TypeAlias = Callable[[JournalStore], None]
_Item: TypeAlias = _Call | threading.Event | None
"""What to write; or a flush, set once all before it is committed; or None: the end."""


class Journal:
    """Writes the journal; all methods but ``flush`` and ``close`` return at once."""

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, object],
        *,
        rows_per_shard: int = 512,
        commit_s: float = 0.05,
        commit_records: int = 256,
        max_waiting: int = 16_384,
        on_error: Callable[[JournalError], None] | None = None,
    ) -> None:
        """Open the journal of a run, a new one or one to go on with.

        Args:
            run_dir: The run directory.
            config: The resolved run config; ``mode`` and ``max_staleness`` are what an audit reads.
            rows_per_shard: Trajectories a Parquet file.
            commit_s: Longest time between a call and its commit, when the disk keeps up.
            commit_records: Most calls in one commit.
            max_waiting: Calls that may wait for the writer; one more blocks its caller.
            on_error: Called in the writer thread when a write fails, once.

        Raises:
            JournalError: When it cannot be opened.
        """
        self._path = run_dir
        self._commit_s = commit_s
        self._commit_records = commit_records
        self._on_error = on_error
        self._error: JournalError | None = None
        self._closed = False
        self._queue: queue.Queue[_Item] = queue.Queue(max_waiting)
        try:
            self._store = JournalStore(run_dir, config, rows_per_shard=rows_per_shard)
        except Exception as e:
            raise self._as_error("cannot be opened", e) from e
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    # What happens

    def dispatched(self, ticket: Ticket, start_version: int) -> None:
        """An attempt begins."""
        now = time.time()
        self._put(lambda store: store.dispatched(now, ticket, start_version))

    def trajectory(self, trajectory: Trajectory) -> None:
        """An attempt ended, well or not."""
        now = time.time()
        self._put(lambda store: store.trajectory(now, trajectory))

    def decided(self, action: LoseTicket | AbortEpisode | DropGroup | StopRun) -> None:
        """The scheduler gave something up, or ended the run."""
        now = time.time()
        self._put(lambda store: store.decided(now, action))

    def batch_taken(self, groups: Sequence[Group], policy_version: int) -> None:
        """The trainer, at ``policy_version``, begins a batch."""
        now = time.time()
        # Worked out here, so that a batch in the queue does not hold on to its tokens.
        ids = tuple(g.group_id for g in groups)
        staleness = tuple(policy_version - g.oldest_version for g in groups)
        tickets = [t.ticket for g in groups for t in g.trajectories]
        attempts = {t.ticket_id: t.attempt for t in tickets}
        self._put(lambda store: store.batch_taken(now, policy_version, ids, staleness, attempts))

    def batch_trained(self, policy_version: int) -> None:
        """The batch taken at ``policy_version`` is trained and its weights are published."""
        now = time.time()
        self._put(lambda store: store.batch_trained(now, policy_version))

    def metrics(self, train_step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of one train_step."""
        rows = [(train_step, policy_version, name, float(v)) for name, v in metrics.items()]
        self._put(lambda store: store.metrics(rows))

    def event(
        self,
        kind: str,
        payload: Mapping[str, object] | None = None,
        *,
        policy_version: int | None = None,
    ) -> None:
        """Keep anything else that is worth knowing later; ``payload`` is plain JSON."""
        now, content = time.time(), dict(payload or {})
        self._put(lambda store: store.event(now, kind, content, policy_version=policy_version))

    def rolled_back(
        self,
        policy_version: int,
        reason: str,
        *,
        as_version: int | None = None,
        discards: tuple[int, int] | None = None,
    ) -> None:
        """A new life of the run begins, from the checkpoint of ``policy_version``.

        Batches from that version on are marked rolled back, and their groups queued to be done
        again, as is every group that was open, or that was dropped because the run was stopped:
        as themselves, with the same ids and higher attempts.

        Args:
            policy_version: Of the checkpoint.
            reason: Why.
            as_version: What its weights are called from now on; None: the same.
            discards: The first version, and the one after the last, whose batches are left out:
                their groups are not done again.
        """
        now = time.time()
        self._put(
            lambda store: store.rolled_back(
                now, policy_version, reason, as_version=as_version, discards=discards
            )
        )

    # Certainty

    def flush(self) -> None:
        """Return when everything said so far is committed.

        Raises:
            JournalError: When it cannot be.
        """
        done = threading.Event()
        self._put(done)
        done.wait()
        self._check()

    def close(self) -> None:
        """Commit, write the last shard and end the thread; may be called twice.

        Raises:
            JournalError: When something could not be written, now or before.
        """
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()
            self._check()

    def _put(self, item: _Call | threading.Event) -> None:
        self._check()
        if self._closed:
            raise JournalError(f"the journal of {self._path} is closed")
        self._queue.put(item)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # The writer thread

    def _work(self) -> None:
        item: _Item = self._queue.get()
        while item is not None:
            item = self._commit_group(item)
        self._try(self._store.finish)
        self._store.close()

    def _commit_group(self, first: _Call | threading.Event) -> _Item:
        """Commit ``first`` and what follows it soon; return what the next group begins with."""
        item: _Item = first
        end_s = time.monotonic() + self._commit_s
        num_calls, idle = 0, False
        self._try(self._store.begin)
        while callable(item) and num_calls < self._commit_records:
            self._try(partial(item, self._store))
            num_calls += 1
            try:
                item = self._queue.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                idle = True
                break
        self._try(self._store.commit)
        if isinstance(item, threading.Event):
            item.set()
            idle = True
        return self._queue.get() if idle else item

    def _try(self, work: Callable[[], None]) -> None:
        """Do ``work`` unless something failed before; after a failure the queue is only drained."""
        if self._error is not None:
            return
        try:
            work()
        except Exception as e:
            self._error = self._as_error("can no longer be written", e)
            if self._on_error is not None:
                self._on_error(self._error)

    def _as_error(self, what: str, error: Exception) -> JournalError:
        why = f"{type(error).__name__}: {first_line(str(error))}"
        return JournalError(f"the journal of {self._path} {what}: {why}")
