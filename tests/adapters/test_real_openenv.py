"""The adapter of OpenEnv on servers of the real library."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from adapters.openenv_process import ServerProcess

from rollart_core.errors import DeadlineFailure, EnvironmentFailure, PluginError
from rollart_core.plugins import registry
from rollart_testing import assert_checks, check_env

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(300)]
pytest.importorskip("openenv", reason="openenv is not installed: `make adapters` installs it")
pytest.importorskip("aiohttp", reason="aiohttp is not installed: `make adapters` installs it")

ECHO = {"deterministic": True, "reward_range": (0.0, 5.0), "connect_s": 60.0}
GUESS = {
    "deterministic": True,
    "reward_range": (0.0, 1.0),
    "observation": "{say} {hint} (turn {turn})",
    "connect_s": 60.0,
}


@pytest.fixture(scope="module")
def echo() -> Iterator[ServerProcess]:
    server = ServerProcess(sys.executable, "echo")
    yield server
    server.close()


@pytest.fixture(scope="module")
def guess() -> Iterator[ServerProcess]:
    server = ServerProcess(sys.executable, "guess")
    yield server
    server.close()


@pytest.fixture
def fragile() -> Iterator[ServerProcess]:
    """A server with one session, to be broken."""
    server = ServerProcess(sys.executable, "echo", sessions=1)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name == "rollart-openenv"] == []


def made(server: ServerProcess, **options: Any) -> Any:
    return registry.make("openenv::test", base_url=server.url, **options)


def test_echo_keeps_the_contract(echo: ServerProcess) -> None:
    options = {"base_url": echo.url, **ECHO}
    spec = registry.env_spec("openenv::echo", options)
    assert spec.network
    assert spec.reward_range == (0.0, 5.0)
    make = partial(registry.make, "openenv::echo", **options)
    assert_checks(check_env(make, spec=spec, num_tasks=2))


def test_guess_keeps_the_contract(guess: ServerProcess) -> None:
    options = {"base_url": guess.url, **GUESS}
    spec = registry.env_spec("openenv::guess", options)
    make = partial(registry.make, "openenv::guess", **options)
    assert_checks(check_env(make, spec=spec, num_tasks=2))


def test_rollart_check_on_a_server(guess: ServerProcess) -> None:
    options = [f"base_url={guess.url}", "deterministic=true", "reward_range=[0, 1]"]
    options += ['observation="{say} {hint}"', "connect_s=60"]
    command = [sys.executable, "-c", "from rollart_core.cli import main; main()", "check"]
    done = subprocess.run(
        [*command, "openenv::guess", *options, "--json"], capture_output=True, text=True
    )
    report = json.loads(done.stdout)
    failed = [r for r in report["results"] if r["outcome"] == "FAIL"]
    assert failed == []
    assert report["passed"]
    assert done.returncode == 0


def test_text_becomes_the_field_and_the_type_that_the_schema_asks_for(guess: ServerProcess) -> None:
    env = made(guess, **GUESS, action={"loud": True})
    assert env.reset(options={"task": 3})[0] == "Guess my number, 0 to 100. none yet (turn 0)"
    observation, *_, info = env.step("50")
    assert observation in ("Well. HIGHER (turn 1)", "Well. LOWER (turn 1)", "Well. RIGHT (turn 1)")
    assert "invalid_action" not in info
    for wrong in ("fifty", "101", "", "nan"):
        observation, reward, terminated, truncated, info = env.step(wrong)
        assert observation.startswith("Invalid action")
        assert (reward, terminated, truncated, info["invalid_action"]) == (0.0, False, False, True)
    env.close()


def test_the_seed_is_the_task(guess: ServerProcess) -> None:
    env = made(guess, **GUESS)
    hints = []
    for task in (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5):
        env.reset(options={"task": task, "split": "test"})
        hints.append([env.step(str(n))[0] for n in (10, 30, 50, 70, 90)])
    env.close()
    assert hints[:6] == hints[6:]
    assert len({tuple(h) for h in hints}) > 1


def test_an_action_can_be_json(guess: ServerProcess) -> None:
    env = made(guess, action_json=True, observation="hint")
    env.reset(seed=3)  # whose number is not 100
    assert env.step('{"number": 100, "loud": true}')[0] in ("LOWER", "RIGHT")
    assert "JSON" in env.step("100")[0]
    assert env.step('{"nummer": 100}')[4]["invalid_action"]
    env.close()


def test_without_options_all_fields_are_shown(guess: ServerProcess) -> None:
    env = made(guess)
    assert json.loads(env.reset()[0]) == {
        "hint": "none yet",
        "say": "Guess my number, 0 to 100.",
        "turn": 0,
    }
    env.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"action_field": "mesage"}, "Did you mean 'message'"),
        ({"observation": "{echoed}"}, "no field 'echoed'"),
        ({"observation": "message_lenght"}, "Did you mean 'message_length'"),
        ({"action": {"lowd": 1}}, "no field 'lowd'"),
        ({"action_json": True, "action_field": "message"}, "no effect"),
        ({"token_env": "ROLLART_TEST_NO_SUCH"}, "ROLLART_TEST_NO_SUCH is not set"),
    ],
)
def test_options_that_do_not_fit_the_server(
    echo: ServerProcess, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PluginError, match=says):
        registry.env_spec("openenv::echo", {"base_url": echo.url, **options})


def test_what_the_server_raises_fails_the_episode_or_is_told(echo: ServerProcess) -> None:
    env = made(echo)
    env.reset()
    with pytest.raises(EnvironmentFailure, match="as told"):
        env.step("raise")
    env.close()
    env = made(echo, errors_end=False)
    env.reset()
    observation, *_, info = env.step("raise")
    assert observation == "Error: as told"
    assert info["invalid_action"]
    env.close()


def test_an_answer_that_does_not_come_is_a_deadline_and_the_next_reset_works(
    echo: ServerProcess,
) -> None:
    env = made(echo, message_s=0.5)
    env.reset()
    with pytest.raises(DeadlineFailure, match=r"did not answer within 0\.5 s"):
        env.step("hang")
    assert env.reset()[0] == "Say something."
    assert env.step("hello")[0] == "hello"
    env.close()


def test_a_cancelled_step_leaves_no_answer_behind(echo: ServerProcess) -> None:
    async def cancelled() -> None:
        await env.areset()
        async with asyncio.timeout(0.3):
            await env.astep("hang")

    env = made(echo)
    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert env.reset()[0] == "Say something."
    assert env.step("fresh")[0] == "fresh"
    env.close()


def test_a_server_that_dies_fails_the_episode_and_serves_again(fragile: ServerProcess) -> None:
    env = made(fragile, connect_s=60.0)
    env.reset()
    with pytest.raises(EnvironmentFailure, match="closed the session"):
        env.step("die")
    with pytest.raises(EnvironmentFailure, match="no session"):
        env.step("again")
    fragile.wait()
    fragile.start()
    assert env.reset()[0] == "Say something."
    env.close()


def test_a_full_server_says_so(fragile: ServerProcess) -> None:
    first = made(fragile, connect_s=60.0)
    second = made(fragile)
    first.reset()
    with pytest.raises(EnvironmentFailure, match="all 1 sessions are in use"):
        second.reset()
    first.close()
    second.close()


def test_a_server_that_is_down_and_one_that_is_no_openenv() -> None:
    with pytest.raises(PluginError, match="no OpenEnv server is reachable"):
        registry.env_spec("openenv::http://127.0.0.1:9")
    with pytest.raises(PluginError, match="set base_url"):
        registry.env_spec("openenv::echo")
