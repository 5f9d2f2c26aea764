"""Any environment as a session of the env server; runs in the sandbox, next to ``server.py``.

Takes: an id that is registered in the sandbox's RollArt, or ``module:Class``, for which the sandbox
needs no RollArt. Gives: ``describe`` and ``Session``, as :mod:`rollart_sandboxes.isolation.server`
expects them. Never: needs more than Python 3.8 and the standard library itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import platform
import threading
from typing import Any

IMPORTS: tuple[str, ...] = ()
MAX_CORPUS_CHARS = 1_000_000
"""More text does not improve a tokenizer."""
_OPTIONAL = ("oracle", "secrets", "num_tasks", "task_clusters", "corpus")
_making = threading.Lock()


def describe(env_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an environment, and the problems of its options.

    Raises:
        LookupError: If there is no such environment.
        ImportError: If its module cannot be imported.
    """
    with _making:
        said = _registered(env_id, options) if _rollart() else _bare(env_id, options)
    return {"python": platform.python_version(), "rollart": _rollart(), **said}


class Session:
    """One environment."""

    def __init__(self, env_id: str, options: dict[str, Any]) -> None:
        """Create the environment."""
        with _making:  # packages with import cycles do not support two threads
            self._env = _make(env_id, options)
        self.offers = tuple(name for name in _OPTIONAL if hasattr(self._env, name))
        space = getattr(self._env, "observation_space", None)
        self.messages = type(space).__name__ == "Messages"

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Begin an episode."""
        answer = self._env.reset(seed=seed, options=options)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError("reset must return (observation, info)")
        return answer

    def step(self, action: str) -> Any:
        """Act."""
        answer = self._env.step(action)
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise TypeError("step must return (observation, reward, terminated, truncated, info)")
        return answer

    def oracle(self) -> Any:
        """Return the expert's next action."""
        return self._env.oracle()

    def secrets(self) -> Any:
        """Return texts that the agent must not read."""
        return self._env.secrets()

    def num_tasks(self, split: str) -> Any:
        """Return the number of tasks of a split."""
        return self._env.num_tasks(split)

    def task_clusters(self, split: str) -> Any:
        """Return a name for each task of a split; similar tasks have the same name."""
        return self._env.task_clusters(split)

    def corpus(self) -> Any:
        """Yield text for a tokenizer, up to about ``MAX_CORPUS_CHARS`` characters."""
        left = MAX_CORPUS_CHARS
        for text in self._env.corpus():
            yield text
            left -= len(text)
            if left < 0:
                return

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _rollart() -> bool:
    return importlib.util.find_spec("rollart_core") is not None


def _make(env_id: str, options: dict[str, Any]) -> Any:
    if _rollart():
        from rollart_core.plugins import registry

        return registry.make(env_id, **options)
    return _class(env_id)(**options)


def _registered(env_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """Describe an environment that is registered in this Python's RollArt."""
    from dataclasses import asdict

    from rollart_core.plugins import registry

    found = registry.find("environments", env_id)
    problems = registry.option_problems("environments", env_id, options)
    said: dict[str, Any] = {
        "problems": [[list(p.path), p.message] for p in problems],
        "distribution": found.plugin.distribution,
        "version": found.plugin.version,
    }
    if problems:
        return said
    registry.resolve("environments", env_id)  # raises if its requirements are missing
    model = registry.config_model("environments", env_id)
    checked = options if model is None else model(**options).model_dump(mode="json")
    return {**said, "options": checked, "spec": asdict(registry.env_spec(env_id, options))}


def _bare(env_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """Describe a class, without RollArt."""
    parameters = inspect.signature(_class(env_id)).parameters.values()
    fields = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    problems = []
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = [p.name for p in fields]
        problems = [[[n], "unknown key"] for n in options if n not in known]
    missing = [p.name for p in fields if p.default is p.empty and p.name not in options]
    return {"problems": problems + [[[n], "is missing"] for n in missing], "options": options}


def _class(env_id: str) -> Any:
    module, _, name = env_id.partition(":")
    if not module or not name or ":" in name:
        raise LookupError(
            f"the sandbox has no RollArt, so it has no id {env_id!r}: set the class as "
            "module:Class, or install rollart in the sandbox too"
        )
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise LookupError(f"module {module!r} in the sandbox has no {part!r}")
        found = getattr(found, part)
    return found
