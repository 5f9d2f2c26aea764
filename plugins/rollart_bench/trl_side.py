"""TRL's side of ``bench loop``: its GRPOTrainer on the CPU, with the same work as ours.

Takes: the work, as plain JSON. Gives: the end time of each step. Never: enables a feature of TRL
that the other side does not have: no reference model, no gradient checkpointing, no logging, no
saving.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from typing import Any

from rollart_bench.one_turn import NUM_TASKS, digits, vowel_share
from rollart_core.models.new import ASSISTANT, USER


def measure(work: Mapping[str, Any]) -> dict[str, Any]:
    """Train, and return ``ended_s`` of every step and the observed lengths in tokens.

    Args:
        work: ``model_path``, ``steps``, ``threads``, ``num_prompts``, ``group_size``,
            ``new_tokens``, ``lr``.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(work["threads"])
    from datasets import Dataset
    from trl import GRPOTrainer

    ended_s: list[float] = []
    lengths: set[int] = set()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ended_s.append(time.perf_counter())

    def reward(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths.update(map(len, completion_ids))
        return [vowel_share(c) for c in completions]

    path = work["model_path"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [f"{USER}{digits(i)}{ASSISTANT}" for i in range(NUM_TASKS)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            reward_funcs=reward,
            args=_arguments(work, folder),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return {
        "ended_s": ended_s,
        "new_tokens": sorted(lengths),
        "prompt_tokens": sorted({len(tokenizer(p)["input_ids"]) for p in prompts}),
    }


def _arguments(work: Mapping[str, Any], folder: str) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=work["num_prompts"] * work["group_size"],
        num_generations=work["group_size"],
        max_completion_length=work["new_tokens"],
        max_steps=work["steps"],
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
