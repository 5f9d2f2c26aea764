"""A run under attack: `rollart run` as a process whose workers are killed one after the other.

    plan: (kind, train_step, dispatches) ... -> wait for these -> SIGKILL -> wait until it recovers

A run has recovered if it has trained one more batch than at the kill, and the victim is replaced.
By then, what the kill rolled back is done again. All waits depend on the run's journal, so a kill
hits the same moment of a run on slow and fast machines. The run trains until it has recovered from
the last kill, and then it is asked to end.

Takes: a config file and a plan. Gives: seconds to recover for each kill, and the run directory.
Never: affects the run in any other way. A run that ends early is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollart_bench.chaos_cluster import LocalCluster
from rollart_bench.chaos_victims import MARK_VARIABLE, Watched
from rollart_bench.rows import echo
from rollart_core.errors import JournalError, RollartError
from rollart_core.store.journal_reader import JournalReader
from rollart_core.store.journal_schema import ROLLED_BACK

POLL_S = 0.05
LOOK_S = 0.5
PROGRESS_S = 30.0
LIMIT_S = 240.0
INTERRUPTED = 130
"""Exit code of a run that was asked to end."""
CONTROLLER, NODE = "controller", "node"
ROLES = {"env worker": "env", "engine": "engine", "trainer rank": "trainer"}
"""Kind of victim -> role of its worker."""
REWARD_WORKER = "reward worker"
"""A process of the reward backend `pool`. It has no role, and no event in the journal."""
BACK_IN_JOURNAL = ("env", "engine")
"""Roles whose return is in the journal. A trainer is back when it trains again."""
_START = "from rollart_core.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Kill:
    """One planned kill."""

    kind: str
    train_step: int
    """Earliest."""
    num_dispatched: int = 0
    """Episodes to start after that train_step before the kill, which can be anywhere in a step."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """The result of a kill."""

    kind: str
    seconds: float


def planned(
    kinds: Sequence[str], num_each: int, num_steps: int, seed: int, *, episodes_per_step: int
) -> list[Kill]:
    """Return ``num_each`` kills of each kind at random moments of a run, in order.

    Args:
        kinds: The kinds of victims.
        num_each: Kills per kind.
        num_steps: Train steps of the run. The moments are in the first three fifths. A kill is
            later if the run has not yet recovered from the previous one.
        seed: The seed of the moments.
        episodes_per_step: Episodes of one train step, to choose a moment within it.
    """
    rng = random.Random(seed)
    kinds = [kind for kind in kinds for _ in range(num_each)]
    rng.shuffle(kinds)
    steps = sorted(rng.uniform(0, 0.6 * num_steps) for _ in kinds)
    return [
        Kill(kind, int(step), rng.randrange(episodes_per_step))
        for kind, step in zip(kinds, steps, strict=True)
    ]


@dataclass(slots=True)
class AttackedRun:
    """One run, started, watched, attacked and resumed."""

    config: Path
    runs_dir: Path
    temp_dir: Path
    watched: Watched
    rng: random.Random
    cluster: LocalCluster | None = None
    limit_s: float = LIMIT_S
    """Time limit in seconds to recover, or to train the next batch."""
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0
    victim: str = ""
    """The node to kill next, or the last killed one."""
    look_at_s: float = 0.0
    """The time of the next check of the processes."""
    progress_at_s: float = 0.0
    """The time of the next progress line."""
    recoveries: list[Recovery] = field(default_factory=list)
    asked_to_end: bool = False

    def execute(self, kills: Sequence[Kill], num_steps: int | None = None) -> float:
        """Run to the end through all kills; return the wall time in seconds.

        Args:
            kills: The kills in order.
            num_steps: Train steps after which the run is asked to end, once it has recovered from
                the last kill. The config must allow many more. If None, the run ends on its own.

        Raises:
            RollartError: If the run fails.
        """
        began = time.monotonic()
        try:
            self._start()
            for kill in kills:
                self._wait_for(kill)
                if self._ended():
                    break  # the run ended before: this kill is missing
                self._attack(kill)
            if num_steps is not None:
                self._ask_to_end(num_steps)
            while not self._ended():
                time.sleep(POLL_S)
        finally:
            self._end()
        return time.monotonic() - began

    def _ask_to_end(self, num_steps: int) -> None:
        """Ask the run to end after enough train steps, and wait for its end."""
        self._wait(lambda: self.trained() >= num_steps, f"train {num_steps} steps")
        if self._ended():
            return
        assert self.process is not None
        self.asked_to_end = True
        self.process.send_signal(signal.SIGINT)
        self._wait(self._ended, "end")

    @property
    def run_dir(self) -> Path | None:
        """The run directory, once it exists."""
        found = sorted(self.runs_dir.glob("*/config.yaml"))
        return found[0].parent if found else None

    def trained(self) -> int:
        """Return the number of trained batches in the lineage."""
        with self._journal() as journal:
            batches = journal.batches() if journal else []
        return max((b.batch + 1 for b in batches if b.state == "trained"), default=0)

    def dispatched(self) -> int:
        """Return the number of started episodes."""
        with self._journal() as journal:
            return journal.num_events("dispatched") if journal else 0

    def _num_back(self, role: str) -> int:
        """Return how often a worker of a role came back. A process alone is not yet an engine."""
        with self._journal() as journal:
            events = journal.events(kind="part_back") if journal else []
        names = [str(json.loads(event.payload)["part"]) for event in events]
        return sum(name.partition("-")[0] == role for name in names)

    def _num_workers(self, pids: Sequence[int]) -> int:
        """Return the number of workers that these processes form: a server has several."""
        assert self.run_dir is not None
        return sum(
            not set(pids).isdisjoint(own) for own in self.watched.parts(self.run_dir).values()
        )

    def _num_incarnations(self) -> int:
        """Return how often the run was rolled back to a checkpoint."""
        with self._journal() as journal:
            return len(journal.events(kind=ROLLED_BACK)) if journal else 0

    @contextlib.contextmanager
    def _journal(self) -> Iterator[JournalReader | None]:
        """Read the journal; None if it does not exist yet."""
        run_dir = self.run_dir
        try:
            journal = JournalReader(run_dir) if run_dir else None
        except (JournalError, OSError):
            journal = None
        if journal is None:
            yield None
            return
        with journal:
            yield journal

    def _attack(self, kill: Kill) -> None:
        lost = self._victims(kill)
        before, lives = self.trained(), self._num_incarnations()
        wanted = {
            role: self._num_back(role) + self._num_workers(lost[role]) for role in BACK_IN_JOURNAL
        }
        at = time.monotonic()
        self._kill(kill, lost)
        what = f"recover from the loss of its {kill.kind}"
        signs = [lambda: all(self._num_back(role) >= n for role, n in wanted.items())]
        if kill.kind == CONTROLLER or lost["trainer"]:
            signs.append(lambda: self._num_incarnations() > lives)
        if kill.kind == REWARD_WORKER:
            signs.append(
                lambda: bool(set(self.watched.reward_workers()) - set(lost[REWARD_WORKER]))
            )
        signs.append(lambda: self.trained() > before)
        if not all(self._wait(sign, what) for sign in signs):
            echo(f"after train_step {before}: {kill.kind} killed, not back when the run ended")
            return  # no recovery: this one is missing
        took = time.monotonic() - at
        self.recoveries.append(Recovery(kill.kind, took))
        echo(f"after train_step {before}: {kill.kind} killed, back in {took:.1f} s")
        if self.cluster is not None:
            self.cluster.bring_back()

    def _victims(self, kill: Kill) -> dict[str, list[int]]:
        """Return the processes to kill, by role. With a controller, all its workers end."""
        none: dict[str, list[int]] = {role: [] for role in ROLES.values()}
        if kill.kind == CONTROLLER:
            return none
        if kill.kind == REWARD_WORKER:
            self._wait(lambda: bool(self.watched.reward_workers()), f"have a {REWARD_WORKER}")
            return none | {REWARD_WORKER: [self.rng.choice(self.watched.reward_workers())]}
        if kill.kind in ROLES:
            role = ROLES[kill.kind]
            self._wait(lambda: bool(self._of(role)), f"have a {role}")
            return none | {role: [self.rng.choice(self._of(role))]}
        assert self.cluster is not None
        self._wait(lambda: bool(self._inhabited()), "have workers on a node")
        self.victim = self.rng.choice(self._inhabited())
        pids = set(self.cluster.pids(self.victim))
        return {role: sorted(pids & set(self._of(role))) for role in none}

    def _kill(self, kill: Kill, lost: Mapping[str, list[int]]) -> None:
        if kill.kind == CONTROLLER:
            assert self.process is not None
            self.process.kill()
            self.process.wait()
            self._start()
        elif kill.kind == NODE:
            assert self.cluster is not None
            self.cluster.kill(self.victim)
        else:
            for pid in (pid for pids in lost.values() for pid in pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _wait_for(self, kill: Kill) -> None:
        step = kill.train_step
        if self._wait(lambda: self.trained() > step, f"get past train_step {step}"):
            num = self.dispatched() + kill.num_dispatched
            self._wait(lambda: self.dispatched() >= num, "begin further episodes")

    def _inhabited(self) -> list[str]:
        """Return the nodes that run workers."""
        assert self.cluster is not None
        parts = self._all_workers()
        return [name for name in self.cluster.nodes if parts & set(self.cluster.pids(name))]

    def _all_workers(self) -> set[int]:
        return {pid for role in ROLES.values() for pid in self._of(role)}

    def _of(self, role: str) -> list[int]:
        run_dir = self.run_dir
        if run_dir is None:
            return []
        parts = self.watched.parts(run_dir).items()
        return sorted(pid for name, pids in parts if name.partition("-")[0] == role for pid in pids)

    def _start(self) -> None:
        """Start the run, or resume it."""
        run_dir = self.run_dir
        arguments = [str(self.config)] if run_dir is None else ["--resume", str(run_dir)]
        environment = {
            **(self.cluster.environment() if self.cluster else os.environ),
            MARK_VARIABLE: self.watched.mark,
            "TMPDIR": str(self.temp_dir),
        }
        self.num_starts += 1
        with self._log_of(self.num_starts).open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, "run", *arguments, "--json"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.runs_dir,
            )

    def _log_of(self, start: int) -> Path:
        return self.runs_dir.parent / f"driver-{start}.log"

    def _wait(self, done: Callable[[], bool], what: str) -> bool:
        """Wait for a condition of the run. Return False if the run ends first.

        Raises:
            RollartError: If it takes too long, or the run fails.
        """
        until = time.monotonic() + self.limit_s
        while not done():
            if self._ended():
                return done()
            if time.monotonic() > until:
                raise RollartError(
                    f"the run did not {what} within {self.limit_s:g} s: {self._tail()}"
                )
            time.sleep(POLL_S)
        return True

    def _ended(self) -> bool:
        """Return whether the run has ended properly.

        Raises:
            RollartError: If it ended in another way.
        """
        assert self.process is not None
        if time.monotonic() > self.look_at_s:
            self.look_at_s = time.monotonic() + LOOK_S
            self.watched.alive()  # records their ids
        if time.monotonic() > self.progress_at_s:
            self.progress_at_s = time.monotonic() + PROGRESS_S
            echo(f"  {self.trained()} train_steps")
        code = self.process.poll()
        if code not in (None, 0) and not (code == INTERRUPTED and self.asked_to_end):
            raise RollartError(f"the run ended with exit code {code}: {self._tail()}")
        return code is not None

    def _tail(self) -> str:
        text = self._log_of(self.num_starts).read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " / ".join(lines[-3:])[-600:] or "it wrote no output"

    def _end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
