"""Classes with the interface of ROLL's agentic environments (GEM's interface with additions).

``reset(seed=)`` returns observation and info; ``step(action)`` returns observation, reward,
terminated, truncated and info. The additions are: the policy reads the observation and then
``info["suffix"]``, at the beginning after ``info["env_instruction"]``. ``info["metrics"]`` contains
``success``, ``action_is_valid`` and other numbers. The info of ``reset`` can contain an answer.

Takes: ``module:Class``, and arguments for it. Gives: a session (see the package's docstring).
Never: requires ROLL or GEM, unless the class does.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

IMPORTS = ()
GLOBAL_RANDOM = True  # reset seeds `random` and `numpy.random`
KEPT_BACK = ("answer", "env_instruction", "metrics_agg_mode", "suffix")
"""Keys of ``info`` that only the adapter uses."""


def describe(env_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the description of the class, from its signature."""
    cls = _class(env_id, options)
    turns = dict(options.get("kwargs") or {}).get("max_steps", _default(cls, "max_steps"))
    return {"max_turns": turns, "summary": f"{env_id}, in the interface of ROLL's environments."}


class Session:
    """One object of the class."""

    def __init__(self, env_id: str, options: dict[str, Any]) -> None:
        cls = _class(env_id, options)
        arguments = dict(options.get("kwargs") or {})
        try:
            inspect.signature(cls).bind(**arguments)
        except TypeError as e:
            raise ValueError(f"kwargs: {e}") from e
        self._env = cls(**arguments)
        self.max_turns = getattr(self._env, "max_steps", None)
        offers = ["secrets"]
        if callable(getattr(self._env, "oracle", None)):
            offers.append("oracle")
        self.offers = tuple(offers)
        self._answer = ""

    def reset(self, seed: int, task: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self._env.reset(seed=seed)
        if observation is None:
            raise RuntimeError("reset returned no observation: there is no task for this seed")
        info = dict(info or {})
        self._answer = str(info.get("answer") or "")
        page = self._page(observation, info)
        instruction = str(info.get("env_instruction") or "")
        if instruction and instruction not in page:
            page = f"{instruction}\n{page}"
        return page, self._info(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Execute one action."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        info = dict(info or {})
        page = self._page("" if observation is None else observation, info)
        terminated = bool(terminated)  # some classes set both at the end
        return page, float(reward), terminated, bool(truncated) and not terminated, self._info(info)

    def oracle(self) -> str | None:
        """Return the next action of the expert."""
        advice = self._env.oracle()
        return None if advice is None else str(advice)

    def secrets(self) -> list[str]:
        """Return the answer in the info of ``reset``, unless it is too short to be detected."""
        return [self._answer] if len(self._answer) > 3 else []

    def close(self) -> None:
        """Close the environment, if it has a ``close`` method."""
        close = getattr(self._env, "close", None)
        if callable(close):
            close()

    def _page(self, observation: Any, info: dict[str, Any]) -> str:
        if not isinstance(observation, str):
            raise TypeError(f"its observation is of type {type(observation).__name__}, not text")
        suffix = str(info.get("suffix") or "")
        if not observation and not suffix and callable(getattr(self._env, "render", None)):
            suffix = self._drawn()
        return "\n".join(part for part in (observation, suffix) if part)

    def _drawn(self) -> str:
        try:
            drawn = self._env.render()
        except Exception:  # rendering is optional; many classes do not implement it
            return ""
        return drawn if isinstance(drawn, str) else ""

    def _info(self, info: dict[str, Any]) -> dict[str, Any]:
        metrics = dict(info.get("metrics") or {})
        kept = {k: v for k, v in info.items() if k not in KEPT_BACK and k != "metrics"}
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, (bool, int, float))}
        if "success" in metrics:
            kept["success"] = bool(metrics["success"])
        if "action_is_valid" in metrics:
            kept["invalid_action"] = not metrics["action_is_valid"]
        if numbers:
            kept["reward_components"] = numbers
        all_actions = getattr(self._env, "get_all_actions", None)
        if callable(all_actions):
            kept["available_actions"] = [str(action) for action in all_actions()]
        return kept


def _class(env_id: str, options: dict[str, Any]) -> Any:
    module, _, name = env_id.partition(":")
    if not module or not name:
        raise LookupError(f"{env_id!r} is not of the form 'module:Class'")
    folder = options.get("path")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name != module.split(".")[0]:
            raise
        raise LookupError(f"module {module!r} not found; set the option path to its folder") from e
    for part in name.split("."):
        if not hasattr(found, part):
            raise LookupError(f"module {module!r} has no {part!r}")
        found = getattr(found, part)
    missing = [m for m in ("reset", "step") if not callable(getattr(found, m, None))]
    if missing:
        raise LookupError(f"{env_id}: it has no {' and no '.join(missing)}")
    return found


def _default(cls: Any, name: str) -> Any:
    parameter = inspect.signature(cls).parameters.get(name)
    default = parameter.default if parameter is not None else None
    return default if isinstance(default, int) else None
