"""`rollart serve-reward`, typed as a person types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest

from rollart_core.contracts.reward import RewardRef
from rollart_plugins.serverless import wire
from rollart_testing import example_request

ROLLART = (sys.executable, "-c", "from rollart_core.cli import main; main()")
ROOT = Path(__file__).resolve().parents[4]
REF = RewardRef("rollart/EnvReturn-v1", {"return_weight": 0.5, "success_weight": 0.0})


def post(url: str, body: bytes, token: str = "t") -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as got:
            return got.status, json.loads(got.read())
    except HTTPError as e:
        with e:
            return e.code, json.loads(e.read())


def test_it_serves_until_it_is_told_to_end() -> None:
    environment = {**os.environ, "PORT": "0", "ROLLART_REWARD_TOKEN": "t"}
    with subprocess.Popen(
        [*ROLLART, "serve-reward", "env-return", "return_weight=0.5"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            url = re.fullmatch(r"rollart/EnvReturn-v1 on (http://127\.0\.0\.1:\d+)\n", said)
            assert url, said
            with urllib.request.urlopen(f"{url[1]}/healthz", timeout=60) as got:
                assert json.loads(got.read()) == {"status": "ok"}
            call = wire.call_bytes(
                REF, [wire.request_bytes(example_request())], group=False, key="k", deadline_s=9.0
            )
            for path in ("", "/", "/invoke", "/score"):
                status, answer = post(url[1] + path, call)
                echoed = {"id": wire.request_id(example_request())}
                result = {**echoed, "value": 0.25, "components": {"return": 0.25}}
                assert (status, answer["results"]) == (200, [result])
            assert post(url[1], call, token="u")[0] == 401
            assert post(url[1], b"{}")[0] == 400
            other = call.replace(b"EnvReturn", b"Other")
            assert post(url[1], other)[0] == 409
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["env-retrun"], "Did you mean 'env-return'?"),
        (["env-return", "weight=1"], "weight: unknown key"),
        (["env-return", "--host", "0.0.0.0"], "set ROLLART_REWARD_TOKEN"),
        (["env-return", "--port", "1"], "cannot listen on 127.0.0.1:1"),
    ],
)
def test_a_mistake_is_said_in_a_line(arguments: list[str], says: str) -> None:
    if says.startswith("cannot listen") and os.geteuid() == 0:
        arguments = [*arguments[:-2], "--host", "192.0.2.1", "--no-token"]
        says = "cannot listen on 192.0.2.1"
    done = subprocess.run(
        [*ROLLART, "serve-reward", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.lambda"])
def test_an_image_starts_what_is_there(name: str) -> None:
    text = (ROOT / "examples/reward_function" / name).read_text("utf-8")
    if name == "Dockerfile":
        assert '["rollart", "serve-reward", "--host", "0.0.0.0"]' in text
        assert "rollart[serverless]" in text
        return
    handler = re.search(r'CMD \["([\w.]+)\.(\w+)"\]', text)
    assert handler
    module = __import__(handler[1], fromlist=[handler[2]])
    assert callable(getattr(module, handler[2]))
