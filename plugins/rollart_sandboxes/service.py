"""The sandbox service: isolated environments, and the sandboxes of this machine.

Takes: calls of the core. Gives: the results of :mod:`rollart_sandboxes.isolation` and
:mod:`rollart_sandboxes.pool`. Never: imports them before the first call that needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollart_core.contracts.sandbox_service import IsolatedDescription, SandboxService
from rollart_core.rollout import loop

if TYPE_CHECKING:
    from rollart_core.config.problems import Problem
    from rollart_core.config.run import Deadlines
    from rollart_core.contracts.env import TextEnv


class LocalSandboxService(SandboxService):
    """Environments in sandboxes of this machine: the key ``isolation``."""

    def option_problems(self, env_id: str, options: Mapping[str, object]) -> list[Problem]:
        """See :meth:`SandboxService.option_problems`."""
        from rollart_sandboxes.isolation.describe import option_faults

        return option_faults(env_id, options)

    def describe(self, env_id: str, options: Mapping[str, object]) -> IsolatedDescription:
        """See :meth:`SandboxService.describe`; results are cached in this process."""
        from rollart_sandboxes.isolation.describe import describe

        return describe(env_id, options)

    def fit(
        self, options: Mapping[str, Any], deadlines: Deadlines, reset_s: float
    ) -> tuple[dict[str, Any], list[Problem]]:
        """See :meth:`SandboxService.fit`."""
        from rollart_sandboxes.isolation.config import fit

        return fit(options, deadlines, reset_s)

    def make(self, env_id: str, options: Mapping[str, object]) -> TextEnv:
        """See :meth:`SandboxService.make`."""
        from rollart_sandboxes.isolation.env import make

        return make(env_id, options)

    async def open(self, env_id: str, options: Mapping[str, object]) -> TextEnv:
        """See :meth:`SandboxService.open`."""
        from rollart_sandboxes.isolation.env import open_env

        return await open_env(env_id, options)

    def fault(self, sandbox: str) -> str:
        """See :meth:`SandboxService.fault`; this starts a sandbox."""
        from rollart_sandboxes.pool.doctor import diagnose

        found = loop.run(diagnose(sandbox))
        if found.works:
            return ""
        bad = next((f for f in found.findings if f.state == "bad"), None)
        return f"{sandbox} does not work on this machine" + (f": {bad.says}" if bad else "")

    async def collect_garbage(self, sandbox: str) -> None:
        """See :meth:`SandboxService.collect_garbage`."""
        from rollart_sandboxes.pool.gc import collect_garbage_in_background

        await collect_garbage_in_background(sandbox)
