r"""gem (``gem-llm``): text games, Reasoning Gym and dataset questions.

An observation is gem's own, between the prefix and suffix of its info, as in gem's observation
wrappers. The conversation contains the history. Actions are free text: most of these environments
read the last ``\boxed{...}`` in it. Without one, they end the episode with a reward of -0.1.

Takes: ids of gem's registry. Gives: see :mod:`rollart_plugins.adapters.sessions`.
Never: downloads a corpus; the error names a missing one.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

IMPORTS = ()
"""Empty: gem draws from the global generators during its import, so it is imported under the
guard."""
GLOBAL_RANDOM = True
LICENCE = "Apache-2.0"
RANGES = {"rg": (0.0, 1.0), "math": (0.0, 1.0), "logic": (0.0, 1.0), "qa": (0.0, 1.0)}
"""Returns by family. The other families can end with a format error of -0.1."""
WITH_DATASET = ("math", "code", "logic", "qa", "eval")
NEEDS_WORDS = ("game:Wordle", "game:Hangman", "game:WordSearch")
MAX_TURNS = 50


class Unavailable(ValueError):
    """The environment exists, but the installed packages cannot run it."""


def describe(env_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an environment."""
    spec = _spec(env_id)
    _check_needs(env_id, options)
    family = env_id.partition(":")[0]
    turns = {**spec.kwargs, **options.get("make", {})}.get("max_turns", 1)
    return {
        "reward_range": RANGES.get(family, (-0.1, 1.0)),
        "max_turns": (turns or MAX_TURNS) if family == "game" else 1,
        "deterministic": True,
        "licence": LICENCE,
        "summary": "gem's " + env_id + ".",
    }


