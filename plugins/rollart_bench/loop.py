"""`rollart bench loop`: a GRPO step, compared with TRL's GRPOTrainer.

Random Qwen3 models of 0.85M and 5M parameters in float32. A step is 4 prompts of 16 tokens, 8
completions of 64 tokens each (a stop token is impossible: the tokenizer's is outside the model's
vocabulary), and one AdamW update, without reference model, logging, evaluation or checkpoints. Ours
is a whole run, with journal and trajectories. The sides alternate, each in a new process. A step's
seconds are the mean from the end of the warm-up to the end of the last counted step.

Takes: ``rounds``, ``steps``, ``threads``, ``short``. Gives: rows in seconds per step. Never: counts
start-up.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from rollart_bench.one_turn import NUM_TASKS, digits
from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.sides import in_fresh_process, run_mapping
from rollart_bench.skip import require
from rollart_core.config.model import NewModel
from rollart_core.errors import RollartError
from rollart_core.models.new import new_model
from rollart_core.store.journal_reader import JournalReader

TAKES: Final = ("rounds", "steps", "threads", "short")

PEER = "TRL GRPOTrainer"
MARK = 1.5
NUM_PROMPTS, GROUP_SIZE, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 16, 64
NUM_WARM, NUM_TAIL = 3, 2
"""Steps not counted: the first ones, and for ours the last ones, without concurrent rollout."""
VOCAB_SIZE = 1024
NEVER = "<|never|>"
MODELS: Mapping[str, NewModel] = {
    "0.85M": NewModel(kind="new", ffn_width=496, vocab_size=VOCAB_SIZE),
    "5M": NewModel(
        kind="new",
        num_layers=6,
        width=256,
        num_heads=4,
        num_kv_heads=2,
        ffn_width=768,
        vocab_size=VOCAB_SIZE,
    ),
}
MODES: Mapping[str, Mapping[str, object]] = {
    "sync": {"mode": "sync"},
    "async": {"mode": "async", "max_staleness": 1},
}


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``short``: the small model, one round of few steps, one thread (several wait for
            each other on a busy machine); ``rounds`` (3) and ``steps`` (12) otherwise;
            ``threads``: all cores.

    Returns:
        The object of ``rollart bench --json``.

    Raises:
        UserError: If an option is wrong.
        BenchSkipped: If TRL is not installed.
    """
    asked = Options("loop", options)
    rounds = asked.integer("rounds", 1 if asked.short else 3)
    steps = asked.integer("steps", NUM_WARM + 2 if asked.short else 12, least=NUM_WARM + 1)
    threads = asked.integer("threads", 1 if asked.short else len(os.sched_getaffinity(0)))
    require("trl", "datasets", extra="bench")
    rows: list[dict[str, object]] = []
    for name in ("0.85M",) if asked.short else MODELS:
        with tempfile.TemporaryDirectory() as folder:
            model_path = save_model(MODELS[name], Path(folder) / "model")
            rows += _rows(name, Work(model_path, folder, steps, threads), rounds)
    return result("loop", rows, conditions={"threads": threads})


@dataclass(frozen=True, slots=True)
class Work:
    """The work of both sides."""

    model_path: str
    runs_dir: str
    steps: int
    """All steps that are run. The first ``NUM_WARM`` are not counted."""
    threads: int

    def ours(self, mode: str) -> float:
        """Return our seconds per step."""
        shared = {"model_path": self.model_path, "steps": self.steps, "threads": self.threads}
        asked = shared | {"mode": mode, "runs_dir": self.runs_dir}
        return self._step_s(in_fresh_process(f"{__name__}:measure", asked))

    def theirs(self) -> float:
        """Return TRL's seconds per step."""
        asked = {
            "model_path": self.model_path,
            "steps": self.steps,
            "threads": self.threads,
            "num_prompts": NUM_PROMPTS,
            "group_size": GROUP_SIZE,
            "new_tokens": NEW_TOKENS,
            "lr": 1e-4,
        }
        return self._step_s(in_fresh_process("rollart_bench.trl_side:measure", asked))

    def _step_s(self, measured: Mapping[str, Any]) -> float:
        """Return the mean over the counted steps.

        Raises:
            RollartError: If the tokens are not those of the work.
        """
        seen = (measured["prompt_tokens"], measured["new_tokens"])
        if seen != ([PROMPT_TOKENS], [NEW_TOKENS]):
            raise RollartError(f"prompts and completions had {seen} tokens: nothing to compare")
        ended_s = measured["ended_s"][: self.steps]
        return float(ended_s[-1] - ended_s[NUM_WARM - 1]) / (self.steps - NUM_WARM)


