"""Whatever a run asks for that is not there is said at once, before anything starts."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict

from rollart_core.cli import main
from rollart_core.config.resolve import ResolvedRun, resolve_all
from rollart_core.contracts.inference import InferenceEngineSpec
from rollart_core.contracts.sandbox import SandboxSpec
from rollart_core.contracts.tracker import TrackerSpec
from rollart_core.errors import ConfigError
from rollart_core.plugins import manager as plugins
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.runtime.prepare import prepare, prepare_mapping
from rollart_ray.nodes import NodeChecks
from rollart_ray.pools import Node

FAKE = "rollart_testing:FakeEnv"
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
    "engine.command": "the program '/nowhere/bin/python' is not on",
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
    with pytest.raises(ConfigError, match=r"engine\.command: the file 'gone/serve\.py'"):
        prepare(config)


def test_a_cluster_that_is_joined_has_its_own_executables(needy: None, config: Path) -> None:
    asked = yaml.safe_load(config.read_text())
    asked["runtime"]["address"] = "10.0.0.1:6379"
    asked["env"].append({"id": "webshop/WebShop-v1", "data_dir": "/of/the/nodes"})
    asked["trackers"] = ["needs"]
    config.write_text(yaml.safe_dump(asked))
    with pytest.raises(ConfigError) as told:
        prepare(config)
    assert "carrier-pigeon" in str(told.value)
    assert "trackers.0.spoon: there is no /kitchen/spoon" in str(told.value)  # is this process's
    assert "/of/the/nodes" not in str(told.value)
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

    @hookimpl
    def rollart_trackers() -> list[TrackerSpec]:
        return [TrackerSpec(id="acme/Needs-v1", alias="needs", **spec)]

    found = SimpleNamespace(
        rollart_inference_engines=rollart_inference_engines,
        rollart_sandboxes=rollart_sandboxes,
        rollart_trackers=rollart_trackers,
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


SMALL: dict[str, Any] = {
    "model": {"kind": "new"},
    "env": FAKE,
    "trackers": [],
    "stop": {"batches": 1},
}


def refused(asked: Mapping[str, Any], **how: bool) -> list[str]:
    """Return the lines of the error that a config ends in; none when it can run."""
    try:
        prepare_mapping({**SMALL, **asked}, "x.yaml", **how)
    except ConfigError as e:
        return str(e).splitlines()
    return []


WEBSHOP = {"id": "webshop/WebShop-v1", "data_dir": "shop"}
FUNCTION = {"id": "swe/FunctionRepair-v1", "sandbox": {"id": "process", "trusted": True}}
REPAIR = {**FUNCTION, "id": "swe/Repair-v1"}
OFFICIAL = ("items_shuffle_1000.json", "items_ins_v2.json", "items_human_ins_1000_v2.json")


@pytest.mark.parametrize(
    ("env", "line"),
    [
        (WEBSHOP, "env.data_dir: no such folder: shop"),
        ({**FUNCTION, "tasks": "nope.jsonl"}, "env.tasks: there is no file nope.jsonl"),
        (
            {**FUNCTION, "id": "swe/FunctionRepairAgent-v1", "tasks": "nope.jsonl"},
            "env.tasks: there is no file nope.jsonl",
        ),
        ({**REPAIR, "tasks": "nope.jsonl"}, "env.tasks: there is no file nope.jsonl"),
        ({**REPAIR, "tasks": "."}, "env.tasks: . is a folder, not a file"),
        ({**REPAIR, "repos_dir": "nope"}, "env.repos_dir: there is no folder nope"),
        (
            {"id": "text/Questions-v1", "file": "nope.jsonl"},
            "env.file: there is no file nope.jsonl",
        ),
    ],
)
def test_a_file_that_an_environment_is_to_read(
    env: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"x.yaml: {line}" in refused({"env": env})


def test_the_official_webshop_needs_three_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop").mkdir()
    for file in OFFICIAL:
        (line,) = refused({"env": WEBSHOP})
        assert "shop has no items_" in line
        assert "it must have the official WebShop files" in line
        (tmp_path / "shop" / file).write_text("")
    assert refused({"env": WEBSHOP}) == []


@pytest.mark.parametrize(
    ("package", "asked", "line"),
    [
        ("wandb", {"trackers": ["wandb"]}, "trackers.0.id: the wandb tracker needs wandb: pip"),
        ("spacy", {"env": {"id": "webshop", "noun_tagger": "spacy"}}, "noun_tagger: spacy needs"),
        *(
            (package, {"reward": "exact-match", "scoring": {"backend": backend}}, line)
            for package, backend, line in (
                ("aiohttp", {"id": "http", "url": "http://h"}, "the http backend needs aiohttp"),
                ("boto3", {"id": "lambda", "function": "f"}, "the lambda backend needs boto3"),
                ("ray", {"id": "ray_serve"}, "the ray_serve backend needs Ray Serve"),
            )
        ),
    ],
)
def test_a_package_that_is_not_installed(
    package: str, asked: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(asked)  # imports all that will look for it
    real = importlib.util.find_spec
    without: Callable[..., Any] = lambda name, of=None: None if name == package else real(name, of)  # noqa: E731
    for module in list(sys.modules.values()):  # each has its own name for it
        if getattr(module, "__name__", "").startswith("rollart") and hasattr(module, "find_spec"):
            monkeypatch.setattr(module, "find_spec", without)
    (told,) = refused(asked)
    assert line in told


def test_who_is_only_scored_notifies_no_tracker() -> None:
    asked = {"trackers": ["wandb"], "model": {"kind": "remote"}}
    asked |= {"engine": {"id": "openai", "base_url": "http://h/v1"}}
    assert refused(asked, trains=False) == []


def test_a_variable_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    http = {"id": "http", "url": "http://h", "token_env": "NO_SUCH_KEY"}
    (line,) = refused({"reward": "exact-match", "scoring": {"backend": http}})
    assert line.endswith(
        "scoring.backend.token_env: the environment variable NO_SUCH_KEY is not set"
    )
    engine = {"id": "openai", "base_url": "http://h/v1", "api_key_env": "NO_SUCH_KEY"}
    asked = {"model": {"kind": "remote"}, "engine": engine}
    (line,) = refused(asked, trains=False)
    assert line.endswith("engine.api_key_env: the environment variable NO_SUCH_KEY is not set")


class Answering:
    """A cluster whose nodes have what this machine has."""

    async def ask(self, question: Callable[[], Any], nodes: Sequence[Node]) -> dict[Node, Any]:
        return {node: question() for node in nodes}


def test_nodes_are_asked_for_the_files_of_environments(tmp_path: Path) -> None:
    run = _resolved({"env": [WEBSHOP, {**REPAIR, "tasks": "nope.jsonl"}, {"id": FAKE}]})
    node = Node("n1", "10.0.0.1", "one", {}, {})
    checks = NodeChecks(run, tmp_path, Answering())  # type: ignore[arg-type]
    assert asyncio.run(checks.environments([node])) == [
        f"node {node.title}: webshop/WebShop-v1: data_dir: no such folder: shop",
        f"node {node.title}: swe/Repair-v1: tasks: there is no file nope.jsonl",
    ]


def test_variables_that_workers_receive_are_set_here_and_not_on_their_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    engine = {"id": "sglang", "url": "http://h", "api_key_variable": "NO_SUCH_KEY"}
    (line,) = refused({"engine": engine})
    assert line.endswith("engine.api_key_variable: the environment variable NO_SUCH_KEY is not set")
    runtime = {"kind": "ray", "address": "10.0.0.1:6379", "env_vars": ["NO_SUCH_KEY"]}
    (line,) = refused({"engine": engine, "runtime": runtime})
    assert "runtime.env_vars: the environment variable NO_SUCH_KEY is not set here" in line
    (line,) = refused({"runtime": runtime | {"env_vars": ["KEY=secret"]}})
    assert "runtime.env_vars: list the names of variables only" in line
    assert "secret" not in line
    node = Node("n1", "10.0.0.1", "one", {}, {})
    for names, problems in ((["NO_SUCH_KEY"], 0), ([], 1)):
        run = _resolved({"engine": engine, "runtime": runtime | {"env_vars": names}})
        checks = NodeChecks(run, tmp_path, Answering())  # type: ignore[arg-type]
        assert len(asyncio.run(checks.engines(["cores"], [node]))) == problems


def _resolved(asked: Mapping[str, Any]) -> ResolvedRun:
    from rollart_core.config.load import validate

    config, problems = validate({**SMALL, **asked})
    assert config is not None
    assert not problems
    run = resolve_all(config).run
    assert run is not None
    return run


def test_a_runs_dir_in_which_nothing_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert refused({"runs_dir": str(tmp_path / "not/yet")}) == []
    for wrong in ("file", "file/below"):
        (line,) = refused({"runs_dir": str(tmp_path / wrong)})
        assert line.startswith(f"x.yaml: runs_dir: {tmp_path / 'file'} is not a folder")
    assert refused({"runs_dir": str(tmp_path / "file")}, makes_folder=False) == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (line,) = refused({"runs_dir": str(tmp_path / "not/yet")})
    assert f"runs_dir: {tmp_path} cannot be written to" in line


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = {"kind": "new", "device": "cuda"}
    (line,) = refused({"model": model})
    assert line.startswith("x.yaml: model.device: cuda: torch sees no CUDA device here")
    assert refused({"model": {"kind": "new", "device": "auto"}}) == []
    assert refused({"model": model, "runtime": "ray"}) == []  # its nodes may have one
