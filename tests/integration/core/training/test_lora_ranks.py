"""Adapters on several trainer ranks: shards of what one rank has, and learned alike."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from support.small_models import make_groups, make_trainer, save_model
from support.trainer_ranks import trainer_ranks

from rollart_algorithms.grpo import GRPO
from rollart_core.config.training import AuxiliaryModels, LoRA
from rollart_core.models import lora
from rollart_core.training.loading import load_model
from rollart_core.training.report import TrainStepReport
from rollart_plugins.engines.incoming import AdapterBase
from rollart_plugins.weights.shared_memory import SharedMemoryChannel

pytest.importorskip("peft", reason="peft is in rollart[lora]")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KL = {"kl_coef": 0.1}  # so that the reference is there: the policy with other adapters
NUM_TRAIN_STEPS, SAVED_AT = 6, 3
CHANGES = {"lr": 1e-3, "max_tokens_per_microbatch": 128}


def adapters(sync: str) -> AuxiliaryModels:
    """Of a rank that two ranks do not share evenly."""
    return AuxiliaryModels(lora=LoRA(rank=3, alpha=6.0, sync=sync))


def numbers(report: TrainStepReport) -> list[float]:
    return [report.metrics[name] for name in ("loss", "grad_norm", "entropy", "ref_kl")]


def batch(train_step: int) -> tuple[object, int]:
    return make_groups(3, seed=train_step), train_step


def written(folder: Path) -> dict[str, torch.Tensor]:
    """The adapters of an export, under our names."""
    from safetensors.torch import load_file

    found = load_file(f"{folder}-adapter/adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0, msg=name)


def test_two_ranks_learn_the_adapters_that_one_learns_and_each_goes_on_from_the_other(tmp_path):
    model, saved = save_model(tmp_path / "model"), tmp_path / "saved"
    one = make_trainer(model, GRPO(**KL), beside=adapters("merged"), **CHANGES)
    begun = one._weights.now()
    want = []
    for n in range(NUM_TRAIN_STEPS):
        if n == SAVED_AT:
            one.save(f"{saved}-by-one", policy_version=n)
        want.append(numbers(one.train_batch(*batch(n))[0]))
    learned = one._weights.now()

    async def two_ranks() -> list[list[float]]:
        async with trainer_ranks(
            model, 2, tmp_path / "two", algorithm=KL, beside=adapters("merged"), **CHANGES
        ) as group:
            await group.call("export_hf", str(tmp_path / "begun"))
            rows = [numbers((await group.train_batch(*batch(n)))[0]) for n in range(SAVED_AT)]
            await group.call("save", f"{saved}-by-two", policy_version=SAVED_AT)
            rest = range(SAVED_AT, NUM_TRAIN_STEPS)
            rows += [numbers((await group.train_batch(*batch(n)))[0]) for n in rest]
            await group.call("export_hf", str(tmp_path / "learned"))
            assert await group.call("load", f"{saved}-by-one") == (SAVED_AT, SAVED_AT)
            again = [numbers((await group.train_batch(*batch(n)))[0]) for n in rest]
            np.testing.assert_allclose(again, rows[SAVED_AT:], rtol=1e-4, atol=2e-6)
            return rows

    np.testing.assert_allclose(asyncio.run(two_ranks()), want, rtol=1e-4, atol=2e-6)
    assert all(torch.equal(tensor, begun[n]) for n, tensor in written(tmp_path / "begun").items())
    assert_close(written(tmp_path / "learned"), learned)
    assert max(float((learned[n] - begun[n]).abs().max()) for n in begun) > 1e-3
    merged = dict(load_model(str(tmp_path / "learned")).named_parameters())
    assert_close(merged, dict(one._weights.whole(torch.float32)))
    other = make_trainer(model, GRPO(**KL), beside=adapters("merged"), **CHANGES)
    assert other.load(f"{saved}-by-two") == (SAVED_AT, SAVED_AT)
    rest = [numbers(other.train_batch(*batch(n))[0]) for n in range(SAVED_AT, NUM_TRAIN_STEPS)]
    np.testing.assert_allclose(rest, want[SAVED_AT:], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_what_two_ranks_publish_is_whole_and_only_adapters_are_trained(tmp_path, sync):
    """In bfloat16, with layers computed again for backward: FSDP2 gathers base and adapters so."""
    model = save_model(tmp_path / "model")
    channel = SharedMemoryChannel(str(tmp_path / "ranks" / "weights"))

    async def main() -> dict[str, torch.Tensor]:
        async with trainer_ranks(
            model,
            2,
            tmp_path / "ranks",
            beside=adapters(sync),
            autocast="bfloat16",
            activation_checkpointing=True,
            **CHANGES,
        ) as group:
            for n in range(2):
                (report,) = await group.train_batch(*batch(n))
                assert report.metrics["updated"] == 1
            await group.publish(1)
            sent = {name: t.clone() for name, t in channel.fetch(1)}
            await group.call("export_hf", str(tmp_path / "hf"))
            return sent

    sent, base = asyncio.run(main()), dict(load_model(model).named_parameters())
    exported = dict(load_model(str(tmp_path / "hf")).named_parameters())
    if sync == "adapter":
        assert {name.endswith((lora.A, lora.B)) for name in sent} == {True}
        sent = dict(AdapterBase(model, torch.device("cpu")).whole(sent.items()))
    assert set(sent) == set(exported)
    changed = set()
    for name, tensor in exported.items():
        assert torch.equal(sent[name], tensor), name
        if not torch.equal(tensor, base[name]):
            changed.add(name.split(".")[-2])
    assert changed == {f"{m}_proj" for m in ("q", "k", "v", "o", "gate", "up", "down")}
    rank = adapters(sync).lora.rank
    assert {t.shape[0] for n, t in written(tmp_path / "hf").items() if n.endswith(lora.A)} == {rank}
