"""The walls that this machine can build, for tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import pytest

from rollart_core.errors import SandboxFailure
from rollart_sandboxes import docker_host
from rollart_sandboxes.base import AgentSandbox
from rollart_sandboxes.bubblewrap import BubblewrapSandbox
from rollart_sandboxes.config import DockerConfig
from rollart_sandboxes.docker import DockerSandbox
from rollart_sandboxes.engine import Engine
from rollart_sandboxes.process import ProcessSandbox
from support.pace import scaled

MIB = 1 << 20
IMAGE = os.environ.get("ROLLART_TEST_IMAGE", "rollart-test:latest")
"""What `tests/docker/engine up` makes."""
START_S = scaled(120.0)
"""For a box to come up beside many others."""
IN_DOCKER: dict[str, Any] = {"image": IMAGE, "pull": "never", "start_timeout_s": START_S}
_IN_TIME = {"start_timeout_s": START_S}

MAKERS: dict[str, Callable[..., AgentSandbox]] = {
    "process": lambda **options: ProcessSandbox(**{"trusted": True, **_IN_TIME, **options}),
    "bubblewrap": lambda **options: BubblewrapSandbox(**{**_IN_TIME, **options}),
    "docker": lambda **options: DockerSandbox(**{**IN_DOCKER, **options}),
}
ISOLATIONS = {isolation: MAKERS[isolation] for isolation in ("process", "bubblewrap")}
"""Those that need no engine."""
HELD = ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]
"""Walls that hold something, as parameters of a test."""
EACH_SANDBOX_TYPE = ["process", *HELD]


@cache
def missing(isolation: str) -> str:
    """Why a wall does not work here; empty where it does."""

    async def attempt() -> None:
        if isolation == "docker":  # with engine and image a box has to come up
            await docker_host.image(Engine(), DockerConfig(**IN_DOCKER))
            return
        async with opened(isolation):
            pass

    try:
        asyncio.run(attempt())
    except SandboxFailure as e:
        remedy = (
            " (`tests/docker/engine up` makes engine and image)" if isolation == "docker" else ""
        )
        return f"{e}{remedy}"
    return ""


def no_bubblewrap() -> str:
    """Why bubblewrap does not work here; empty where it does."""
    return missing("bubblewrap")


def no_docker() -> str:
    """Why there is no Docker engine with the image for tests; empty where there is one."""
    return missing("docker")


@asynccontextmanager
async def opened(isolation: str, **options: object) -> AsyncIterator[AgentSandbox]:
    """Give a box that is up, and take it down."""
    sandbox = MAKERS[isolation](**options)
    await sandbox.start()
    try:
        yield sandbox
    finally:
        await sandbox.close()
