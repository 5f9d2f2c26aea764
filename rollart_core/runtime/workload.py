"""Workloads of environments on the hardware, which specs declare and a run measures.

    turn i:  i (p + d) tokens in the KV cache  ->  + p tokens of prefill  ->  + d tokens of decode

Takes: declared workloads, finished trajectories. Gives: measured workloads, and whether one has
drifted from the plan. Never: reads a clock, or counts an episode that failed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollart_core.config.model import Model, NewModel, RemoteModel
from rollart_core.config.validation.consistency import hub_cached
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import ModelShape
from rollart_core.errors import ConfigError
from rollart_core.types import Trajectory

BYTES = {"float32": 4.0, "bfloat16": 2.0}
"""Bytes per value of each dtype that a config may set."""
ROUNDED = 0.05
"""Allowed relative error of the number of parameters in a config."""


def shape_of(model: Model) -> ModelShape | None:
    """Return the shape of a config's model; None if it is unknown.

    Raises:
        ConfigError: If the ``config.json`` of the model is present and contradicts the config.
    """
    if isinstance(model, NewModel):
        return _of_new(model)
    if isinstance(model, RemoteModel):
        return None
    folder = Path(model.path).expanduser()
    path = folder / "config.json" if folder.is_dir() else hub_cached(model.path)
    num_bytes, said = BYTES[model.dtype], None
    if model.shape:
        said = ModelShape(**model.shape.model_dump(), bytes_per_value=num_bytes)
    if path is None or not path.is_file():
        return said
    try:
        read = of_config(json.loads(path.read_text(encoding="utf-8")), num_bytes)
    except (ValueError, KeyError, TypeError):
        return said
    if said is not None:
        _check_alike(said, read, path)
    return read


def of_config(config: Mapping[str, Any], bytes_per_value: float) -> ModelShape:
    """Return the shape of a decoder from its ``config.json``.

    The parameters are those of grouped-query attention, of gated feed-forward layers (all experts
    of a mixture; a token uses only some) and of the embeddings, which may be tied. Norms and
    routers are not counted: they are less than a thousandth of all parameters.

    Raises:
        KeyError: If the config describes another kind of model.
    """
    text = config.get("text_config", config)
    width, num_layers = text["hidden_size"], text["num_hidden_layers"]
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or width // heads
    attention = width * head_dim * (2 * heads + 2 * kv_heads)
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    per_token = text["num_experts_per_tok"] if experts else 0
    ffn = (experts and text.get("moe_intermediate_size")) or text["intermediate_size"]
    expert = 3 * width * ffn
    embeddings = text["vocab_size"] * width * (1 if text.get("tie_word_embeddings") else 2)
    return ModelShape(
        num_params=embeddings + num_layers * (attention + max(1, experts) * expert),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        bytes_per_value=bytes_per_value,
        num_active_params=embeddings + num_layers * (attention + per_token * expert)
        if experts
        else 0,
        num_experts=experts,
        experts_per_token=per_token,
        width=width,
        num_outer_params=embeddings,
        vocab_size=text["vocab_size"],
    )


def _check_alike(said: ModelShape, read: ModelShape, path: Path) -> None:
    """Check that the shape in the config is the model's; parameter counts may be rounded."""
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "num_experts"):
        if getattr(said, name) != getattr(read, name):
            raise ConfigError(
                f"model.shape.{name} is {getattr(said, name)}, but {path} has "
                f"{getattr(read, name)}: correct it, or remove model.shape"
            )
    if abs(said.num_params / read.num_params - 1) > ROUNDED:
        raise ConfigError(
            f"model.shape.num_params is {said.num_params:,}, but {path} gives "
            f"{read.num_params:,}: correct it, or remove model.shape"
        )


def _of_new(model: NewModel) -> ModelShape:
    config = {
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_width,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": True,
    }
    return of_config(config, BYTES[model.dtype])


