"""Check that a plugin is deterministic, isolated from other instances, and leaves nothing open.

Takes: a subject, an environment or an agent task. Gives: checks that raise, the same for both.
Never: leaves the process's random state changed, or its own resources open.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from rollart_core.spaces import Text
from rollart_testing.play import BRIEF_TURNS, GOOD, MALFORMED, Episode, Subject
from rollart_testing.results import SkipCheck, expect

GRACE_S: Final = 5.0
"""Grace period in seconds for ending threads and processes, after each series of rounds."""
_NUM_NAMED: Final = 3
_NUM_SERIES: Final = 2

Census = dict[str, dict[int, str]]
"""Kind (thread, process or file) -> number and name of each."""


def expect_nothing_left(once: Callable[[], object], num_rounds: int, rounds: str) -> str | None:
    """Run several rounds, and check that they leave no thread, process or file open.

    Growth of less than one per round is a pool that fills up. Growth in one series of rounds but
    not in the next comes from elsewhere, such as a thread pool or an event loop of this process.

    Args:
        once: One round; it has run before, so that one-time resources are open.
        num_rounds: Rounds of a series.
        rounds: Their description for the reason, such as ``"5 times open, play, close"``.

    Returns:
        What could not be observed on this system; None if everything could.

    Raises:
        CheckFailed: If something was left in every series.
    """
    for _ in range(_NUM_SERIES):
        before = census()
        for _ in range(num_rounds):
            once()
        left = _left(before, num_rounds)
        if not left:
            break
    expect(not left, f"after {rounds}: {' and '.join(left)}")
    sees_all = Path("/proc/self/task").exists()
    return None if sees_all else "only threads: this system does not list the others"


def _left(before: Census, num_rounds: int) -> list[str]:
    """Return descriptions of what grew and did not end within the grace period."""
    deadline = time.monotonic() + GRACE_S
    while left := _grown(before, census(), num_rounds):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)  # a thread or process may take a moment to end
    return left


def _grown(before: Census, now: Census, num_rounds: int) -> list[str]:
    left = []
    for kind, had in before.items():
        has = now.get(kind, {})
        if (more := len(has) - len(had)) >= num_rounds:
            names = list(dict.fromkeys(name for number, name in has.items() if number not in had))
            such = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
            left.append(f"{more} {kind} more ({such})")
    return left


def census() -> Census:
    """Return the threads, child processes and open files of this process."""
    names = {t.native_id: t.name for t in threading.enumerate() if t.native_id is not None}
    found: Census = {"threads": dict(names)}
    with suppress(OSError):
        threads = {int(task.name): task for task in Path("/proc/self/task").iterdir()}
        children = [pid for task in threads.values() for pid in _children(task)]
        files = map(int, os.listdir("/proc/self/fd"))
        found |= {
            "threads": {number: names.get(number, "of no Python") for number in threads},
            "processes": {pid: _first_line(Path(f"/proc/{pid}/comm"), "gone") for pid in children},
            "open files": {number: _target(number) for number in files},
        }
    return found


def _children(task: Path) -> list[int]:
    """Return the processes that a thread started; none if the thread has ended."""
    return list(map(int, _first_line(task / "children", "").split()))


def _first_line(path: Path, otherwise: str) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return otherwise


def _target(number: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    return "gone"


def check_make(subject: Subject) -> None:
    """It can be created without further options, and closed."""
    with subject.open():
        return


def check_tasks(subject: Subject) -> None:
    """Each split has tasks, in clusters or not, and a task always begins in the same way."""
    with subject.open() as player:
        expect(subject.spec.splits, "the spec names no splits")
        for split in subject.spec.splits:
            player.task_clusters(split)
        for options in subject.tasks(player):
            first, again = (subject.begin(player, options) for _ in range(2))
            expect(
                first == again or not subject.spec.deterministic,
                f"{subject.begin_call}({options}) gives a different observation the second time",
            )


def check_same_episode(subject: Subject) -> None:
    """The same seed, options and actions give the same episode on a new instance."""
    expect_deterministic(subject)
    for policy in (GOOD, MALFORMED):
        for options in ({}, {"split": subject.spec.splits[0], "task": 0}):
            with subject.open() as player:
                first = subject.play(player, policy, options)
            with subject.open() as player:
                second = subject.play(player, policy, options)
            found = first.difference(second)
            expect(found is None, f"{options or 'no options'}: {found}")


def expect_deterministic(subject: Subject) -> None:
    """Skip the check for a subject that is not deterministic."""
    if not subject.spec.deterministic:
        raise SkipCheck("its spec says that it is not deterministic")


def check_global_random_state(subject: Subject) -> None:
    """It neither draws from nor seeds ``random``, ``numpy.random`` or torch's generator."""
    with subject.open() as player:  # seeding at import is not caused by the episode
        subject.play(player, GOOD, {}, max_turns=BRIEF_TURNS)
    with random_state_kept(), subject.open() as player:
        subject.play_varied(player)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Fail if a block changes a global random state; the state is always restored."""
    before = _random_states()
    try:
        yield
        after = _random_states()
    finally:
        _restore(before)
    changed = [name for name in before if not _same_state(before[name], after[name])]
    expect(
        not changed,
        f"an episode changes the global state of {' and '.join(changed)}: draw from "
        "self.np_random, or from a separate random.Random",
    )


def check_interleaved(subject: Subject) -> str | None:
    """Several concurrent instances give the same episodes as each one alone."""
    expect_deterministic(subject)
    alone, slowest_s = _play_alone(subject)
    for n, (one, other) in enumerate(zip(alone, subject.play_together(alone), strict=True)):
        found = one.difference(other)
        where = f"instance {n} of {len(alone)} ({one.options})"
        expect(found is None, f"{where} plays differently with others running: {found}")
    return subject.fewer(len(alone), slowest_s)


def _play_alone(subject: Subject) -> tuple[list[Episode], float]:
    """Return an episode of each instance, and the seconds of the slowest."""
    split, slowest_s = subject.spec.splits[0], 0.0
    episodes: list[Episode] = []
    with subject.open() as player:
        num_tasks = player.num_tasks(split)
    for n, (policy, seed) in enumerate(subject.instances()):
        options = {"split": split, "task": n % num_tasks if num_tasks else n}
        began, player = time.monotonic(), subject.fresh()
        try:
            played = subject.play(player, policy, options, seed=seed, max_turns=BRIEF_TURNS)
        finally:
            player.close()
        slowest_s = max(slowest_s, time.monotonic() - began)
        episodes.append(played)
    return episodes, slowest_s


def check_corpus(subject: Subject) -> None:
    """``corpus()`` yields text."""
    with subject.open() as player:
        if not player.has("corpus"):
            raise SkipCheck("it has no corpus()")
        texts = list(islice(player.call("corpus"), 20))
        expect(texts, "corpus() yields nothing")
        expect(all(text in Text() for text in texts), "corpus() yields something other than text")


def check_nothing_left_open(subject: Subject) -> str | None:
    """No thread, process or file stays open after ``close``, over several rounds."""
    closed: list[object] = []  # kept, so that only close() can free resources

    def once() -> None:
        closed.append(subject.open_and_close())

    for _ in range(subject.num_warm_ups):
        once()
    return expect_nothing_left(once, subject.num_rounds, subject.rounds)


def check_timeouts(subject: Subject) -> str | None:
    """Every call so far returned within the time limit of its spec."""
    with subject.open() as player:
        subject.play(player, GOOD, {}, max_turns=BRIEF_TURNS)
    took = subject.watch.longest_s
    for call, limit_s in subject.limits_s.items():
        expect(
            took.get(call, 0.0) <= limit_s,
            f"the slowest {call} took {took.get(call, 0.0):.2f} s, its spec allows {limit_s:g} s",
        )
    slowest = ", ".join(f"{call} {took[call]:.2g} s" for call in subject.limits_s if call in took)
    return f"slowest: {slowest}" if slowest else None


def check_close(subject: Subject) -> None:
    """``close`` may be called twice, before and after an episode."""
    if subject.given is not None:
        subject.given.close()
        subject.given.close()
        return
    with subject.open() as fresh:
        fresh.close()  # before any episode, and again at the end of the block
    with subject.open() as player:
        subject.begin(player)
        player.close()


def _random_states() -> dict[str, Any]:
    states = {"random": random.getstate(), "numpy.random": np.random.get_state()}
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state()
    return states


def _same_state(one: Any, two: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(_same_state, one, two))
    return bool(np.array_equal(one, two)) if hasattr(one, "shape") else bool(one == two)


def _restore(states: dict[str, Any]) -> None:
    restore: dict[str, Callable[[Any], object]] = {
        "random": random.setstate,
        "numpy.random": np.random.set_state,
    }
    for name, state in states.items():
        if name == "torch":
            sys.modules["torch"].set_rng_state(state)
        else:
            restore[name](state)
