"""Reasoning Gym: each task is a question of a procedural dataset, answered in one turn.

Takes: the name of a dataset (``leg_counting``). Gives: a session (see the package's docstring).
The seed of a task is the index in the dataset. Never: shows metadata, which can contain the answer.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

IMPORTS = ("reasoning_gym",)
GLOBAL_RANDOM = True  # some datasets draw from numpy.random
SPLITS = {"train": [0, 16_000], "warm": [16_000, 18_000], "test": [18_000, 20_000]}
"""Small enough for datasets that have a maximum size, or prepare all questions in advance."""
MIN_SECRET_CHARS = 4
"""Shorter answers occur in other texts by chance."""
_TAGGED = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)
_datasets: dict[str, Any] = {}


def describe(env_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a dataset."""
    _dataset(env_id, options)
    return {
        "reward_range": (0.0, 1.0),
        "max_turns": 1,
        "licence": "Apache-2.0",
        "summary": f"Reasoning Gym's {env_id}: one question, one answer.",
        "splits": SPLITS,
    }


class Session:
    """Questions of one dataset."""

    offers = ("oracle", "secrets")
    max_turns = 1
    splits = SPLITS

    def __init__(self, env_id: str, options: dict[str, Any]) -> None:
        self._dataset = _dataset(env_id, options)
        self._extract = options.get("extract") or "auto"
        self._tags = self._extract != "text"
        self.prompt = (
            "Answer the question. Write the answer alone between <answer> and </answer>."
            if self._tags
            else "Answer the question. Write the answer and nothing else."
        )
        self._entry: dict[str, Any] = {}

    def reset(self, seed: int, task: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Ask the question with the index ``seed``."""
        self._entry = self._dataset[seed]
        answer = self._entry.get("answer")
        told = {} if answer is None else {"reward_context": {"reference": str(answer)}}
        return str(self._entry["question"]), {"index": seed, **told}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the answer; an answer that the dataset cannot parse scores 0."""
        info: dict[str, Any] = {}
        try:
            score = float(self._dataset.score_answer(self._answer(action), entry=self._entry))
        except Exception as e:  # scorers parse any text
            score = 0.0
            info["score_error"] = f"{type(e).__name__}: {e}"[:200]
        info.update(success=score >= 1.0, reward_components={"score": score})
        return f"Score: {score:g}", score, True, False, info

    def oracle(self) -> str | None:
        """Return the dataset's own answer."""
        answer = self._entry.get("answer")
        if answer is None:
            return None
        return f"<answer>{answer}</answer>" if self._tags else str(answer)

    def secrets(self) -> list[str]:
        """Return the answer, unless it is in the question or too short to be detected."""
        answer = str(self._entry.get("answer", ""))
        told = answer in str(self._entry.get("question", ""))
        return [] if told or len(answer) < MIN_SECRET_CHARS else [answer]

    def close(self) -> None:
        """Do nothing; no resources are open."""

    def _answer(self, said: str) -> str | None:
        tagged = _TAGGED.findall(said) if self._tags else []
        if tagged:
            return str(tagged[-1]).strip()
        return None if self._extract == "tag" else said.strip()


def _dataset(name: str, options: dict[str, Any]) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, list(DATASETS), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise LookupError(f"reasoning-gym has no dataset {name!r}.{hint}")
    config = dict(options.get("dataset") or {})
    size = max(end for _, end in (options.get("splits") or SPLITS).values())
    config = {"seed": 0, "size": size, **config}
    key = f"{name} {json.dumps(config, sort_keys=True)}"
    if key not in _datasets:
        try:
            _datasets[key] = reasoning_gym.create_dataset(name, **config)
        except (TypeError, AssertionError) as e:
            raise ValueError(f"dataset: {e}") from e
    return _datasets[key]
