"""Options of an algorithm that do not fit the run around it: refused, or warned of, at load."""

import pytest

from rollart_core.config.load import validate
from rollart_core.config.validation.plugins import algorithm_problems, config_warnings

BASE = {"env": "toy/FrozenLake-v1", "model": {"kind": "new"}, "stop": {"batches": 1}}


def config_of(algorithm, **sections):
    config, problems = validate({**BASE, "algorithm": algorithm, **sections})
    assert config is not None, problems
    return config


def told(algorithm, **sections):
    config = config_of(algorithm, **sections)
    return [p.within() for p in algorithm_problems(config, config.algorithm.id)]


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        ({"id": "grpo", "clip_high": 0.28}, "clip_high"),
        ({"id": "dapo", "clip_low": 0.1}, "clip_low"),
        ({"id": "cispo", "clip_high": 0.4}, "clip_high"),
        ({"id": "grpo", "dual_clip": 3.0}, "dual_clip"),
        ({"id": "ppo", "value_clip": 0.5}, "value_clip"),
    ],
)
def test_a_clip_of_a_ratio_that_is_always_1_is_refused(algorithm, name):
    (line,) = told(algorithm)
    assert line.startswith(f"algorithm.{name}: has no effect with trainer.updates_per_batch: 1")
    assert told(algorithm, trainer={"updates_per_batch": 2}) == []


def test_a_clip_of_a_ratio_to_what_sampled_is_not():
    assert told({"id": "grpo", "clip_high": 0.28, "proximal": "inference"}) == []
    assert told({"id": "grpo"}) == told({"id": "sft"}) == []
    # A run's own config holds every default.
    assert told({"id": "dapo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}) == []
    assert told({"id": "ppo", "value_clip": None}) == []


def test_the_options_of_one_environment_are_told_of_where_they_stand():
    env = [
        {"id": "toy/FrozenLake-v1"},
        {"id": "toy/Sokoban-v1", "run": {"algorithm": {"clip_low": 0.1}}},
    ]
    (line,) = told({"id": "grpo"}, env=env)
    assert line.startswith("env.1.run.algorithm.clip_low: has no effect")
    assert told({"id": "grpo", "proximal": "inference"}, env=env) == []


def test_a_number_of_groups_that_no_batch_has_or_every_batch_has_is_refused():
    algorithm = {"id": "grpo", "min_effective_groups": 9}
    (line,) = told(algorithm, rollout={"groups_per_batch": 8})
    assert line == (
        "algorithm.min_effective_groups: 9 is more than rollout.groups_per_batch (8): every batch "
        "would be scaled down; set it to 8 or less"
    )
    (line,) = told(algorithm, rollout={"groups_per_batch": 16, "equal_groups": "replace"})
    assert "has no effect with rollout.equal_groups: replace" in line
    assert told(algorithm, rollout={"groups_per_batch": 9}) == []


def test_a_divisor_that_shrinks_is_warned_of():
    config = config_of({"id": "grpo", "zero_advantage": "drop"}, warm_start={})
    (line,) = config_warnings(config, "grpo")
    assert line.startswith("algorithm.zero_advantage: drop divides the loss")
    assert "the divisor shrinks during training" in line
    assert config_warnings(config_of("grpo", warm_start={}), "grpo") == []


def test_a_new_model_that_nothing_teaches_is_warned_of():
    (line,) = config_warnings(config_of("grpo"), "grpo")
    assert line.startswith("model: a new model writes random text")
    assert "add warm_start" in line
    assert config_warnings(config_of("sft"), "sft") == [], "it imitates demonstrations"
    assert config_warnings(config_of("grpo", model={"path": "/any"}), "grpo") == []


def test_options_that_are_wrong_by_themselves_are_left_to_their_own_check():
    assert told({"id": "grpo", "clip_high": -1.0}) == []
