from __future__ import annotations

import importlib
import logging
from importlib.metadata import Distribution, EntryPoint, PathDistribution
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollart_core import PLUGIN_API
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.reward import RewardSpec
from rollart_core.contracts.spec import CommandSpec
from rollart_core.plugins import manager as plugins
from rollart_core.plugins import registry
from rollart_core.plugins.hookspecs import hookimpl


def bringing(*specs: object, kind: str = "environments") -> object:
    """Return a plugin object that registers these specs."""

    def hook() -> list[object]:
        return list(specs)

    hook.__name__ = f"rollart_{kind}"
    return SimpleNamespace(__name__="made_up", **{hook.__name__: hookimpl(hook)})


def env(env_id: str = "acme/Maze-v1", **kwargs: object) -> EnvSpec:
    return EnvSpec(id=env_id, entry_point="acme.maze:Maze", **kwargs)  # type: ignore[arg-type]


def reason(loaded: plugins.Plugins, name: str) -> str:
    """Return why plugin ``name`` is broken."""
    (plugin,) = [p for p in loaded.plugins if p.name == name]
    assert plugin.broken is not None
    return plugin.broken


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install made-up distributions: name, version, {entry point: source of its module}."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(dist: str, version: str, **modules: str) -> list[EntryPoint]:
        slug = dist.replace("-", "_")
        info = tmp_path / f"{slug}-{version}.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n"
        )
        lines = [f"{name} = {slug}_{name}" for name in modules]
        info.joinpath("entry_points.txt").write_text("\n".join(["[rollart]", *lines]))
        for name, source in modules.items():
            tmp_path.joinpath(f"{slug}_{name}.py").write_text(source)
        found: Distribution = PathDistribution(info)
        return list(found.entry_points)

    return install


def test_the_built_ins_come_through_the_entry_points_with_their_version() -> None:
    loaded = plugins.load()
    grpo = loaded.registered("algorithms")["rollart/GRPO-v1"]
    assert grpo.plugin.distribution == "rollart"
    assert grpo.plugin.version.split(".")[0].isdigit()
    assert loaded.broken == ()


def test_what_other_distributions_bring_is_tried_before_ours(
    installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "from rollart_core.plugins.hookspecs import hookimpl\n"
        "from rollart_core.contracts.forward_pass import ForwardPassSpec\n"
        "CONTRACT_VERSION = 2\n"
        "@hookimpl\n"
        "def rollart_forward_passes():\n"
        "    return [ForwardPassSpec(id='zeta/Fast-v1', entry_point='zeta:Fast')]\n"
    )
    ours = plugins.entry_points(group=plugins.GROUP)
    found = [*ours, *installed("zeta", "1", fast=source)]
    monkeypatch.setattr(plugins, "_current", plugins.load(found=found))
    keys = [registered.key for registered in registry.others_first("forward_passes")]
    assert keys == ["zeta/Fast-v1", "rollart/PrefixTree-v1"]


def test_a_plugin_is_attributed_to_its_distribution(installed) -> None:
    source = (
        "from rollart_core.plugins.hookspecs import hookimpl\n"
        "from rollart_core.contracts.env import EnvSpec\n"
        "@hookimpl\n"
        "def rollart_environments():\n"
        "    return [EnvSpec(id='acme/Maze-v1', entry_point='no_such_module:Maze')]\n"
    )
    loaded = plugins.load(found=installed("acme-maze", "2.1", maze=source))
    maze = loaded.registered("environments")["acme/Maze-v1"]
    assert str(maze.plugin) == "'maze' (acme-maze 2.1)"


def test_a_failing_import_breaks_only_its_plugin(installed) -> None:
    found = installed("bad", "1", boom="raise RuntimeError('no licence here')", fine="")
    loaded = plugins.load({"good": bringing(env())}, found=found)
    assert "RuntimeError: no licence here" in reason(loaded, "boom")
    assert [p.name for p in loaded.broken] == ["boom"]
    assert "acme/Maze-v1" in loaded.registered("environments")


@pytest.mark.parametrize(
    "source", ["import sys; sys.exit('no licence')", "def broken(:", "raise SystemExit"]
)
def test_a_plugin_that_ends_the_process_when_it_is_imported_breaks_itself_alone(
    installed, source: str
) -> None:
    loaded = plugins.load({"good": bringing(env())}, found=installed("bad", "1", ends=source))
    assert "cannot import bad_ends: " in reason(loaded, "ends")
    assert "acme/Maze-v1" in loaded.registered("environments")


def test_a_plugin_that_ends_the_process_when_it_is_asked_breaks_itself_alone() -> None:
    @hookimpl
    def rollart_rewards() -> list[object]:
        raise SystemExit(3)

    bad = SimpleNamespace(rollart_rewards=rollart_rewards)
    loaded = plugins.load({"bad": bad, "good": bringing(env())}, found=[])
    assert reason(loaded, "bad") == "rollart_rewards raised SystemExit: 3"
    assert "acme/Maze-v1" in loaded.registered("environments")


