"""Where an environment gets its boxes.

Takes: a sandbox's id and options. Gives: started boxes. Never: hands one box to two episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from rollart_core import registry
from rollart_core.config import PluginRef
from rollart_core.contracts.sandbox import Sandbox


class BoxSource:
    """Boxes of one kind; all its coroutines run on the boxes' loop.

    Args:
        sandbox: Id or alias of a sandbox plugin.
        options: The fields of its config.
    """

    def __init__(self, sandbox: str, options: Mapping[str, Any] | None = None) -> None:
        self.sandbox = sandbox
        self.options = dict(options or {})

    async def take(self, **needs: object) -> Sandbox:
        """Return a box that has started and that nobody has used.

        Args:
            needs: Options of this box that go before the source's own, such as ``image`` (of a
                container) and ``ro_binds`` (paths of the host that it may read).

        Raises:
            SandboxFailure: When it does not come up.
        """
        box: Sandbox = registry.build("sandboxes", self.sandbox, {**self.options, **needs})
        await box.start()
        return box

    async def give_back(self, box: Sandbox) -> None:
        """Take a box that is no longer needed; it is closed."""
        await box.close()


class SandboxedOptions(BaseModel):
    """Base of the config models of environments that run in a box."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sandbox: PluginRef = PluginRef(id="docker")
    """The sandbox, by id or alias, with its options beside it (`rollart list sandboxes`)."""


def box_source(sandbox: PluginRef | Mapping[str, Any] | str) -> BoxSource:
    """Return where boxes of this kind come from in this process."""
    ref = PluginRef.model_validate(sandbox)
    return BoxSource(ref.id, ref.options)
