from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from pydantic import BaseModel, ConfigDict, field_validator

import rollart_core
from rollart_core.config.base import PluginRef
from rollart_core.config.problems import Problem
from rollart_core.config.resolve_plugin import PluginFinder
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.sandbox_service import SandboxService, SandboxServiceSpec
from rollart_core.errors import ConfigError, PluginError, UnknownIdError
from rollart_core.plugins import manager as plugins
from rollart_core.plugins import registry
from rollart_core.plugins.hookspecs import hookimpl


class MazeConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    width: int = 3
    walls: tuple[int, ...] = ()

    @field_validator("width")
    @classmethod
    def _is_there(cls, value: int) -> int:
        if value == 404:
            raise FileNotFoundError("no maze of that width on disk")
        return value


class Maze:
    def __init__(self, width: int, walls: tuple[int, ...] = ()) -> None:
        self.width, self.walls = width, walls


@pytest.fixture(autouse=True)
def maze(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register acme/Maze-v1, and a plugin that is broken."""
    module = ModuleType("acme_maze")
    module.__dict__.update(Maze=Maze, MazeConfig=MazeConfig)
    monkeypatch.setitem(sys.modules, "acme_maze", module)

    @hookimpl
    def rollart_environments() -> list[EnvSpec]:
        return [
            EnvSpec(
                id="acme/Maze-v1",
                alias="maze",
                entry_point="acme_maze:Maze",
                config="acme_maze:MazeConfig",
            ),
            EnvSpec(id="acme/Lost-v1", entry_point="acme_maze:Lots"),
        ]

    @hookimpl(specname="rollart_environments")
    def broken() -> list[EnvSpec]:
        return [EnvSpec(id="new/Hall-v1", entry_point="a:B", contract_version=99)]

    extra = {
        "acme": SimpleNamespace(rollart_environments=rollart_environments),
        "newer": SimpleNamespace(broken=broken),
    }
    with plugins.using(extra):
        yield


@pytest.mark.parametrize("name", ["acme/Maze-v1", "maze"])
def test_make_by_id_and_alias_fills_in_defaults(name: str) -> None:
    env = rollart_core.make(name, walls=[1, 2])
    assert isinstance(env, Maze)
    assert (env.width, env.walls) == (3, (1, 2))


def test_make_code_that_is_not_registered() -> None:
    env = registry.make("acme_maze:Maze", width=7)
    assert isinstance(env, Maze)
    assert env.width == 7
    assert registry.env_spec("acme_maze:Maze").max_turns == EnvSpec(id="", entry_point="").max_turns


def test_unknown_id_names_the_nearest() -> None:
    with pytest.raises(UnknownIdError, match=r"Did you mean 'acme/Maze-v1'"):
        registry.make("acme/Mace-v1")


def test_an_id_of_a_broken_plugin_says_why_it_is_broken() -> None:
    with pytest.raises(PluginError, match=r"'newer'.*contract version 99"):
        registry.make("new/Hall-v1")


def test_unknown_option_of_a_config_model() -> None:
    with pytest.raises(ConfigError, match=r"widht: unknown key\. Did you mean 'width'\?"):
        registry.make("maze", widht=3)


def test_unknown_option_of_unregistered_code() -> None:
    with pytest.raises(ConfigError, match=r"widht: unknown key\. Did you mean 'width'\?"):
        registry.make("acme_maze:Maze", widht=3)


def test_missing_option_of_unregistered_code() -> None:
    with pytest.raises(ConfigError, match=r"width: is missing"):
        registry.make("acme_maze:Maze")


def test_wrong_option_says_what_it_must_be() -> None:
    with pytest.raises(ConfigError, match=r"width: must be a valid integer.*got 'broad'"):
        registry.make("maze", width="broad")


def test_a_validator_that_raises_another_error_is_still_one_line() -> None:
    with pytest.raises(ConfigError, match="FileNotFoundError: no maze of that width"):
        registry.make("maze", width=404)


def test_a_class_that_is_not_where_the_spec_says() -> None:
    with pytest.raises(PluginError, match=r"'acme_maze' has no 'Lots'"):
        registry.resolve("environments", "acme/Lost-v1")


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(PluginError, match="No module named 'acme_mice'"):
        registry.resolve("rewards", "acme_mice:Reward")
    mend = r"\(install acme_mice, or put its folder on PYTHONPATH\)"
    for named in ("acme_mice:Reward", "acme_mice.small:Reward"):
        with pytest.raises(PluginError, match=mend):
            registry.resolve("rewards", named)


def test_a_module_that_another_one_lacks_is_no_matter_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_cats.py").write_text("import acme_mice\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="No module named 'acme_mice'") as told:
        registry.resolve("rewards", "acme_cats:Reward")
    assert "PYTHONPATH" not in str(told.value)


def test_context_is_passed_beside_the_options() -> None:
    built = registry.build("weight_channels", "acme_maze:Maze", {"walls": (1,)}, width=1)
    assert (built.width, built.walls) == (1, (1,))


class NoSandboxes(SandboxService):
    """Refuses every environment."""

    def option_problems(self, env_id, options):
        return [Problem(("isolation",), "there are no sandboxes")]

    def describe(self, env_id, options):
        raise ConfigError("there are no sandboxes")

    fit = make = open = fault = collect_garbage = describe


def service_of(name: str) -> object:
    @hookimpl
    def rollart_sandbox_services() -> list[SandboxServiceSpec]:
        path = f"{__name__}:NoSandboxes"
        return [SandboxServiceSpec(id=f"{name}/Service-v1", entry_point=path, contract_version=2)]

    return SimpleNamespace(rollart_sandbox_services=rollart_sandbox_services)


def test_every_use_of_the_option_isolation_asks_the_sandbox_service_of_a_plugin() -> None:
    options = {"isolation": {"kind": "venv"}}
    with plugins.using({"acme": service_of("acme")}):
        assert isinstance(registry.sandbox_service(), NoSandboxes)
        (problem,) = registry.option_problems("environments", "maze", options)
        assert problem.message == "there are no sandboxes"
        for ask in (registry.env_spec, partial(registry.build, "environments")):
            with pytest.raises(ConfigError, match="there are no sandboxes"):
                ask("maze", options)
    assert type(registry.sandbox_service()).__module__ == "rollart_sandboxes.service"


def test_two_other_sandbox_services_are_refused_with_both_names() -> None:
    both = {"acme": service_of("acme"), "zeta": service_of("zeta")}
    with (
        plugins.using(both),
        pytest.raises(PluginError, match=r"'acme' .* and 'zeta' .* both provide a sandbox"),
    ):
        registry.sandbox_service()


def test_no_sandbox_service_is_said() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_current", plugins.load(found=[]))
        with pytest.raises(PluginError, match="no sandbox service is installed"):
            registry.make("maze", isolation="venv")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("acme_maze:Maze", "environments"),
        ("acme_maze:NoSuchClass", "environments"),
        ("no_such_module:Class", "environments"),
        (f"{__name__}:NoSandboxes", "sandbox_services"),
        ("rollart_testing:FakeReward", "rewards"),
        ("rollart_testing:FakeGroupReward", "rewards"),
        ("rollart_testing:FakeAlgorithm", "algorithms"),
        ("rollart_testing:FakeMapper", "hardware_mappers"),
        ("rollart_testing:ScriptedEngine", "inference_engines"),
        ("rollart_testing:FakeSandbox", "sandboxes"),
        ("rollart_testing:FaultyBackend", "reward_backends"),
        ("rollart_testing:FakeWeightChannel", "weight_channels"),
        ("rollart_testing:FakeTracker", "trackers"),
        ("rollart_ray.runtime:RayRuntime", "runtimes"),
        ("rollart_envs.swe.function_agent:FunctionRepairAgent", "agents"),
    ],
)
def test_a_class_is_of_the_kind_of_its_base(path: str, kind: str) -> None:
    assert registry.kind_of(path) == kind


TOOLS = """
from rollart_core.rollout.tools import ToolEnv

class Agent:
    tools = True

class Without(Agent):
    tools = False

class Plain:
    def reset(self): ...

class Calls(ToolEnv):
    def begin(self, task, split, seed): ...
    def said(self, content): ...
"""


@pytest.mark.parametrize(
    ("name", "has_tools"), [("Agent", True), ("Without", False), ("Plain", False), ("Calls", True)]
)
def test_an_unregistered_class_says_itself_whether_it_has_tools(
    name: str, has_tools: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_tools.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    path = f"of_tools:{name}"
    assert registry.env_spec(path).tools is has_tools
    find = PluginFinder(lambda problem: pytest.fail(problem.message), import_classes=False)
    assert find("environments", PluginRef(id=path), "env").spec.tools is has_tools
