"""Train a model on a dataset with a reward function, from Python: ``rollart_core.fit``.

Takes: a model, a dataset and a reward. Gives: the report of a run that ``rollart run`` would give
for the same config. Never: has settings of its own; all others are keys of the run config.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TypeAlias

from rollart_core.errors import UserError
from rollart_core.runtime.launch import launch
from rollart_core.runtime.prepare import prepare_mapping
from rollart_core.runtime.report import RunReport
from rollart_envs.questions.config import QuestionsConfig
from rollart_envs.questions.dataset import read_dataset

Rows: TypeAlias = Iterable[Mapping[str, Any]]
RewardLike: TypeAlias = str | Mapping[str, Any] | Callable[..., Any]
_SOURCE: Final = "rollart_core.fit"
_DEFAULTS: Final[Mapping[str, Any]] = {"name": "fit", "stop": {"batches": 200}}


def fit(
    model: str | Path | Mapping[str, Any],
    dataset: str | Path | Rows | Mapping[str, Any],
    reward: RewardLike | Sequence[RewardLike] | None = None,
    *,
    reward_weights: Sequence[float] | None = None,
    **settings: Any,
) -> RunReport:
    """Train a model; see :func:`rollart_core.fit`.

    Raises:
        UserError: If the run cannot start.
    """
    mapping: dict[str, Any] = {**_DEFAULTS, **settings}
    given = mapping.get("env", {})
    env = {"id": "questions", **(given if isinstance(given, Mapping) else {"id": given})}
    folder = Path(mapping.get("runs_dir", "runs")) / "datasets"
    mapping["env"] = {**env, "file": _file(dataset, folder)}
    mapping["model"] = dict(model) if isinstance(model, Mapping) else str(model)
    if reward is not None:
        mapping["reward"] = _reward(reward, reward_weights, mapping)
    read_dataset(QuestionsConfig(**{k: v for k, v in mapping["env"].items() if k != "id"}))
    return launch(prepare_mapping(mapping, _SOURCE))


def _file(dataset: Any, folder: Path) -> str | dict[str, str]:
    """Return a dataset as the option ``file``; rows in memory are written to a file first."""
    if isinstance(dataset, str | Path):
        return str(dataset)
    if isinstance(dataset, Mapping):
        return {str(split): str(_file(part, folder)) for split, part in dataset.items()}
    try:
        lines = [json.dumps(dict(row), default=str) + "\n" for row in dataset]
    except (TypeError, ValueError) as e:
        raise UserError(f"dataset: must be a file, a hub id or rows (mappings): {e}") from None
    text = "".join(lines).encode()
    path = folder / f"{blake2b(text, digest_size=8).hexdigest()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return str(path)


def _reward(
    reward: RewardLike | Sequence[RewardLike],
    weights: Sequence[float] | None,
    mapping: dict[str, Any],
) -> Any:
    """Return one reward, or the weighted sum of several, as in a run config."""
    if isinstance(reward, str | Mapping) or callable(reward):
        if weights is not None:
            raise UserError("reward_weights: has no effect with one reward; remove it")
        return _ref(reward, mapping)
    weights = weights or [1.0] * len(reward)
    if len(weights) != len(reward):
        raise UserError(f"reward_weights: has {len(weights)} for {len(reward)} rewards")
    refs = [_ref(one, mapping) for one in reward]
    names = [str(ref["id"] if isinstance(ref, Mapping) else ref) for ref in refs]
    names = [name.rpartition(":")[2].rpartition(".")[2] for name in names]
    if len(set(names)) < len(names):
        raise UserError(f"reward: two rewards have the same name: {', '.join(names)}")
    parts = zip(names, refs, weights, strict=True)
    return {"id": "weighted", "parts": {n: {"reward": r, "weight": w} for n, r, w in parts}}


class Local:
    """Functions that other processes cannot import."""


def _ref(reward: RewardLike, mapping: dict[str, Any]) -> str | dict[str, Any]:
    """Return a reward as in a run config.

    Other processes cannot import a function of a script, a notebook or another function. It is
    called in this process then.
    """
    if isinstance(reward, str):
        return reward
    if isinstance(reward, Mapping):
        return dict(reward)
    name = getattr(reward, "__qualname__", type(reward).__name__)
    module = getattr(reward, "__module__", "__main__")
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is reward:
        return f"{module}:{name}"
    short = name.rpartition(".")[2].strip("<>")
    setattr(Local, short, staticmethod(reward))
    mapping.setdefault("scoring", {"backend": "inline"})
    return f"{__name__}:{Local.__name__}.{short}"
