"""Gymnasium: environments of Discrete or Text actions, as text.

Takes: an id for ``gymnasium.make`` (``FrozenLake-v1``, ``my_module:Mine-v0``). Gives: a session
(see the package's docstring). Never: steps the environment with an invalid action.
"""

from __future__ import annotations

import json
import re
from typing import Any

IMPORTS = ("gymnasium", "numpy")

ACTIONS = {
    "FrozenLake": ["left", "down", "right", "up"],
    "CliffWalking": ["up", "right", "down", "left"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "Blackjack": ["stick", "hit"],
    "CartPole": ["left", "right"],
    "MountainCar": ["left", "wait", "right"],
    "Acrobot": ["left", "wait", "right"],
}
"""Names of the actions of Gymnasium's own environments, by the start of the id."""
RETURNS = {"Blackjack": (-1.0, 1.0), "CartPole": (0.0, 500.0), "MountainCar": (-200.0, 0.0)}
"""Smallest and largest return of environments without a transition table."""
MAX_TURNS = 100
"""Maximum number of turns, if the environment has no time limit."""
MAX_NUMBERS = 1000
"""Maximum number of values in an observation that is shown as text."""
DISCOUNT = 0.999
"""Discount of the oracle's plan, so that it prefers the shortest of equally good paths."""
_COLOUR = re.compile("\x1b\\[([0-9;]*)m(.*?)\x1b\\[0m", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_tables: dict[str, Any] = {}


def describe(env_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an environment."""
    env = _make(env_id, options)
    try:
        turns = _max_turns(env, options)
        return {
            "reward_range": _reward_range(env_id, env, options, turns),
            "max_turns": turns,
            "deterministic": not env.spec.nondeterministic,
            "licence": "MIT" if type(env.unwrapped).__module__.startswith("gymnasium.") else "",
            "summary": f"Gymnasium's {env_id}, as text.",
        }
    finally:
        env.close()


class Session:
    """One environment of Gymnasium."""

    def __init__(self, env_id: str, options: dict[str, Any]) -> None:
        self._env = _make(env_id, options)
        self._actions = _Actions(env_id, self._env.action_space, options.get("actions"))
        self._page = _Page(self._env, options.get("observation") or "auto")
        self.max_turns = _max_turns(self._env, options)
        self.prompt = f"This is {_name(env_id)}. {self._actions.told} Say nothing else."
        table = _table(env_id, self._env, options)
        self._penalty = _penalty(self._env, table, options)
        self._table = table if table is not None and table.deterministic else None
        self.offers = ("oracle",) if self._table is not None else ()
        self._state: Any = None
        self._relative = _Relative(table, self.max_turns) if _is_relative(options) else None

    def reset(self, seed: int, task: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        self._state, info = self._env.reset(seed=seed)
        if self._relative is not None:
            self._relative.begin(int(self._state))
        return self._page(self._state), self._info(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Execute one action; an invalid one costs the penalty and changes nothing."""
        page, reward, terminated, truncated, info = self._native_step(action)
        if self._relative is not None:
            reward, truncated = self._relative.earned(reward, terminated, truncated)
            if terminated or truncated:
                info["success"] = terminated and reward > 0
        return page, reward, terminated, truncated, info

    def oracle(self) -> str | None:
        """Return the best action, by value iteration over the transition table."""
        assert self._table is not None
        return str(self._actions.names[self._table.policy[int(self._state)]])

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _native_step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        chosen = self._actions.meant(action)
        if chosen is None:
            page = f"That is no action. {self._actions.told}\n{self._page(self._state)}"
            return page, -self._penalty, False, False, self._info({}, invalid_action=True)
        self._state, reward, terminated, truncated, info = self._env.step(chosen)
        return self._page(self._state), float(reward), terminated, truncated, self._info(info)

    def _info(self, info: dict[str, Any], **more: Any) -> dict[str, Any]:
        names = {"available_actions": self._actions.names} if self._actions.names else {}
        return {**info, **names, **more}


class _Actions:
    """The available actions, and the parsing of text to an action."""

    def __init__(self, env_id: str, space: Any, named: list[str] | None) -> None:
        from gymnasium import spaces

        self._space = space
        self.names: list[str] = []
        self.told = "Answer with text."
        if isinstance(space, spaces.Discrete):
            known = next((a for name, a in ACTIONS.items() if _name(env_id).startswith(name)), None)
            usual = known if known is not None and len(known) == space.n else None
            numbers = [str(int(space.start) + i) for i in range(int(space.n))]
            self.names = named or usual or numbers
            if len(self.names) != space.n:
                raise ValueError(
                    f"actions: {len(self.names)} names were given for {space.n} actions"
                )
            self.told = f"Answer with one of: {', '.join(self.names)}."
        elif type(space).__name__ != "Text":
            raise ValueError(f"its actions are {space}; only Discrete and Text are supported")

    def meant(self, said: str) -> Any:
        """Return the action for a text, or None if it is invalid."""
        tagged = _ANSWER.findall(said)
        words = (tagged[-1] if tagged else said).strip()
        if not self.names:
            return words if self._space.contains(words) else None
        lowered = [name.lower() for name in self.names]
        if words.lower() in lowered:
            return int(self._space.start) + lowered.index(words.lower())
        is_number = words.isascii() and words.isdecimal() and len(words) < 10
        number = int(words) if is_number else -1
        return number if self._space.contains(number) else None


class _Page:
    """Conversion of observations to text."""

    def __init__(self, env: Any, how: str) -> None:
        self._env = env
        draws = env.render_mode == "ansi"
        if how == "ansi" and not draws:
            raise ValueError("observation: ansi is set, but the environment has no text rendering")
        name = type(env.unwrapped).__name__
        self._special = {"TaxiEnv": _taxi, "BlackjackEnv": _blackjack}.get(name)
        self._how = how if how != "auto" or self._special is None else "special"
        if self._how == "auto":
            self._how = "ansi" if draws else "value"
        if self._how == "value":
            _refuse_large(env.observation_space)

    def __call__(self, observation: Any) -> str:
        if self._how == "special" and self._special is not None:
            return self._special(self._env.unwrapped, observation)
        if self._how == "ansi":
            return uncoloured(str(self._env.render()))
        return text_of(observation)


def uncoloured(drawn: str) -> str:
    """Return a terminal drawing as plain text, with brackets for coloured backgrounds."""

    def plain(found: Any) -> str:
        grounds = [code for code in found[1].split(";") if len(code) == 2 and code[0] == "4"]
        return f"[{found[2]}]" if grounds else str(found[2])

    return _COLOUR.sub(plain, drawn).strip("\n")


def text_of(value: Any) -> str:
    """Return an observation as text: numbers with few digits, one line for each key of a dict."""
    if isinstance(value, dict):
        return "\n".join(f"{key}: {text_of(inner)}" for key, inner in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(text_of(inner) for inner in value)
    if getattr(value, "ndim", 0):
        return "[" + (", " if value.ndim == 1 else ",\n").join(map(text_of, value)) + "]"
    number = value.item() if hasattr(value, "item") else value
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def _refuse_large(space: Any) -> None:
    from gymnasium import spaces

    try:
        size = spaces.flatdim(space) if not isinstance(space, spaces.Discrete) else 1
    except (NotImplementedError, ValueError):  # text and similar spaces are not limited
        return
    if isinstance(space, spaces.Box) and size > MAX_NUMBERS:
        raise ValueError(f"its observations contain {size} numbers (an image?), too many for text")


def _taxi(env: Any, state: Any) -> str:
    row, column, passenger, goal = env.decode(int(state))
    places = ["red (row 0, column 0)", "green (row 0, column 4)"]
    places += ["yellow (row 4, column 0)", "blue (row 4, column 3)"]
    where = "in the taxi" if passenger == 4 else f"at {places[passenger]}"
    cells = [line[1:-1] for line in env.desc[1:-1].astype(str).tolist()]
    rows = "\n".join("".join(line) for line in cells)
    return (
        f"The taxi is at row {row}, column {column}. The passenger is {where} and wants to go to "
        f"{places[goal]}.\nThe map (| is a wall):\n{rows}"
    )


def _blackjack(env: Any, observation: Any) -> str:
    total, dealer, ace = observation
    usable = "with a usable ace" if ace else "without a usable ace"
    return f"Your cards sum to {total}, {usable}. The dealer shows {dealer}."


class Table:
    """A transition table as arrays ``[states, actions, outcomes]``, and its best policy."""

    def __init__(self, transitions: Any, start: Any) -> None:
        import numpy as np

        num_outcomes = max(len(o) for actions in transitions.values() for o in actions.values())
        shape = (len(transitions), len(transitions[0]), num_outcomes)
        self.chance, self.reward = np.zeros(shape), np.zeros(shape)
        self.after, self.done = np.zeros(shape, int), np.ones(shape, bool)
        for state, actions in transitions.items():
            for action, outcomes in actions.items():
                for i, (chance, after, reward, done) in enumerate(outcomes):
                    at = (state, action, i)
                    self.chance[at], self.after[at] = chance, after
                    self.reward[at], self.done[at] = reward, done
        self.start = np.flatnonzero(np.asarray(start) > 0)
        self.deterministic = bool(np.all(self.chance.max(axis=2) > 1 - 1e-9))
        self._policy: Any = None

    @property
    def worst(self) -> float:
        """The smallest reward of one step."""
        return float(self.reward[self.chance > 0].min())

    @property
    def policy(self) -> Any:
        """The best action of each state, discounted so that shorter paths are better."""
        import numpy as np

        if self._policy is None:
            values = np.zeros(len(self.reward))
            for _ in range(10_000):
                after = np.where(self.done, 0.0, values[self.after])
                q = (self.chance * (self.reward + DISCOUNT * after)).sum(axis=2)
                new = q.max(axis=1)
                settled = np.abs(new - values).max() < 1e-9
                values = new
                if settled:
                    break
            self._policy = (q + 1e-7 >= q.max(axis=1, keepdims=True)).argmax(axis=1)
        return self._policy

    def best(self, turns: int, finishing: bool = True) -> Any:
        """Return the greatest return from each state, optionally without ever finishing."""
        import numpy as np

        seen = (self.chance > 0) & (finishing | ~self.done)
        value = np.zeros(len(self.reward))
        for _ in range(turns):
            outcomes = self.reward + np.where(self.done, 0.0, value[self.after])
            value = np.where(seen, outcomes, -np.inf).max(axis=(1, 2))
        return np.where(np.isfinite(value), value, self.worst * turns)

    def returns(self, turns: int, penalty: float) -> tuple[float, float]:
        """Return the smallest and greatest return of an episode of at most ``turns`` turns."""
        import numpy as np

        low = np.zeros(len(self.reward))
        seen = self.chance > 0
        for _ in range(turns):
            worst = self.reward + np.where(self.done, 0.0, low[self.after])
            low = np.minimum(np.where(seen, worst, np.inf).min(axis=(1, 2)), low - penalty)
        return float(low[self.start].min()), float(self.best(turns)[self.start].max())


class _Relative:
    """The return as a share of the possible return: 0 is never finishing, 1 the best path."""

    def __init__(self, table: Table | None, turns: int) -> None:
        if table is None or not table.deterministic:
            raise ValueError("reward: relative requires a deterministic transition table (P)")
        self._turns = turns
        self._best = table.best(turns)
        self._unfinished = table.best(turns, finishing=False)
        self._start = self._turn = 0
        self._total = 0.0

    def begin(self, state: int) -> None:
        """Start an episode."""
        self._start, self._turn, self._total = state, 0, 0.0

    def earned(self, reward: float, terminated: bool, truncated: bool) -> tuple[float, bool]:
        """Add a reward; return the relative reward, and whether the turn limit is reached."""
        self._total += reward
        self._turn += 1
        truncated = truncated or (self._turn >= self._turns and not terminated)
        if not (terminated or truncated):
            return 0.0, False
        low, high = float(self._unfinished[self._start]), float(self._best[self._start])
        if self._total >= high:
            return 1.0, truncated
        return max(0.0, (self._total - low) / (high - low)) if high > low else 0.0, truncated


def _is_relative(options: dict[str, Any]) -> bool:
    return options.get("reward") == "relative"


def _table(env_id: str, env: Any, options: dict[str, Any]) -> Table | None:
    transitions = getattr(env.unwrapped, "P", None)
    start = getattr(env.unwrapped, "initial_state_distrib", None)
    if not isinstance(transitions, dict) or start is None:
        return None
    if options.get("make", {}).get("map_name", "") is None:  # every make returns a new random map
        return Table(transitions, start)
    key = f"{env_id} {json.dumps(options.get('make'), sort_keys=True, default=str)}"
    if key not in _tables:
        _tables[key] = Table(transitions, start)
    return _tables[key]  # type: ignore[no-any-return]


def _penalty(env: Any, table: Table | None, options: dict[str, Any]) -> float:
    """Return the cost of an invalid action.

    The default is the cost of the worst step, so that an invalid action is never better than a
    valid one.
    """
    given = options.get("invalid_penalty")
    if given is not None:
        return float(given)
    return 1.0 if table is None else max(0.0, -table.worst)


def _reward_range(
    env_id: str, env: Any, options: dict[str, Any], turns: int
) -> tuple[float, float] | None:
    table = _table(env_id, env, options)
    if _is_relative(options):
        _Relative(table, turns)
        return 0.0, 1.0
    penalty = _penalty(env, table, options)
    if table is not None:
        return table.returns(turns, penalty)
    known = next((r for name, r in RETURNS.items() if _name(env_id).startswith(name)), None)
    return None if known is None else (known[0] - turns * penalty, known[1])


def _max_turns(env: Any, options: dict[str, Any]) -> int:
    return int(options.get("max_turns") or env.spec.max_episode_steps or MAX_TURNS)


def _name(env_id: str) -> str:
    return re.split(r"[/:]", env_id)[-1]


def _make(env_id: str, options: dict[str, Any]) -> Any:
    import gymnasium

    arguments = dict(options.get("make") or {})
    try:
        entry: Any = gymnasium.spec(env_id).entry_point
        creator = entry
        if isinstance(entry, str):
            creator = gymnasium.envs.registration.load_env_creator(entry)
        modes = getattr(creator, "metadata", {}).get("render_modes", ())
        if "ansi" in modes:
            arguments.setdefault("render_mode", "ansi")
        return gymnasium.make(env_id, disable_env_checker=True, **arguments)
    except gymnasium.error.DependencyNotInstalled as e:
        raise ImportError(str(e)) from e
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as e:
        raise LookupError(str(e)) from e
    except TypeError as e:
        raise ValueError(f"make: {e}") from e
