"""Learning rates against the formulas of the papers, and configs that cannot be followed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from rollart_core.config.run import AsyncRun, Trainer
from rollart_core.config.training import Schedule
from rollart_core.config.validation.consistency import schedule_problems, trainer_section
from rollart_core.training.optimizer import lr_factor


def factors(num: int, warmup: int = 0, **keys: object) -> list[float]:
    schedule = Schedule.model_validate(keys)
    return [lr_factor(schedule, warmup, step, None) for step in range(num)]


def test_a_constant_schedule_is_the_warm_up_alone() -> None:
    assert factors(6, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(2) == [1.0, 1.0]


def test_cosine_is_equation_5_of_sgdr() -> None:
    least, greatest, period = 0.2, 1.0, 8
    want = [
        least + 0.5 * (greatest - least) * (1 + math.cos(t / period * math.pi))
        for t in range(period + 1)
    ]
    got = factors(9, kind="cosine", num_train_steps=8, min_ratio=0.2)
    assert got == pytest.approx(want)
    assert got[8] == pytest.approx(0.2)


def test_a_warm_up_comes_before_the_period() -> None:
    got = factors(14, warmup=4, kind="cosine", num_train_steps=12, min_ratio=0.0)
    assert got[:4] == [0.25, 0.5, 0.75, 1.0]
    assert got[4:12] == pytest.approx([(1 + math.cos(t / 8 * math.pi)) / 2 for t in range(8)])
    assert got[12:] == pytest.approx([0, 0])  # after the end it stays


def test_linear_and_wsd_are_lines() -> None:
    got = factors(5, kind="linear", num_train_steps=4, min_ratio=0.5)
    assert got == pytest.approx([1, 0.875, 0.75, 0.625, 0.5])
    got = factors(11, kind="wsd", num_train_steps=10, decay_share=0.4, min_ratio=0.0)
    assert got == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_over_stop_the_used_share_is_the_place(kind: str) -> None:
    keys = {"kind": kind, **({"decay_share": 0.5} if kind == "wsd" else {})}
    over_stop = Schedule.model_validate({**keys, "over": "stop"})
    steps = Schedule.model_validate({**keys, "num_train_steps": 10})
    for n in range(11):
        by_share = lr_factor(over_stop, 0, train_step=1000, progress=n / 10)
        assert by_share == pytest.approx(lr_factor(steps, 0, n, None))
    assert lr_factor(over_stop, 4, train_step=0, progress=0.0) == 0.25
    assert lr_factor(over_stop, 0, 0, progress=1.7) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="used share"):
        lr_factor(over_stop, 0, 0, progress=None)


def run(trainer: object, stop: object, **more: object) -> AsyncRun:
    base = {"env": "webshop", "model": {"kind": "new"}, "trainer": trainer, "stop": stop}
    return AsyncRun.model_validate({**base, **more})


def said(*args: object, **more: object) -> Sequence[str]:
    return [p.within() for p in schedule_problems(run(*args, **more))]


def test_a_schedule_without_an_end_is_refused_with_the_fix() -> None:
    (line,) = said({"schedule": "cosine"}, {"wall_s": 60})
    assert line == (
        "trainer.schedule: cosine has no end: set num_train_steps, or stop.batches, or over: stop "
        "to spread it over the run"
    )
    assert not said({"schedule": "cosine"}, {"batches": 60})
    assert not said({"schedule": {"kind": "wsd", "over": "stop"}}, {"wall_s": 60})
    assert not said({"schedule": {"kind": "linear", "num_train_steps": 100}}, {"wall_s": 60})
    assert not said({"schedule": "constant"}, {"wall_s": 60})


def test_a_schedule_that_ends_in_the_warm_up_or_hangs_on_time_is_refused() -> None:
    ends = {"warmup_train_steps": 9, "schedule": {"kind": "linear", "num_train_steps": 9}}
    (line,) = said(ends, {"wall_s": 60})
    assert "must be more than trainer.warmup_train_steps (9)" in line
    timed = {"schedule": {"kind": "linear", "over": "stop"}}
    (line,) = said(timed, {"wall_s": 60, "batches": 5}, deterministic=True)
    assert "trainer.schedule.over: stop: with stop.wall_s" in line
    assert not said(timed, {"batches": 5}, deterministic=True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"over": "stop"}, "over has no effect with kind: constant"),
        ({"kind": "cosine", "decay_share": 0.2}, "decay_share has no effect with kind: cosine"),
        (
            {"kind": "cosine", "over": "stop", "num_train_steps": 5},
            "num_train_steps has no effect with over: stop",
        ),
        ({"kind": "step"}, "'constant', 'linear', 'cosine' or 'wsd'"),
    ],
)
def test_keys_without_effect_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Trainer.model_validate({"schedule": keys})


@pytest.mark.parametrize("trainer", [{}, {"schedule": "cosine", "clip": "quantile"}])
def test_a_config_with_all_its_defaults_written_out_is_the_same(trainer: object) -> None:
    section = Trainer.model_validate(trainer)
    assert Trainer.model_validate(section.model_dump()) == section


def test_the_end_of_a_run_is_the_end_of_its_schedule() -> None:
    config = run({"schedule": "linear", "updates_per_batch": 3}, {"batches": 7})
    assert trainer_section(config).schedule.num_train_steps == 21
    given = {"schedule": {"kind": "linear", "num_train_steps": 12}}
    assert trainer_section(run(given, {"batches": 7})).schedule.num_train_steps == 12
    plain = run({}, {"wall_s": 5})
    assert trainer_section(plain) is plain.trainer
