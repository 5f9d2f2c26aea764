"""The key ``isolation`` of an environment's options: what wall it runs behind, and in which Python.

Takes: what a run config gives. Gives: a frozen :class:`Isolation`. Never: imports a wall.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rollart_core.config.base import PositiveInt
from rollart_core.config.problems import Problem, of_validation
from rollart_core.config.run import Deadlines
from rollart_core.config.sandbox_options import PoolOptions
from rollart_core.errors import ConfigError
from rollart_core.plugins import registry

KEY = registry.ISOLATION
SANDBOX = {"docker": "docker", "bubblewrap": "bubblewrap", "venv": "process"}
"""The sandbox behind each kind."""
_TTL_S = 8 * 3600.0
_WAIT_SHARE = 0.8
"""Of ``reset_s``: the wait for room ends before, with a reason, and leaves time for the start."""


class Isolation(BaseModel):
    """Where an environment runs; all other keys are options of the sandbox."""

    model_config = ConfigDict(frozen=True, extra="allow")

    kind: Literal["docker", "bubblewrap", "venv"]
    """`docker`: in a container; `bubblewrap`: in namespaces of this machine; `venv`: in another
    Python without a wall, for its dependencies only."""
    python: str | None = None
    """Python (3.8 or newer) that has the environment; in a container a path of the image. With
    `requires`: what the venv is made from. none: this one, or the image's `python3`."""
    venv: str | None = None
    """Folder of a virtual environment that has it."""
    requires: tuple[str, ...] = ()
    """Requirements, as pip takes them: a virtual environment with them is made once and kept."""
    num_seats: PositiveInt = 8
    """Most episodes in one box at once."""
    episodes_per_box: PositiveInt = 1000
    """Episodes after which a box is replaced."""
    pool: PoolOptions = PoolOptions()
    """How many boxes there may be, and how many are kept ready."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_python(self) -> Isolation:
        if self.venv is not None and (self.requires or self.python is not None):
            raise ValueError("venv names a Python: leave requires and python out, or venv")
        if self.kind == "docker" and (self.venv is not None or self.requires):
            raise ValueError("a container has its own Python: install in the image (rollart build)")
        if self.kind == "venv" and not (self.venv or self.requires or self.python):
            raise ValueError("kind venv needs one of venv, requires and python")
        if self.venv == "" or "" in self.requires:
            raise ValueError("venv and requires must not hold empty text")
        flags = [r for r in self.requires if r.startswith("-")]
        if flags:
            raise ValueError(
                f"requires: {flags[0]!r} is an option of pip, set it by its environment variable "
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
        """Return what was given, as plain values that make an equal one."""
        return self.model_dump(mode="json", exclude_unset=True)


def split(options: Mapping[str, object]) -> tuple[object | None, dict[str, object]]:
    """Return the isolation among an environment's options (None: there is none), and the rest."""
    rest = {name: value for name, value in options.items() if name != KEY}
    return options.get(KEY), rest


def problems_of(given: object) -> list[Problem]:
    """Return what is wrong with an isolation."""
    try:
        isolation = Isolation.model_validate(given)
    except ValidationError as e:
        return [p.under(KEY) for p in of_validation(e, Isolation)]
    faults = registry.option_problems("sandboxes", isolation.sandbox, isolation.options)
    return [fault.under(KEY) for fault in faults]


def fit(
    options: Mapping[str, Any], deadlines: Deadlines, reset_s: float
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the options of an isolated environment in line with the deadlines, and what is wrong.

    Args:
        options: Checked.
        deadlines: Of the run.
        reset_s: Seconds a reset may take, which the wait for a box is part of.
    """
    isolation, problems = Isolation.model_validate(options[KEY]), []
    ttl_s, wait_s = float(isolation.options["ttl_s"]), isolation.pool.wait_s
    if deadlines.episode_s >= ttl_s / 2:  # an episode may begin in the first half of a box's life
        message = (
            f"{ttl_s:g} s: must be more than twice deadlines.episode_s "
            f"({deadlines.episode_s:g} s), since a box serves many episodes"
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
    """Return an isolation.

    Raises:
        ConfigError: Naming all that is wrong with it.
    """
    problems = problems_of(given)
    if problems:
        raise ConfigError("\n".join(problem.within() for problem in problems))
    return Isolation.model_validate(given)
