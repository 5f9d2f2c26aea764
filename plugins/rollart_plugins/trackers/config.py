"""Options of the trackers.

Takes: what a config says. Gives: checked options. Never: imports a tracker's package.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollart_core.config.base import Seconds

NO_WANDB = "the wandb tracker needs wandb: pip install 'rollart[wandb]'"
Text = Annotated[str, Field(min_length=1)]


class WandbConfig(BaseModel):
    """Options of ``rollart/Wandb-v1``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["online", "offline"] = "online"
    """``offline``: files in the run directory, which ``wandb sync`` uploads later."""
    server: Text | None = None
    """Address of a server of one's own; none: the one that wandb is set up for."""
    project: Text = "rollart"
    """What W&B puts the run under."""
    entity: Text | None = None
    """Whose project: a user or a team; none: the default of the account."""
    name: Text | None = None
    """What W&B calls the run; none: the name of the run directory."""
    tags: tuple[Text, ...] = ()
    """Labels to find it by."""
    timeout_s: Seconds = 30.0
    """How long to wait for W&B when the run begins, and again when it ends."""

    def missing(self) -> dict[str, str]:
        """Return the package that is not installed."""
        return {"id": NO_WANDB} if find_spec("wandb") is None else {}
