"""Options of the software-repair environments, as pydantic models that import nothing heavy.

Takes: plain mappings. Gives: frozen models. Never: reads a task file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollart_core.config.base import MOST, PluginRef, PositiveInt, Seconds
from rollart_core.config.sandbox_options import SandboxedOptions
from rollart_envs.rows import missing_files

MAX_OUTPUT_CHARS = 10_000
_PYTHON = Field(pattern=r"^(/.*)?$")


class FunctionRepairConfig(SandboxedOptions):
    """Options of ``swe/FunctionRepair-v1``."""

    tasks: Path | None = None
    """Task file in HumanEvalPack's format, `.jsonl` or `.parquet`. If not set: 40 small built-in
    tasks."""
    num_generated: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Number of generated tasks. If above 0, they are used instead of a task file. Each process
    generates them once, about 500 per second."""
    num_attempts: PositiveInt = 3
    """Number of answers that are judged before the episode ends."""
    test_timeout_s: Seconds = 10.0
    """Timeout in seconds of the hidden test of one answer."""
    python: Annotated[str, _PYTHON] = ""
    """Absolute path in the sandbox of the Python (3.8 or newer) that runs the answers. Default: the
    `python3` on its PATH."""

    @model_validator(mode="after")
    def _tasks_have_one_source(self) -> FunctionRepairConfig:
        if self.num_generated and self.tasks is not None:
            raise ValueError("num_generated and tasks exclude each other; remove one of the two")
        return self

    def missing(self) -> dict[str, str]:
        """Return the problem if the task file is missing on this machine."""
        return missing_files(tasks=self.tasks)


class FunctionAgentConfig(SandboxedOptions):
    """Options of ``swe/FunctionRepairAgent-v1``."""

    program: tuple[str, ...] = ()
    """The agent, as a command in the sandbox. Its working folder has `solution.py`. In each word,
    `{task}` is replaced by the prompt and `{model}` by the model's name. If not set: a small agent
    that asks for the whole file."""
    program_s: Seconds = 300.0
    """Seconds until it is killed. Its files are then judged, and the episode is truncated."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables that it gets in addition to `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL`."""
    tasks: Path | None = None
    """Task file in HumanEvalPack's format, `.jsonl` or `.parquet`. If not set: 40 small built-in
    tasks."""
    test_timeout_s: Seconds = 10.0
    """Timeout in seconds of the hidden test."""
    python: Annotated[str, _PYTHON] = ""
    """Absolute path in the sandbox of the Python (3.8 or newer) that judges. Default: the `python3`
    on its PATH."""

    def missing(self) -> dict[str, str]:
        """Return the problem if the task file is missing on this machine."""
        return missing_files(tasks=self.tasks)


class RepairOptions(SandboxedOptions):
    """Options of every environment with repository tasks."""

    sandbox: PluginRef = PluginRef.model_validate({"id": "docker", "image": "python:3.11"})
    """The sandbox, by id or alias, with its options (`rollart list sandboxes`). It needs `git`,
    which `python:3.11-slim` does not have."""
    tasks: Path | None = None
    """Task file in SWE-bench's format, `.jsonl` or `.parquet`. If not set: a few small built-in
    tasks."""
    repos_dir: Path | None = None
    """Folder of git mirrors and unpacked packages, by the `repo` of the rows. Default: `repos` next
    to the task file."""
    test_timeout_s: Seconds = 1800.0
    """Timeout in seconds of the tests that judge."""
    judge: Literal["strict", "parity"] = "strict"
    """How an expected failure (XFAIL) is judged. `strict`: it passes only if the row's
    `gold_statuses` has it. `parity`: it always passes, as in the SWE-bench harness; a policy can
    then get the reward with `pytest.xfail()`."""
    python: Annotated[str, _PYTHON] = ""
    """Absolute path in the sandbox of the Python that runs the tests, unless the row has one.
    Default: the `python3` on its PATH."""

    def missing(self) -> dict[str, str]:
        """Return a problem for the task file or the repository folder if it is missing."""
        found = missing_files(tasks=self.tasks)
        if self.repos_dir is not None and not self.repos_dir.is_dir():
            found["repos_dir"] = f"there is no folder {self.repos_dir}"
        return found


class RepairConfig(RepairOptions):
    """Options of ``swe/Repair-v1``."""

    max_turns: PositiveInt = 50
    """Number of actions after which the repository is judged as if it had been submitted."""
    command_timeout_s: Seconds = 60.0
    """Timeout in seconds of one command of the agent."""
    max_output_chars: Annotated[int, Field(ge=100, le=MOST)] = MAX_OUTPUT_CHARS
    """Number of characters of a command's output that are shown: its head and its tail."""
    shell: Literal["fresh", "persistent"] = "fresh"
    """Whether each command starts in a fresh shell, or with the folder, variables, functions and
    shell options that the previous command left. A command that is stopped leaves none of them.
    Background processes are stopped in both cases."""
    tools: bool = False
    """Whether the model acts with function calls (`bash`, `view`, `create`, `str_replace`,
    `insert`, `undo_edit`, `submit`) instead of fenced blocks."""


class RepairAgentConfig(RepairOptions):
    """Options of ``swe/RepairAgent-v1``."""

    program: tuple[str, ...] = ()
    """The agent, as a command in the sandbox. Its working folder is the repository. In each word,
    `{task}` is replaced by the prompt and `{model}` by the model's name. If not set: a small agent
    that runs shell commands."""
    program_s: Seconds = 1800.0
    """Seconds until it is killed. The repository is then judged, and the episode is truncated."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables that it gets in addition to `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL`."""
