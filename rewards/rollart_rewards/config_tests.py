"""Options of the reward that runs unit tests in a box. Never imports a wall."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollart_core.config.base import NonNegative, PositiveInt, Seconds
from rollart_core.config.sandbox_options import SandboxedOptions


class UnitTestsConfig(SandboxedOptions):
    """Options of ``rollart/UnitTests-v1``."""

    tests: Annotated[str, Field(min_length=1)] = "tests"
    """Key of ``info["reward_context"]`` under which the environment hands over the tests."""
    credit: Literal["all", "share"] = "all"
    """Whether 1 is for passing all tests, or the value is the share that pass."""
    test_timeout_s: Seconds = 10.0
    """Seconds for each test in Python; they run one after the other."""
    cpu_s: Seconds = 5.0
    """Processor seconds of the program for each input; a busy machine makes no answer wrong."""
    abs_tol: NonNegative = 0.0
    """How far numbers in an output may be from the right ones."""
    max_tests: PositiveInt = 100
    """Of more tests, the first ones are run."""
    python: Annotated[str, Field(pattern=r"^(/.*)?$")] = ""
    """Python 3.8 or newer that runs them, as an absolute path in the box; empty: the `python3` on
    its PATH."""
