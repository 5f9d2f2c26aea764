"""Several trainer ranks give what one gives, resume from one another, and end as one."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from support.pace import scaled
from support.small_models import make_groups, make_trainer, save_model
from support.trainer_ranks import trainer_ranks

from rollart_algorithms.grpo import GRPO
from rollart_algorithms.ppo import PPO
from rollart_core.config.training import AuxiliaryModels, Critic
from rollart_core.errors import ConfigError, TrainerLost
from rollart_core.training.report import TrainStepReport
from rollart_core.training.trainer import load_model
from rollart_plugins.weights.shared_memory import SharedMemoryChannel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KL = {"kl_coef": 0.1}  # so that the reference policy is there, and sharded
NUM_TRAIN_STEPS = 12
SAVED_AT = 6


def numbers(report: TrainStepReport) -> list[float]:
    names = ("loss", "grad_norm", "entropy", "ref_kl")
    return [report.metrics[name] for name in names if name in report.metrics]


def batch(train_step: int) -> tuple[object, int]:
    return make_groups(3, seed=train_step), train_step


def one_rank(model: str, **changes: object) -> list[list[float]]:
    trainer = make_trainer(model, GRPO(**KL), lr=1e-3, **changes)
    return [numbers(trainer.train_batch(*batch(n))[0]) for n in range(NUM_TRAIN_STEPS)]


def test_losses_do_not_depend_on_the_number_of_ranks_nor_does_resuming(tmp_path: Path) -> None:
    """Sums are taken in another order, and 1e-6 is what float32 gives for that.

    One rank computes shared prefixes once (the tree road), or every sample whole, as several ranks
    do (the packed road).
    """
    model, saved = save_model(tmp_path / "model"), str(tmp_path / "saved")
    tree = one_rank(model)
    packed = one_rank(model, activation_checkpointing=True)

    async def ranks(num_ranks: int, first: int) -> list[list[float]]:
        async with trainer_ranks(
            model, num_ranks, tmp_path / str(num_ranks), algorithm=KL, lr=1e-3
        ) as group:
            if first > 0:
                assert await group.call("load", saved) == (first, first)
            rows = []
            for n in range(first, NUM_TRAIN_STEPS):
                if n == SAVED_AT and first == 0:
                    await group.call("save", saved, policy_version=n)
                report = (await group.train_batch(*batch(n)))[0]
                assert report.train_step == n + 1
                assert 1.0 <= report.metrics["rank_imbalance"] < 1.2
                rows.append(numbers(report))
            return rows

    two = asyncio.run(ranks(2, 0))
    for want in (tree, packed):
        np.testing.assert_allclose(two, want, rtol=1e-4, atol=2e-6)
    three = asyncio.run(ranks(3, SAVED_AT))
    np.testing.assert_allclose(three, two[SAVED_AT:], rtol=1e-4, atol=2e-6)
    trainer = make_trainer(model, GRPO(**KL), lr=1e-3)
    trainer.load(saved)
    alone = [numbers(trainer.train_batch(*batch(n))[0]) for n in range(SAVED_AT, NUM_TRAIN_STEPS)]
    np.testing.assert_allclose(alone, two[SAVED_AT:], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("autocast", ["off", "bfloat16"])
@pytest.mark.parametrize("first_rank", [0, 1])
def test_the_head_is_gathered_for_each_of_its_chunks(
    tmp_path: Path, autocast: str, first_rank: int
) -> None:
    model = save_model(tmp_path / "model")
    changes = {"algorithm": KL, "lr": 1e-3, "autocast": autocast}

    async def two_ranks(folder: str, *, in_chunks: bool) -> list[list[float]]:
        async with trainer_ranks(model, 2, tmp_path / folder, **changes) as group:
            if in_chunks:
                await group.call("support.trainer_ranks:shrink_head_chunks", first_rank)
            return [numbers((await group.train_batch(*batch(n)))[0]) for n in range(3)]

    plain = asyncio.run(two_ranks("plain", in_chunks=False))
    chunked = asyncio.run(two_ranks("chunked", in_chunks=True))
    apart = {"rtol": 1e-4, "atol": 2e-6} if autocast == "off" else {"rtol": 0.05, "atol": 1e-3}
    np.testing.assert_allclose(chunked, plain, **apart)


def test_ranks_start_again_with_half_if_one_runs_out_of_memory(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    patch = "support.trainer_ranks:run_out_of_memory"

    async def ranks(most_tokens: int) -> list[float]:
        async with trainer_ranks(model, 2, tmp_path / "ranks", lr=1e-3) as group:
            await group.call(patch, 1, most_tokens)
            with pytest.raises(TrainerLost, match=r"OutOfMemory.* at most 256 tokens"):
                await group.train_batch(*batch(0))
            await group.restart()
            await group.call(patch, 1, 10)
            with pytest.raises(TrainerLost, match=r"OutOfMemory.* at most 128 tokens"):
                await group.train_batch(*batch(0))
            await group.restart()
            return numbers((await group.train_batch(*batch(0)))[0])[:2]

    found = asyncio.run(ranks(100))
    np.testing.assert_allclose(found, one_rank_without_reference(model), rtol=1e-4, atol=2e-6)


def one_rank_without_reference(model: str) -> list[float]:
    trainer = make_trainer(model, GRPO(), lr=1e-3)
    report = trainer.train_batch(*batch(0))[0]
    return [report.metrics["loss"], report.metrics["grad_norm"]]


def test_what_two_ranks_publish_export_and_supervise_is_what_one_does(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    samples = make_groups(1)[0].samples[:1]  # one: the second rank only keeps in step
    channel = SharedMemoryChannel(str(tmp_path / "ranks" / "weights"))

    async def main() -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        async with trainer_ranks(
            model, 2, tmp_path / "ranks", dtype="bfloat16", autocast="off", lr=1e-3
        ) as group:
            supervised = await group.supervise(samples, 1e-3)
            publication = await group.publish(1)
            assert publication.num_bytes == 2 * sum(
                p.numel() for p in load_model(model).parameters()
            )
            sent = {name: t.clone() for name, t in channel.fetch(1)}
            await group.call("export_hf", str(tmp_path / "hf"))
            (tmp_path / "ranks" / "weights").rename(tmp_path / "ranks" / "away")
            (tmp_path / "ranks" / "weights").write_text("in the way")
            with pytest.raises(OSError, match="weights"):
                await group.publish(2)
            (tmp_path / "ranks" / "weights").unlink()
            (tmp_path / "ranks" / "away").rename(tmp_path / "ranks" / "weights")
            await group.publish(3)  # a publication that fails on rank 0 ends nobody
            return sent, supervised

    sent, supervised = asyncio.run(main())
    alone = make_trainer(model, dtype="bfloat16", lr=1e-3)
    want = alone.supervise(samples, 1e-3)
    assert supervised["loss"] == pytest.approx(want["loss"], rel=1e-2)
    assert supervised["grad_norm"] == pytest.approx(want["grad_norm"], rel=5e-2)
    exported = dict(load_model(str(tmp_path / "hf")).named_parameters())
    assert list(sent) == list(exported)
    for name, tensor in sent.items():
        assert torch.equal(tensor.float(), exported[name]), name
        apart = (exported[name] - dict(alone._model.named_parameters())[name]).abs().max()
        assert apart < 0.02, name


def test_activation_checkpointing_and_late_reduction_change_no_number(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")

    async def grad_norms(name: str, **changes: object) -> list[float]:
        async with trainer_ranks(model, 2, tmp_path / name, lr=1e-3, **changes) as group:
            reports = [(await group.train_batch(*batch(n)))[0] for n in range(2)]
            return [r.metrics["grad_norm"] for r in reports]

    many = {"max_tokens_per_microbatch": 100}  # several microbatches a rank
    plain = asyncio.run(grad_norms("plain", host=None, **many))  # as over machines
    assert asyncio.run(grad_norms("again", activation_checkpointing=True, **many)) == plain
    one = make_trainer(model, lr=1e-3)
    want = [one.train_batch(*batch(n))[0].metrics["grad_norm"] for n in range(2)]
    np.testing.assert_allclose(plain, want, rtol=1e-4)


@pytest.mark.parametrize("ending", ["killed", "hangs"])
def test_a_rank_that_is_lost_in_a_batch_ends_the_group(tmp_path: Path, ending: str) -> None:
    """One that dies does so at once, and one that hangs when a collective call is given up."""
    model, saved = save_model(tmp_path / "model"), str(tmp_path / "saved")
    limit_s = 3600 if ending == "killed" else scaled(20)

    async def main() -> None:
        async with trainer_ranks(
            model, 2, tmp_path / "ranks", collective_timeout_s=limit_s
        ) as group:
            await group.train_batch(*batch(0))
            await group.call("save", saved, policy_version=1)
            want = numbers_of(await group.train_batch(*batch(1)))
            pids = [part.pid for part in group._workers]
            os.kill(pids[1], signal.SIGSTOP)  # rank 0 waits for it in a collective call
            training = asyncio.create_task(group.train_batch(*batch(2)))
            await asyncio.sleep(0.3)  # in which it mostly gets there
            assert not training.done()
            if ending == "killed":
                os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(
                TrainerLost, match="trainer-1" if ending == "killed" else "trainer-0"
            ):
                await training
            with pytest.raises(TrainerLost):
                await group.publish(2)
            await group.restart()
            assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
            assert await group.call("load", saved) == (1, 1)
            np.testing.assert_allclose(
                numbers_of(await group.train_batch(*batch(1))), want, rtol=1e-4
            )

    def numbers_of(reports: list[TrainStepReport]) -> list[float]:
        return [reports[0].metrics["loss"], reports[0].metrics["grad_norm"]]

    asyncio.run(main())


def test_a_damaged_checkpoint_is_named_by_all_ranks_and_the_group_goes_on(tmp_path: Path) -> None:
    model, saved = save_model(tmp_path / "model"), tmp_path / "saved"

    async def main() -> None:
        async with trainer_ranks(model, 2, tmp_path / "ranks") as group:
            await group.call("save", str(saved), policy_version=1)
            shards = sorted(saved.glob("*.distcp"))
            assert len(shards) == 2  # each rank has written what it holds
            whole = shards[1].read_bytes()
            shards[1].write_bytes(whole[:-100])
            with pytest.raises(
                ConfigError, match=rf"{shards[1].name} is damaged \(\d+ bytes where"
            ):
                await group.call("load", str(saved))
            shards[1].write_bytes(whole)
            assert await group.call("load", str(saved)) == (1, 0)

    asyncio.run(main())


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_a_critic_on_two_ranks_learns_as_on_one_and_resumes(tmp_path: Path, backbone: str) -> None:
    model, saved = save_model(tmp_path / "model"), str(tmp_path / "saved")
    beside = AuxiliaryModels(critic=Critic(backbone=backbone))

    def values(report: TrainStepReport) -> list[float]:
        names = ("loss", "grad_norm", "value_loss", "return_mean")
        return [report.metrics[name] for name in names]

    trainer = make_trainer(model, PPO(), lr=1e-3, beside=beside)
    one = [values(trainer.train_batch(*batch(n))[0]) for n in range(5)]

    async def two_ranks() -> list[list[float]]:
        async with trainer_ranks(
            model, 2, tmp_path / "two", plugin="ppo", beside=beside, lr=1e-3
        ) as group:
            rows = [values((await group.train_batch(*batch(n)))[0]) for n in range(3)]
            await group.call("save", saved, policy_version=3)
            return [*rows, *[values((await group.train_batch(*batch(n)))[0]) for n in (3, 4)]]

    np.testing.assert_allclose(asyncio.run(two_ranks()), one, rtol=2e-4, atol=5e-6)
    again = make_trainer(model, PPO(), lr=1e-3, beside=beside)
    assert again.load(saved) == (3, 3)
    rest = [values(again.train_batch(*batch(n))[0]) for n in (3, 4)]
    np.testing.assert_allclose(rest, one[3:], rtol=2e-4, atol=5e-6)
