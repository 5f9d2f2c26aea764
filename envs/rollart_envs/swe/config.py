"""Options of the software-repair environments, as pydantic models that import nothing heavy.

Takes: plain mappings. Gives: frozen models. Never: reads a task file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rollart_core.config.base import MOST, PositiveInt, Seconds
from rollart_core.config.sandbox_options import SandboxedOptions
from rollart_envs.files import missing_files
from rollart_envs.swe.tools import MAX_OUTPUT_CHARS

_PYTHON = Field(pattern=r"^(/.*)?$")


class FunctionRepairConfig(SandboxedOptions):
    """Options of ``swe/FunctionRepair-v1``."""

    tasks: Path | None = None
    """File of tasks in HumanEvalPack's format, `.jsonl` or `.parquet`; none: 40 small ones of
    RollArt's own."""
    num_attempts: PositiveInt = 3
    """Answers that are judged before the episode is over."""
    test_timeout_s: Seconds = 10.0
    """Seconds for the hidden test of one answer."""
    python: Annotated[str, _PYTHON] = ""
    """Python 3.8 or newer that runs the answers, as an absolute path in the box; empty: the
    `python3` on its PATH."""

    def missing(self) -> dict[str, str]:
        """Return the task file that this machine has not."""
        return missing_files(tasks=self.tasks)


class FunctionAgentConfig(SandboxedOptions):
    """Options of ``swe/FunctionRepairAgent-v1``."""

    program: tuple[str, ...] = ()
    """The agent, as a command in the box, whose working folder holds `solution.py`; `{task}` in a
    word stands for what is asked, `{model}` for the model's name. None: a small one that asks for
    the whole file."""
    program_s: Seconds = 300.0
    """Seconds after which it is killed; what is there is judged, and the episode truncated."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables that it gets besides `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`."""
    tasks: Path | None = None
    """File of tasks in HumanEvalPack's format, `.jsonl` or `.parquet`; none: 40 small ones of
    RollArt's own."""
    test_timeout_s: Seconds = 10.0
    """Seconds for the hidden test."""
    python: Annotated[str, _PYTHON] = ""
    """Python 3.8 or newer that judges, as an absolute path in the box; empty: the `python3` on its
    PATH."""

    def missing(self) -> dict[str, str]:
        """Return the task file that this machine has not."""
        return missing_files(tasks=self.tasks)


class RepairConfig(SandboxedOptions):
    """Options of ``swe/Repair-v1``."""

    tasks: Path | None = None
    """File of tasks in SWE-bench's format, `.jsonl` or `.parquet`; none: a few small ones of
    RollArt's own."""
    repos_dir: Path | None = None
    """Folder of git mirrors and unpacked packages, by the `repo` of the rows; none: `repos` beside
    the task file."""
    max_turns: PositiveInt = 50
    """Actions after which what is there is judged as if it had been submitted."""
    command_timeout_s: Seconds = 60.0
    """Seconds for one command of the agent."""
    test_timeout_s: Seconds = 1800.0
    """Seconds for the tests that judge."""
    judge: Literal["strict", "parity"] = "strict"
    """What an expected failure (XFAIL) is worth: `strict`: it passes only where the row's
    `gold_statuses` have it, `parity`: always, as in the SWE-bench harness; a policy can then earn
    the reward by `pytest.xfail()`."""
    max_output_chars: Annotated[int, Field(ge=100, le=MOST)] = MAX_OUTPUT_CHARS
    """Characters of a command's output that are shown: its head and its tail."""
    python: Annotated[str, _PYTHON] = ""
    """Python that runs the tests, as an absolute path in the box, where the row does not name one;
    empty: the `python3` on its PATH."""

    def missing(self) -> dict[str, str]:
        """Return the task file, or the folder of repositories, that this machine has not."""
        found = missing_files(tasks=self.tasks)
        if self.repos_dir is not None and not self.repos_dir.is_dir():
            found["repos_dir"] = f"there is no folder {self.repos_dir}"
        return found
