"""Adapters of low rank: what they change, what is kept and sent of them, and what is refused."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from support import fork_server
from support.small_models import VOCAB, make_groups, make_trainer, save_model
from support.weight_ends import end
from support.whole_runs import BASE, run

from rollart_algorithms.grpo import GRPO
from rollart_bench import bandit
from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.config.training import AuxiliaryModels, Critic, LoRA, Reference
from rollart_core.contracts.inference import GenerateRequest
from rollart_core.errors import ConfigError
from rollart_core.models import lora
from rollart_core.runtime.launch import launch
from rollart_core.store.audit import audit
from rollart_core.store.journal_reader import JournalReader
from rollart_core.training.loading import load_model
from rollart_core.types import Group, Sample, Trajectory
from rollart_plugins.engines.config import EmbeddedConfig
from rollart_plugins.engines.embedded import EmbeddedEngine
from rollart_plugins.engines.incoming import AdapterBase
from rollart_plugins.weights.shared_memory import SharedMemoryChannel

pytest.importorskip("peft", reason="peft is in rollart[lora]")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def adapted(path: str, algorithm: GRPO | None = None, beside=None, **changes):
    """A trainer with adapters; keys of the section ``lora`` among the changes."""
    keys = {k: changes.pop(k) for k in ("rank", "alpha", "target_modules", "sync") if k in changes}
    beside = AuxiliaryModels(lora=LoRA(**{"rank": 4, **keys}), **(beside or {}))
    return make_trainer(path, algorithm, beside=beside, **{"lr": 1e-2, **changes})


def logprobs(trainer, groups=None) -> torch.Tensor:
    samples = [s for g in groups or make_groups() for s in g.samples]
    with torch.no_grad():
        return trainer._policy.logprobs(samples)[0]


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("qwen3", {}), ("llama", {}), ("qwen2", {"activation_checkpointing": True})],
)
def test_new_adapters_change_no_bit_and_trained_ones_are_what_they_make_of_the_base(
    architecture, changes, tmp_path
):
    path = save_model(tmp_path / "m", architecture)
    trainer = adapted(path, **changes)
    assert torch.equal(logprobs(trainer), logprobs(make_trainer(path, **changes)))
    for version in range(2):
        trainer.train_batch(make_groups(), version)
    trained = logprobs(trainer)
    trainer.export_hf(str(tmp_path / "out"))
    merged = logprobs(make_trainer(str(tmp_path / "out"), **changes))
    torch.testing.assert_close(merged, trained, atol=1e-5, rtol=1e-5)
    assert (trained - logprobs(make_trainer(path, **changes))).abs().max() > 1e-2


def test_only_adapters_change_and_only_they_have_moments(model_path):
    trainer = adapted(model_path, target_modules=("q_proj", "down_proj"))
    before = {n: p.detach().clone() for n, p in trainer._model.named_parameters()}
    for version in range(2):  # in the first update A has no gradient, for B is zero
        trainer.train_batch(make_groups(), version)
    changed = {n for n, p in trainer._model.named_parameters() if not torch.equal(p, before[n])}
    assert {n.split(".")[-4] for n in changed} == {"q_proj", "down_proj"}
    assert {n.split(".")[-3] for n in changed} == {"lora_A", "lora_B"}
    assert len(changed) == 2 * 2 * 2  # layers, modules, matrices
    assert set(trainer._optimizer.state()) == set(trainer._weights.parameters())
    assert len(trainer._optimizer.state()) == len(changed)
    assert all(p.grad is None for n, p in trainer._model.named_parameters() if n not in changed)


def test_the_alpha_scales_what_adapters_give(model_path):
    whole = {}
    for alpha in (4.0, 8.0):
        trainer = adapted(model_path, alpha=alpha)
        torch.manual_seed(3)
        for parameter in trainer._weights.parameters().values():
            parameter.data.normal_(std=0.1)
        whole[alpha] = dict(trainer._weights.whole(torch.float32))
    base = dict(load_model(model_path).named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    once, twice = (whole[alpha][name] - base[name] for alpha in (4.0, 8.0))
    assert once.abs().max() > 0.01
    torch.testing.assert_close(twice, 2 * once, atol=1e-6, rtol=1e-4)


def test_peft_reads_what_is_written_beside_the_merged_model(model_path, tmp_path):
    peft = pytest.importorskip("peft")
    trainer = adapted(model_path, rank=3, alpha=7.0)
    for version in range(2):
        trainer.train_batch(make_groups(), version)
    trainer.export_hf(str(tmp_path / "out"))
    ids = torch.arange(20)[None] % VOCAB
    model = load_model(model_path)
    type(model).is_gradient_checkpointing = False  # peft asks for it, transformers warns of that
    try:
        read = peft.PeftModel.from_pretrained(model, str(tmp_path / "out-adapter"))
        got = read(ids).logits
    finally:
        del type(model).is_gradient_checkpointing
    torch.testing.assert_close(
        got, load_model(str(tmp_path / "out"))(ids).logits, atol=1e-5, rtol=0
    )
    config = json.loads((tmp_path / "out-adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 7.0)
    assert config["base_model_name_or_path"] == model_path


def rollout(engine, versions=()) -> list:
    """Let an engine take versions, and generate."""

    async def work():
        await engine.start()
        try:
            swaps = [await engine.load_weights(v) for v in versions]
            asked = (
                GenerateRequest(str(i), list(range(1, 12 + i)), 16, sampling_key=i)
                for i in range(4)
            )
            return swaps, await asyncio.gather(*map(engine.generate, asked))
        finally:
            await engine.close()

    return asyncio.run(work())


@pytest.mark.parametrize("kind", ["shared-memory", "delta"])
@pytest.mark.parametrize("decoder", ["own", "transformers"])
def test_engines_are_the_same_whichever_way_adapters_come(model_path, tmp_path, kind, decoder):
    results, sizes = {}, {}
    for sync in ("merged", "adapter"):
        trainer = adapted(model_path, sync=sync, channel=end(kind, tmp_path / sync))
        for version in range(2):
            trainer.publish(version)
            trainer.train_batch(make_groups(), version)
        sizes[sync] = trainer.publish(2).num_bytes
        config = EmbeddedConfig(decoder=decoder, weight_buffers=1 if kind == "delta" else 2)
        made = EmbeddedEngine(
            config,
            model_path=model_path,
            channel=end(kind, tmp_path / sync),
            max_context_tokens=64,
        )
        swaps, results[sync] = rollout(made, (1, 2))
        assert [s.policy_version for s in swaps] == [1, 2]
        trainer.export_hf(str(tmp_path / "out"))
        trainer.close()
    assert results["merged"] == results["adapter"]
    assert sizes["adapter"] < 0.4 * sizes["merged"]
    alone = EmbeddedEngine(
        EmbeddedConfig(decoder=decoder), model_path=str(tmp_path / "out"), max_context_tokens=64
    )
    _, exported = rollout(alone)
    for a, b in zip(exported, results["adapter"], strict=True):
        assert (a.token_ids, a.inference_logprobs) == (b.token_ids, b.inference_logprobs)


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_what_the_engine_sampled_is_as_likely_to_the_trainer(model_path, tmp_path, sync):
    trainer = adapted(model_path, sync=sync, channel=SharedMemoryChannel(str(tmp_path / "w")))
    for version in range(2):
        trainer.train_batch(make_groups(), version)
    trainer.publish(2)
    engine = EmbeddedEngine(
        model_path=model_path,
        channel=SharedMemoryChannel(str(tmp_path / "w")),
        max_context_tokens=64,
    )
    _, results = rollout(engine, (2,))
    task = make_groups(1)[0].task
    members = []
    for i, result in enumerate(results):
        ids = torch.tensor([*range(1, 12 + i), *result.token_ids]).numpy().astype("int32")
        mask = torch.zeros(len(ids), dtype=torch.bool).numpy()
        mask[-16:] = True
        said = torch.zeros(len(ids)).numpy()
        said[-16:] = result.inference_logprobs
        versions = torch.where(torch.from_numpy(mask), 2, -1).numpy().astype("int32")
        ticket = make_groups(1)[0].trajectories[i].ticket
        sample = Sample(ids, mask, said, versions, versions)
        members.append(Trajectory(ticket, "finished", (sample,), reward=float(i)))
    (report,) = trainer.train_batch([Group("g0", task, tuple(members), 4)], 2)
    assert report.metrics["logprob_diff_max"] < 1e-4
    assert report.metrics["updated"] == 1
    trainer.close()


def test_a_resumed_trainer_goes_on_bit_for_bit_and_its_checkpoint_holds_no_base(
    model_path, tmp_path
):
    first = adapted(model_path, GRPO(kl_coef=0.1), deterministic=True)
    first.train_batch(make_groups(seed=1), 0)
    first.save(str(tmp_path / "c"), policy_version=1)
    want = [first.train_batch(make_groups(seed=n), n)[0].metrics for n in (2, 3)]
    second = adapted(model_path, GRPO(kl_coef=0.1), deterministic=True)
    assert second.load(str(tmp_path / "c")) == (1, 1)
    got = [second.train_batch(make_groups(seed=n), n)[0].metrics for n in (2, 3)]
    for a, b in zip(want, got, strict=True):
        assert (a["loss"], a["grad_norm"], a["ref_kl"]) == (b["loss"], b["grad_norm"], b["ref_kl"])
    assert want[1]["ref_kl"] > 0
    size = sum(f.stat().st_size for f in (tmp_path / "c").iterdir())
    whole = make_trainer(model_path, GRPO(kl_coef=0.1))
    whole.save(str(tmp_path / "w"), policy_version=1)
    assert size < 0.7 * sum(f.stat().st_size for f in (tmp_path / "w").iterdir())


def test_adapters_of_another_base_are_refused(model_path, tmp_path):
    adapted(model_path).save(str(tmp_path / "c"), policy_version=1)
    other = load_model(model_path)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"adapters for other weights than model\.path has now"):
        adapted(str(tmp_path / "other")).load(str(tmp_path / "c"))
    with pytest.raises(ConfigError, match="not of this model and algorithm"):
        adapted(model_path, rank=2).load(str(tmp_path / "c"))
    with pytest.raises(ConfigError, match="not of this model and algorithm"):
        make_trainer(model_path).load(str(tmp_path / "c"))


@pytest.mark.parametrize("named", [False, True])
def test_the_reference_is_the_policy_with_the_adapters_rl_began_with(model_path, named):
    """As a second model says it; named in the config, the base is meant, whatever was warmed up."""

    def trained(path_of_reference, **own):
        beside = {"reference": Reference(path=path_of_reference)} if path_of_reference else {}
        trainer = adapted(model_path, GRPO(kl_coef=0.1), beside, **own)
        trainer.supervise(make_groups(1)[0].samples, lr=1e-2)
        reports = [trainer.train_batch(make_groups(seed=n), n)[0].metrics for n in range(3)]
        return trainer, [m["ref_kl"] for m in reports]

    trainer, kl = trained(model_path if named else None)
    assert trainer._reference._other is None
    assert (kl[0] > 1e-3) if named else (kl[0] == pytest.approx(0, abs=1e-6))
    assert kl[2] > 1e-3
    if named:
        other, as_second_model = trained(f"{model_path}/.")
        assert other._reference._other is not None
        assert kl == pytest.approx(as_second_model, rel=1e-4, abs=1e-6)


def test_a_new_model_is_warmed_up_whole_and_is_then_the_base_of_the_adapters(tmp_path):
    path = save_model(tmp_path / "model")
    made = load_model(path)
    later = {"warms_whole": True}
    trainer = adapted(path, beside=later, sync="adapter", channel=end("shared-memory", tmp_path))
    for _ in range(2):
        trainer.supervise(make_groups(1)[0].samples, lr=1e-2)
    trainer.publish(-1)  # as the checks of a warm start do
    sent = dict(trainer._channel.fetch(-1))
    assert all(not torch.equal(sent[name], p) for name, p in made.named_parameters())
    warmed = logprobs(trainer)
    trainer.begin_adapters()
    assert torch.equal(logprobs(trainer), warmed)
    base = dict(load_model(path).named_parameters())
    assert all(torch.equal(base[name], tensor) for name, tensor in sent.items())
    trainer.train_batch(make_groups(seed=1), 0)
    assert {n for n, _ in trainer._channel.fetch(trainer.publish(1).policy_version)} == set(
        trainer._weights.now()
    )
    trainer.save(str(tmp_path / "saved"), policy_version=1)
    want = trainer.train_batch(make_groups(seed=2), 1)[0].metrics["loss"]
    trainer.close()
    again = adapted(path, beside=later, sync="adapter")  # one that was lost, or a resumed run's
    assert again.load(str(tmp_path / "saved")) == (1, 1)
    assert again.train_batch(make_groups(seed=2), 1)[0].metrics["loss"] == want


def test_equal_runs_are_equal_bit_for_bit(model_path):
    runs = []
    for _ in range(2):
        trainer = adapted(model_path, deterministic=True)
        runs.append([trainer.train_batch(make_groups(), n)[0].metrics["loss"] for n in range(3)])
    assert runs[0] == runs[1]


def test_a_critic_that_reads_the_policy_goes_with_adapters(model_path):
    from rollart_algorithms.ppo import PPO

    beside = {"critic": Critic(backbone="detached")}
    trainer = adapted(model_path, PPO(), beside)
    metrics = [trainer.train_batch(make_groups(), n)[0].metrics for n in range(2)]
    assert all(m["updated"] == 1 for m in metrics)


def test_what_is_not_there_is_named_with_what_is(model_path, tmp_path):
    with pytest.raises(ConfigError, match=r"has no nose, qproj; it has down_proj, gate_proj, k_"):
        adapted(model_path, target_modules=("qproj", "q_proj", "nose"))
    gpt2 = save_model(tmp_path, "gpt2", n_embd=32, n_head=2, n_layer=1)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layers"):
        adapted(gpt2)


def test_adapters_that_do_not_fit_the_base_are_refused_and_the_old_weights_stay(model_path):
    base = AdapterBase(model_path, torch.device("cpu"))
    up = "model.layers.0.mlp.up_proj"
    down, wide = torch.zeros(2, 32), torch.zeros(48, 2)

    def whole(tensors):
        return dict(base.whole(tensors))

    with pytest.raises(ValueError, match=r"lack 1 tensors, such as .*up_proj.lora_B.weight"):
        whole([(up + lora.A, down)])
    with pytest.raises(ValueError, match=r"'nose.weight', which this model does not have"):
        whole([("nose" + lora.A, down), ("nose" + lora.B, wide)])
    with pytest.raises(ValueError, match=r"has shape \(47, 32\), but the weight has \(48, 32\)"):
        whole([(up + lora.A, down), (up + lora.B, wide[1:])])
    plain = [("a", down), ("b", wide)]
    assert list(base.whole(plain)) == plain
    assert list(base.whole([])) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_adapters_goes_on_and_its_model_can_be_evaluated(tmp_path):
    """In processes of their own, from a small model that is made first."""
    made = run(tmp_path / "first", stop={"batches": 1})
    base = str(Path(made.run_dir) / "model-trained")
    changes = {
        "lora": {"rank": 8, "sync": "adapter"},
        "algorithm": {"id": "grpo", "kl_coef": 0.01},
        "trainer": {"lr": 1e-2},
        "checkpoint": {"every_batches": 2},
    }
    changes["model"] = {"path": base, **dict.fromkeys(BASE["model"])}
    report = run(tmp_path / "second", **changes)
    run_dir = Path(report.run_dir)
    assert report.ok
    changed_keys = ["stop.batches=5", "lora.sync=merged"]
    on = launch(resolve_run(load_config(run_dir / "config.yaml", changed_keys)), resume=run_dir)
    assert (on.ok, on.batches) == (True, 5)
    assert audit(run_dir).ok
    with JournalReader(run_dir) as journal:
        sizes = {m.policy_version: m.value for m in journal.metrics("weights/bytes")}
    assert 0 < sizes[min(sizes)] < 0.5 * sizes[max(sizes)]
    folders = (base, f"{run_dir}/model-trained")
    before, after = (dict(load_model(path).named_parameters()) for path in folders)
    changed = {name.split(".")[-2] for name, p in after.items() if not torch.equal(p, before[name])}
    assert changed == {f"{m}_proj" for m in ("q", "k", "v", "o", "gate", "up", "down")}
    assert (run_dir / "model-trained-adapter" / "adapter_config.json").is_file()
    evaluation = fork_server.start_program(
        *("eval", str(run_dir), "evaluation.tasks=4", f"runs_dir={tmp_path}"),
        environment={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    _, said = evaluation.communicate()
    assert evaluation.returncode == 0, said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_warms_a_new_model_whole_and_two_ranks_train_adapters_on_it(tmp_path):
    """And one rank goes on from their checkpoint, on the base that the warm start made."""
    config = bandit.run_config("lora", tmp_path, {}) | {
        "model": bandit.MODEL,
        "warm_start": {"until_success": 0.3, "lr": 2e-3, "batch_size": 32, "check_every": 4},
        "lora": {"rank": 8, "sync": "adapter"},
        "runtime": {"env_processes": 0, "num_trainer_ranks": 2},
        "evaluation": {"split": "test", "tasks": 8, "greedy": False},
        "checkpoint": {"every_batches": 1},
        "stop": {"batches": 2},
    }
    run_dir = Path(bandit.learn(config).report.run_dir)
    base = dict(load_model(f"{run_dir}/model").named_parameters())
    again = ["stop.batches=3", "runtime.num_trainer_ranks=1"]
    on = launch(resolve_run(load_config(run_dir / "config.yaml", again)), resume=run_dir)
    assert (on.ok, on.batches) == (True, 3)
    assert audit(run_dir).ok
    after = dict(load_model(f"{run_dir}/model-trained").named_parameters())
    changed = {name.split(".")[-2] for name, p in after.items() if not torch.equal(p, base[name])}
    assert changed == {f"{m}_proj" for m in ("q", "k", "v", "o", "gate", "up", "down")}
    assert all(
        torch.equal(p, base[n]) for n, p in load_model(f"{run_dir}/model").named_parameters()
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_learn(tmp_path):
    """By how much is the tiny model's affair: its frozen head bounds how sure it can become."""
    base = bandit.beginner(tmp_path, {})
    config = bandit.run_config("lora", tmp_path, {})
    changes = {
        "model": {"path": base},
        "lora": {"rank": 16, "alpha": 32.0, "sync": "adapter"},
        "trainer": {"lr": 1e-2},
        "stop": {"batches": 20},
    }
    learned = bandit.learn(bandit.merged(config, changes))
    assert learned.before < 0.3
    assert learned.after > learned.before + 0.1