class Session:
    """One gem environment; a dataset has one for training and one for all other splits."""

    def __init__(self, env_id: str, options: dict[str, Any]) -> None:
        """Make the environment of the training split, so that errors are raised early."""
        _spec(env_id)
        _check_needs(env_id, options)
        self._id = env_id
        self._options = options
        self._envs: dict[str, Any] = {}
        self._env = self._env_of("train")
        self.offers = _offers(self._env)

    def reset(self, seed: int, task: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        self._env = env = self._env_of(task["split"])
        if self._id.startswith("rg:"):
            # Its counter makes a new dataset every 500 resets, so that a seed would give another
            # question.
            env.set_state({"idx": 0, "data": None})
        observation, info = env.reset(seed=seed)
        return _text(observation, info), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Execute one action."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        told = {k: v for k, v in info.items() if k not in ("prefix", "suffix")}
        if "correct" in info:
            told["success"] = bool(info["correct"])
        # At its turn limit, gem sets both flags. The limit is a rule of the game, so it is an end.
        cut = truncated and not terminated
        return _text(observation, info), float(reward), terminated, cut, told

    def oracle(self) -> str | None:
        """Return the answer, from the environment's state."""
        return ORACLES[type(self._env).__name__](self._env)

    def secrets(self) -> list[str]:
        """Return the word to guess."""
        return [self._env.secret_word]

    def close(self) -> None:
        """Release all resources, including gem's process pools."""
        for env in self._envs.values():
            pool = getattr(env, "mp_pool", None)
            if pool is not None:
                pool.terminate()
                pool.join()
        self._envs.clear()

    def _env_of(self, split: str) -> Any:
        fixed = self._id.startswith("game:")
        half = "train" if fixed or split in ("train", "warm") else "other"
        if half not in self._envs:
            self._envs[half] = self._make(split, held_out=half == "other")
        return self._envs[half]

    def _make(self, split: str, *, held_out: bool) -> Any:
        spec = _spec(self._id)
        kwargs = dict(self._options.get("make", {}))
        if self._id.startswith("rg:"):
            # Question i is made from seed + i. A seed that is closer would repeat questions.
            said = {**spec.kwargs, **kwargs}
            kwargs["seed"] = said["seed"] + said["size"] * held_out
        path = self._options.get("dataset")
        if path:
            kwargs["dataset"] = _read_dataset(path.replace("{split}", split))
        with _no_download():
            try:
                return _gem().make(self._id, **kwargs)
            except TypeError as e:
                raise ValueError(f"make: the arguments do not fit {self._id}: {e}") from e


def _gem() -> Any:
    """Import gem, and restore the root logger that gem configures."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        importlib.import_module("gem.envs")
        return importlib.import_module("gem")
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def _spec(env_id: str) -> Any:
    _gem()
    known = importlib.import_module("gem.envs.registration").ENV_REGISTRY
    if env_id in known:
        return known[env_id]
    near = difflib.get_close_matches(env_id, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise LookupError(f"gem has no environment {env_id!r}.{hint}")


def _check_needs(env_id: str, options: dict[str, Any]) -> None:
    """Reject environments that would fail, or download data, at the first reset."""
    family = env_id.partition(":")[0]
    if env_id.startswith(NEEDS_WORDS):
        _check_words(env_id)
    if family == "game" and None in _spec(env_id).kwargs.values() and "FifteenPuzzle" in env_id:
        raise Unavailable(f"gem itself cannot make {env_id}; use -easy or -hard")
    if family in WITH_DATASET:
        try:
            importlib.import_module(_spec(env_id).entry_point.partition(":")[0])
        except ModuleNotFoundError as e:
            raise Unavailable(
                f"{env_id} requires {e.name}, which gem-llm does not install: pip install {e.name}"
            ) from e
    elif options.get("dataset"):
        raise ValueError(f"{env_id} does not use a dataset: remove the option dataset")


def _check_words(env_id: str) -> None:
    words = importlib.import_module("nltk.corpus").words
    try:
        words.words("en-basic")
    except LookupError as e:
        raise Unavailable(
            f"{env_id} requires NLTK's word list, which is missing: python -m nltk.downloader words"
        ) from e


@contextlib.contextmanager
def _no_download() -> Iterator[None]:
    """Prevent games from downloading NLTK corpora at every start."""
    nltk: Any = importlib.import_module("nltk")
    download, nltk.download = nltk.download, lambda *args, **kwargs: True
    try:
        yield
    finally:
        nltk.download = download


def _read_dataset(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as e:
        raise ValueError(f"dataset {path}: {e}") from e
    return importlib.import_module("datasets").Dataset.from_list(rows)


def _text(observation: str, info: dict[str, Any]) -> str:
    parts = (info.get("prefix", ""), observation, info.get("suffix", ""))
    return "\n".join(part.rstrip("\n") for part in parts if part)


def _offers(env: Any) -> tuple[str, ...]:
    name = type(env).__name__
    offers = ("oracle",) if name in ORACLES else ()
    if name == "ReasoningGymEnv" and not _scores_own_answer(env):
        offers = ()
    return (*offers, "secrets") if hasattr(env, "secret_word") else offers


def _scores_own_answer(env: Any) -> bool:
    """Return whether a dataset's own answer earns the full reward, which is usually the case."""
    for index in range(3):
        entry = env.ds[index]
        answer = entry["answer"]
        if not isinstance(answer, str) or env.reward_fn(answer=answer, entry=entry) != 1:
            return False
    return True


def _boxed(answer: object) -> str:
    return "\\boxed{" + str(answer) + "}"


def _sudoku(env: Any) -> str | None:
    for row, (have, want) in enumerate(zip(env.board, env.full_grid), start=1):
        for column, (value, right) in enumerate(zip(have, want), start=1):
            if value == 0:
                return _boxed(f"{row} {column} {right}")
    return None


def _hanoi(env: Any) -> str | None:
    target, move = "C", None
    for disk in range(env.num_disks, 0, -1):
        tower = next(name for name, disks in env.board.items() if disk in disks)
        if tower != target:
            move = f"{tower} {target}"
            target = ({"A", "B", "C"} - {tower, target}).pop()
    return None if move is None else _boxed(move)


ORACLES: dict[str, Callable[[Any], str | None]] = {
    "GuessTheNumberEnv": lambda env: _boxed(env.game_number),
    "MastermindEnv": lambda env: _boxed(" ".join(map(str, env.game_code))),
    "WordleEnv": lambda env: _boxed(env.secret_word),
    "HangmanEnv": lambda env: _boxed(env.secret_word),
    "SudokuEnv": _sudoku,
    "TowerofHanoiEnv": _hanoi,
    "ReasoningGymEnv": lambda env: _boxed(env.data["answer"]),
    "MathEnv": lambda env: _boxed(env.answer[0] if isinstance(env.answer, list) else env.answer),
}
"""The expert's next action, from the state of the environment, by class."""
