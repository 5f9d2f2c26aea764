"""What a run config may say where an environment is an agent, and where none is."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rollart_core.config import resolve_envs
from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.contracts.env import EnvSpec
from rollart_core.errors import ConfigError
from rollart_core.plugins import manager as plugins
from rollart_core.plugins.hookspecs import hookimpl
from rollart_testing.agents import FakeAgent
from rollart_testing.envs import FakeEnv

BASE = """
model: {kind: new}
stop: {batches: 2}
algorithm: "parts_of_agents:Part"
engine: "parts_of_agents:Part"
weights: "parts_of_agents:Part"
mapper: "parts_of_agents:Part"
trackers: []
"""
AGENT = "env: acme/Agent-v1\n"


class Timed(FakeAgent):
    def __init__(self, program_s: float = 300.0) -> None:
        super().__init__()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An agent and an environment that is stepped."""
    parts = SimpleNamespace(FakeAgent=FakeAgent, FakeEnv=FakeEnv, Timed=Timed, Part=object)
    monkeypatch.setitem(sys.modules, "parts_of_agents", parts)

    @hookimpl
    def rollart_environments() -> list[EnvSpec]:
        return [
            EnvSpec(id="acme/Agent-v1", entry_point="parts_of_agents:FakeAgent", kind="agent"),
            EnvSpec(id="acme/Timed-v1", entry_point="parts_of_agents:Timed", kind="agent"),
            EnvSpec(id="acme/Stepped-v1", entry_point="parts_of_agents:FakeEnv"),
        ]

    with plugins.using({"acme": SimpleNamespace(rollart_environments=rollart_environments)}):
        yield


def resolved(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(BASE + text)
    return resolve_run(load_config(path))


def test_the_gateway_is_part_of_a_run_with_agents_and_survives_the_round_trip(tmp_path):
    run = resolved(tmp_path, AGENT + "gateway: {port: 4100}\n")
    assert run.as_dict()["gateway"] == {"host": "127.0.0.1", "port": 4100}
    again = tmp_path / "again.yaml"
    again.write_text(run.to_yaml())
    assert resolve_run(load_config(again)).as_dict() == run.as_dict()
    stepped = resolved(tmp_path, "env: acme/Stepped-v1\n")
    assert "gateway" not in stepped.as_dict()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("env: acme/Stepped-v1\ngateway: {port: 4100}\n", "gateway: has no effect"),
        (AGENT + "warm_start: {until_success: 0.5}\n", "has no oracle to learn from"),
        (AGENT + "rollout: {max_observation_chars: 100}\n", "max_observation_chars: has no effect"),
        (AGENT + "gateway: {port: 70000}\n", "gateway.port"),
        (AGENT + "gateway: {adress: 1.2.3.4}\n", "gateway.adress"),
        (
            AGENT + "runtime: {kind: ray, address: '10.0.0.7:6379'}\n",
            "gateway.host: 127.0.0.1: env workers on other machines cannot reach it",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        resolved(tmp_path, text)


def test_a_program_has_less_time_than_its_episode(tmp_path):
    text = "env: {id: acme/Timed-v1, program_s: 700}\n"
    with pytest.raises(ConfigError, match=r"env.program_s: 700 s: must be shorter than deadlines"):
        resolved(tmp_path, text)


def test_a_missing_aiohttp_is_told_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve_envs, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rollart\[gateway\]'"):
        resolved(tmp_path, AGENT)
