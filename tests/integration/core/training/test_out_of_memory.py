"""If memory runs out, microbatches are halved and the update is computed again."""

from collections.abc import Sequence

import pytest
import torch
from support.small_models import make_groups, save_model
from support.small_models import make_trainer as any_trainer

from rollart_algorithms.grpo import GRPO
from rollart_algorithms.ppo import PPO
from rollart_core.config.training import AuxiliaryModels, Critic
from rollart_core.contracts.algorithm import Algorithm
from rollart_core.errors import OutOfMemory
from rollart_core.training.batch import model_input
from rollart_core.training.policy import PackedPolicy, Policy
from rollart_core.training.trainer import Trainer
from rollart_core.types import Sample

CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:130] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 9 bytes. Error code 12 (Cannot allocate memory)"
)


def make_trainer(model: str, algorithm: Algorithm, **changes: object) -> Trainer:
    """Return a trainer whose microbatches count every token."""
    return any_trainer(model, algorithm, activation_checkpointing=True, **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


class Memory:
    """A device whose memory has room for so many tokens.

    Args:
        monkeypatch: Replaces the forward pass.
        most_tokens: Largest microbatch that fits.
        error: What a larger one raises, after its backward pass has begun if ``late``.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, most_tokens: int, error: Exception, *, late: bool
    ) -> None:
        self.sizes: list[int] = []
        plain = Policy.outputs

        def outputs(policy: Policy, samples: Sequence[Sample], **more: bool) -> object:
            tokens = sum(len(model_input(s)) for s in samples)
            self.sizes.append(tokens)
            if tokens > most_tokens:
                if late:
                    plain(policy, samples, **more)[0].sum().backward()
                raise error
            return plain(policy, samples, **more)

        monkeypatch.setattr(PackedPolicy, "outputs", outputs)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError(CPU_TEXT)])
def test_the_update_is_that_of_small_microbatches(
    model: str, monkeypatch: pytest.MonkeyPatch, error: Exception, late: bool
):
    groups = make_groups(4)
    wanted = make_trainer(model, GRPO(), lr=1e-3, max_tokens_per_microbatch=128)
    plain = [wanted.train_batch(groups, n)[0].metrics for n in range(2)]
    trainer = make_trainer(model, GRPO(), lr=1e-3, max_tokens_per_microbatch=512)
    memory = Memory(monkeypatch, 150, error, late=late)
    found = [trainer.train_batch(groups, n)[0].metrics for n in range(2)]
    assert [m["microbatch_halvings"] for m in found] == [2, 2]
    assert [m["microbatch_halvings"] for m in plain] == [0, 0]
    for ours, theirs in zip(found, plain, strict=True):
        for name in ("loss", "grad_norm", "entropy", "tokens", "loss_tokens"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7)
    assert sum(size > 150 for size in memory.sizes) == 2  # later batches begin with what fits


def test_signals_and_critics_are_computed_again_too(model: str, monkeypatch: pytest.MonkeyPatch):
    def trainer_of(budget: int):
        beside = AuxiliaryModels(critic=Critic())
        return make_trainer(
            model, PPO(kl_coef=0.1), lr=1e-3, max_tokens_per_microbatch=budget, beside=beside
        )

    groups = make_groups(2)
    plain = trainer_of(128).train_batch(groups, 0)[0].metrics
    trainer = trainer_of(512)
    Memory(monkeypatch, 140, torch.OutOfMemoryError("no room"), late=False)
    found = trainer.train_batch(groups, 0)[0].metrics
    assert found["microbatch_halvings"] > 0
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5)


def test_supervised_steps_are_repeated_with_half(model: str, monkeypatch: pytest.MonkeyPatch):
    samples = [s for g in make_groups(2) for s in g.samples]
    plain = make_trainer(model, GRPO(), max_tokens_per_microbatch=128).supervise(samples, 1e-3)
    trainer = make_trainer(model, GRPO(), max_tokens_per_microbatch=512)
    Memory(monkeypatch, 140, torch.OutOfMemoryError("no room"), late=True)
    found = trainer.supervise(samples, 1e-3)
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)


def test_a_row_that_does_not_fit_ends_with_the_keys_to_lower(
    model: str, monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(model, GRPO(), max_tokens_per_microbatch=256)
    memory = Memory(monkeypatch, 10, torch.OutOfMemoryError("no room"), late=False)
    with pytest.raises(OutOfMemory, match=r"longest row has \d+\): .*rollout.max_context_tokens"):
        trainer.train_batch(make_groups(2), 0)
    assert len(memory.sizes) < 30


def test_other_errors_are_not_repeated(model: str, monkeypatch: pytest.MonkeyPatch):
    trainer = make_trainer(model, GRPO())
    memory = Memory(monkeypatch, 10, RuntimeError("shape mismatch"), late=False)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        trainer.train_batch(make_groups(2), 0)
    assert len(memory.sizes) == 1
