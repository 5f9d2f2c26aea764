"""The adapter of skyrl-gym; see ``sessions/skyrl_gym.py``.

Takes: options of ``skyrl-gym::ID``. Gives: the config model and the adapter.
Never: imports skyrl-gym. The session does that, in this Python or in another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from pydantic import Field, field_validator

from rollart_plugins.adapters.base import AdapterOptions, ForeignAdapter

Rows: TypeAlias = str | list[dict[str, Any]]


class SkyrlGymOptions(AdapterOptions):
    """Options of ``skyrl-gym::ID``."""

    tasks: Rows | dict[str, Rows] = Field(default_factory=dict)
    """Rows in SkyRL's dataset form, or a file of them (.jsonl, .json, .parquet), for each split; or
    one source whose rows contain `extra_info.split`."""
    env_config: dict[str, Any] = Field(default_factory=dict)
    """SkyRL's settings of the environment, such as `search_url` and `db_path`."""

    @field_validator("tasks")
    @classmethod
    def _from_anywhere(cls, value: Rows | dict[str, Rows]) -> Rows | dict[str, Rows]:
        if isinstance(value, dict):
            return {split: _absolute(source) for split, source in value.items()}
        return _absolute(value)


class SkyrlGymAdapter(ForeignAdapter):
    """Environments of ``skyrl_gym.make``."""

    session: ClassVar[str] = "skyrl_gym"
    options: ClassVar[type[AdapterOptions]] = SkyrlGymOptions
    module: ClassVar[str] = "skyrl_gym"
    package: ClassVar[str] = "skyrl-gym"


def _absolute(source: Rows) -> Rows:
    return str(Path(source).expanduser().absolute()) if isinstance(source, str) else source
