"""What boxes and the machine they are on tell each other: what a box leaves, what a wall finds.

Takes: nothing. Gives: the records that :class:`~rollart_core.contracts.sandbox.Sandbox` speaks in.
Never: removes or checks anything by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a wall needs or uses on this machine, for ``rollart sandbox doctor``."""

    what: str
    """Such as ``user namespaces``."""
    state: Literal["ok", "warn", "bad"]
    """``warn``: it works, but holds less; ``bad``: a box cannot start."""
    says: str = ""
    mend: str = ""
    """What to do about it."""


class LedgerLine(Protocol):
    """A box's line in the ledger of live boxes, from which a killed owner's boxes are reaped."""

    @property
    def labels(self) -> Mapping[str, str]:
        """What to label things with that outlive this process (containers)."""

    def leaves(self, kind: str, what: str) -> None:
        """Note something on the host that is there until the box is closed.

        Args:
            kind: ``folder`` or ``cgroup`` (anybody removes them; their names begin with
                ``rollart-``), ``usage`` (a cgroup that shows how much memory the box uses), or a
                wall's own, such as ``container``.
            what: Its absolute path, or its id.
        """
