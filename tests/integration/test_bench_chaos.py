"""The chaos benchmark: its plan, how it finds processes, and a short run whose parts are killed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollart_core.bench import chaos
from rollart_core.bench.chaos_run import ROLES, AttackedRun, Kill, planned
from rollart_core.bench.chaos_victims import MARK_VARIABLE, Watched
from rollart_core.errors import UserError


def test_kills_are_planned_by_the_seed_within_the_run():
    plan = planned(["env worker", "engine"], 3, 200, seed=4)
    assert plan == planned(["env worker", "engine"], 3, 200, seed=4)
    assert plan != planned(["env worker", "engine"], 3, 200, seed=5)
    assert Counter(kill.kind for kill in plan) == {"env worker": 3, "engine": 3}
    assert sorted(kill.train_step for kill in plan) == [kill.train_step for kill in plan]
    assert all(1 <= kill.train_step < 120 for kill in plan)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_processes_are_found_by_mark_and_parts_by_their_log(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    watched = Watched("of this test")
    with (tmp_path / "logs" / "engine-1.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=log,
            env={MARK_VARIABLE: watched.mark},
        )
    try:
        until = time.monotonic() + 10
        while not watched.alive() and time.monotonic() < until:
            time.sleep(0.01)  # between fork and exec it has this process's environment
        assert watched.alive() == [child.pid]
        assert watched.parts(tmp_path) == {"engine-1": [child.pid]}
    finally:
        child.kill()
        child.communicate()
    assert watched.alive() == []
    assert watched.seen == {child.pid}


class _Attacked(AttackedRun):
    """A run that trains, and either has what it lost back at once or ends without."""

    comes_back = True
    num_back = 0

    def trained(self) -> int:
        return 2 + self.num_back

    def _start(self) -> None:
        waits = "import sys; sys.stdin.read()"
        self.process = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE)

    def _victims(self, kill: Kill) -> dict[str, list[int]]:
        return {role: [0] if role == ROLES[kill.kind] else [] for role in ROLES.values()}

    def _num_back(self, role: str) -> int:
        return self.num_back

    def _num_parts(self, pids: Sequence[int]) -> int:
        return len(pids)

    def _kill(self, kill: Kill, lost: object) -> None:
        assert self.process is not None
        self.num_back += self.comes_back
        if not self.comes_back or kill.train_step == 1:
            self.process.communicate()


@pytest.mark.parametrize("comes_back", [True, False])
def test_what_is_not_back_when_the_run_ends_is_no_recovery(tmp_path: Path, comes_back: bool):
    run = _Attacked(tmp_path, tmp_path, tmp_path, Watched("no mark"), random.Random(0))
    run.comes_back = comes_back
    run.execute([Kill("env worker", 0, 0.0), Kill("env worker", 1, 0.0)])
    assert [found.kind for found in run.recoveries] == ["env worker"] * (2 if comes_back else 0)


def test_a_server_of_several_processes_is_one_part(tmp_path: Path, monkeypatch):
    parts = {"engine-0": [1], "engine-1": [2, 3, 4], "env-0": [5]}
    monkeypatch.setattr(Watched, "parts", lambda self, run_dir: parts)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    run = AttackedRun(tmp_path, tmp_path, tmp_path, Watched("no mark"), random.Random(0))
    assert [run._num_parts(pids) for pids in ([2, 3, 4, 9], [1, 2, 3], [3], [])] == [1, 2, 1, 0]


@pytest.mark.parametrize("options", [{"kinds": "engin"}, {"kinds": "node"}, {"runtime": "rai"}])
def test_what_is_not_there_to_kill_is_refused(options: dict[str, str]):
    with pytest.raises(UserError, match="is none of"):
        chaos.run({"short": True, **options})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_run_gets_through_one_kill_of_each_kind():
    rows = {str(row["case"]): row for row in chaos.run({"short": True})["rows"]}
    marks = {case: row["meets_mark"] for case, row in rows.items() if row["mark"] is not None}
    assert all(marks.values()), marks
    assert len(marks) == len(chaos.KINDS["inline"]) + 4
