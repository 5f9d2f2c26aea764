"""Whatever a run asks for that is not there is said at once, before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict

from rollart_core import plugins
from rollart_core.cli import main
from rollart_core.contracts.inference import InferenceEngineSpec
from rollart_core.contracts.sandbox import SandboxSpec
from rollart_core.errors import ConfigError
from rollart_core.hookspecs import hookimpl
from rollart_core.runtime.prepare import prepare

FAKE = "rollart_core.testing:FakeEnv"
NOWHERE = "unix:///nowhere/docker.sock"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run that asks for seven things of six kinds that are not there."""
    asked: dict[str, Any] = {
        "model": str(tmp_path / "models/gone"),
        "runtime": {"kind": "ray", "pools": [{"name": "cores", "count": 4}]},
        "engine": {"id": "sglang", "command": ["/nowhere/bin/python", "-m", "sglang"]},
        "weights": "carrier-pigeon",
        "mapper": {"id": "static", "envs": {"*": "attic"}, "trainer": "cellar"},
        "env": [
            {"id": FAKE, "name": "own", "run": {"reward": "no_such_module:Score"}},
            {"id": "webshop/WebShip-v1"},
            {"id": "swe/FunctionRepair-v1", "sandbox": {"id": "docker", "host": NOWHERE}},
        ],
        "runs_dir": str(tmp_path / "runs"),
        "stop": {"batches": 1},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(asked))
    return path


EXPECTED = {
    "model.path": "there is no folder",
    "engine.command": "no program '/nowhere/bin/python'",
    "weights": "no weight channel 'carrier-pigeon'",
    "env.0.run.reward": "No module named 'no_such_module'",
    "env.1": "Did you mean 'webshop/WebShop-v1'",
    "env.2.sandbox.host": f"no Docker engine answers at {NOWHERE}",
}


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_all_that_is_missing_is_one_error_and_nothing_starts(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dry: list[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["rollart", "run", str(config), *dry])
    with pytest.raises(SystemExit) as left:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert left.value.code
    for key, why in EXPECTED.items():
        found = [line for line in lines if f"{config}: {key}: " in line and why in line]
        assert len(found) == 1, (key, lines)
    pools = [line for line in lines if "runtime.pools: " in line]
    assert [pool for pool in ("attic", "cellar") if any(repr(pool) in p for p in pools)] == [
        "attic",
        "cellar",
    ]
    assert len(lines) == len(EXPECTED) + len(pools) == 8
    assert not (tmp_path / "runs").exists()


def test_what_is_there_is_not_missing(config: Path, tmp_path: Path) -> None:
    asked = yaml.safe_load(config.read_text())
    asked |= {"model": {"kind": "new"}, "weights": "disk"}
    asked["mapper"] = {"id": "static", "envs": {"*": "cores"}}
    asked["engine"]["command"][0] = sys.executable
    asked["env"] = [{"id": FAKE}]
    config.write_text(yaml.safe_dump(asked))
    assert prepare(config).engine.options["command"][0] == sys.executable


def test_a_script_that_launches_servers_and_is_not_there(config: Path) -> None:
    asked = yaml.safe_load(config.read_text())
    asked["engine"]["command"] = [sys.executable, "gone/serve.py"]
    config.write_text(yaml.safe_dump(asked))
    with pytest.raises(ConfigError, match=r"engine\.command: there is no file 'gone/serve\.py'"):
        prepare(config)


def test_a_cluster_that_is_joined_has_its_own_executables(config: Path) -> None:
    asked = yaml.safe_load(config.read_text())
    asked["runtime"]["address"] = "10.0.0.1:6379"
    config.write_text(yaml.safe_dump(asked))
    with pytest.raises(ConfigError) as told:
        prepare(config)
    assert "carrier-pigeon" in str(told.value)
    assert "/nowhere/bin/python" not in str(told.value)
    assert NOWHERE not in str(told.value)


def test_pools_with_too_few_devices_are_told_of_before_a_cluster_starts(config: Path) -> None:
    asked = yaml.safe_load(config.read_text())
    asked["mapper"] = {"id": "static"}
    asked["runtime"]["num_engines"] = 9
    config.write_text(yaml.safe_dump(asked))
    with pytest.raises(ConfigError, match=r"runtime\.pools: pool 'cores' has 4 device"):
        prepare(config)


class Needy(BaseModel):
    model_config = ConfigDict(extra="forbid")
    spoon: str = "/kitchen/spoon"

    def missing(self) -> Mapping[str, str]:
        return {} if self.spoon == "here" else {"spoon": f"there is no {self.spoon}"}


@pytest.fixture
def needy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine and a sandbox whose options say what is missing."""
    part = SimpleNamespace(Part=object, Needy=Needy)
    monkeypatch.setitem(sys.modules, "tests_of_missing", part)
    spec = {"entry_point": "tests_of_missing:Part", "config": "tests_of_missing:Needy"}

    @hookimpl
    def rollart_inference_engines() -> list[InferenceEngineSpec]:
        return [InferenceEngineSpec(id="acme/Needy-v1", alias="needy", **spec)]

    @hookimpl
    def rollart_sandboxes() -> list[SandboxSpec]:
        return [SandboxSpec(id="acme/Drawer-v1", alias="drawer", **spec)]

    found = SimpleNamespace(
        rollart_inference_engines=rollart_inference_engines, rollart_sandboxes=rollart_sandboxes
    )
    with plugins.using({"acme": found}):
        yield


def test_a_strangers_plugin_says_what_it_misses(needy: None, config: Path) -> None:
    asked = yaml.safe_load(config.read_text())
    asked["engine"] = "needy"
    asked["env"] = {"id": "swe/FunctionRepair-v1", "sandbox": {"id": "drawer", "spoon": "/x"}}
    config.write_text(yaml.safe_dump(asked))
    with pytest.raises(ConfigError) as told:
        prepare(config)
    assert "engine.spoon: there is no /kitchen/spoon" in str(told.value)
    assert "env.sandbox.spoon: there is no /x" in str(told.value)
    asked["engine"] = {"id": "needy", "spoon": "here"}
    config.write_text(yaml.safe_dump(asked))
    with pytest.raises(ConfigError) as told:
        prepare(config)
    assert "engine" not in str(told.value)
