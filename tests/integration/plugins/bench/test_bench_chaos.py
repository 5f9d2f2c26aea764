"""The chaos benchmark: its plan, how it finds processes, and what it waits for.

``tests/bench`` runs its short form, in which parts of a real run are killed.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.pace import wait_until

from rollart_bench import chaos, chaos_run, chaos_victims
from rollart_bench.chaos_run import INTERRUPTED, ROLES, AttackedRun, Kill, planned
from rollart_bench.chaos_victims import MARK_VARIABLE, Watched
from rollart_bench.learn import example
from rollart_core.config.load import read_yaml
from rollart_core.errors import ConfigError, RollartError, UserError
from rollart_core.runtime.process import WorkerProcess
from rollart_plugins.serverless.config import WORKER


def test_kills_are_planned_by_the_seed_within_the_run():
    plan, same, other = (
        planned(["env worker", "engine"], 3, 200, seed, episodes_per_step=12) for seed in (4, 4, 5)
    )
    assert plan == same
    assert plan != other
    assert Counter(kill.kind for kill in plan) == {"env worker": 3, "engine": 3}
    assert sorted(kill.train_step for kill in plan) == [kill.train_step for kill in plan]
    assert all(0 <= kill.train_step < 120 for kill in plan)
    assert len({kill.num_dispatched for kill in plan} & set(range(12))) > 1


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
        wait_until(watched.alive, "a process")  # between fork and exec it has another environment
        assert watched.alive() == [child.pid]
        assert watched.parts(tmp_path) == {"engine-1": [child.pid]}
    finally:
        child.kill()
        child.communicate()
    assert watched.alive() == []
    assert watched.seen == {child.pid}


def test_files_in_shared_memory_are_found_by_the_process_that_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chaos_victims, "MEMORY", tmp_path)
    (tmp_path / "rollart-run-4113-old").touch()
    watched = Watched("no mark")
    watched.seen = {15, 4113, 2236}
    for name in (
        "rollart-run-4113-chaos-20261123-102236",
        "torch_2236_77_0",
        "rollart-run-99-others-20261123-004113",  # the time of day is no process
        "sglang_loads_15c6b4a9383d_2236ddc.shm",
        "sem.mp-1elo7xip",
    ):
        (tmp_path / name).touch()
    assert watched.shared_files() == ["rollart-run-4113-chaos-20261123-102236", "torch_2236_77_0"]
    monkeypatch.setattr(chaos_victims, "MEMORY", tmp_path / "nowhere")
    assert Watched("no mark").shared_files() == []


class _Attacked(AttackedRun):
    """A run without a run: each look at it is an event, and time does not matter.

    With every look one more episode begins, and with every fourth a batch is trained; a part that
    was killed is back ``back_after`` looks later. It ends at SIGINT, or by itself at ``ends_at``
    train steps.
    """

    back_after = 40
    ends_at = 10_000
    num_looks = 0
    killed_at: tuple[int, ...] = ()
    steps_at_kill: tuple[int, ...] = ()

    def _look(self) -> int:
        self.num_looks += 1
        if self.num_looks == 4 * self.ends_at:
            assert self.process is not None
            assert self.process.stdin is not None
            self.process.stdin.close()  # and so it ends
            self.process.wait()
        return self.num_looks

    def _ended(self) -> bool:
        self._look()
        return super()._ended()

    def trained(self) -> int:
        return min(self._look() // 4, self.ends_at)

    def dispatched(self) -> int:
        return self._look()

    def _start(self) -> None:
        program = (
            "import signal, sys\n"
            f"signal.signal(signal.SIGINT, lambda *_: sys.exit({INTERRUPTED}))\n"
            "print(flush=True)\n"
            "sys.stdin.read()"
        )
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def _victims(self, kill: Kill) -> dict[str, list[int]]:
        return {role: [0] if role == ROLES[kill.kind] else [] for role in ROLES.values()}

    def _num_back(self, role: str) -> int:
        return sum(self._look() >= at + self.back_after for at in self.killed_at)

    def _num_workers(self, pids: Sequence[int]) -> int:
        return len(pids)

    def _kill(self, kill: Kill, lost: object) -> None:
        self.killed_at += (self.num_looks,)
        self.steps_at_kill += (self.num_looks // 4,)


@pytest.fixture
def attacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Attacked]:
    monkeypatch.setattr(chaos_run, "POLL_S", 0.0)
    run = _Attacked(tmp_path, tmp_path, tmp_path, Watched("no mark"), random.Random(0))
    yield run
    assert run.process is not None
    assert run.process.returncode is not None
    assert run.process.stdin is not None
    assert run.process.stdout is not None
    run.process.stdin.close()
    run.process.stdout.close()


def test_a_kill_waits_for_its_train_step_and_then_for_episodes(attacked: _Attacked):
    attacked.execute([Kill("env worker", 6, 0), Kill("env worker", 50, 9)], 51)
    first, second = attacked.steps_at_kill
    assert first >= 7
    assert second >= 51 + 9 // 4
    assert [found.kind for found in attacked.recoveries] == ["env worker"] * 2


@pytest.mark.parametrize("back_after", [1, 2000])
def test_a_run_goes_on_until_it_has_recovered_from_the_last_kill(
    attacked: _Attacked, back_after: int
):
    attacked.back_after = back_after
    attacked.execute([Kill("env worker", 2, 3)], 30)
    (killed_at,) = attacked.killed_at
    assert attacked.num_looks >= max(4 * 30, killed_at + back_after)
    assert len(attacked.recoveries) == 1
    assert attacked.asked_to_end
    assert attacked.process is not None
    assert attacked.process.returncode == INTERRUPTED


def test_what_is_not_back_when_the_run_ends_is_no_recovery(attacked: _Attacked):
    attacked.back_after, attacked.ends_at = 10_000, 100
    attacked.execute([Kill("env worker", 0, 0), Kill("env worker", 1, 0)], 50)
    assert attacked.recoveries == []
    assert len(attacked.killed_at) == 1
    assert not attacked.asked_to_end


def test_without_a_number_of_steps_a_run_ends_by_itself(attacked: _Attacked):
    attacked.ends_at = 20
    attacked.execute([Kill("env worker", 3, 0)])
    assert not attacked.asked_to_end
    assert attacked.process is not None
    assert attacked.process.returncode == 0


def test_an_end_that_nobody_asked_for_is_an_error(attacked: _Attacked):
    attacked.runs_dir = attacked.runs_dir / "runs"
    (attacked.runs_dir.parent / "driver-0.log").write_text("why\n")
    attacked._start()
    assert attacked.process is not None
    attacked.num_starts = 0
    attacked.process.send_signal(signal.SIGINT)
    attacked.process.wait()
    with pytest.raises(RollartError, match=f"exit code {INTERRUPTED}: why"):
        attacked._ended()
    attacked.asked_to_end = True
    assert attacked._ended()


def test_a_server_of_several_processes_is_one_part(tmp_path: Path, monkeypatch):
    parts = {"engine-0": [1], "engine-1": [2, 3, 4], "env-0": [5]}
    monkeypatch.setattr(Watched, "parts", lambda self, run_dir: parts)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    run = AttackedRun(tmp_path, tmp_path, tmp_path, Watched("no mark"), random.Random(0))
    assert [run._num_workers(pids) for pids in ([2, 3, 4, 9], [1, 2, 3], [3], [])] == [1, 2, 1, 0]


@pytest.mark.parametrize("options", [{"kinds": "engin"}, {"kinds": "node"}, {"runtime": "rai"}])
def test_what_is_not_there_to_kill_is_refused(options: dict[str, str]):
    with pytest.raises(UserError, match="is none of"):
        chaos.run({"short": True, **options})


def test_a_config_is_taken_as_it_is_but_for_its_end(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = {"warm_start": None, "rollout": {"group_size": 4}}
    with pytest.raises(ConfigError, match=r"command line: rollout\.group_size: "):  # it is checked
        chaos._from_file(example("webshop.yaml"), {"rollout": {"group_size": 0}}, 7)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    (tmp_path / "weights" / "model.safetensors").touch()
    config, per_step = chaos._from_file(example("webshop.yaml"), {**keys, "model": "weights"}, 7)
    assert config["stop"] == {"batches": 7}
    assert config["model"] == str(tmp_path / "weights")
    assert per_step == 8 * 4
    given = read_yaml(example("webshop.yaml"))
    assert "failures" not in config  # the limits are the defaults
    assert config["rollout"] == given["rollout"] | {"group_size": 4}


def test_keys_of_a_config_need_one():
    with pytest.raises(UserError, match=r"has no 'kils'. Did you mean 'kills'.*config=PATH"):
        chaos.run({"short": True, "kils": 2})


@pytest.mark.starts_normally  # /proc shows the variables that a process was started with
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_workers_of_rewards_are_found_by_their_name():
    watched = Watched("of this test, too")

    async def main() -> None:
        marked = {MARK_VARIABLE: watched.mark}
        worker, other, unmarked = (
            WorkerProcess(WORKER, environment=marked),
            WorkerProcess("engine", environment=marked),
            WorkerProcess(WORKER),
        )
        for process in (worker, other, unmarked):
            await process.start()
            await process.call("__ping__")
        assert set(watched.alive()) == {worker.pid, other.pid}
        assert watched.reward_workers() == [worker.pid]
        for process in (worker, other, unmarked):
            await process.close()
        assert watched.reward_workers() == []

    asyncio.run(main())
