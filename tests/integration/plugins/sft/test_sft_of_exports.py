"""Exported trajectories of a real run are trained on without a change, token for token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.whole_runs import run
from typer.testing import CliRunner

from rollart_core.cli import build_app
from rollart_core.models.tokenizer import load_tokenizer
from rollart_core.store.journal_reader import read_trajectories
from rollart_plugins.sft.config import SftConfig
from rollart_plugins.sft.rows import read_demonstrations, samples_of
from rollart_plugins.sft.run import fine_tune


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that plays the expert of an environment with tools."""
    changes = {
        "algorithm": "sft",
        "env": {"id": "toy/Stock-v1", "turns": None},
        "reward": None,
        "mode": "sync",
        "max_staleness": None,
        "model": {"vocab_size": 512},
        "rollout": {
            "group_size": 1,
            "min_group_size": 1,
            "max_new_tokens": 96,
            "max_context_tokens": 512,
        },
        "evaluation": {"tasks": 2},
        "stop": {"batches": 2},
    }
    report = run(tmp_path_factory.mktemp("run"), **changes)
    return Path(report.run_dir)


def test_an_exported_run_goes_in_without_a_change(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "good.jsonl"
    options = ["--to", "messages", "--min-reward", "1", "--out", str(file)]
    exported = CliRunner().invoke(build_app(), ["export", str(run_dir), *options])
    assert exported.exit_code == 0, exported.output
    tokenizer = load_tokenizer(run_dir / "model")
    given = {
        "model": str(run_dir / "model"),
        "data": str(file),
        "shares": {"warm": 0, "validation": 0, "test": 0},
    }
    config = SftConfig.model_validate({**given, "runs_dir": str(tmp_path), "trackers": []})

    found = read_demonstrations(config)["train"]
    recorded = {f"{t.ticket.ticket_id}#{t.ticket.attempt}": t for t in read_trajectories(run_dir)}
    ids = [json.loads(line)["id"] for line in file.read_text().splitlines()]
    assert len(found) == len(ids) >= 4
    for name, one in zip(ids, found, strict=True):
        assert one.tools
        (sample,) = samples_of(one, tokenizer)
        (want,) = recorded[name].samples
        np.testing.assert_array_equal(sample.token_ids, want.token_ids)
        np.testing.assert_array_equal(sample.loss_mask, want.loss_mask)

    report = fine_tune(config.model_copy(update={"epochs": 1, "shares": {"validation": 0.4}}))
    assert report.ok
    assert report.rows["train"] + report.rows["validation"] == len(ids)
    assert report.train_steps > 0
