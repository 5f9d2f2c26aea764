"""`rollart sft` with real trainers: it learns, computes the model's own gradients, and goes on."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rollart_algorithms.sft import SFT
from rollart_core.cli import build_app
from rollart_core.config.run import Trainer as TrainerConfig
from rollart_core.errors import ConfigError, UserError
from rollart_core.models.tokenizer import load_tokenizer
from rollart_core.scheduling.observer import NobodyWatches
from rollart_core.training.trainer import Trainer, load_model
from rollart_plugins.sft.config import SftConfig
from rollart_plugins.sft.rows import read_demonstrations, samples_of
from rollart_plugins.sft.run import fine_tune, groups_of

NEW = {"kind": "new", "num_layers": 2, "width": 64, "ffn_width": 96, "vocab_size": 320}
QUESTIONS = [(f"What follows {n}?", str(n + 1)) for n in range(40)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions of two digits, each several times: learned by heart, so `validation` holds some."""
    file = tmp_path_factory.mktemp("rows") / "next.jsonl"
    lines = [
        {"question": question, "answer": answer, "split": "dev" if n == 3 else "train"}
        for n in range(4)
        for question, answer in QUESTIONS
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def config(rows: Path, folder: Path, **given: Any) -> SftConfig:
    defaults = {
        "model": NEW,
        "data": str(rows),
        "shares": {"warm": 0, "validation": 0, "test": 0},
        "runs_dir": str(folder),
        "trainer": {"lr": 5e-3},
        "trackers": [],
        "deterministic": True,
    }
    return SftConfig.model_validate({**defaults, **given})


@pytest.fixture(scope="module")
def trained(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    report = fine_tune(config(rows, folder, epochs=20, batch_rows=24, trackers=["tensorboard"]))
    return json.loads((Path(report.run_dir) / "report.json").read_text())


def test_it_lowers_the_held_out_loss_and_raises_exact_answers(trained: Mapping[str, Any]) -> None:
    run_dir = Path(trained["run_dir"])
    first, *_, last = (point["loss"] for point in trained["held_out_loss"])
    assert last < first / 5
    assert exact(run_dir / "model") == 0
    assert exact(run_dir / "model-trained") > 0.8
    assert (trained["ok"], trained["batches"]) == (True, trained["num_batches"])
    assert trained["rows"] == {"train": 120, "warm": 0, "validation": 40, "test": 0}
    best = min(trained["held_out_loss"][1:], key=lambda point: point["loss"])
    assert trained["chosen_batch"] == best["batch"]
    assert list((run_dir / "tensorboard").iterdir())
    assert not list(run_dir.glob("*.part"))


def exact(model_path: Path) -> float:
    """Return the share of questions that the model answers exactly, greedily."""
    tokenizer, model = load_tokenizer(model_path), load_model(str(model_path))
    right = 0
    for question, answer in QUESTIONS:
        prompt = tokenizer.encode(
            tokenizer.render([{"role": "user", "content": question}], add_generation_prompt=True)
        )
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=4, do_sample=False)[0, len(prompt) :].tolist()  # type: ignore[operator]
        right += tokenizer.decode(out).partition(tokenizer.stop_texts[0])[0] == answer
    return right / len(QUESTIONS)


def test_gradients_are_those_of_the_model_itself_and_of_a_supervised_step(
    trained: Mapping[str, Any], rows: Path, tmp_path: Path
) -> None:
    path = str(Path(trained["run_dir"]) / "model")
    found = read_demonstrations(config(rows, tmp_path))["train"][:12]
    lists = [samples_of(one, load_tokenizer(path)) for one in found]
    samples = [sample for row in lists for sample in row]
    settings = TrainerConfig(grad_clip=1e9, max_tokens_per_microbatch=64)

    model = load_model(path)
    total = sum(s.num_loss_tokens for s in samples)
    for sample in samples:  # one row at a time, and transformers' own forward pass
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        (-(chosen[torch.from_numpy(sample.loss_mask[1:])].sum()) / total).backward()
    want = {name: p.grad for name, p in model.named_parameters()}

    by_batch = Trainer(settings, SFT(), model_path=path)
    (report,) = by_batch.train_batch(groups_of(lists), 0)
    by_step = Trainer(settings, SFT(), model_path=path)
    metrics = by_step.supervise(samples, lr=1e-3)
    for trainer in (by_batch, by_step):
        for name, parameter in trainer._weights.parameters().items():
            torch.testing.assert_close(parameter.grad, want[name], rtol=2e-4, atol=1e-6)
    assert report.metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    fresh = Trainer(settings, SFT(), model_path=path)
    assert fresh.held_out_loss(samples) == pytest.approx(metrics["loss"], rel=1e-5)
    with pytest.raises(ValueError, match="no sample has a loss token"):
        fresh.held_out_loss([])


def test_adapters_learn_and_leave_the_base_as_it_is(
    trained: Mapping[str, Any], rows: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    base = Path(trained["run_dir"]) / "model-trained"
    before = (base / "model.safetensors").read_bytes()
    others = tmp_path / "others.jsonl"
    others.write_text(rows.read_text().replace("follows", "follows next"))  # other questions
    given = {"model": str(base), "lora": {"rank": 8}, "trainer": {"lr": 1e-2}, "epochs": 6}
    report = fine_tune(config(others, tmp_path, **given))
    losses = [point["loss"] for point in report.held_out_loss]
    assert min(losses) < losses[0] / 2
    assert (base / "model.safetensors").read_bytes() == before
    adapters = load_file(Path(report.run_dir) / "model-trained-adapter/adapter_model.safetensors")
    assert all(re.search(r"lora_[AB]\.weight$", name) for name in adapters)
    assert load_model(str(Path(report.run_dir) / "model-trained"))


class Interrupts(NobodyWatches):
    """Presses Ctrl-C after a batch."""

    def __init__(self, after: int) -> None:
        self._after = after

    def progress(self, fraction: float | None, line: Mapping[str, float | str]) -> None:
        if line["batch"] == self._after:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_saves_and_a_resumed_run_ends_with_the_same_weights(
    rows: Path, tmp_path: Path
) -> None:
    whole = fine_tune(config(rows, tmp_path / "whole", epochs=2))
    cut = fine_tune(config(rows, tmp_path / "cut", epochs=2), observer=Interrupts(5))
    assert (cut.ok, cut.stop_reason) == (False, "interrupted")
    assert 5 <= cut.batches < whole.batches
    assert (Path(cut.run_dir) / "model-trained/model.safetensors").is_file()
    done = CliRunner().invoke(build_app(), ["sft", "--resume", cut.run_dir, "--json"])
    assert done.exit_code == 0, done.output
    resumed = json.loads(done.stdout)
    assert (resumed["batches"], resumed["train_steps"]) == (whole.batches, whole.train_steps)
    assert weights(resumed["run_dir"]) == weights(whole.run_dir)
    assert resumed["held_out_loss"][-1] == whole.held_out_loss[-1]


def weights(run_dir: str) -> bytes:
    return (Path(run_dir) / "model-trained/model.safetensors").read_bytes()


def test_a_run_is_not_resumed_with_other_rows(rows: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(rows.read_bytes())
    report = fine_tune(config(file, tmp_path, epochs=1))
    with file.open("a") as more:
        more.write('{"question": "What follows 90?", "answer": "91"}\n')
    done = CliRunner().invoke(build_app(), ["sft", "--resume", report.run_dir])
    assert isinstance(done.exception, ConfigError)
    assert "the rows differ from those of the run" in str(done.exception)


def test_a_schedule_ends_with_the_last_batch_and_metrics_reach_the_trackers(
    rows: Path, tmp_path: Path, logged: list[tuple[int, Mapping[str, float]]]
) -> None:
    trainer = {"lr": 1e-2, "warmup_train_steps": 0, "schedule": {"kind": "linear", "min_ratio": 0}}
    changes = {"epochs": 1, "trainer": trainer, "trackers": ["support.sft_tracker:Remembers"]}
    report = fine_tune(config(rows, tmp_path, **changes))
    rates = [metrics["train/lr"] for _, metrics in logged if "train/lr" in metrics]
    n = report.num_batches
    assert rates == pytest.approx([1e-2 * (n - i) / n for i in range(n)])
    held_out = [(step, m["held_out/loss"]) for step, m in logged if "held_out/loss" in m]
    assert held_out == [(int(p["batch"]), p["loss"]) for p in report.held_out_loss]


@pytest.fixture
def logged() -> Iterator[list[tuple[int, Mapping[str, float]]]]:
    from support.sft_tracker import LOGGED

    LOGGED.clear()
    yield LOGGED
    LOGGED.clear()


def test_a_dry_run_reads_everything_and_makes_nothing(
    trained: Mapping[str, Any], rows: Path, tmp_path: Path
) -> None:
    model = str(Path(trained["run_dir"]) / "model")
    arguments = ["sft", str(rows), f"model={model}", f"runs_dir={tmp_path / 'r'}", "--dry-run"]
    done = CliRunner().invoke(build_app(), [*arguments, "--json"])
    report = json.loads(done.stdout)
    assert report["tokens"] > report["loss_tokens"] > 0
    assert report["num_batches"] > 0
    assert "This can run" in CliRunner().invoke(build_app(), arguments).stdout
    assert not (tmp_path / "r").exists()
    for changes, problem in (
        ("max_context_tokens=9", r"next.jsonl, row \d+: has \d+ tokens, above max_context_tokens"),
        ("trackers=[tensorbord]", "trackers.0: .*Did you mean"),
        ("model=./nowhere", "model.path: there is no folder ./nowhere"),
    ):
        failed = CliRunner().invoke(build_app(), [*arguments, changes])
        assert isinstance(failed.exception, UserError)
        assert re.search(problem, str(failed.exception))
        assert "\n" not in str(failed.exception)