PER_TURN = ("prefill_tokens", "decode_tokens", "env_s")
"""Fields of a workload that count a turn, not an episode."""
NEGLIGIBLE: Mapping[str, float] = {
    "prefill_tokens": 8.0,
    "decode_tokens": 4.0,
    "turns": 0.5,
    "env_s": 0.01,
    "reward_s": 0.01,
    "rows": 0.5,
}
"""Absolute differences up to these are never drift, so 1 ms instead of 0.1 ms is ignored."""


def total_tokens(workload: Workload) -> float:
    """Return the number of tokens of a whole trajectory."""
    return workload.turns * (workload.prefill_tokens + workload.decode_tokens)


def trained_tokens(workload: Workload) -> float:
    """Return the number of tokens in all rows of a trajectory.

    Rows end at equal distances, so row i of r has i/r of the tokens. Thoughts that the chat
    template removes from later rows count, so this is an upper bound.
    """
    return total_tokens(workload) * (workload.rows + 1) / 2


def trained_context(workload: Workload) -> float:
    """Return how many tokens a token of a trained row attends to, as a mean over all rows."""
    return total_tokens(workload) / 2 * (2 * workload.rows + 1) / (3 * workload.rows)


def cached_tokens(workload: Workload) -> float:
    """Return the number of cached tokens at the start of a turn, as a mean over turns."""
    return (workload.turns - 1) / 2 * (workload.prefill_tokens + workload.decode_tokens)


def decode_context(workload: Workload) -> float:
    """Return the length of the row that a decoded token attends to, as a mean over tokens."""
    return cached_tokens(workload) + workload.prefill_tokens + workload.decode_tokens / 2


def held_tokens(workload: Workload) -> float:
    """Return the number of cached tokens at the end of a turn, as a mean over turns."""
    return cached_tokens(workload) + workload.prefill_tokens + workload.decode_tokens


def of_trajectory(trajectory: Trajectory) -> Workload | None:
    """Return the workload of one trajectory; None if it has no turn.

    Reward seconds are not recorded by trajectory and stay 0.
    """
    turns = trajectory.turns
    if not turns:
        return None
    num_decoded = sum(turn.num_new_tokens for turn in turns)
    row = turns[-1].num_prompt_tokens + turns[-1].num_new_tokens
    return Workload(
        prefill_tokens=max(0, row - num_decoded) / len(turns),
        decode_tokens=num_decoded / len(turns),
        turns=float(len(turns)),
        env_s=sum(turn.step_s for turn in turns) / len(turns),
        rows=float(max(1, len(trajectory.samples))),
    )


@dataclass(slots=True)
class WorkloadMeter:
    """An exponential mean over the trajectories of one environment.

    The first ``1 / (1 - decay)`` trajectories have equal weights, so that the very first ones do
    not dominate. Means of tokens and env seconds per turn are weighted by turns.
    """

    declared: Workload
    decay: float = 0.98
    count: int = 0
    """Number of trajectories added."""
    _means: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Means per trajectory."""

    def add(self, trajectory: Trajectory) -> None:
        """Add a finished trajectory; ignore it if it failed or has no turn."""
        seen = None if trajectory.failure else of_trajectory(trajectory)
        if seen is None:
            return
        self.count += 1
        share = max(1 / self.count, 1 - self.decay)
        for name in ("turns", "rows", *PER_TURN):
            value = getattr(seen, name) * (seen.turns if name in PER_TURN else 1.0)
            self._means[name] += share * (value - self._means[name])

    @property
    def measured(self) -> Workload:
        """The measured workload; the declared one before the first trajectory."""
        if not self.count:
            return self.declared
        means = self._means
        per_turn = {name: means[name] / means["turns"] for name in PER_TURN}
        return replace(self.declared, turns=means["turns"], rows=means["rows"], **per_turn)


def departures(planned: Workload, measured: Workload, factor: float) -> list[str]:
    """Return a phrase for each figure that differs from the plan by more than ``factor``."""
    found = []
    for name, negligible in NEGLIGIBLE.items():
        was, now = getattr(planned, name), getattr(measured, name)
        if abs(now - was) > negligible and max(was, now) > factor * min(was, now):
            found.append(f"{name} {now:.4g} instead of {was:.4g}")
    return found
