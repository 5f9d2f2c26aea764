import asyncio
import itertools
import time
from types import SimpleNamespace

import pytest

from rollart_core.config.run import WarmStart
from rollart_core.training.warm_start import CHECK_ANYWAY, WarmStartDependencies, warm_start

EVERY = 5


def warmed(loss, tokens, success=lambda step: 0.0, **changes):
    """Warm up on episodes of so many tokens; return the result and the steps that were checked."""
    checked = []

    class Trainer:
        async def supervise(self, samples, lr):
            return {"loss": loss}

    async def take(n):
        return [SimpleNamespace(num_loss_tokens=num) for num in tokens]

    async def check(step):
        checked.append(step)
        return success(step)

    options = {"max_train_steps": 3 * EVERY, "check_every": EVERY, "until_success": 0.4, **changes}
    parts = WarmStartDependencies(take, Trainer(), check, lambda line: None)
    return asyncio.run(warm_start(WarmStart(**options), parts)), checked


def test_it_ends_when_enough_succeed():
    result, checked = warmed(0.01, [5, 5], lambda step: step / 20)
    assert checked == [5, 10]
    assert (result.train_steps, result.success, result.reached) == (10, 0.5, True)


@pytest.mark.parametrize(
    ("loss", "tokens", "checks"),
    [
        (3.0, [5, 5], 0),  # hardly one of them can be right
        (0.5, [2, 2], 3),
        (0.5, [2, 200], 3),  # those of the short ones can
        (0.5, [20, 200], 0),
    ],
)
def test_it_checks_where_the_loss_lets_some_succeed(loss, tokens, checks):
    assert len(warmed(loss, tokens)[1]) == checks


@pytest.mark.parametrize(("limits", "steps"), [({}, 15), ({"max_wall_s": 3000}, 4)])
def test_time_ends_it_only_where_the_config_says_so(monkeypatch, limits, steps):
    clock = itertools.count(0, 1000)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    result, _ = warmed(3.0, [9], **limits)
    assert (result.train_steps, result.reached) == (steps, False)


def test_now_and_then_it_checks_whatever_the_loss_says():
    """As of an expert that draws among ways that are as good: its loss never falls."""
    steps = 2 * CHECK_ANYWAY * EVERY
    result, checked = warmed(3.0, [9], lambda step: 1.0 * (step == steps), max_train_steps=steps)
    assert checked == [steps // 2, steps]
    assert result.reached
