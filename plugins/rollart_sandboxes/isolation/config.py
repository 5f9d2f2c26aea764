"""The key ``isolation`` of an environment's options: its sandbox type, and its Python.

Takes: the value in a run config. Gives: a frozen :class:`Isolation`. Never: imports a sandbox type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rollart_core.config.base import PositiveInt, old_names
from rollart_core.config.problems import Problem, of_validation
from rollart_core.config.run import Deadlines
from rollart_core.config.sandbox_options import PoolOptions
from rollart_core.errors import ConfigError
from rollart_core.plugins import registry

KEY = registry.ISOLATION
SANDBOX = {"docker": "docker", "bubblewrap": "bubblewrap", "venv": "process"}
"""The sandbox type of each kind."""
_TTL_S = 8 * 3600.0
_WAIT_SHARE = 0.8
"""Share of ``reset_s``: the wait for capacity ends earlier, to leave time for the start."""


class Isolation(BaseModel):
    """Where an environment runs. All other keys are options of the sandbox."""

    model_config = ConfigDict(frozen=True, extra="allow")
    _old_names = old_names(num_seats="num_slots", episodes_per_box="episodes_per_sandbox")

    kind: Literal["docker", "bubblewrap", "venv"]
    """`docker`: in a container; `bubblewrap`: in Linux namespaces; `venv`: in another Python,
    without isolation, only for its dependencies."""
    python: str | None = None
    """Python (3.8 or newer) that has the environment; for a container, a path in the image. With
    `requires`: the Python that creates the venv. Default: this Python, or the image's `python3`."""
    venv: str | None = None
    """Folder of a virtual environment that has the environment installed."""
    requires: tuple[str, ...] = ()
    """Requirements in pip's format. A virtual environment with them is created once and kept."""
    num_slots: PositiveInt = 8
    """Maximum number of concurrent episodes in one sandbox."""
    episodes_per_sandbox: PositiveInt = 1000
    """Number of episodes after which a sandbox is replaced."""
    pool: PoolOptions = PoolOptions()
    """Limits of the number of sandboxes, and how many are kept ready."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_python(self) -> Isolation:
        if self.venv is not None and (self.requires or self.python is not None):
            raise ValueError("venv already selects a Python: remove requires and python, or venv")
        if self.kind == "docker" and (self.venv is not None or self.requires):
            raise ValueError("a container has its own Python: install in the image (rollart build)")
        if self.kind == "venv" and not (self.venv or self.requires or self.python):
            raise ValueError("kind venv needs one of venv, requires and python")
        if self.venv == "" or "" in self.requires:
            raise ValueError("venv and requires must not contain empty text")
        flags = [r for r in self.requires if r.startswith("-")]
        if flags:
            raise ValueError(
                f"requires: {flags[0]!r} is an option of pip: set its environment variable instead "
                "(PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX)"
            )
        return self

    @property
    def sandbox(self) -> str:
        """Id or alias of the sandbox."""
        return SANDBOX[self.kind]

    @property
    def options(self) -> dict[str, Any]:
        """Options of the sandbox."""
        given = dict(self.model_extra or {})
        trusted = {"trusted": True} if self.kind == "venv" else {}
        return {"ttl_s": _TTL_S, **given, **trusted}

    def as_dict(self) -> dict[str, Any]:
        """Return the given values, as plain values that validate to an equal object."""
        return self.model_dump(mode="json", exclude_unset=True)


def split(options: Mapping[str, object]) -> tuple[object | None, dict[str, object]]:
    """Return the isolation among an environment's options (None if there is none), and the rest."""
    rest = {name: value for name, value in options.items() if name != KEY}
    return options.get(KEY), rest


def problems_of(given: object) -> list[Problem]:
    """Return the problems of an isolation."""
    try:
        isolation = Isolation.model_validate(given)
    except ValidationError as e:
        return [p.under(KEY) for p in of_validation(e, Isolation)]
    faults = registry.option_problems("sandboxes", isolation.sandbox, isolation.options)
    return [fault.under(KEY) for fault in faults]


def fit(
    options: Mapping[str, Any], deadlines: Deadlines, reset_s: float
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the options of an isolated environment, adapted to the deadlines, and their problems.

    Args:
        options: The checked options.
        deadlines: The deadlines of the run.
        reset_s: Maximum seconds of a reset, which includes the wait for a sandbox.
    """
    isolation, problems = Isolation.model_validate(options[KEY]), []
    ttl_s, wait_s = float(isolation.options["ttl_s"]), isolation.pool.wait_s
    if deadlines.episode_s >= ttl_s / 2:  # an episode may start in the first half of the lifetime
        message = (
            f"{ttl_s:g} s: must be more than twice deadlines.episode_s "
            f"({deadlines.episode_s:g} s), since a sandbox runs many episodes"
        )
        problems.append(Problem((KEY, "ttl_s"), message))
    if wait_s is not None and wait_s >= reset_s:
        message = f"{wait_s:g} s: must be shorter than deadlines.reset_s ({reset_s:g} s)"
        problems.append(Problem((KEY, "pool", "wait_s"), message))
    given = isolation.as_dict()
    if wait_s is None:
        given["pool"] = {**given.get("pool", {}), "wait_s": _WAIT_SHARE * reset_s}
    return {**options, KEY: given}, problems


def checked(given: object) -> Isolation:
    """Return a validated isolation.

    Raises:
        ConfigError: With all of its problems.
    """
    problems = problems_of(given)
    if problems:
        raise ConfigError("\n".join(problem.within() for problem in problems))
    return Isolation.model_validate(given)
