"""The sandbox service of a process: runs environments in sandboxes and removes leftovers.

Takes: nothing. Gives: the base class of sandbox services, their spec, and the description of an
environment. Never: starts a sandbox.

The core calls the service for every environment with the option ``isolation``, to collect the
sandboxes of killed processes, and to check whether a sandbox works on this machine. A process uses
one service, which :func:`rollart_core.plugins.registry.sandbox_service` selects.
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
    """The spec of a sandbox service."""


@dataclass(frozen=True, slots=True)
class IsolatedDescription:
    """The description of an environment by the sandbox that contains it."""

    spec: EnvSpec
    problems: list[Problem] = field(default_factory=list)
    """Problems of its options."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options, validated and filled with defaults by the environment's config model, with the
    isolation."""
    distribution: str = "unregistered"
    version: str = "0"


class SandboxService(ABC):
    """Runs environments in sandboxes and manages the sandboxes of this machine.

    Options are those of the environment, including ``isolation``.
    """

    @abstractmethod
    def option_problems(self, env_id: str, options: Mapping[str, object]) -> list[Problem]:
        """Return the problems of the isolation, or else of the environment's own options.

        Raises:
            UserError: As :meth:`describe`, if the isolation is valid.
        """

    @abstractmethod
    def describe(self, env_id: str, options: Mapping[str, object]) -> IsolatedDescription:
        """Return the description of an environment from its sandbox. It need not be installed here.

        Args:
            env_id: Id or ``module:Class`` inside the sandbox.
            options: Options of the environment.

        Raises:
            UserError: If the isolation is invalid, the sandbox does not start, or it has no such
                environment.
        """

    @abstractmethod
    def fit(
        self, options: Mapping[str, Any], deadlines: Deadlines, reset_s: float
    ) -> tuple[dict[str, Any], list[Problem]]:
        """Return validated options adjusted to the deadlines of a run, and their problems.

        Args:
            options: Options from :meth:`describe`.
            deadlines: Deadlines of the run.
            reset_s: Maximum seconds of a reset, including the wait for a sandbox.
        """

    @abstractmethod
    def make(self, env_id: str, options: Mapping[str, object]) -> TextEnv:
        """Create an environment in a sandbox and wait until it is ready.

        Raises:
            UserError: If the isolation or the options are invalid, or a sandbox cannot start here.
            EpisodeError: If the constructor of the environment raised, or the sandbox is gone.
        """

    @abstractmethod
    async def open(self, env_id: str, options: Mapping[str, object]) -> TextEnv:
        """Create an environment as in :meth:`make`. If cancelled, kill a sandbox that hangs.

        Raises:
            UserError: As :meth:`make`.
            EpisodeError: As :meth:`make`, and if a sandbox cannot start here.
        """

    @abstractmethod
    def fault(self, sandbox: str) -> str:
        """Return why a sandbox plugin does not work on this machine. Empty if it works.

        Args:
            sandbox: Id or alias.

        Raises:
            UserError: If there is no such sandbox.
        """

    @abstractmethod
    async def collect_garbage(self, sandbox: str) -> None:
        """Remove the sandboxes of killed processes within a few seconds. Never raises.

        Args:
            sandbox: Id of the sandbox plugin whose labeled resources are removed.
        """
