"""skyrl-gym: its environments, over rows of a dataset in SkyRL's form.

A row is a dict with ``prompt`` (chat messages) and the fields that its environment requires:
``reward_spec`` (``{"ground_truth": ...}``), ``reward_model``, ``db_id``, ``data``, ``max_turns``,
``extra_info``.
The option ``tasks`` contains rows, or files of rows (.jsonl, .json, .parquet), by split; or one
source whose rows have their split in ``extra_info.split``. Observations are chat messages.

Takes: ids of skyrl-gym's registry. Gives: see :mod:`rollart_plugins.adapters.sessions`.
Never: uses an environment for a second episode (skyrl-gym's environments support only one).
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import json
import os
from collections.abc import Callable
from typing import Any

IMPORTS = ("skyrl_gym",)
LICENCE = "MIT"
RANGES = {
    "aime": (-1.0, 1.0),
    # A wrong answer in the right format earns 0.2 divided by the maximum number of turns, and
    # another turn.
    "gsm8k_multi_turn": (0.0, 1.2),
    "text2sql": (-1.0, 1.0),
}
TURNS = {"gsm8k_multi_turn": 5, "search": 2, "searchcode": 2, "text2sql": 5}
CONFIGS = {
    "search": "skyrl_gym.envs.search.env:SearchEnvConfig",
    "text2sql": "skyrl_gym.envs.sql.env:Text2SQLEnvConfig",
}
"""Config classes for ``env_config``, for the environments that have one."""
ASKS_FOR = {
    "aime": ("reward_model",),
    "gsm8k_multi_turn": ("reward_spec", "extra_info"),
    "text2sql": ("reward_spec", "db_id", "data"),
}
"""Required fields of a row besides the prompt. All other environments only require
``reward_spec``."""
LONGEST_TURN_S = {"lcb": 120.0, "search": 330.0, "searchcode": 330.0, "text2sql": 60.0}
"""Maximum duration of a turn, with the environment's own tests, retries and queries."""


