"""Nothing is lost and nothing trained twice, wherever a run is killed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import Program, start_program
from support.lineage_run import CONFIG, CUTS, ENV, NUM_TASKS, worth

from rollart_core.errors import ConfigError
from rollart_core.scheduling.tasks import TaskSource, TaskSourceState
from rollart_core.store.audit import AuditReport, audit
from rollart_core.store.checkpoints import Checkpoints
from rollart_core.store.journal import Journal
from rollart_core.store.journal_reader import JournalReader, ordinal, read_trajectories
from rollart_core.store.resume import check_resume, check_same_run
from rollart_core.store.run_dir import RunState, run_lock


def start(folder: Path, **options: Any) -> Program:
    """Start it; see ``lineage_run.main`` for the options."""
    return start_program(
        *(str(folder), json.dumps({"seed": 0, **options})),
        target="support.lineage_run:program",
        environment={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def ends(process: Program) -> dict[str, Any]:
    """Wait for its end; return the exit codes of all lives, and what they said before."""
    out, err = process.communicate()
    assert process.returncode == 0, err
    ended: dict[str, Any] = json.loads(out)
    assert ended["codes"][-1] == 0, err
    return ended


def run(folder: Path, **options: Any) -> tuple[list[int], AuditReport]:
    """Run it to its end through all its kills; return exit codes and the audit."""
    return ends(start(folder, **options))["codes"], audit(folder)


def check_lineage(folder: Path, report: AuditReport) -> None:
    """What the final weights were trained on is what the journal says, each ticket once."""
    assert report.ok, report.violations
    assert (report.ended, report.open) == ("done", 0)
    weights = json.loads((folder / "final.json").read_text())
    with JournalReader(folder) as journal:
        live = [b for b in journal.batches() if b.state == "trained"]
        tasks = {ordinal(t.group_id): json.loads(t.task)[2] for t in journal.tickets()}
        num_rows = len(journal.attempts())
    live.sort(key=lambda b: b.batch)
    members = [[b.batch, t, a] for b in live for t, a in zip(b.ticket_ids, b.attempts, strict=True)]
    assert weights == members
    if not report.guard:
        assert [b.batch for b in live] == list(range(report.batches))
    assert set(Counter(ticket for _, ticket, _ in weights).values()) <= {1}
    assert report.trained == len(weights)
    # Every task the source gave became a group, in the source's order, and none twice.
    source = TaskSource(ENV, "train", NUM_TASKS, 0)
    assert [tasks[i] for i in range(len(tasks))] == [source.next().index for _ in tasks]
    assert len(list(read_trajectories(folder))) == num_rows
    check_validations(folder, [0, *(b.batch + 1 for b in live)], has_guard=bool(report.guard))


def check_validations(folder: Path, versions: list[int], *, has_guard: bool) -> None:
    """Each version that is due was validated with its own weights; the best one is kept."""
    with JournalReader(folder) as journal:
        found = {v["policy_version"]: v["score"] for v in journal.validations()}
        metrics = journal.metrics("validation/score")
    every = CONFIG["evaluation"]["every_batches"]
    assert {v for v in versions if v % every == 0} <= set(found)
    assert found == {version: worth(version) for version in found}
    assert {m.policy_version: m.value for m in metrics} == found
    best = max(found, key=worth)
    marks = Checkpoints(folder, 2, print).marks()
    assert marks["best"] == best
    if has_guard:
        assert marks.get("good", 0) in found
        return
    assert versions[-1] in found
    assert set(marks) == {"best"}
    kept = {int(p.name[1:]) for p in Checkpoints(folder, 2, print).whole()}
    assert best in kept
    assert len(kept) <= 3


def test_killed_at_random_moments(tmp_path: Path) -> None:
    codes, report = run(tmp_path, kills=50, most_writes=80)
    check_lineage(tmp_path, report)
    assert codes == [-9] * 50 + [0]
    assert report.unrecorded > 0


@pytest.mark.slow
def test_killed_before_and_after_everything_that_writes(tmp_path: Path) -> None:
    cuts = [(name, n, before) for name in CUTS for n in (1, 2) for before in (True, False)]
    once = {("back", 2, True), ("back", 2, False)}  # a life goes back once, where it is resumed
    ended, report = ends(start(tmp_path, cuts=cuts, seed=3)), audit(tmp_path)
    check_lineage(tmp_path, report)
    assert ended["codes"] == [-9] * len(cuts) + [0]
    missed = {cut for cut, said in zip(cuts, ended["said"], strict=False) if said != "cut"}
    assert missed == once


def test_a_trainer_that_dies_comes_back_in_the_same_run(tmp_path: Path) -> None:
    codes, report = run(tmp_path, rates={"trainer": 0.06}, batches=60)
    assert codes == [0]
    check_lineage(tmp_path, report)
    assert report.batches_rolled_back > 0
    assert report.rolled_back > 0
    assert any("the trainer was lost" in why for why in report.went_back)


def test_trainer_and_controller_die_and_redundant_members_are_cancelled(tmp_path: Path) -> None:
    config = {"rollout": {"groups_per_batch": 2, "group_size": 2, "redundant": 1}}
    rates = {"trainer": 0.03, "episode": 0.1}
    _, report = run(tmp_path, kills=12, most_writes=80, rates=rates, config=config)
    check_lineage(tmp_path, report)
    assert report.aborted["redundant"] > 0


@pytest.mark.slow
def test_killed_while_the_guard_undoes_what_was_trained(tmp_path: Path) -> None:
    guard = {"max_rollbacks": 10_000, "window": 2}
    rates = {"trainer": 0.02, "diverge": 1}
    codes, report = run(tmp_path, kills=6, most_writes=60, rates=rates, config={"guard": guard})
    check_lineage(tmp_path, report)
    assert codes == [-9] * 6 + [0]
    assert report.guard
    assert report.discarded_by_guard > 0
    assert any("the guard tripped" in why for why in report.went_back)


def test_an_account_of_a_run_that_goes_on_is_sound_at_every_moment(tmp_path: Path) -> None:
    """It goes on until there are accounts of it; then it is killed, and resumed to its end."""
    enough, folder = tmp_path / "enough", tmp_path / "run"
    folder.mkdir()
    rates = {"trainer": 0.02, "episode": 0.1}
    process = start(folder, seed=5, rates=rates, until=[str(enough)])
    reports: list[AuditReport] = []
    while process.poll() is None:
        if list(folder.glob("checkpoints/*")):
            reports.append(audit(folder))
        if len(reports) >= 10 and any(r.open for r in reports):
            enough.touch()
    assert ends(process)["codes"] == [-9, 0]
    assert [r.violations for r in reports if not r.ok] == []
    check_lineage(folder, audit(folder))


def test_a_run_that_has_ended_may_be_resumed_as_it_is_and_further(tmp_path: Path) -> None:
    run(tmp_path, seed=1)
    with JournalReader(tmp_path) as journal:
        num_tickets = len(journal.tickets())
    folder = Checkpoints(tmp_path, 2, print).whole()[0]
    _, report = run(tmp_path, seed=2)
    check_lineage(tmp_path, report)
    assert report.went_back == (f"to version {int(folder.name[1:])}: resumed",)
    assert report.batches_rolled_back == 0
    assert report.num_tickets > num_tickets


def test_dropping_what_is_stale_loses_no_task(tmp_path: Path) -> None:
    _, report = run(tmp_path, kills=12, most_writes=80, batches=60, config={"on_stale": "drop"})
    assert report.ok, report.violations
    with JournalReader(tmp_path) as journal:
        history = list(journal.source_history())
    # Played back, each task comes from the source's order or from what was put back.
    source, given = TaskSource(ENV, "train", NUM_TASKS, 0), []
    for _, task, put_back in history:
        if put_back:
            source.requeue(task)
        else:
            given.append((task.index, source.next().index))
    assert all(got == wanted for got, wanted in given)
    assert any(put_back for _, _, put_back in history)


def damage_content(folder: Path) -> None:
    path = folder / "weights.json"
    path.write_bytes(path.read_bytes()[:-2] + b" ]")


def damage_length(folder: Path) -> None:
    with (folder / "weights.json").open("ab") as file:
        file.truncate(5)


def damage_state(folder: Path) -> None:
    (folder / "run_state.json").write_text('{"policy_version": 3}')


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (damage_content, "content of weights.json has changed"),
        (damage_length, "has 5 bytes"),
        (lambda folder: (folder / "weights.json").unlink(), "weights.json is missing"),
        (damage_state, "from another release"),
    ],
)
def test_a_corrupt_checkpoint_is_set_aside_for_the_one_before(
    tmp_path: Path, damage: Callable[[Path], None], why: str
) -> None:
    run(tmp_path, kills=1, most_writes=25)
    newest, before, *_ = Checkpoints(tmp_path, 2, print).whole()
    damage(newest)
    told: list[str] = []
    loaded: list[str] = []

    async def load(method: str, path: str) -> None:
        loaded.append(Path(path).name)

    state = asyncio.run(Checkpoints(tmp_path, 2, told.append).load_newest(load))
    assert loaded == [before.name] == [f"v{state.policy_version:06d}"]
    assert why in told[0]
    assert (tmp_path / "checkpoints" / f"bad-{newest.name}").is_dir()
    _, report = run(tmp_path)
    check_lineage(tmp_path, report)
    assert report.went_back[-1] == f"to version {state.policy_version}: resumed"
    for folder in Checkpoints(tmp_path, 2, print).whole():
        damage(folder)
    with pytest.raises(ConfigError, match=f"no checkpoint .* can be loaded .*{why}.* new run"):
        asyncio.run(Checkpoints(tmp_path, 2, print).load_newest(load))


def test_a_run_that_is_going_on_is_not_gone_on_with(tmp_path: Path) -> None:
    with (
        run_lock(tmp_path),
        pytest.raises(ConfigError, match=rf"is in use: process {os.getpid()}"),
        run_lock(tmp_path),
    ):
        raise AssertionError("two at once")
    with run_lock(tmp_path):
        pass  # it is free again


def test_what_cannot_be_gone_on_with_is_refused_before_anything_starts(tmp_path: Path) -> None:
    Journal(tmp_path, {"seed": 1}).close()
    with run_lock(tmp_path), pytest.raises(ConfigError, match="is in use"):
        check_resume(tmp_path, {"seed": 1})
    with pytest.raises(ConfigError, match=r"contains no checkpoint .* start a new run"):
        check_resume(tmp_path, {"seed": 1})
    folder = tmp_path / "checkpoints" / "v000004"
    folder.mkdir(parents=True)
    RunState(4, 4, TaskSourceState(0), 0, 0, {}, 1.0).write(folder, {"weights": [3, 0]})
    with pytest.raises(ConfigError, match="v000004: weights is missing"):
        check_resume(tmp_path, {"seed": 1})


def test_the_journal_of_another_config_is_refused_and_free_keys_are_not(tmp_path: Path) -> None:
    recorded = {
        "env": {"id": "a", "size": 3},
        "stop": {"batches": 3},
        "rollout": {"group_size": 4, "max_concurrent": 9},
        "trackers": [{"id": "tensorboard"}],
    }
    Journal(tmp_path, recorded).close()
    free = {**recorded, "stop": {"batches": 9}, "trackers": [], "new_key": 1}
    check_same_run(tmp_path, free | {"rollout": {"group_size": 4, "max_concurrent": 1}})
    other = recorded | {"env": {"id": "b", "size": 3}, "rollout": {"group_size": 8}}
    with pytest.raises(ConfigError) as refused:
        check_same_run(tmp_path, other)
    assert "env.id ('a' in the run, 'b' now); rollout.group_size (4 in the run, 8 now)" in str(
        refused.value
    )
    check_same_run(tmp_path, recorded | {"task_seeds": "by_index"})  # as an earlier release did
    with pytest.raises(ConfigError, match=r"task_seeds \('by_index' in the run, 'by_split' now\)"):
        check_same_run(tmp_path, recorded | {"task_seeds": "by_split"})
    sets = {"every_batches": 9, "validation_tasks": 8}
    with pytest.raises(ConfigError, match="which would hold out other training tasks"):
        check_same_run(tmp_path, recorded | {"evaluation": sets})
    check_same_run(tmp_path, recorded | {"evaluation": sets | {"validation_split": "val"}})
    (tmp_path / "journal.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="its journal cannot be continued"):
        check_same_run(tmp_path, recorded)
    with pytest.raises(ConfigError, match="is not a run directory"):
        check_same_run(tmp_path / "nowhere", recorded)
