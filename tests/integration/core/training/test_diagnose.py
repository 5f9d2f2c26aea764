"""`rollart diagnose` on journals: as a run writes them, of a real collapse, and of no run."""

from __future__ import annotations

import io
import json
import lzma
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.metric_series import FAULTS, Curve, collapse, healthy

from rollart_core.cli import main
from rollart_core.cli.progress import report_table
from rollart_core.scheduling.events import StopRun
from rollart_core.store.journal import Journal
from rollart_view.diagnosis.diagnose import diagnose, find
from rollart_view.diagnosis.findings import ADVICE
from rollart_view.diagnosis.history import BUSY, read_history

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def collapsed(shared_dir: Path, tmp_path: Path) -> Path:
    """The journal of a real run that collapsed, in a folder with nothing else."""
    packed = shared_dir / "data/collapse/journal.db.xz"
    if not packed.is_file():
        pytest.skip(f"no journal at {packed}")
    with lzma.open(packed) as source, (tmp_path / "journal.db").open("wb") as target:
        shutil.copyfileobj(source, target)
    return tmp_path


@pytest.fixture
def rollart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; return exit code, stdout and stderr."""

    def inner(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollart", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return inner


def test_a_real_collapse_and_the_same_run_before_it(collapsed: Path) -> None:
    course = read_history(collapsed)
    (found,) = find(course)
    assert (found.kind, found.severity) == ("collapse", "error")
    assert abs(found.first_version - 1831) <= 2
    assert found.numbers["largest_update"] == 1834
    assert found.last_version == 1848
    assert found.keys[0].key == "algorithm.zero_advantage"
    assert len(course.versions) == 1849  # 235 skipped updates share a train_step with another.
    assert 0.5 < course.get(BUSY).values.mean() <= 1
    for end in (200, 450, 620, 1000, 1500, 1825):
        assert find(course.before(end)) == ()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_in_a_journal(fault: str, tmp_path: Path) -> None:
    found = diagnose(FAULTS[fault](7).write(tmp_path))
    assert [f.kind for f in found.findings] == [fault]
    assert found.ended == "stop.batches: all are trained"


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = healthy(0)
    expected, read = run.history(), read_history(run.write(tmp_path))
    assert read.versions.tolist() == expected.versions.tolist()
    for name, series in expected.series.items():
        assert read.get(name).versions.tolist() == series.versions.tolist()
        assert np.allclose(read.get(name).values, series.values)


def test_a_run_that_goes_on_or_was_killed_can_be_diagnosed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    journal = Journal(tmp_path / "run", {"mode": "sync"})
    for n in range(5):
        journal.metrics(n + 1, n, {"rollout/reward_mean": 0.5, "train/loss": float("nan")})
    journal.flush()
    found = diagnose(tmp_path / "run")
    assert (found.num_batches, found.too_short, found.ended) == (5, True, None)
    shutil.copytree(tmp_path / "run", tmp_path / "killed")  # With its write-ahead log.
    journal.close()
    assert diagnose(tmp_path / "killed").num_batches == 5


def test_batches_that_were_undone_do_not_count(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"mode": "sync"})

    def train(version: int, reward: float) -> None:
        journal.batch_taken([], version)
        journal.metrics(version + 1, version, {"rollout/reward_mean": reward})
        journal.batch_trained(version)

    for n in range(4):
        train(n, 0.5)
    journal.decided(StopRun("stop.batches: all are trained", "done"))
    journal.rolled_back(2, "resumed")
    train(2, 0.7)
    journal.batch_taken([], 3)
    journal.flush()
    read = read_history(tmp_path)
    assert read.versions.tolist() == [0, 1, 2]
    assert read.get("rollout/reward_mean").values.tolist() == [0.5, 0.5, 0.7]
    assert read.went_back == ("to policy_version 2: resumed",)
    assert read.ended is None
    journal.decided(StopRun("interrupted", "requested"))
    journal.close()
    assert read_history(tmp_path).ended == "interrupted"


def test_several_updates_of_a_batch_are_one_value(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"mode": "sync"})
    for step, norm in enumerate((1.0, 3.0)):
        metrics = {"train/grad_norm": norm, "train/entropy": norm, "rollout/reward_mean": 0.5}
        journal.metrics(step, 0, metrics)
    journal.close()
    read = read_history(tmp_path)
    assert (read.get("train/grad_norm").values, read.get("train/entropy").values) == (3.0, 2.0)


def test_the_command_says_what_happened_and_what_to_change(rollart: Run, tmp_path: Path) -> None:
    run_dir = str(collapse(0).write(tmp_path))
    code, out, _ = rollart("diagnose", run_dir)
    assert code == 0
    assert f"{run_dir}: 300 batches, policy_version 0 to 299\n" in out
    assert "error: collapse, policy_version" in out
    assert "The largest update is that of policy_version 202: gradient norm 30" in out
    assert "    trainer.lr " in out
    code, out, _ = rollart("diagnose", run_dir, "--json")
    (finding,) = json.loads(out)["findings"]
    assert (code, finding["kind"], finding["keys"][0]["key"]) == (0, "collapse", "trainer.lr")


def test_the_command_on_a_sound_run_and_on_a_short_one(rollart: Run, tmp_path: Path) -> None:
    code, out, _ = rollart("diagnose", str(healthy(0).write(tmp_path / "sound")))
    assert (code, out.splitlines()[-1]) == (0, "No finding.")
    (tmp_path / "short").mkdir()
    Journal(tmp_path / "short", {}).close()
    code, out, _ = rollart("diagnose", str(tmp_path / "short"))
    assert code == 0
    assert out.endswith("The run is too short for findings: they need at least 20 batches.\n")


def test_what_is_no_run_is_refused_in_one_line(rollart: Run, tmp_path: Path) -> None:
    code, out, err = rollart("diagnose", str(tmp_path))
    assert (code, out) == (1, "")
    assert err == f"Error: {tmp_path} is not a run directory: it has no journal.db\n"
    (tmp_path / "journal.db").write_text("no database")
    code, _, err = rollart("diagnose", str(tmp_path))
    assert (code, len(err.splitlines())) == (1, 1)
    assert "is not the journal of a run" in err


def test_the_page_names_every_finding_and_its_keys(repo_root: Path) -> None:
    page = (repo_root / "docs/guides/diagnose.md").read_text(encoding="utf-8")
    for kind, advice in ADVICE.items():
        keys = ", ".join(f"`{one.key}`" for one in advice)
        assert re.search(rf"^\| `{kind}` \|.*\| {re.escape(keys)} \|$", page, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("outcome", "is_named"),
    [
        ({"ok": True, "score_gain": {"mean": -0.1, "low": -0.3, "high": 0.1}}, False),
        ({"ok": True, "score_gain": {"mean": -0.2, "low": -0.3, "high": -0.1}}, True),
        ({"ok": False}, True),
        ({"ok": True}, False),
    ],
)
def test_the_report_names_the_command_if_the_run_fell_or_failed(
    outcome: dict[str, object], is_named: bool
) -> None:
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as shown:
        console.print(report_table({"run_dir": "runs/x-1", **outcome}))
    assert ("rollart diagnose runs/x-1" in shown.get()) == is_named


def test_what_could_not_be_checked_or_learned_is_said(rollart: Run, tmp_path: Path) -> None:
    few = healthy(0)
    few.validation = dict(list(few.validation.items())[:3])
    _, out, _ = rollart("diagnose", str(few.write(tmp_path / "few")))
    assert out.endswith(
        "No finding.\nOverfitting was not checked: it needs 8 validations, the run has 3.\n"
    )
    mute = healthy(0, Curve(num_batches=5))
    mute.metrics["train/zero_advantage_groups"] = mute.metrics["train/batch_groups"]
    _, out, _ = rollart("diagnose", str(mute.write(tmp_path / "mute")))
    assert "\nNo group had an advantage: the rewards within every group were equal" in out
    assert out.endswith("The run is too short for findings: they need at least 20 batches.\n")
