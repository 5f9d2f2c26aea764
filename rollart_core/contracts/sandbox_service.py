"""The sandbox service of a process: environments that run in sandboxes, and what is left of them.

Takes: nothing. Gives: the base of sandbox services, their spec, and what one says of an
environment.
Never: starts a sandbox.

The core asks the service for every environment with the option ``isolation``, for the sandboxes
that killed processes left, and whether a sandbox works here. One service is used in a process:
:func:`rollart_core.plugins.registry.sandbox_service` says which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollart_core.contracts.spec import PluginSpec

if TYPE_CHECKING:
    from rollart_core.config.problems import Problem
    from rollart_core.config.run import Deadlines
    from rollart_core.contracts.env import EnvSpec, TextEnv


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxServiceSpec(PluginSpec):
    """What a sandbox service says of itself."""


@dataclass(frozen=True, slots=True)
class IsolatedDescription:
    """An environment, as the sandbox that has it describes it."""

    spec: EnvSpec
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with its options."""
    options: dict[str, Any] = field(default_factory=dict)
    """Checked and filled with defaults by the environment's own model, and the isolation."""
    distribution: str = "unregistered"
    version: str = "0"


class SandboxService(ABC):
    """Runs environments in sandboxes, and looks after the sandboxes of this machine.

    Options are those of the environment, with ``isolation`` among them.
    """

    @abstractmethod
    def option_problems(self, env_id: str, options: Mapping[str, object]) -> list[Problem]:
        """Return what is wrong with the isolation, or else with the environment's own options.

        Raises:
            UserError: As :meth:`describe`, if nothing is wrong with the isolation.
        """

    @abstractmethod
    def describe(self, env_id: str, options: Mapping[str, object]) -> IsolatedDescription:
        """Return what a sandbox says of an environment, which need not be installed here.

        Args:
            env_id: Id or ``module:Class``, as the sandbox knows it.
            options: Of the environment.

        Raises:
            UserError: When the isolation is wrong, the sandbox does not start, or it knows no such
                environment.
        """

    @abstractmethod
    def fit(
        self, options: Mapping[str, Any], deadlines: Deadlines, reset_s: float
    ) -> tuple[dict[str, Any], list[Problem]]:
        """Return checked options in line with the deadlines of a run, and what is wrong with them.

        Args:
            options: As :meth:`describe` gives them.
            deadlines: Of the run.
            reset_s: Seconds a reset may take, which the wait for a sandbox is part of.
        """

    @abstractmethod
    def make(self, env_id: str, options: Mapping[str, object]) -> TextEnv:
        """Make an environment in a sandbox, and wait for it.

        Raises:
            UserError: When the isolation or the options are wrong, or a sandbox cannot start here.
            EpisodeError: When the environment's making raised, or the sandbox is gone.
        """

    @abstractmethod
    async def open(self, env_id: str, options: Mapping[str, object]) -> TextEnv:
        """Make an environment as :meth:`make`; cancelled, it kills a sandbox that hangs.

        Raises:
            UserError: As :meth:`make`.
            EpisodeError: As :meth:`make`, and when a sandbox cannot start here.
        """

    @abstractmethod
    def fault(self, sandbox: str) -> str:
        """Return why a sandbox plugin does not work on this machine; empty if it does.

        Args:
            sandbox: Id or alias.

        Raises:
            UserError: When there is no such sandbox.
        """

    @abstractmethod
    async def collect_garbage(self, sandbox: str) -> None:
        """Remove in a few seconds what killed processes left of their sandboxes; raises nothing.

        Args:
            sandbox: Id of the sandbox plugin that is asked for what bears its marks.
        """
