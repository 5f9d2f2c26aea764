"""Runs of what needs more than a policy: a critic, a teacher, an expert, a curriculum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart_core.config.load import load_config
from rollart_core.config.model import NewModel
from rollart_core.config.resolve import resolve_run
from rollart_core.models.new import new_model
from rollart_core.runtime.launch import launch
from rollart_core.runtime.report import RunReport
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader, read_trajectories
from rollart_testing import FakeEnv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FAKE = "rollart_testing:FakeEnv"
LETTERS = "support.whole_runs:LetterReward"
MODEL = {"kind": "new", "num_layers": 1, "width": 32, "ffn_width": 48, "vocab_size": 320}


def run(folder: Path, *, resume: Path | None = None, **changes: Any) -> RunReport:
    base: dict[str, Any] = {
        "name": "learning",
        "runs_dir": str(folder / "runs"),
        "seed": 3,
        "model": MODEL,
        "env": {"id": FAKE, "turns": 2},
        "reward": LETTERS,
        "trackers": [],
        "rollout": {
            "groups_per_batch": 2,
            "group_size": 2,
            "max_turns": 2,
            "max_new_tokens": 4,
            "max_context_tokens": 160,
        },
        "evaluation": {"tasks": 2, "greedy": False},
        "runtime": {"env_processes": 0},
        "stop": {"batches": 2},
    }
    path = folder / "run.yaml"
    rollout = {**base["rollout"], **changes.pop("rollout", {})}
    path.write_text(yaml.safe_dump({**base, **changes, "rollout": rollout}))
    path = path if resume is None else resume / "config.yaml"
    return launch(resolve_run(load_config(path)), resume=resume)


def metrics(report: RunReport, name: str) -> list[float]:
    with JournalReader(Path(report.run_dir)) as journal:
        return [row.value for row in journal.metrics(name)]


def test_ppo_learns_values_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    report = run(tmp_path, algorithm="ppo", critic={"backbone": "own", "warmup_train_steps": 1})
    assert report.ok
    values = metrics(report, "train/value_loss")
    assert len(values) == 2
    assert all(value > 0 for value in values)
    folder = Path(report.run_dir)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("batches: 2", "batches: 3"))
    assert run(tmp_path, resume=folder).ok
    assert audit(folder).ok
    assert len(metrics(report, "train/value_loss")) == 3


def test_a_teacher_judges_what_the_policy_wrote(tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    new_model(model, NewModel.model_validate(MODEL), [FakeEnv(turns=2).reset(seed=0)[0]] * 9, 0)
    report = run(
        tmp_path,
        model={"path": model},
        algorithm="opd",
        teacher={"path": model},
    )
    assert report.ok
    assert not report.failures
    # The first batch's teacher is the policy itself: it finds each token as likely as that did.
    assert metrics(report, "train/loss")[0] == pytest.approx(0, abs=1e-3)


def test_demonstrations_of_the_expert_are_imitated(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        algorithm="sft",
        reward=None,
        rollout={"group_size": 1, "min_group_size": 1, "max_new_tokens": 32},
        trainer={"lr": 3e-3},
        stop={"batches": 8},
    )
    assert report.ok
    losses = metrics(report, "train/loss")
    assert losses[-1] < losses[0] - 0.3  # batches of other tasks differ by 0.06
    trained = [t for t in read_trajectories(Path(report.run_dir)) if t.ticket.group_id[0] == "g"]
    assert all(t.success for t in trained)


def test_a_mixture_with_settings_and_a_curriculum_resumes(tmp_path: Path) -> None:
    shaping = {"normalise": "running", "overlong": {"max_tokens": 8, "buffer_tokens": 4}}
    envs = [
        {"id": FAKE, "name": "long", "turns": 2, "run": {"algorithm": {"kl_coef": 0.1}}},
        {"id": FAKE, "name": "short", "turns": 1, "run": {"shaping": shaping}},
    ]
    changes: dict[str, Any] = {
        "env": envs,
        "curriculum": {"begin_after": 2, "solved_at": 0.5, "retire_above": 0.9},
        "rollout": {"equal_groups": "replace", "small_groups": "requeue"},
    }
    report = run(tmp_path, **changes)
    assert report.ok
    assert len(metrics(report, "train/ref_kl")) == 2
    assert metrics(report, "curriculum/long/factor")
    folder = Path(report.run_dir)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("batches: 2", "batches: 3"))
    assert run(tmp_path, resume=folder).ok
    assert audit(folder).ok