def test_what_a_plugin_prints_when_it_is_loaded_is_not_on_stdout(
    installed, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "from rollart_core.plugins.hookspecs import hookimpl\n"
        "print('hello from the import')\n"
        "@hookimpl\n"
        "def rollart_environments():\n"
        "    print('hello from the hook')\n"
        "    return []\n"
    )
    assert plugins.load(found=installed("loud", "1", loud=source)).broken == ()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.split("\n")[:2] == ["hello from the import", "hello from the hook"]


def test_a_misspelled_hook_is_broken_and_names_the_nearest() -> None:
    loaded = plugins.load({"a": bringing(env(), kind="enviroments")}, found=[])
    assert "rollart_enviroments" in reason(loaded, "a")
    assert "Did you mean 'rollart_environments'?" in reason(loaded, "a")


def test_a_hook_without_its_mark_is_broken() -> None:
    target = SimpleNamespace(rollart_rewards=lambda: [])
    assert "@hookimpl" in reason(plugins.load({"a": target}, found=[]), "a")


def test_a_hook_with_a_wrong_argument_is_broken() -> None:
    def rollart_run_started(run_dirr: Path) -> None: ...

    target = SimpleNamespace(rollart_run_started=hookimpl(rollart_run_started))
    assert "run_dirr" in reason(plugins.load({"a": target}, found=[]), "a")


def test_two_distributions_with_one_entry_point_name(installed) -> None:
    found = installed("one", "1", maze="") + installed("two", "2", maze="")
    loaded = plugins.load(found=found)
    assert len(loaded.broken) == 2
    for plugin in loaded.broken:
        assert "(one 1)" in str(plugin.broken)
        assert "(two 2)" in str(plugin.broken)


def test_two_plugins_with_one_id_are_both_broken_and_name_each_other() -> None:
    loaded = plugins.load(
        {"a": bringing(env()), "b": bringing(env()), "c": bringing(env("acme/Other-v1"))}, found=[]
    )
    assert [p.name for p in loaded.broken] == ["a", "b"]
    assert "'a'" in reason(loaded, "b")
    assert "'b'" in reason(loaded, "a")
    assert list(loaded.registered("environments")) == ["acme/Other-v1"]


def test_one_id_may_stand_in_two_kinds() -> None:
    reward = RewardSpec(id="acme/Maze-v1", entry_point="a:B")
    loaded = plugins.load({"a": bringing(env()), "b": bringing(reward, kind="rewards")}, found=[])
    assert loaded.broken == ()


def test_a_stranger_that_takes_a_built_in_id_or_alias_is_the_broken_one() -> None:
    loaded = plugins.load(
        {
            "id": bringing(env("webshop/WebShop-v1")),
            "alias": bringing(env("acme/Shop-v1", alias="webshop")),
        }
    )
    assert [p.name for p in loaded.broken] == ["alias", "id"]
    assert "(rollart " in reason(loaded, "id")
    assert loaded.registered("environments")["webshop/WebShop-v1"].plugin.distribution == "rollart"


def test_two_specs_of_one_plugin_with_one_id() -> None:
    loaded = plugins.load({"a": bringing(env(), env())}, found=[])
    assert "'acme/Maze-v1'" in reason(loaded, "a")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (env(contract_version=PLUGIN_API + 1), "upgrade rollart"),
        (env("Maze"), "namespace/Name-vN"),
        (EnvSpec(id="acme/Maze-v1", entry_point="acme.maze"), "module:Class"),
        (RewardSpec(id="acme/R-v1", entry_point="a:B"), "RewardSpec"),
    ],
)
def test_a_spec_that_breaks_a_rule(spec: object, said: str) -> None:
    loaded = plugins.load({"a": bringing(spec)}, found=[])
    assert said in reason(loaded, "a")
    assert not loaded.registered("environments")


class Maze:
    """What somebody gives where its name is wanted."""


@pytest.mark.parametrize(
    ("spec", "kind", "said"),
    [
        (EnvSpec(id="acme/Bad-v1", entry_point=Maze), "environments", "entry_point must be text"),  # type: ignore[arg-type]
        (env(["acme/Bad-v1"]), "environments", "id must be text, got ['acme/Bad-v1']"),  # type: ignore[arg-type]
        (env("acme/Bad-v1", alias=["bad"]), "environments", "alias must be text, got ['bad']"),
        (env("acme/Bad-v1", config=Maze), "environments", "config must be text, got <class"),
        (env("acme/Bad-v1", summary=("Bad.",)), "environments", "summary must be text"),
        (CommandSpec(name=["bad"], entry_point="a:b"), "commands", "name must be text"),  # type: ignore[arg-type]
        (CommandSpec(name="bad", entry_point=None), "commands", "entry_point must be text"),  # type: ignore[arg-type]
    ],
)
def test_a_spec_whose_words_are_no_text_breaks_its_plugin_alone(
    spec: object, kind: str, said: str
) -> None:
    extra = {"bad": bringing(spec, kind=kind), "good": bringing(env())}
    loaded = plugins.load(extra, found=[])
    assert reason(loaded, "bad").startswith(f"rollart_{kind}: {said}")
    assert [p.name for p in loaded.broken] == ["bad"]
    assert list(loaded.registered("environments")) == ["acme/Maze-v1"]


