"""Extra modules of the trainer: a critic over the policy's hidden states, or a second model's."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.small_models import VOCAB, make_groups, make_sample, save_model

from rollart_core.config.run import Trainer as TrainerConfig
from rollart_core.config.training import AuxiliaryModels, Critic, Reference
from rollart_core.contracts.algorithm import Algorithm
from rollart_core.errors import BatchRefused, ConfigError
from rollart_core.training.policy import ForwardSettings, PackedPolicy, PaddedPolicy
from rollart_core.training.trainer import Trainer, load_model
from rollart_cpu.training.policy import TreePolicy


class Head(torch.nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, hidden_size)[None])

    def forward(self, hidden):
        return (hidden * self.weight).sum(-1)


class Values(Algorithm):
    """Learns values alone: the reward of its trajectory is what each token should be worth."""

    requires = frozenset({"values"})

    def __init__(self, policy=0.0):
        self.policy, self.seen = policy, None

    def extra_modules(self, hidden_size):
        return {"values": Head(hidden_size)}

    def advantages(self, groups, signals):
        self.seen = list(signals["values"])
        return [np.float32(1) * s.loss_mask for g in groups for s in g.samples]

    def targets(self, groups, signals):
        trajectories = [t for g in groups for t in g.trajectories]
        return {
            "returns": [np.float32(t.reward) * s.loss_mask for t in trajectories for s in t.samples]
        }

    def loss(self, trainer_logprobs, batch):
        errors = (batch.outputs["values"] - batch.signals["returns"]) ** 2
        was = ((batch.signals["values"] - batch.signals["returns"]) ** 2).sum()
        loss = (errors.sum() - self.policy * trainer_logprobs.sum()) / batch.total_loss_tokens
        return loss, {"value_loss": errors.sum().detach(), "value_loss_before": was}


def trainer(path, backbone="own", algorithm=None, critic=True, **changes):
    config = TrainerConfig(lr=1e-3, max_tokens_per_microbatch=256, warmup_train_steps=0)
    warmup = changes.pop("warmup_train_steps", 0)
    section = Critic(backbone=backbone, lr=3e-3, warmup_train_steps=warmup) if critic else None
    return Trainer(
        config,
        algorithm or Values(),
        model_path=path,
        device="cpu",
        beside=AuxiliaryModels(critic=section, **changes),
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(before, model):
    return all(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("forward_pass", [TreePolicy, PackedPolicy, PaddedPolicy])
def test_every_forward_pass_shows_the_hidden_states_its_logits_come_from(model_path, forward_pass):
    samples = [make_sample(np.random.default_rng(n), 30 + n, prefix=8) for n in (1, 2)]
    model = load_model(model_path)
    want = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        states = model(ids, output_hidden_states=True).hidden_states[-1][0]
        want.append(states[np.flatnonzero(sample.loss_mask) - 1])
    policy = forward_pass(load_model(model_path), ForwardSettings(temperature=0.7))
    logprobs, _, hidden = policy.outputs(samples, hidden=True)
    torch.testing.assert_close(hidden, torch.cat(want), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(policy.hidden(samples), torch.cat(want), rtol=1e-4, atol=1e-5)
    assert torch.equal(logprobs, policy.logprobs(samples)[0])


@pytest.mark.parametrize("backbone", ["own", "shared", "detached"])
def test_a_critic_learns_and_only_a_shared_backbone_moves_the_policy(model_path, backbone):
    ours = trainer(model_path, backbone)
    before, groups = weights(ours._model), make_groups(2)
    losses, explained = [], []
    for _ in range(6):
        (report,) = ours.train_batch(groups, 0)
        # What it says of the batch before the update is the signal, what it says in it the output.
        assert report.metrics["value_loss"] == pytest.approx(
            report.metrics["value_loss_before"], rel=1e-4
        )
        losses.append(report.metrics["value_loss"])
        explained.append(report.metrics["explained_variance"])
    assert losses[-1] < losses[0] * (0.99 if backbone == "detached" else 0.5)
    assert explained[0] < explained[-1] < 1
    rows = ours._algorithm.seen
    assert len(rows) == sum(len(g.samples) for g in groups)
    assert all(
        (row != 0).sum() == s.num_loss_tokens
        for row, s in zip(rows, groups[0].samples, strict=False)
    )
    # AdamW without decay leaves a parameter with a gradient of 0 as it is.
    assert same(before, ours._model) == (backbone != "shared")


def test_a_checkpoint_holds_the_critic_and_its_optimizer(model_path, tmp_path: Path):
    groups = make_groups(2)
    ours = trainer(model_path, algorithm=Values(policy=1.0))
    ours.train_batch(groups, 0)
    ours.save(str(tmp_path / "c"), policy_version=1)
    go_on = [ours.train_batch(groups, 1)[0].metrics["loss"] for _ in range(2)]
    again = trainer(model_path, algorithm=Values(policy=1.0))
    assert again.load(str(tmp_path / "c")) == (1, 1)
    assert [again.train_batch(groups, 1)[0].metrics["loss"] for _ in range(2)] == go_on
    trainer(model_path, "shared").save(str(tmp_path / "shared"), policy_version=1)
    with pytest.raises(ConfigError, match="not of this model and algorithm"):
        again.load(str(tmp_path / "shared"))


def test_the_critic_may_learn_alone_first(model_path):
    ours = trainer(model_path, algorithm=Values(policy=1.0), warmup_train_steps=2)
    before = weights(ours._model)
    for alone in (True, True, False):
        (report,) = ours.train_batch(make_groups(1), 0)
        assert same(before, ours._model) is alone
    assert report.train_step == 3


def test_one_number_that_is_not_finite_holds_up_policy_and_critic(model_path):
    class Broken(Values):
        def loss(self, trainer_logprobs, batch):
            loss, metrics = super().loss(trainer_logprobs, batch)
            return loss + float("inf") * batch.outputs["values"].sum(), metrics

    ours = trainer(model_path, algorithm=Broken(policy=1.0))
    before = weights(ours._model)
    (report,) = ours.train_batch(make_groups(1), 0)
    assert report.metrics["updated"] == 0
    assert same(before, ours._model)


def test_what_does_not_go_together_is_refused_with_the_reason(model_path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"also trains values: add critic"):
        trainer(model_path, critic=False)

    class Plain(Values):
        requires = frozenset()

        def extra_modules(self, hidden_size):
            return {}

    with pytest.raises(ConfigError, match="critic: has no effect"):
        trainer(model_path, algorithm=Plain())
    with pytest.raises(ConfigError, match="reference: has no effect"):
        trainer(model_path, algorithm=Plain(), critic=False, reference=Reference(path="x"))

    class Compared(Plain):
        requires = frozenset({"ref_logprobs"})

    other = save_model(tmp_path / "other", vocab_size=VOCAB + 64)
    ours = trainer(model_path, algorithm=Compared(), critic=False, reference=Reference(path=other))
    with pytest.raises(ConfigError, match=f"{VOCAB + 64} tokens, but the policy .* {VOCAB}"):
        ours.save(str(tmp_path / "c"), policy_version=0)

    class Taught(Plain):
        requires = frozenset({"teacher_logprobs"})

        def advantages(self, groups, signals):
            return list(signals["teacher_logprobs"])

    with pytest.raises(ConfigError, match=r"teacher_logprobs: set teacher.path to the model"):
        trainer(model_path, algorithm=Taught(), critic=False)
    with pytest.raises(BatchRefused, match="have no teacher_logprobs"):
        trainer(model_path, algorithm=Taught(), critic=False, has_teacher=True).train_batch(
            make_groups(1), 0
        )

    class Wavers(Values):
        def advantages(self, groups, signals):
            raise ValueError("a group of one")

    with pytest.raises(BatchRefused, match="Wavers: a group of one"):
        trainer(model_path, algorithm=Wavers()).train_batch(make_groups(1), 0)
