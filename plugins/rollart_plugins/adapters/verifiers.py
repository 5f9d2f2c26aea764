"""The adapter of verifiers' tasksets (its v1 API): agent tasks, played by a harness of verifiers.

Takes: the id of an installed taskset, and options. Gives: agent tasks and their spec. Never:
imports verifiers before one of them is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rollart_core.config.base import Number, PositiveInt, Seconds
from rollart_core.contracts.adapter import EnvAdapter
from rollart_core.contracts.env import EnvSpec, Timeouts
from rollart_core.errors import PluginError
from rollart_plugins.adapters.fields import Folder, Splits
from rollart_plugins.adapters.verifiers_task import HARNESS, VerifiersTask, summary_of

DEFAULT_TURNS = 10


class VerifiersOptions(BaseModel):
    """Options of ``verifiers::TASKSET``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    taskset: dict[str, Any] = Field(default_factory=dict)
    """The taskset's own configuration, as under verifiers' `--env.taskset`."""
    harness: dict[str, Any] = Field(default_factory=lambda: {"id": HARNESS})
    """The program that plays, as under verifiers' `--env.agent.harness`. `rollart_chat` is a chat
    loop with the taskset's tools, in the env worker's process; verifiers' own (`null`, `bash`, ...)
    are programs that it starts with `uv`."""
    runtime: dict[str, Any] = Field(default_factory=lambda: {"type": "subprocess"})
    """Where that program runs, as under verifiers' `--env.agent.runtime`: `subprocess` is this
    machine, without a wall; `docker` a container."""
    max_turns: PositiveInt = DEFAULT_TURNS
    """Requests after which verifiers ends an episode, which is then judged as truncated."""
    splits: Splits | None = None
    """First position and end of each split in what the taskset loads. none: the last fifth is the
    test, all before it train; of a taskset without end, 0 to 1000 and 1000 to 1200."""
    reward_range: tuple[Number, Number] | None = None
    """Smallest and largest reward, which verifiers does not tell."""
    deterministic: bool = False
    """The same answers of the policy get the same requests and reward."""
    network: bool = False
    """Its tasks or their judges need the network."""
    path: Folder | None = None
    """A folder to import the taskset from."""
    prepare_s: Seconds = 120.0
    """For loading the taskset, when a worker first needs it."""


class VerifiersAdapter(EnvAdapter):
    """Tasksets of verifiers' v1 API, by their package's name."""

    def make(self, env_id: str, options: Mapping[str, object]) -> VerifiersTask:
        """Make an agent task.

        Raises:
            UserError: When package, id or options are wrong.
        """
        chosen = self._chosen(options)
        return VerifiersTask(env_id, chosen)

    def spec(self, env_id: str, options: Mapping[str, object]) -> EnvSpec:
        """Say what is known of a taskset, without loading its tasks.

        Raises:
            UserError: When package, id or options are wrong.
        """
        chosen = self._chosen(options)
        return EnvSpec(
            id=env_id,
            entry_point=f"{type(self).__module__}:{type(self).__name__}",
            kind="agent",
            summary=summary_of(env_id, chosen),
            splits=tuple(chosen.splits or ("train", "test")),
            disjoint_splits=False,  # other seeds, and perhaps the same tasks
            reward_range=chosen.reward_range or (float("-inf"), float("inf")),
            deterministic=chosen.deterministic,
            max_turns=chosen.max_turns,
            timeouts=Timeouts(reset_s=chosen.prepare_s),
            network=chosen.network,
        )

    def _chosen(self, options: Mapping[str, object]) -> VerifiersOptions:
        if find_spec("verifiers") is None:
            raise PluginError(
                "verifiers is not installed: pip install 'verifiers>=0.4' (Python 3.11 or newer)"
            )
        chosen = VerifiersOptions(**options)
        if chosen.path is not None and chosen.path not in sys.path:
            sys.path.insert(0, chosen.path)
        return chosen
