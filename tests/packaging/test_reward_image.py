"""The image of a reward function: built from its Dockerfile offline, and asked as a run would."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pace import scaled, wait_until
from support.sandbox_types import IMAGE, no_docker

from rollart_core.contracts.reward import RewardRef, RewardRequest
from rollart_core.errors import ConfigError
from rollart_core.plugins import registry
from rollart_plugins.engines.server_process import free_port
from rollart_plugins.serverless.http_backend import HttpBackend

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

# The image of the tests has Python but no pip, and Debian's Python wants to be asked twice.
BASE = f"""FROM {IMAGE}
USER root
COPY pip-*.whl /opt/
RUN ln -sf python3 /usr/bin/python \\
 && printf '#!/bin/sh\\nexec python3 /opt/%s/pip "$@" --break-system-packages\\n' \\
    "$(basename /opt/pip-*.whl)" > /usr/bin/pip \\
 && printf '#!/bin/sh\\necho reward:x:2000:2000::/tmp:/bin/sh >> /etc/passwd\\n' \\
    > /usr/bin/useradd \\
 && chmod +x /usr/bin/pip /usr/bin/useradd
"""


def docker(*arguments: str | Path) -> str:
    """Run a command of Docker; show what it said when it fails."""
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}  # the classic builder needs no plugin
    command = ["docker", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert not ended.returncode, f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    return ended.stdout.strip()


@pytest.fixture(scope="module")
def image(
    repo_root: Path, wheel: Path, wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The image, made with nothing but wheels that lie beside the Dockerfile."""
    if why := no_docker():
        pytest.skip(why)
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the wheels are for another Python than that of the tests' image")
    base = tmp_path_factory.mktemp("base")
    for pip in wheelhouse.glob("pip-*.whl"):
        shutil.copy(pip, base)
    (base / "Dockerfile").write_text(BASE)
    folder = tmp_path_factory.mktemp("image")
    for one in (
        wheel,
        *wheelhouse.glob("*.whl"),
        repo_root / "examples/reward_function/Dockerfile",
    ):
        if not one.name.startswith(("torch-", "transformers-", "pip-")):
            shutil.copy(one, folder)
    tag = uuid.uuid4().hex[:12]
    names = (f"rollart-reward-base:{tag}", f"rollart-reward:{tag}")
    try:
        docker("build", "-q", "-t", names[0], base)
        # Compiling all packages would take longer than all the rest.
        values = (f"BASE={names[0]}", "PIP_OPTIONS=--no-index --no-compile")
        options = [word for value in values for word in ("--build-arg", value)]
        docker("build", "-q", "-t", names[1], *options, folder)
        yield names[1]
    finally:
        for name in reversed(names):
            with contextlib.suppress(AssertionError):
                docker("rmi", "-f", name)


@pytest.fixture
def served(image: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a running container that serves exact-match."""
    monkeypatch.setenv("ROLLART_REWARD_TOKEN", "a token")
    port = free_port()
    variables = ("-e", "ROLLART_REWARD_TOKEN", "-e", f"PORT={port}")
    sandbox = docker("run", "-d", "--network", "host", *variables, image, "exact-match")
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/healthz", sandbox)
        yield f"http://127.0.0.1:{port}"
    finally:
        docker("rm", "-f", sandbox)


def wait_until_healthy(url: str, sandbox: str) -> None:
    """Return when the function says that it is there."""

    def is_healthy() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            assert answer.status == 200
            return True
        assert docker("inspect", "-f", "{{.State.Running}}", sandbox) == "true", docker(
            "logs", sandbox
        )
        time.sleep(0.3)
        return False

    wait_until(is_healthy, "a healthy reward function", limit_s=180)


def test_the_image_is_a_reward_function(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = RewardRef("exact-match", registry.checked_options("rewards", "exact-match", {}))
    where = {"reward": ref, "reward_range": (0.0, 1.0), "timeout_s": scaled(60), "url": served}
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    requests = [
        RewardRequest("g.0", "x/Y-v1", "train", 0, tuple(said), 0.0, None, context={"reference": r})
        for r in ("4", "5")
    ]

    async def main() -> None:
        backend = HttpBackend(**where, token_env="ROLLART_REWARD_TOKEN")
        await backend.open()
        try:
            assert [result.value for result in await backend.score(requests)] == [1.0, 0.0]
        finally:
            await backend.close()
        monkeypatch.setenv("WRONG", "another")
        stranger = HttpBackend(**where, token_env="WRONG")
        try:
            with pytest.raises(ConfigError, match="token is missing or wrong"):
                await stranger.open()
        finally:
            await stranger.close()

    asyncio.run(main())