def describe(env_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an environment over these rows."""
    _check_id(env_id)
    rows = _Rows(env_id, options)
    turns = [_max_turns(env_id, row) for row in rows.all]
    said = {
        "reward_range": RANGES.get(env_id, (0.0, 1.0)),
        "max_turns": max(turns),
        "deterministic": env_id not in ("search", "searchcode"),
        "network": env_id in ("search", "searchcode"),
        "licence": LICENCE,
        "summary": "skyrl-gym's " + env_id + ".",
        "splits": rows.splits,
    }
    if env_id in LONGEST_TURN_S:
        said["timeouts"] = {"step_s": LONGEST_TURN_S[env_id]}
    return said


class Session:
    """One environment at a time, over the rows."""

    messages = True

    def __init__(self, env_id: str, options: dict[str, Any]) -> None:
        """Read the rows and make the environment of the first one, so that errors are early."""
        _check_id(env_id)
        self._id = env_id
        self._rows = _Rows(env_id, options)
        self._config = _config(env_id, options.get("env_config") or {})
        self.splits = self._rows.splits
        self.offers = ("oracle", "secrets") if env_id in ORACLES else ("secrets",)
        self._row: dict[str, Any] = self._rows.all[0]
        self._env: Any = None
        try:
            self._begin()
        except (AssertionError, KeyError, OSError, TypeError) as e:
            raise ValueError(
                f"a row of tasks does not fit {env_id}: {type(e).__name__}: {e}"
            ) from e

    def reset(self, seed: int, task: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Begin the episode of a row."""
        self._row = self._rows.all[seed]
        return self._begin(), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute one action."""
        out = self._env.step(action)
        done, reward = bool(out["done"]), float(out["reward"])
        info: dict[str, Any] = {}
        if done:
            info["success"] = reward >= 1.0
        return _messages(out["observations"]), reward, done, False, info

    def oracle(self) -> str | None:
        """Return the row's answer, in the format of its environment."""
        return ORACLES[self._id](self._row)

    def secrets(self) -> list[str]:
        """Return the ground truth, unless it is so short that texts contain it by chance."""
        truth = _truth(self._row)
        text = truth if isinstance(truth, str) else json.dumps(truth)
        return [text] if len(text) >= 8 else []

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()

    def _begin(self) -> Any:
        self.close()
        row = copy.deepcopy(self._row)
        prompt = row.pop("prompt")
        config = {} if self._config is None else {"env_config": self._config}
        self._env = importlib.import_module("skyrl_gym").make(self._id, extras=row, **config)
        messages, _ = self._env.init(prompt)
        return _messages(messages)


class _Rows:
    """All rows; each split is a range of them."""

    def __init__(self, env_id: str, options: dict[str, Any]) -> None:
        self.all: list[dict[str, Any]] = []
        self.splits: dict[str, list[int]] = {}
        if options.get("splits"):
            raise ValueError("tasks defines the splits: remove the option splits")
        for split, rows in _by_split(env_id, options.get("tasks")).items():
            if not rows:
                raise ValueError(f"tasks: split {split!r} has no rows")
            first = len(self.all)
            self.all += [_checked(row, split, i, env_id) for i, row in enumerate(rows)]
            self.splits[split] = [first, len(self.all)]


def _by_split(env_id: str, tasks: Any) -> dict[str, list[Any]]:
    if not tasks:
        raise ValueError(
            f"{env_id} has no questions of its own. Set tasks, such as "
            f"{{train: train.jsonl, test: test.jsonl}}, to rows in SkyRL's dataset form"
        )
    if isinstance(tasks, dict):
        return {split: _read(source) for split, source in tasks.items()}
    found: dict[str, list[Any]] = {}
    for row in _read(tasks):
        split = (row.get("extra_info") or {}).get("split") if isinstance(row, dict) else None
        if not split:
            raise ValueError(
                "tasks: a row has no extra_info.split; add it, or give the splits: tasks: "
                "{train: train.jsonl, test: test.jsonl}"
            )
        found.setdefault(str(split), []).append(row)
    return found


def _read(source: Any) -> list[Any]:
    if not isinstance(source, str):
        return list(source)
    try:
        return _read_file(source, os.stat(source).st_mtime_ns)
    except (OSError, ValueError, ImportError) as e:
        raise ValueError(f"tasks: {source}: {e}") from e


@functools.lru_cache(maxsize=8)
def _read_file(path: str, changed_ns: int) -> list[Any]:
    """Read rows; all environments of a worker share them."""
    if path.endswith(".parquet"):
        frame = importlib.import_module("pandas").read_parquet(path)
        return [_listed(row) for row in frame.to_dict("records")]
    with open(path, encoding="utf-8") as file:
        if path.endswith(".json"):
            return list(json.load(file))
        return [json.loads(line) for line in file if line.strip()]


def _listed(value: Any) -> Any:
    """Convert arrays in a parquet value to lists."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or hasattr(value, "tolist"):
        items = value.tolist() if hasattr(value, "tolist") else value
        return [_listed(item) for item in items] if isinstance(items, (list, tuple)) else items
    return value


def _checked(row: Any, split: str, index: int, env_id: str) -> dict[str, Any]:
    where = f"tasks: {split}, row {index}"
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}, not a mapping")
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        row = {**row, "prompt": [{"role": "user", "content": prompt}]}
    elif not (isinstance(prompt, list) and prompt and all("content" in m for m in prompt)):
        raise ValueError(f"{where}: prompt must be a list of {{role, content}}, or text")
    for field in ASKS_FOR.get(env_id, ("reward_spec",)):
        if field not in row:
            raise ValueError(f"{where} has no {field}, which {env_id} requires")
    other = row.get("env_class", env_id)
    if other != env_id:
        raise ValueError(f"{where} is for the environment {other!r}, not {env_id!r}")
    return dict(row)


def _check_id(env_id: str) -> None:
    known = importlib.import_module("skyrl_gym").registry
    if env_id not in known:
        near = difflib.get_close_matches(env_id, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise LookupError(f"skyrl-gym has no environment {env_id!r}.{hint}")


def _config(env_id: str, given: dict[str, Any]) -> Any:
    """Return ``env_config`` in the form of the environment; None if it has no config."""
    if env_id not in CONFIGS:
        if given:
            raise ValueError(f"{env_id} has no env_config: remove it")
        return None
    module, _, name = CONFIGS[env_id].partition(":")
    omegaconf = importlib.import_module("omegaconf").OmegaConf
    known = omegaconf.structured(getattr(importlib.import_module(module), name))
    try:
        return omegaconf.merge(known, omegaconf.create(given))
    except Exception as e:
        raise ValueError(f"env_config: {str(e).splitlines()[0]}") from e


def _max_turns(env_id: str, row: dict[str, Any]) -> int:
    said = row.get("max_turns") or (row.get("extra_info") or {}).get("max_turns")
    return int(said or TURNS[env_id]) if env_id in TURNS else 1


def _messages(messages: Any) -> Any:
    said = [{"role": m["role"], "content": m["content"]} for m in messages]
    return said or [{"role": "user", "content": ""}]


def _truth(row: dict[str, Any]) -> Any:
    return (row.get("reward_spec") or row.get("reward_model") or {}).get("ground_truth")


ORACLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "aime": lambda row: f"Answer: {_truth(row)}",
    "gsm8k": lambda row: f"#### {_truth(row)}",
    "search": lambda row: f"<answer>{_first(_truth(row)['target'])}</answer>",
    "searchcode": lambda row: f"#### {_truth(row)} <solution></solution>",
    "text2sql": lambda row: f"<think>.</think><solution>{_truth(row)}</solution>",
}
"""An answer that earns the full reward, by id."""


def _first(target: Any) -> Any:
    return target if isinstance(target, str) else target[0]