def _rows(name: str, work: Work, rounds: int) -> Iterator[dict[str, object]]:
    """Measure one model: sync, TRL, async, and repeat."""
    got: dict[str, list[float]] = {"sync": [], "peer": [], "async": []}
    for number in range(1, rounds + 1):
        for side, seconds in got.items():
            seconds.append(work.theirs() if side == "peer" else work.ours(side))
            who = PEER if side == "peer" else f"ours, {side}"
            echo(f"{name}, round {number} of {rounds}: {who}: {seconds[-1]:.3f} s/step")
    for mode in MODES:
        ratios = [b / a for a, b in zip(got[mode], got["peer"], strict=True)]
        case = f"{name} fp32, {NUM_PROMPTS * GROUP_SIZE} x {NEW_TOKENS} tokens, {_spell(mode)}"
        ours, theirs = median(got[mode]), median(got["peer"])
        yield row(case, ours, theirs, PEER, "s/step", ratios=ratios, mark=MARK)


def _spell(mode: str) -> str:
    if mode == "sync":
        return "sync (all threads to the engine, then to the trainer)"
    return "async, max_staleness 1 (a thread each for engine and trainer)"


def measure(work: Mapping[str, Any]) -> dict[str, Any]:
    """Run our side in this process and return the same figures as TRL's side.

    Args:
        work: ``model_path``, ``steps``, ``threads``, ``mode``, ``runs_dir``.
    """
    report = run_mapping(_config(work))
    with JournalReader(Path(report.run_dir)) as journal:
        ended_s = [m.value for m in journal.metrics("time/wall_s")]
        new_tokens = {m.value for m in journal.metrics("rollout/loss_tokens_mean")}
        all_tokens = {m.value for m in journal.metrics("rollout/tokens_mean")}
    prompts = {int((a or 0) - (b or 0)) for a in all_tokens for b in new_tokens}
    lengths = sorted(int(n or 0) for n in new_tokens)
    return {"ended_s": ended_s, "new_tokens": lengths, "prompt_tokens": sorted(prompts)}


def _config(work: Mapping[str, Any]) -> dict[str, object]:
    threads = work["threads"] if work["mode"] == "sync" else 1
    return {
        "name": "bench-loop",
        "runs_dir": work["runs_dir"],
        **MODES[work["mode"]],
        "runtime": {"engine_threads": threads, "trainer_threads": threads, "env_processes": 0},
        "model": {"path": work["model_path"], "device": "cpu"},
        "env": "rollart_bench.one_turn:OneTurnEnv",
        "algorithm": {"id": "grpo", "zero_advantage": "keep"},
        "trackers": [],
        "rollout": {
            "groups_per_batch": NUM_PROMPTS,
            "group_size": GROUP_SIZE,
            "max_turns": 1,
            "max_new_tokens": NEW_TOKENS,
            "max_context_tokens": PROMPT_TOKENS + NEW_TOKENS,
        },
        "trainer": {"lr": 1e-4, "warmup_train_steps": 0},
        "evaluation": {"tasks": 1, "greedy": False},
        "checkpoint": {"every_batches": 1_000_000},
        "stop": {"batches": work["steps"] + NUM_TAIL},
    }


def save_model(spec: NewModel, folder: Path) -> str:
    """Make a random model whose stop token is outside its vocabulary.

    Raises:
        RollartError: If the tokenizer has fewer tokens than the model's vocabulary.
    """
    from tokenizers import AddedToken, Tokenizer

    new_model(folder, spec, _texts(), seed=0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if tokenizer.get_vocab_size(with_added_tokens=True) != VOCAB_SIZE:
        raise RollartError(f"the tokenizer has fewer than {VOCAB_SIZE} tokens: too few texts")
    tokenizer.add_special_tokens([AddedToken(NEVER, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _change(folder / "tokenizer_config.json", eos_token=NEVER)
    for name in ("config.json", "generation_config.json"):
        _change(folder / name, eos_token_id=None)
    return str(folder)


def _texts() -> Iterator[str]:
    """Yield the prompts, and enough random words for the vocabulary."""
    yield from map(digits, range(NUM_TASKS))
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(1_000)]
    yield from (" ".join(rng.choices(words, k=20)) for _ in range(500))


def _change(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **changes}), encoding="utf-8")