@pytest.mark.parametrize("error", [RuntimeError("no licence\nhere"), SystemExit("no licence")])
def test_a_plugin_whose_hooks_cannot_be_read_breaks_itself_alone(error: BaseException) -> None:
    class Bad:
        @property
        def rollart_rewards(self) -> object:
            raise error

    extra = {"a": bringing(env("acme/First-v1")), "bad": Bad(), "good": bringing(env())}
    loaded = plugins.load(extra, found=[])
    said = f"its hooks cannot be read: {type(error).__name__}: no licence"
    assert reason(loaded, "bad").startswith(said)
    assert [p.name for p in loaded.broken] == ["bad"]
    assert sorted(loaded.registered("environments")) == ["acme/First-v1", "acme/Maze-v1"]


def test_an_entry_point_that_names_none_breaks_its_plugin_alone(installed) -> None:
    found = installed("bad", "1", nothing="X = None")
    found = [EntryPoint(e.name, f"{e.value}:X", e.group) for e in found]
    loaded = plugins.load({"good": bringing(env())}, found=found)
    assert reason(loaded, "nothing") == "bad_nothing:X is None, which has no hooks"
    assert "acme/Maze-v1" in loaded.registered("environments")


OBSERVER = """
from rollart_core.plugins.hookspecs import hookimpl
heard = []
@hookimpl
def rollart_run_started(run_dir):
    heard.append(run_dir)
"""


def test_an_observer_that_is_named_twice_hears_everything_once(
    installed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (first,) = installed("acme-ear", "1", twice=OBSERVER)
    monkeypatch.setenv("ROLLART_PLUGINS", f"{first.value},{first.value}")
    again = EntryPoint("again", first.value, first.group)
    loaded = plugins.load(found=[first, again])
    assert [p.name for p in loaded.plugins] == ["again", "twice"]
    assert loaded.broken == ()
    loaded.observe("rollart_run_started", config={}, run_dir=tmp_path)
    assert importlib.import_module(first.value).heard == [tmp_path]


def test_an_installed_plugin_that_is_named_in_the_environment_too_is_there_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLART_PLUGINS", "rollart_rewards.plugin")
    loaded = plugins.load()
    assert loaded.broken == ()
    assert loaded.registered("rewards")["rollart/EnvReturn-v1"].plugin.distribution == "rollart"


def test_entry_points_left_without_metadata_stop_nothing(
    installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "acme_left-1.dist-info"
    left.mkdir()
    left.joinpath("entry_points.txt").write_text("[rollart]\nleft = acme_left.plugin\n")
    found = [*installed("fine", "1", fine=""), *PathDistribution(left).entry_points]
    loaded = plugins.load({"good": bringing(env())}, found=found)
    assert "No module named 'acme_left'" in reason(loaded, "left")
    assert [str(p) for p in loaded.broken] == ["'left' (? ?)"]
    assert "acme/Maze-v1" in loaded.registered("environments")


def test_a_registering_hook_that_raises() -> None:
    @hookimpl
    def rollart_trackers() -> list[object]:
        raise OSError("disk full")

    loaded = plugins.load({"a": SimpleNamespace(rollart_trackers=rollart_trackers)}, found=[])
    assert "OSError: disk full" in reason(loaded, "a")


def test_a_command_may_not_take_one_of_our_names() -> None:
    command = CommandSpec(name="run", entry_point="acme:app")
    loaded = plugins.load({"a": bringing(command, kind="commands")}, found=[])
    assert "'run'" in reason(loaded, "a")


def test_modules_named_in_the_environment_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLART_PLUGINS", "rollart_rewards.plugin, no_such_module")
    loaded = plugins.load(found=[])
    assert "rollart/EnvReturn-v1" in loaded.registered("rewards")
    assert "No module named 'no_such_module'" in reason(loaded, "no_such_module")


def test_an_observer_that_raises_is_heard_once_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[object] = []

    def rollart_run_started(run_dir: Path) -> None:
        seen.append(run_dir)

    @hookimpl(specname="rollart_run_started")
    def bad(config: object) -> None:
        seen.append("bad")
        raise ZeroDivisionError

    loaded = plugins.load(
        {
            "good": SimpleNamespace(rollart_run_started=hookimpl(rollart_run_started)),
            "bad": SimpleNamespace(bad=bad),
        },
        found=[],
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            loaded.observe("rollart_run_started", run_dir=Path("r"), config={})
    assert seen.count(Path("r")) == 2
    assert seen.count("bad") == 1
    assert len(caplog.records) == 1
    assert "'bad'" in caplog.text


def test_the_first_decision_that_is_not_none_holds() -> None:
    def deciding(answer: bool | None) -> object:
        @hookimpl
        def rollart_filter_group(group: object) -> bool | None:
            return answer

        return SimpleNamespace(rollart_filter_group=rollart_filter_group)

    loaded = plugins.load({"x": deciding(None), "y": deciding(False)}, found=[])
    assert loaded.decide("rollart_filter_group", group=object()) is False
    assert plugins.load(found=[]).decide("rollart_filter_group", group=object()) is None
