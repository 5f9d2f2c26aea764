"""TextArena: its single-player games, as text.

An observation contains the messages of the game since the last action, one per line (``history:
true``: the whole game so far, as TextArena's own wrapper formats it). Actions are in square
brackets; the wrappers of a game add missing ones. TextArena gives one reward, at the end.

Takes: ids of TextArena's registry. Gives: see :mod:`rollart_plugins.adapters.sessions`.
Never: plays against an opponent, or downloads a corpus; the error names a missing one.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

IMPORTS = ()
"""Empty: TextArena draws from the global generators, so it is imported under the guard."""
GLOBAL_RANDOM = True
LICENCE = "MIT"
RANGES = {
    "Bandit": (-1.0, 1.0),
    "LightsOut": (-24.0, 1.0),
    "Secretary": (-1.0, 1.0),
    "Set": (0.0, 20.0),
}
"""Rewards of games that are not between 0 and 1."""
MAX_TURNS = 30
ACTION = "PLAYER_ACTION"
"""Type of a message that repeats the player's action."""


class Unavailable(ValueError):
    """The game exists, but the installed packages cannot run it."""


def describe(env_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a game."""
    spec = _checked(env_id)
    settings = {**spec.kwargs, **options.get("make", {})}
    turns = settings.get("max_turns") or settings.get("num_turns") or settings.get("num_guesses")
    return {
        "reward_range": RANGES.get(_game(spec), (0.0, 1.0)),
        "max_turns": int(turns or MAX_TURNS),
        "deterministic": True,
        "licence": LICENCE,
        "summary": "TextArena's " + env_id + ".",
    }


class Session:
    """One game."""

    def __init__(self, env_id: str, options: dict[str, Any]) -> None:
        """Make the game."""
        spec = _checked(env_id)
        self._history = bool(options.get("history", False))
        with _no_download():
            try:
                self._env = _textarena().make(env_id, **options.get("make", {}))
            except TypeError as e:
                raise ValueError(f"make: the arguments do not fit {env_id}: {e}") from e
        self._layers = list(_layers(self._env))
        self._game = self._layers[-1]
        name = _game(spec)
        self._oracle = ORACLES.get(name)
        self._secret = SECRETS.get(name)
        self._top = RANGES.get(name, (0.0, 1.0))[1]
        offers = {"oracle": self._oracle, "secrets": self._secret}
        self.offers = tuple(name for name, found in offers.items() if found)

    def reset(self, seed: int, task: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        for layer in self._layers:
            # TextArena's wrappers would otherwise keep the texts of the previous game.
            vars(layer).get("full_observations", {}).clear()
        with _prints_aside():
            self._env.reset(num_players=1, seed=seed)
        return self._observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Execute one action."""
        with _prints_aside():
            done, _ = self._env.step(action)
        info: dict[str, Any] = {"invalid_action": self._game.state.error_count > 0}
        if not done:
            return self._observation(), 0.0, False, False, info
        rewards, said = self._env.close()
        # For a second invalid move, four games return their text as the reward.
        reward = 0.0 if isinstance(rewards[0], str) else float(rewards[0])
        info["success"] = reward >= self._top
        info["invalid_action"] = bool(said[0].get("invalid_move"))
        reason = said[0].get("reason") or ""
        return "\n".join(filter(None, (self._new(), reason))), reward, True, False, info

    def oracle(self) -> str | None:
        """Return the winning move, from the game's state."""
        assert self._oracle is not None
        return self._oracle(self._game)

    def secrets(self) -> list[str]:
        """Return the text to guess."""
        assert self._secret is not None
        return [self._secret(self._game)]

    def close(self) -> None:
        """Do nothing; no resources are open."""

    def _observation(self) -> str:
        if self._history:
            _, text = self._env.get_observation()
            return str(text).lstrip("\n")
        return self._new()

    def _new(self) -> str:
        """Return the new messages of the game."""
        _, messages = self._game.get_observation()
        # Some games pass the player's action with its fields in another order, so that it has no
        # type.
        said = [text for _, text, kind in messages if getattr(kind, "name", ACTION) != ACTION]
        return "\n".join(said)


def _prints_aside() -> Any:
    """Redirect the output of a game to stderr, because stdout can contain JSON of the caller."""
    return contextlib.redirect_stdout(sys.stderr)


def _textarena() -> Any:
    return importlib.import_module("textarena")


def _layers(env: Any) -> Iterator[Any]:
    """Yield the wrappers of a game from the outermost inwards, and then the game."""
    wrapper = _textarena().Wrapper
    while isinstance(env, wrapper):
        yield env
        env = env.env
    yield env


def _game(spec: Any) -> str:
    """Return the name of a game, which is that of its module; a game can have several sizes."""
    return str(spec.entry_point).split(".")[2]


def _checked(env_id: str) -> Any:
    """Return the registry entry of a game, if it is a single-player game that can run here."""
    _textarena()
    known = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    if env_id not in known:
        near = difflib.get_close_matches(env_id, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise LookupError(f"TextArena has no environment {env_id!r}.{hint}")
    spec = known[env_id]
    try:
        with _no_download():
            module = importlib.import_module(str(spec.entry_point).partition(":")[0])
    except SyntaxError as e:
        version = ".".join(map(str, sys.version_info[:2]))
        raise Unavailable(
            f"{env_id}: TextArena's code for it does not run on Python {version}; set the option "
            f"python to a newer one ({e.msg})"
        ) from e
    source = inspect.getsource(module)
    if "SinglePlayerState" not in source:
        raise Unavailable(
            f"{env_id} is a multiplayer game; this adapter only supports single-player games"
        )
    if "OpenRouter" in source and not os.environ.get("OPENROUTER_API_KEY"):
        raise Unavailable(f"{env_id} uses a model over the network: set OPENROUTER_API_KEY")
    _check_corpora(env_id, source)
    return spec


def _check_corpora(env_id: str, source: str) -> None:
    needed = ["words"] if "nltk" in source or "EnglishDictionary" in source else []
    needed += ["averaged_perceptron_tagger_eng"] if "pos_tag" in source else []
    nltk: Any = importlib.import_module("nltk")
    for name in needed:
        try:
            if name == "words":
                nltk.corpus.words.words("en-basic")
            else:
                nltk.pos_tag(["word"])
        except LookupError as e:
            raise Unavailable(
                f"{env_id} requires NLTK's {name}, which is missing: python -m nltk.downloader "
                f"{' '.join(needed)}"
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


def _frozen_lake(game: Any) -> str | None:
    """Return the first step of a shortest path that avoids the holes."""
    state = game.state.game_state
    start, goal, grid = tuple(state["player_pos"]), tuple(state["goal_pos"]), state["grid"]
    queue = deque([(start, "")])
    seen = {start}
    while queue:
        (row, column), first = queue.popleft()
        if (row, column) == goal:
            return f"[{first}]"
        for name, (down, right) in game.actions.items():
            cell = (row + down, column + right)
            inside = 0 <= cell[0] < game.size and 0 <= cell[1] < game.size
            if inside and cell not in seen and grid[cell[0]][cell[1]] != "H":
                seen.add(cell)
                queue.append((cell, first or name))
    return None


def _hanoi(game: Any) -> str | None:
    target, move = "C", None
    for disk in range(game.num_disks, 0, -1):
        towers = game.state.game_state["towers"]
        tower = next(name for name, disks in towers.items() if disk in disks)
        if tower != target:
            move = f"[{tower} {target}]"
            target = ({"A", "B", "C"} - {tower, target}).pop()
    return move


def _sudoku(game: Any) -> str | None:
    board = game.state.game_state["board"]
    for row, (have, want) in enumerate(zip(board, game.full_grid), start=1):
        for column, (value, right) in enumerate(zip(have, want), start=1):
            if value == 0:
                return f"[{row} {column} {right}]"
    return None


def _secretary(game: Any) -> str:
    state = game.state.game_state
    now = state["draws"][state["current_idx"] - 1]
    return "[accept]" if now == max(state["draws"]) else "[continue]"


def _code(game: Any) -> str:
    return " ".join(map(str, game.state.game_state["secret_code"]))


ORACLES: dict[str, Callable[[Any], str | None]] = {
    "FrozenLake": _frozen_lake,
    "GuessTheNumber": lambda game: f"[{game.game_number}]",
    "Hangman": lambda game: f"[{game.state.game_state['target_word']}]",
    "Mastermind": lambda game: f"[{_code(game)}]",
    "Secretary": _secretary,
    "Sudoku": _sudoku,
    "TowerOfHanoi": _hanoi,
    "Wordle": lambda game: f"[{game.state.game_state['secret_word']}]",
}
"""The expert's next action, from the state, by game."""
SECRETS: dict[str, Callable[[Any], str]] = {
    "Hangman": lambda game: str(game.state.game_state["target_word"]),
    "Mastermind": _code,
    "Wordle": lambda game: str(game.state.game_state["secret_word"]),
}
"""The texts that the agent must not read, by game."""
