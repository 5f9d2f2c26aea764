"""Premature convergence: four contexts, a network, and what keeps it from settling too early.

The figures in ``docs/explanation/learning.md`` were measured with ``examples/bandit.yaml``; budgets
are in updates.
"""

from pathlib import Path
from statistics import fmean

import pytest
import torch
from support.neural_bandit import Setting, learn, make

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.runtime.launch import launch
from rollart_core.store.journal_reader import JournalReader

EXAMPLE = Path(__file__).parents[3] / "examples" / "bandit.yaml"
HASTY, CAREFUL = Setting(lr=0.2, num_updates=300), Setting(lr=0.02, num_updates=300)
HELPS = {"entropy_coef": 0.1, "std_floor": 0.5}
ALGORITHMS = ("grpo", "dapo", "dr-grpo", "gspo", "cispo", "rloo", "starpo", "gigpo")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_bonus_and_a_floor_reach_what_haste_does_not():
    assert learn(make("grpo", **HELPS), CAREFUL, seed=0) >= 0.75
    assert fmean(learn(make("grpo"), HASTY, seed) for seed in range(2)) < 0.72


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("alias", ALGORITHMS)
def test_every_algorithm_of_groups_settles_too_early_in_haste_and_learns_with_what_helps(alias):
    assert fmean(learn(make(alias), HASTY, seed) for seed in range(3)) < 0.72
    assert fmean(learn(make(alias, **HELPS), CAREFUL, seed) for seed in range(3)) >= 0.75


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_the_example_learns_all_four_contexts(seed, tmp_path):
    overrides = [f"seed={seed}", f"runs_dir={tmp_path}", "trackers=[]"]
    report = launch(resolve_run(load_config(EXAMPLE, overrides)))
    assert report.ok, report.stop_reason
    with JournalReader(Path(report.run_dir)) as journal:
        rewards = [m.value for m in journal.metrics("rollout/reward_mean") if m.value is not None]
    assert fmean(rewards[-30:]) >= 0.75
