"""A trainer's tensors in host memory and back: nothing stays, every bit comes back."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.small_models import make_groups, make_trainer, save_model
from support.trainer_ranks import trainer_ranks

from rollart_algorithms.grpo import GRPO
from rollart_algorithms.ppo import PPO
from rollart_core.config.training import AuxiliaryModels, Critic, LoRA, Reference
from rollart_core.training.loading import HostCopies
from rollart_core.training.trainer import Trainer
from rollart_plugins.weights.shared_memory import SharedMemoryChannel

KL = {"kl_coef": 0.1}  # with a reference


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def whole(path: str) -> Trainer:
    return make_trainer(path, GRPO(**KL), lr=1e-2)


def with_adapters(path: str) -> Trainer:
    pytest.importorskip("peft", reason="peft is in rollart[lora]")
    return make_trainer(path, GRPO(**KL), lr=1e-2, beside=AuxiliaryModels(lora=LoRA(rank=4)))


def with_own_critic(path: str) -> Trainer:
    beside = AuxiliaryModels(critic=Critic(backbone="own"), reference=Reference(path=path))
    return make_trainer(path, PPO(**KL), lr=1e-2, beside=beside)


def steps(trainer: Trainer, between: Callable[[], object]) -> list[dict[str, float]]:
    """Return what is measured in a warm start and several batches, with something between them."""
    found = []
    samples = [s for g in make_groups(2, seed=9) for s in g.samples]
    for _ in range(2):
        found.append(trainer.supervise(samples, 1e-3))
        between()
    for n in range(3):
        found += [dict(r.metrics) for r in trainer.train_batch(make_groups(3, seed=n), n)]
        between()
    return [
        {k: v for k, v in one.items() if not k.endswith(("_s", "tokens_per_s"))} for one in found
    ]


def live_bytes() -> dict[int, int]:
    """Return the bytes of each storage that a tensor of this process uses."""
    gc.collect()
    # isinstance would read __class__, for which deprecated objects of torch warn
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}


@pytest.mark.parametrize("make", [whole, with_adapters, with_own_critic])
def test_training_goes_on_bit_for_bit_and_nothing_stays_on_the_device(
    model_path: str, tmp_path: Path, make: Callable[[str], Trainer]
) -> None:
    plain = steps(make(model_path), lambda: None)
    before = live_bytes()
    trainer = make(model_path)
    left = []

    def away_and_back() -> None:
        held = sum(n for p, n in live_bytes().items() if p not in before)
        moved = trainer.offload()
        assert moved > 0.2 * held
        hosts = {host.data_ptr() for _, host in trainer._host_copies._held}
        left.append(sum(n for p, n in live_bytes().items() if p not in hosts and p not in before))
        trainer.reload()
        trainer.reload()  # a second one does nothing

    assert steps(trainer, away_and_back) == plain
    trainer.offload()
    trainer.reload()
    assert max(left) < 20_000  # the model has 300 KB and more

    published = SharedMemoryChannel(str(tmp_path / "weights"))
    trainer._channel = SharedMemoryChannel(str(tmp_path / "weights"))
    trainer.publish(1)
    weights = {name: tensor.clone() for name, tensor in published.fetch(1)}
    for name, tensor in trainer._weights.whole(torch.float32):
        assert torch.equal(weights[name], tensor), name
    published.close()
    trainer.close()


def test_host_memory_is_used_again() -> None:
    tensors = [torch.randn(1000), torch.randn(1000), torch.randn(10)]
    tensors.append(tensors[0][10:20])  # of one storage
    copies = HostCopies()
    seen = []
    for _ in range(2):
        copies.offload(tensors)
        assert copies.num_bytes == 8040
        seen.append({host.data_ptr() for _, host in copies._held})
        assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
        copies.reload()
        assert copies.num_bytes == 0
    assert seen[0] == seen[1]
    assert torch.equal(tensors[3], tensors[0][10:20])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shards_of_several_ranks_are_moved_and_training_goes_on_bit_for_bit(
    model_path: str, tmp_path: Path
) -> None:
    async def losses(name: str, *, moves: bool) -> list[float]:
        found = []
        async with trainer_ranks(model_path, 2, tmp_path / name, algorithm=KL, lr=1e-2) as group:
            for n in range(3):
                reports = await group.train_batch(make_groups(3, seed=n), n)
                found += [report.metrics["loss"] for report in reports]
                if moves:
                    num_params = sum(p.numel() for p in whole(model_path)._model.parameters())
                    moved = await group.offload()  # half of weights, moments and reference
                    assert moved == pytest.approx(16 * num_params / 2, rel=0.1)
                    await group.reload()
        return found

    plain = asyncio.run(losses("plain", moves=False))
    assert asyncio.run(losses("moved", moves=True)) == plain
