"""What bounds an update on tiny models: clipping by history, skipped outliers, the KL of a step."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.small_models import make_groups, make_trainer, reference_logprobs, save_model
from support.trainer_ranks import trainer_ranks

from rollart_algorithms.grpo import GRPO
from rollart_algorithms.ppo import PPO
from rollart_core.config.run import Trainer as TrainerConfig
from rollart_core.config.training import AuxiliaryModels, Critic, LoRA
from rollart_core.training.optimizer import GuardedAdamW
from rollart_core.training.report import TrainStepReport
from rollart_core.training.trainer import Trainer, load_model

QUANTILE = {"kind": "quantile", "window": 8, "warmup_updates": 2, "quantile": 0.5}
COSINE = {"kind": "cosine", "num_train_steps": 6, "min_ratio": 0.0}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer._weights.parameters().items()}


def moments(trainer: Trainer) -> dict[str, torch.Tensor]:
    state = trainer._optimizer.state()
    return {f"{n}.{k}": t.clone() for n, of_one in state.items() for k, t in of_one.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def metrics(trainer: Trainer, seed: int, **keys: object) -> dict[str, float]:
    (report,) = trainer.train_batch(make_groups(2, seed=seed), seed, **keys)
    return dict(report.metrics)


# Schedule and clipping


def test_schedule_and_clipping_go_on_from_a_checkpoint_bit_for_bit(
    model_path: str, tmp_path: Path
) -> None:
    def trainer() -> Trainer:
        return make_trainer(
            model_path,
            lr=1e-2,
            warmup_train_steps=2,
            schedule=COSINE,
            clip=QUANTILE,
            grad_clip=100.0,
        )

    first, second = trainer(), trainer()
    before = [metrics(first, seed) for seed in range(3)]
    first.save(str(tmp_path / "c"), policy_version=3)
    second.load(str(tmp_path / "c"))
    want = [metrics(first, seed) for seed in range(3, 6)]
    got = [metrics(second, seed) for seed in range(3, 6)]
    names = ("loss", "grad_norm", "lr", "clip_threshold", "clipped", "num_updates")
    assert [[m[n] for n in names] for m in want] == [[m[n] for n in names] for m in got]
    lrs = [m["lr"] / 1e-2 for m in (*before, *got)]
    falling = [(1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]
    assert lrs == pytest.approx([0.5, 1.0, *falling])
    assert all(0 < m["clip_threshold"] < 100.0 for m in got)
    assert len({m["clip_threshold"] for m in got}) == 3


def test_a_schedule_over_stop_follows_the_share_it_is_given(model_path: str) -> None:
    schedule = {"kind": "linear", "over": "stop", "min_ratio": 0.5}
    trainer = make_trainer(model_path, lr=1e-2, schedule=schedule)
    lrs = [metrics(trainer, 0, progress=share)["lr"] for share in (0.0, 0.5, 1.0, 0.5)]
    assert lrs == pytest.approx([1e-2, 7.5e-3, 5e-3, 7.5e-3])
    with pytest.raises(ValueError, match="used share"):
        metrics(trainer, 0)


def test_a_checkpoint_with_another_history_of_norms_loads_without_it(
    model_path: str, tmp_path: Path
) -> None:
    plain = make_trainer(model_path)
    metrics(plain, 0)
    plain.save(str(tmp_path / "plain"), policy_version=1)
    clipped = make_trainer(model_path, clip=QUANTILE)
    assert clipped.load(str(tmp_path / "plain")) == (1, 1)
    assert sum(clipped._optimizer.clipping.state()) == 0
    metrics(clipped, 1)
    clipped.save(str(tmp_path / "clipped"), policy_version=2)
    for other in (plain, make_trainer(model_path, clip={**QUANTILE, "window": 9})):
        assert other.load(str(tmp_path / "clipped")) == (2, 2)
        assert sum(other._optimizer.clipping.state()) == 0


def one_parameter(**config: object) -> tuple[torch.nn.Parameter, GuardedAdamW]:
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    given = {"lr": 0.1, "warmup_train_steps": 0, **config}
    return parameter, GuardedAdamW({"p": parameter}, TrainerConfig.model_validate(given))


def test_an_outlier_is_skipped_and_counted_as_nothing_else() -> None:
    clip = {"kind": "quantile", "window": 16, "warmup_updates": 3, "quantile": 0.5, "skip_above": 5}
    parameter, optimizer = one_parameter(grad_clip=1e9, clip=clip)
    rows = []
    for size in (1.0, 1.0, 1.0, 1.0, 100.0, 2.0, math.nan, math.nan, 100.0, math.nan, math.nan):
        parameter.grad = torch.full((4, 4), size / 4)
        before = parameter.detach().clone()
        found = optimizer.update(0.0).metrics()
        assert torch.equal(parameter, before) == (not found["updated"])
        rows.append([found["updated"], found["skipped"], found["not_finite"]])
    good, outlier, bad = [1, 0, 0], [0, 1, 0], [0, 0, 1]
    # Two that are not finite, and two again: a finite norm between them counts as one.
    assert rows == [good, good, good, good, outlier, good, bad, bad, outlier, bad, bad]
    assert optimizer.train_step == 5


def test_a_clipped_gradient_has_the_norm_of_the_threshold() -> None:
    parameter, optimizer = one_parameter(clip=QUANTILE, grad_clip=10.0)
    for size in (1.0, 1.0, 1.0, 3.0):
        parameter.grad = torch.full((4, 4), size / 4)
        found = optimizer.update(0.0).metrics()
        kept = float(parameter.grad.norm())
    assert (found["grad_norm"], found["clipped"], found["clip_threshold"]) == (3.0, 1.0, 1.0)
    assert kept == pytest.approx(1.0, rel=1e-5)


# The KL of a step


def kl_by_hand(path: str, after: torch.nn.Module) -> float:
    """Return the k3 estimate over all rows of ``make_groups(2)``, one row at a time."""
    before, ratios = load_model(path), []
    with torch.no_grad():
        for sample in (s for g in make_groups(2) for s in g.samples):
            ratios.append(
                reference_logprobs(after, sample, 1.0) - reference_logprobs(before, sample, 1.0)
            )
    log_ratio = torch.cat(ratios).double()
    return float((log_ratio.exp() - 1 - log_ratio).mean())


def test_a_small_step_is_measured_and_changes_no_number(model_path: str) -> None:
    settings = {"lr": 1e-3, "deterministic": True}
    free, bounded = (
        make_trainer(model_path, **settings),
        make_trainer(model_path, max_kl=10.0, **settings),
    )
    first = metrics(bounded, 0)
    assert first["kl_after_step"] == pytest.approx(kl_by_hand(model_path, bounded._model), rel=1e-3)
    assert first["kl_after_step"] > 1e-4
    assert (first["step_scale"], first["max_kl_given_up"]) == (1.0, 0.0)
    assert first["max_kl_s"] > 0
    want = metrics(free, 0)
    for seed in (1, 2):
        a, b = metrics(free, seed), metrics(bounded, seed)
        assert {n: b[n] for n in a if not n.endswith("_s")} == {
            n: v for n, v in a.items() if not n.endswith("_s")
        }
    assert "kl_after_step" not in want
    assert same(weights(free), weights(bounded))


def test_too_large_a_step_is_halved_until_it_is_within_the_bound(model_path: str) -> None:
    full = make_trainer(model_path, lr=1e-3)
    metrics(full, 0)
    kl = kl_by_hand(model_path, full._model)
    bounded = make_trainer(model_path, lr=1e-3, max_kl=0.5 * kl)
    found = metrics(bounded, 0)
    assert found["step_scale"] == 0.5  # the KL of half a small step is about a quarter
    assert found["kl_after_step"] <= 0.5 * kl
    assert (found["updated"], found["num_updates"]) == (1, 1)
    scaled = make_trainer(model_path, lr=0.5e-3)
    metrics(scaled, 0)
    assert same(weights(bounded), weights(scaled))
    assert same(moments(bounded), moments(scaled))


@pytest.mark.parametrize("adapted", [False, True])
def test_a_step_that_cannot_be_made_small_enough_leaves_everything_as_it_was(
    model_path: str, adapted: bool
) -> None:
    if adapted:
        pytest.importorskip("peft", reason="peft is in rollart[lora]")
    beside = {"beside": AuxiliaryModels(lora=LoRA(rank=4))} if adapted else {}
    trainer = make_trainer(model_path, lr=1e-2, max_kl=1e-12, **beside)
    free = make_trainer(model_path, lr=1e-2, **beside)
    metrics(free, 0)
    trainer._weights.model.load_state_dict(free._weights.model.state_dict())
    before, kept = weights(trainer), moments(trainer)
    found = metrics(trainer, 1)
    assert (found["updated"], found["max_kl_given_up"], found["step_scale"]) == (0, 1, 0)
    assert (found["not_finite"], found["skipped"], found["num_updates"]) == (0, 0, 0)
    assert found["kl_after_step"] > 1e-12
    assert same(weights(trainer), before)
    assert same(moments(trainer), kept)


def test_a_critic_is_updated_with_the_policy_or_not_at_all(model_path: str) -> None:
    def trained(max_kl: float) -> tuple[dict[str, float], bool]:
        beside = AuxiliaryModels(critic=Critic(backbone="shared"))
        trainer = make_trainer(model_path, PPO(), lr=1e-2, max_kl=max_kl, beside=beside)
        assert trainer._extras is not None
        before = {n: p.detach().clone() for n, p in trainer._extras._parameters().items()}
        found = metrics(trainer, 0)
        return found, same(before, dict(trainer._extras._parameters()))

    found, is_same = trained(10.0)
    assert (found["updated"], is_same) == (1, False)
    found, is_same = trained(1e-12)
    assert (found["updated"], is_same) == (0, True)


def test_only_some_rows_of_a_large_update_are_measured(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollart_core.training.step_kl.MAX_ROWS", 3)
    trainer = make_trainer(model_path, GRPO(), lr=1e-3, max_kl=10.0)
    seen: list[int] = []
    policy_logprobs = trainer._policy.logprobs

    def counted(samples):  # type: ignore[no-untyped-def]
        seen.append(len(samples))
        return policy_logprobs(samples)

    monkeypatch.setattr(trainer._policy, "logprobs", counted)
    metrics(trainer, 0)
    assert sum(seen) == 3


# Several ranks


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_bound_an_update_as_one_does_and_go_on_from_its_history(
    model_path: str, tmp_path: Path
) -> None:
    """The bound is between the KL of a full and of half a step, so that no rounding decides."""
    full = make_trainer(model_path, lr=1e-3)
    metrics(full, 0)
    max_kl = 0.5 * kl_by_hand(model_path, full._model)
    settings = {"lr": 1e-3, "max_kl": max_kl, "clip": QUANTILE, "grad_clip": 100.0}
    names = ("loss", "grad_norm", "clip_threshold", "clipped", "kl_after_step", "step_scale")

    def numbers(report: TrainStepReport) -> list[float]:
        return [report.metrics[name] for name in names]

    one = make_trainer(model_path, **settings)
    want = [numbers(one.train_batch(make_groups(2, seed=n), n)[0]) for n in range(5)]

    async def ranks() -> list[list[float]]:
        async with trainer_ranks(model_path, 2, tmp_path / "ranks", **settings) as group:
            rows = [
                numbers((await group.train_batch(make_groups(2, seed=n), n))[0]) for n in range(3)
            ]
            await group.call("save", str(tmp_path / "saved"), policy_version=3)
            for n in (3, 4):
                rows.append(numbers((await group.train_batch(make_groups(2, seed=n), n))[0]))
            return rows

    got = asyncio.run(ranks())
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6)
    assert want[0][-1] == 0.5
    again = make_trainer(model_path, **settings)
    again.load(str(tmp_path / "saved"))
    rest = [numbers(again.train_batch(make_groups(2, seed=n), n)[0]) for n in (3, 4)]
    np.testing.assert_allclose(rest, want[3:], rtol=1e-3, atol=1e-6)
