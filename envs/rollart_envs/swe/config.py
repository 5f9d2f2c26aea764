"""Options of the software-repair environments, as pydantic models that import nothing heavy.

Takes: plain mappings. Gives: frozen models. Never: reads a task file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from rollart_core.boxes.options import SandboxedOptions

BOX_PYTHON = "/usr/bin/python3"


class FunctionRepairConfig(SandboxedOptions):
    """Options of ``swe/FunctionRepair-v1``."""

    tasks: Path | None = None
    """File of tasks in HumanEvalPack's format, `.jsonl` or `.parquet`; none: 40 small ones of
    RollArt's own."""
    num_attempts: Annotated[int, Field(ge=1)] = 3
    """Answers that are judged before the episode is over."""
    test_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds for the hidden test of one answer."""
    python: str = BOX_PYTHON
    """Python 3.8 or newer that runs the answers, as an absolute path in the box."""
