"""Keys of validation that do not go together are refused when the config loads, with the fix."""

from pathlib import Path

import pytest

from rollart_core.config.load import apply_override, validate
from rollart_core.config.resolve import resolve_run

BASE = {
    "env": "webshop",
    "model": {"kind": "new"},
    "stop": {"batches": 2},
}
ON = ("evaluation.every_batches=50",)


def problems(*overrides: str, env: object = "webshop") -> list[str]:
    mapping = {**BASE, "env": env, "stop": {"batches": 2}}
    for override in overrides:
        apply_override(mapping, override)
    return [problem.within() for problem in validate(mapping)[1]]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (
            ("checkpoint.keep_best=validation/success",),
            "checkpoint.keep_best: validation/success needs validations, and there are "
            "none: set evaluation.every_batches, such as 50, or remove checkpoint.keep_best",
        ),
        (
            ("stop.when={metric: validation/score}",),
            "stop.when: validation/score needs validations, and there are none: set "
            "evaluation.every_batches, such as 50, or remove stop.when",
        ),
        (
            ("evaluation.validation_tasks=8",),
            "evaluation.validation_tasks: has no effect without evaluation.every_batches: set "
            "evaluation.every_batches, such as 50, or remove it",
        ),
        (
            (*ON, "evaluation.validation_split=test"),
            "evaluation.validation_split: 'test' is also evaluation.split, and validation tasks "
            "must have no other use: use another split, or remove it to hold tasks out of "
            "rollout.split",
        ),
        (
            (*ON, "stop.when={metric: validation/success, value: 95}"),
            "stop.when.value: 95 is not a share of successes: it must be above 0 and at most 1",
        ),
        (
            (*ON, "checkpoint.keep_best=train/loss"),
            "checkpoint.keep_best: must be 'validation/success' or 'validation/score', got "
            "'train/loss'",
        ),
        (
            ("stop={when: {metric: validation/score}}",),
            "stop: stop needs batches or wall_s; without them the run never ends: stop.when may "
            "never be met, so it needs one of them as an upper limit",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: tuple[str, ...], wanted: str) -> None:
    assert problems(*overrides) == [wanted]


@pytest.mark.parametrize("split", ["train", "warm"])
def test_the_split_of_training_or_of_the_warm_start_is_no_validation_split(split: str) -> None:
    keys = (*ON, f"evaluation.validation_split={split}", "warm_start.lr=1e-3")
    key = {"train": "rollout.split", "warm": "warm_start.check_split"}[split]
    assert f"{split!r} is also {key}" in problems(*keys)[0]


def test_each_environment_of_several_has_its_own_splits() -> None:
    sokoban = {"id": "sokoban", "run": {"split": "easy", "validation_split": "easy"}}
    found = problems(*ON, env=["frozenlake", sokoban])
    assert len(found) == 1
    assert found[0].startswith("env.1.run.validation_split: 'easy' is also rollout.split of env.1")
    idle = {"id": "sokoban", "run": {"validation_split": "hard"}}
    assert "has no effect without evaluation.every_batches" in problems(env=["frozenlake", idle])[0]
    few = problems(*ON, "evaluation.validation_tasks=1", env=["frozenlake", "sokoban"])
    assert few == ["evaluation.validation_tasks: 1 is too few for 2 environments"]


def test_a_resolved_config_is_read_back_with_and_without_validation(tmp_path: Path) -> None:
    for keys in ((), (*ON, "checkpoint.keep_best=validation/score")):
        mapping = {**BASE, "env": "webshop", "stop": {"batches": 2}}
        for key in keys:
            apply_override(mapping, key)
        config, wrong = validate(mapping)
        assert config is not None
        assert not wrong
        run = resolve_run(config)
        again, wrong = validate(run.as_dict())
        assert again is not None
        assert not wrong
        assert resolve_run(again).as_dict() == run.as_dict()
