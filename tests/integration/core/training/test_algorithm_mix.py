"""One algorithm with other options for some environments: each learns as if it were alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.small_models import make_groups, make_trainer, save_model

from rollart_algorithms.grpo import GRPO
from rollart_core.config.training import AuxiliaryModels, Shaping
from rollart_core.errors import BatchRefused, ConfigError
from rollart_core.training.batch import canonical, make_rows, split
from rollart_core.training.loss import loss_batch
from rollart_core.training.mixture import AlgorithmMix
from rollart_testing import assert_checks, check_algorithm, example_group


def groups_of(*envs, size=3):
    return [
        replace(g, task=replace(g.task, env_id=env))
        for g, env in zip(make_groups(len(envs), size=size), envs, strict=True)
    ]


def mix(**options):
    return AlgorithmMix({name: GRPO(**own) for name, own in options.items()})


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def test_with_like_options_it_is_the_algorithm_itself(model_path):
    groups = groups_of("a", "b", "a")
    kl = {"kl_coef": 0.1}
    losses = []
    for algorithm in (GRPO(**kl), mix(a=kl, b=kl)):
        trainer = make_trainer(model_path, algorithm, lr=1e-3)
        reports = [trainer.train_batch(groups, 0)[0].metrics for _ in range(2)]
        losses.append(
            [(r["loss"], r["grad_norm"], r["ref_kl"], r["is_ratio_max"]) for r in reports]
        )
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5, atol=1e-7)


def test_each_environment_has_its_own_share_of_the_loss():
    groups = canonical(groups_of("a", "b", "a"))
    algorithm = mix(a={"normalise": "none"}, b={"proximal": "inference"})
    rows = algorithm.advantages(groups, {})
    alone = GRPO(normalise="none").advantages([groups[0]], {})
    assert all(np.array_equal(x, y) for x, y in zip(rows[:3], alone, strict=True))
    made = make_rows(groups, rows, 0)
    (minibatch,) = split(made, 1, "drop")
    part = loss_batch(minibatch, range(len(minibatch.rows)), 0, torch.device("cpu"))
    logprobs = torch.where(part.loss_mask, part.inference_logprobs - 0.3, 0.0)
    part.signals = {"proximal_logprobs": torch.where(part.loss_mask, logprobs + 0.1, 0.0)}
    total, metrics = algorithm.loss(logprobs, part)
    of_b = torch.from_numpy(np.array([r.group == 1 for r in made]))[part.sample_ids]
    want = 0.0
    for own, mask in ((GRPO(normalise="none"), ~of_b), (GRPO(proximal="inference"), of_b)):
        kept = part.loss_mask & mask
        want += own.loss(
            torch.where(kept, logprobs, 0.0),
            replace(part, loss_mask=kept, advantages=torch.where(kept, part.advantages, 0.0)),
        )[0]
    torch.testing.assert_close(total, want)
    assert metrics["is_ratio_mean"] == pytest.approx(float(part.loss_mask.sum()) * np.exp(-0.3))


def test_it_keeps_the_contract_of_algorithms():
    env = example_group().task.env_id
    assert_checks(check_algorithm(AlgorithmMix({env: GRPO(kl_coef=0.1), "other": GRPO()})))


def test_what_makes_no_whole_is_refused():
    with pytest.raises(ConfigError, match="zero_advantage drops samples for one environment"):
        mix(a={}, b={"zero_advantage": "drop"})
    with pytest.raises(BatchRefused, match="no algorithm for 'c'"):
        mix(a={}, b={}).advantages(groups_of("c"), {})


def test_the_trainer_shapes_rewards_and_remembers_what_they_were_like(model_path, tmp_path):
    def trainer(env="a"):
        own = {env: Shaping(normalise="running")}
        return make_trainer(
            model_path, GRPO(normalise="none"), beside=AuxiliaryModels(shapings=own)
        )

    groups = groups_of("a", "b")
    ours = trainer()
    first = ours.train_batch(groups, 0)[0].metrics["loss"]
    assert first != pytest.approx(trainer("c").train_batch(groups, 0)[0].metrics["loss"])
    ours.save(str(tmp_path / "c"), policy_version=1)
    again = trainer()
    again.load(str(tmp_path / "c"))
    assert again._shaper.statistics.tolist() == ours._shaper.statistics.tolist()
    assert again._shaper.statistics[0, 0] == 3
