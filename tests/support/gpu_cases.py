"""Cases of `make test-gpu` that end in each possible way."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from cases import Case, Figure, Machine, Skipped, in_ranks, need


def passes(machine: Machine) -> Iterator[Figure]:
    yield Figure("speed", 2.0, "GB/s", at_least=1.0)
    yield Figure("kernel", "flash")


def crashes(machine: Machine) -> Iterator[Figure]:
    yield Figure("before the crash", 1)
    os.kill(os.getpid(), signal.SIGSEGV)


def misses_its_mark(machine: Machine) -> Iterator[Figure]:
    yield Figure("difference", 2.0, at_most=1.0)
    yield Figure("not a number", float("nan"), at_most=1.0)


def raises(machine: Machine) -> Iterator[Figure]:
    print("what it wrote", flush=True)
    yield Figure("before the error", 1)
    raise ValueError("wrong\nin two lines")


def hangs(machine: Machine) -> Iterator[Figure]:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield Figure("child", child.pid)
    signal.pause()


def lacks_a_package(machine: Machine) -> Iterator[Figure]:
    need("no_such_package")
    yield Figure("never", 1)


def skips(machine: Machine) -> Iterator[Figure]:
    yield Figure("before", 1)
    raise Skipped("one GPU is too few")


def _rank(rank: int, given: int) -> int:
    if given < 0:
        os._exit(3)
    return rank + given


def ranks(machine: Machine) -> Iterator[Figure]:
    yield Figure("sum", sum(in_ranks(_rank, 2, 10)), at_least=21, at_most=21)


def lost_rank(machine: Machine) -> Iterator[Figure]:
    yield Figure("never", in_ranks(_rank, 2, -1)[0])


CASES: dict[Case, float] = {
    passes: 60,
    crashes: 60,
    misses_its_mark: 60,
    raises: 60,
    hangs: 5,
    lacks_a_package: 60,
    skips: 60,
    ranks: 60,
    lost_rank: 60,
}
