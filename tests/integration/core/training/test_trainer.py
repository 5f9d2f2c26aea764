"""The trainer on tiny random models: the roads agree, it learns, and luck has no part in it."""

import math
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.small_models import (
    ARCHITECTURES,
    VOCAB,
    make_groups,
    make_sample,
    make_trainer,
    reference_logits,
    reference_logprobs,
    save_model,
)

from rollart_algorithms.grpo import GRPO
from rollart_core.contracts.forward_pass import ForwardPassSpec
from rollart_core.errors import ConfigError, TrainingDiverged
from rollart_core.plugins import manager as plugins
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.training.loading import recompute_activations
from rollart_core.training.policy import (
    ForwardSettings,
    Kernels,
    PackedPolicy,
    PaddedPolicy,
    Policy,
    new_policy,
)
from rollart_core.training.trainer import Trainer, load_model
from rollart_core.types import Group, Trajectory
from rollart_cpu.training.policy import TreePolicy, native_ops
from rollart_plugins.weights.shared_memory import SharedMemoryChannel

FORWARD_PASSES: dict[str, type[Policy]] = {
    "native": TreePolicy,
    "tree": TreePolicy,
    "packed": PackedPolicy,
    "autocast": PackedPolicy,
    "padded": PaddedPolicy,
}
OVERFLOWS = -1e9
"""An inference logprob so small that the ratio to it is infinite, and so is the loss."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("name", ["native", "tree", "packed", "padded"])
def test_every_forward_pass_gives_the_models_own_logprobs_and_gradients(
    architecture: str, name: str, tmp_path: Path
) -> None:
    if name == "native" and native_ops() is None:
        pytest.skip("no C compiler")
    path = save_model(tmp_path, architecture)
    rng = np.random.default_rng(1)
    samples = [make_sample(rng, n, prefix=p) for n, p in ((40, 20), (200, 20), (90, 70), (90, 70))]
    samples.append(samples[1])
    weights = torch.randn(sum(s.num_loss_tokens for s in samples))
    plain, model = load_model(path), load_model(path)
    want = torch.cat([reference_logprobs(plain, s, 0.7) for s in samples])
    settings = ForwardSettings(temperature=0.7, kernels="native" if name == "native" else "torch")
    got, entropy = FORWARD_PASSES[name](model, settings).logprobs(samples)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert entropy.min() > 0
    assert entropy.max() < math.log(VOCAB)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["native", "tree", "packed", "padded", "autocast"])
def test_every_forward_pass_gives_the_gradient_of_the_entropy(name: str, tmp_path: Path) -> None:
    path = save_model(tmp_path)
    rng = np.random.default_rng(1)
    samples = [make_sample(rng, n, prefix=p) for n, p in ((40, 20), (90, 70), (90, 70))]
    samples.append(samples[1])  # tokens in common: the tree computes them once
    if name == "native" and native_ops() is None:
        pytest.skip("no C compiler")
    autocast = name == "autocast"
    weights = torch.randn(2, sum(s.num_loss_tokens for s in samples))
    plain, model = load_model(path), load_model(path)
    kernels: Kernels = "native" if name == "native" else "torch"
    settings = ForwardSettings(temperature=0.7, autocast=autocast, kernels=kernels)
    policy = FORWARD_PASSES[name](model, settings)
    got, entropy, _ = policy.outputs(samples, entropy_gradient=True)
    same, without, _ = policy.outputs(samples)
    assert torch.equal(same, got)
    assert torch.equal(without, entropy)
    assert not without.requires_grad
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = [reference_logits(plain, s) for s in samples]
    logp = torch.log_softmax(torch.cat(logits).float() / 0.7, -1)
    targets = torch.cat([torch.from_numpy(s.token_ids[s.loss_mask]).long() for s in samples])
    wanted = logp.gather(1, targets[:, None]).squeeze(1)
    naive = -(logp.exp() * logp).sum(-1)
    rough = {"rtol": 0.1, "atol": 0.05} if autocast else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(entropy, naive, **rough)
    (wanted * weights[0] + naive * weights[1]).sum().backward()
    (got * weights[0] + entropy * weights[1]).sum().backward()
    rough = {"rtol": 0.1, "atol": 0.2} if autocast else {"rtol": 1e-3, "atol": 1e-4}
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, **rough)


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("qwen3", {}, TreePolicy),
        ("llama", {"hidden_act": "gelu"}, PackedPolicy),
        ("mistral", {"sliding_window": 16}, PaddedPolicy),
        ("gpt2", {"n_embd": 32, "n_head": 2, "n_layer": 1}, PackedPolicy),
    ],
)
def test_the_forward_pass_fits_the_model(
    architecture: str, changes: dict[str, object], expected: type[Policy], tmp_path: Path
) -> None:
    model = load_model(save_model(tmp_path, architecture, **changes))
    sample = make_sample(np.random.default_rng(0), 40)
    want = reference_logprobs(model, sample, 1.0)
    policy = new_policy(model, ForwardSettings())  # which may change the model's attention
    assert type(policy) is expected
    got, _ = policy.logprobs([sample, sample])
    torch.testing.assert_close(got, torch.cat([want, want]), rtol=1e-4, atol=1e-5)


class ForeignPolicy(PaddedPolicy):
    """A forward pass of another distribution, for one kind of model."""

    @classmethod
    def fits(cls, model: torch.nn.Module, settings: ForwardSettings) -> bool:
        return model.config.model_type == "qwen3"


@pytest.mark.parametrize(
    ("architecture", "expected"), [("qwen3", ForeignPolicy), ("llama", TreePolicy)]
)
def test_a_forward_pass_of_a_plugin_comes_before_ours_where_it_fits(
    architecture: str, expected: type[Policy], tmp_path: Path
) -> None:
    spec = ForwardPassSpec(
        id="zeta/Fast-v1", entry_point=f"{__name__}:ForeignPolicy", contract_version=2
    )
    plugin = SimpleNamespace(rollart_forward_passes=hookimpl(lambda: [spec]))
    model = load_model(save_model(tmp_path, architecture))
    with plugins.using({"zeta": plugin}):
        found = type(new_policy(model, ForwardSettings()))
    assert found.__name__ == expected.__name__


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_activation_checkpointing_keeps_less_and_changes_no_number(
    architecture: str, tmp_path: Path
) -> None:
    changes = {"n_embd": 32, "n_head": 2, "n_layer": 2} if architecture == "gpt2" else {}
    path = save_model(tmp_path, architecture, **changes)
    samples = [s for g in make_groups(1) for s in g.samples]
    kept, gradients = [], []
    for recompute in (False, True):
        model = load_model(path)
        if recompute:
            recompute_activations(model)
        policy = new_policy(model, ForwardSettings(recompute=True))
        assert type(policy) is PackedPolicy  # the prefix tree goes past the layers
        num_bytes: list[int] = []

        def pack(t: torch.Tensor, num_bytes: list[int] = num_bytes) -> torch.Tensor:
            num_bytes.append(t.nbytes)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            logprobs, _ = policy.logprobs(samples)
        kept.append(sum(num_bytes))
        logprobs.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert kept[1] < 0.5 * kept[0]
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_reports_hold_what_the_run_wants_to_know(model_path: str) -> None:
    groups = make_groups(version=2)
    reports = make_trainer(model_path, updates_per_batch=2).train_batch(groups, 3)
    assert [r.train_step for r in reports] == [1, 2]
    assert pickle.loads(pickle.dumps(reports)) == reports
    metrics = reports[0].metrics
    assert all(math.isfinite(v) for v in metrics.values())
    wanted = (
        "loss grad_norm lr clip_fraction approx_kl entropy is_ratio_mean is_ratio_max updated "
        "logprob_diff_mean logprob_diff_max zero_advantage_groups staleness_mean staleness_max "
        "tokens tokens_per_s train_s loss_tokens"
    )
    assert set(wanted.split()) <= set(metrics)
    assert metrics["staleness_max"] == metrics["token_staleness_mean"] == 1
    assert metrics["tokens"] == sum(s.num_tokens for g in groups[:2] for s in g.samples)
    assert metrics["loss_tokens"] == 8 * 8


def test_the_phases_of_an_update_are_within_its_duration(model_path: str) -> None:
    first, second = make_trainer(model_path, updates_per_batch=2).train_batch(make_groups(), 0)
    phases = ["batch_s", "forward_s", "backward_s", "optimizer_s"]
    for metrics, names in ((first.metrics, phases), (second.metrics, phases[1:])):
        assert [name for name in phases if name in metrics] == names
        assert all(metrics[name] > 0 for name in names)
        assert sum(metrics[name] for name in names) <= metrics["train_s"]


def test_the_mismatch_is_measured_against_what_the_engine_recorded(model_path: str) -> None:
    (group,) = make_groups(1)
    model = load_model(model_path)
    exact = []
    for t in group.trajectories:
        sample = t.samples[0]
        sample.inference_logprobs[sample.loss_mask] = (
            reference_logprobs(model, sample, 0.9).detach().numpy()
        )
        exact.append(t)
    exact[1].samples[0].inference_logprobs[exact[1].samples[0].loss_mask] -= 0.5
    (report,) = make_trainer(model_path, temperature=0.9).train_batch([group], 0)
    assert report.metrics["logprob_diff_max"] == pytest.approx(0.5, abs=1e-4)
    assert report.metrics["logprob_diff_mean"] == pytest.approx(0.125, abs=1e-4)


def test_microbatches_change_nothing(model_path: str) -> None:
    losses = []
    for budget in (64, 4096):
        trainer = make_trainer(model_path, max_tokens_per_microbatch=budget, updates_per_batch=2)
        reports = trainer.train_batch(make_groups(), 0)
        losses.append([(r.metrics["loss"], r.metrics["grad_norm"]) for r in reports])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4, atol=1e-6)


def test_deterministic_losses_are_equal_bit_for_bit_in_any_order_of_arrival(
    model_path: str,
) -> None:
    def losses(reverse: bool) -> list[float]:
        trainer = make_trainer(model_path, deterministic=True, updates_per_batch=2)
        out = []
        for n in range(2):
            groups = make_groups(seed=n)
            if reverse:
                groups = [
                    Group(g.group_id, g.task, g.trajectories[::-1], g.num_dispatched)
                    for g in groups[::-1]
                ]
            out += [r.metrics["loss"] for r in trainer.train_batch(groups, n)]
        return out

    assert losses(reverse=False) == losses(reverse=True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_only_a_deterministic_trainer_notifies_cublas_so(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, "")  # or it would not be as before afterwards
    monkeypatch.delenv(name)
    make_trainer(model_path)
    assert name not in os.environ
    make_trainer(model_path, deterministic=True)
    assert os.environ[name] == ":4096:8"
    monkeypatch.setenv(name, ":16:8")
    make_trainer(model_path, deterministic=True)
    assert os.environ[name] == ":16:8"


def test_training_raises_the_probability_of_what_was_rewarded(model_path: str) -> None:
    groups = make_groups(2)
    trainer = make_trainer(model_path, lr=1e-3)
    before = total_gain(trainer, groups)
    for n in range(4):
        trainer.train_batch(groups, n)
    assert total_gain(trainer, groups) > before + 0.05


def total_gain(trainer: Trainer, groups: list[Group]) -> float:
    rows = GRPO().advantages(groups, {})
    gain = 0.0
    for sample, row in zip((s for g in groups for s in g.samples), rows, strict=True):
        with torch.no_grad():
            logprobs, _ = trainer._policy.logprobs([sample])
        gain += float((logprobs * torch.from_numpy(row[sample.loss_mask])).mean())
    return gain


def test_groups_without_preference_cost_no_update(model_path: str) -> None:
    groups = make_groups(1)
    same = tuple(
        Trajectory(t.ticket, t.status, t.samples, reward=1.0) for t in groups[0].trajectories
    )
    flat = Group("g0", groups[0].task, same, 4)
    trainer = make_trainer(model_path)
    (report,) = trainer.train_batch([flat], 0)
    assert (report.train_step, report.metrics["updated"]) == (0, 0)
    assert report.metrics["zero_advantage_groups"] == 1


def test_skipping_zero_advantages_changes_no_gradient(model_path: str) -> None:
    class Keeping(GRPO):
        def __init__(self) -> None:
            super().__init__(zero_advantage="keep")

    class Training(Keeping):
        def __init__(self) -> None:
            super().__init__()
            self.zero_advantage = "train"

    groups = make_groups(2)
    groups[0] = Group(
        "g0",
        groups[0].task,
        tuple(
            Trajectory(t.ticket, t.status, t.samples, reward=0.5) for t in groups[0].trajectories
        ),
        4,
    )
    norms = [
        make_trainer(model_path, algorithm).train_batch(groups, 0)[0].metrics
        for algorithm in (Keeping(), Training())
    ]
    assert norms[0]["grad_norm"] == pytest.approx(norms[1]["grad_norm"], rel=1e-4)
    assert norms[0]["loss"] == pytest.approx(norms[1]["loss"], rel=1e-4)
    assert norms[0]["tokens"] < norms[1]["tokens"]


def test_the_proximal_policy_is_the_one_before_the_first_update(model_path: str) -> None:
    trainer = make_trainer(model_path, lr=1e-2, updates_per_batch=2)
    first, second = trainer.train_batch(make_groups(), 0)
    assert first.metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert second.metrics["approx_kl"] > 1e-3


def test_the_reference_stays_where_rl_began(model_path: str) -> None:
    trainer = make_trainer(model_path, GRPO(kl_coef=0.1), lr=1e-2)
    (first,) = trainer.train_batch(make_groups(), 0)
    (second,) = trainer.train_batch(make_groups(), 1)
    assert first.metrics["ref_kl"] == pytest.approx(0, abs=1e-6)
    assert second.metrics["ref_kl"] > 1e-3


def test_learning_rate_warms_up(model_path: str) -> None:
    trainer = make_trainer(model_path, lr=1e-3, warmup_train_steps=2)
    lrs = [trainer.train_batch(make_groups(), n)[0].metrics["lr"] for n in range(3)]
    assert lrs == pytest.approx([5e-4, 1e-3, 1e-3])


def test_the_learning_rate_has_a_factor_and_a_loaded_checkpoint_forgets_bad_updates(
    model_path: str, tmp_path: Path
) -> None:
    trainer = make_trainer(model_path, lr=1e-3, warmup_train_steps=0)
    trainer.save(str(tmp_path / "v0"), policy_version=0)
    trainer.set_lr_factor(0.5)
    assert trainer.train_batch(make_groups(), 0)[0].metrics["lr"] == pytest.approx(5e-4)
    for _ in range(2):
        trainer._optimizer.update(math.nan)
    trainer.load(str(tmp_path / "v0"))
    assert not trainer._optimizer.update(math.nan).updated  # the first, and not the third
    assert trainer.train_batch(make_groups(), 0)[0].metrics["lr"] == pytest.approx(5e-4)


def test_supervised_steps_lower_the_cross_entropy_and_leave_rl_a_fresh_optimizer(
    model_path: str,
) -> None:
    samples = [s for g in make_groups(2) for s in g.samples]
    trainer = make_trainer(model_path, temperature=0.5)
    model = load_model(model_path)
    want = -torch.cat([reference_logprobs(model, s, 1.0) for s in samples]).mean()
    losses = [trainer.supervise(samples, lr=3e-3)["loss"] for _ in range(8)]
    assert losses[0] == pytest.approx(want.item(), rel=1e-4)
    assert losses[-1] < losses[0] - 0.5
    assert trainer.train_step == 0
    (report,) = trainer.train_batch(make_groups(), 0)
    assert report.train_step == 1
    with pytest.raises(ValueError, match="no sample has a loss token"):
        trainer.supervise([], lr=1e-3)


def test_numbers_that_are_not_finite_skip_the_update_and_end_the_run_at_the_third(
    model_path: str,
) -> None:
    groups = make_groups(1)
    for sample in groups[0].samples:
        sample.inference_logprobs[sample.loss_mask] = OVERFLOWS
    trainer = make_trainer(model_path, GRPO(proximal="inference"))
    before = {n: p.clone() for n, p in trainer._model.named_parameters()}
    for _ in range(2):
        (report,) = trainer.train_batch(groups, 0)
        assert (report.metrics["updated"], report.metrics["not_finite"]) == (0, 1)
    assert all(torch.equal(p, before[n]) for n, p in trainer._model.named_parameters())
    with pytest.raises(TrainingDiverged, match="3 updates in a row were not finite"):
        trainer.train_batch(groups, 0)


def test_logprobs_that_are_no_numbers_are_refused_before_any_update(model_path: str) -> None:
    groups = make_groups(1)
    sample = groups[0].samples[0]
    sample.inference_logprobs[np.flatnonzero(sample.loss_mask)[2]] = np.nan
    with pytest.raises(ValueError, match=r"inference_logprobs of 1 sampled tokens .*nan"):
        make_trainer(model_path).train_batch(groups, 0)


def test_a_good_update_between_bad_ones_starts_the_count_anew(model_path: str) -> None:
    bad = make_groups(1)
    for sample in bad[0].samples:
        sample.inference_logprobs[sample.loss_mask] = OVERFLOWS
    trainer = make_trainer(model_path, GRPO(proximal="inference"))
    updated = [
        trainer.train_batch(groups, 0)[0].metrics["updated"]
        for groups in (bad, bad, make_groups(1), bad, bad)
    ]
    assert updated == [0, 0, 1, 0, 0]


def test_publishing_sends_transformers_names_without_the_tied_head(
    model_path: str, tmp_path: Path
) -> None:
    channel = SharedMemoryChannel(str(tmp_path / "w"))
    trainer = make_trainer(model_path, channel=channel, dtype="bfloat16")
    publication = trainer.publish(4)
    sent = dict(channel.fetch(4))
    model = load_model(model_path)
    assert "lm_head.weight" not in sent
    assert set(sent) == {n for n, _ in model.named_parameters()}
    assert publication.num_bytes == 2 * sum(p.numel() for p in model.parameters())
    for name, p in model.named_parameters():
        assert torch.equal(sent[name], p.to(torch.bfloat16))
    trainer.close()
    assert list(tmp_path.iterdir()) == []


def test_bad_models_and_signals_are_named(model_path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a causal language model"):
        make_trainer(str(tmp_path))

    class Greedy(GRPO):
        def __init__(self) -> None:
            super().__init__()
            self.requires = frozenset({"values"})

    with pytest.raises(ConfigError, match="requires values"):
        make_trainer(model_path, Greedy())
