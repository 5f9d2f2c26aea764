"""Records about sandboxes and their host: resources that a sandbox leaves, results of host checks.

Takes: nothing. Gives: the records that :class:`~rollart_core.contracts.sandbox.Sandbox` uses.
Never: removes or checks anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of this machine, for ``rollart sandbox doctor``."""

    what: str
    """The checked feature, such as ``user namespaces``."""
    state: Literal["ok", "warn", "bad"]
    """``warn``: sandboxes work, but with weaker isolation. ``bad``: a sandbox cannot start."""
    says: str = ""
    """The result, as text."""
    mend: str = ""
    """How to fix it."""


class LedgerLine(Protocol):
    """The line of one sandbox in the ledger of live sandboxes.

    Garbage collection reads the ledger to remove the sandboxes of killed processes.
    """

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels for resources that outlive this process, such as containers."""

    def leaves(self, kind: str, what: str) -> None:
        """Record a host resource that exists until the sandbox is closed.

        Args:
            kind: ``folder`` or ``cgroup`` (any process may remove them; their names begin with
                ``rollart-``), ``usage`` (a cgroup with the memory usage of the sandbox), or a kind
                of the sandbox plugin, such as ``container``.
            what: The absolute path or the id.
        """
