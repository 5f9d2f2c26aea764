from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from rollart_core.contracts.env import EnvSpec, Resources, Timeouts
from rollart_core.contracts.reward import RewardSpec
from rollart_core.errors import PluginError, UserError
from rollart_core.plugins import manager as plugins
from rollart_core.plugins import manifest
from rollart_testing.check.target import open_target

MAZE = """
contract_version: 2
licence: MIT
environments:
  - id: acme/Maze-v1
    alias: maze
    entry_point: acme_maze.env:MazeEnv
    config: acme_maze.config:MazeConfig
    summary: Find the way out.
    reward_range: [0, 1]
    deterministic: true
    max_turns: 12
    splits: [train, test]
    timeouts: {reset_s: 5, step_s: 2.5}
    resources: {cpu: 0.1, memory_bytes: 67108864}
    network: false
rewards:
  - {id: acme/Short-v1, entry_point: "acme_maze.reward:Short"}
"""


def faults(text: str) -> list[str]:
    """Return what is wrong with a manifest, a line a fault, without its source."""
    with pytest.raises(PluginError) as caught:
        manifest.parse_manifest(text, "rollart.yaml")
    return [line.removeprefix("rollart.yaml: ") for line in str(caught.value).splitlines()]


def with_env(line: str) -> str:
    """Return a manifest whose one environment has this line besides id and entry point."""
    return (
        "contract_version: 2\nlicence: MIT\nenvironments:\n"
        f"  - id: acme/Maze-v1\n    entry_point: acme_maze.env:Maze\n    {line}\n"
    )


def test_specs_are_the_dataclasses_of_their_kind() -> None:
    read = manifest.parse_manifest(MAZE, "here")
    assert (read.contract_version, read.licence) == (2, "MIT")
    assert dict(read.specs) == {
        "environments": (
            EnvSpec(
                id="acme/Maze-v1",
                alias="maze",
                entry_point="acme_maze.env:MazeEnv",
                config="acme_maze.config:MazeConfig",
                summary="Find the way out.",
                max_turns=12,
                timeouts=Timeouts(reset_s=5, step_s=2.5),
                resources=Resources(cpu=0.1, memory_bytes=67108864),
                licence="MIT",
                contract_version=2,
            ),
        ),
        "rewards": (
            RewardSpec(
                id="acme/Short-v1", entry_point="acme_maze.reward:Short", contract_version=2
            ),
        ),
    }
    assert type(read.specs["environments"][0].splits) is tuple


def test_every_fault_is_named_at_once() -> None:
    text = with_env("max_turn: 3") + "enviroments: []\n"
    assert faults(text.replace("MIT", "''")) == [
        "enviroments: unknown key. Did you mean 'environments'?",
        "licence: must be an SPDX expression, such as Apache-2.0",
        "environments[0].max_turn: unknown key. Did you mean 'max_turns'?",
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("max_turns: many", "max_turns: must be a whole number, got 'many'"),
        ("max_turns: true", "max_turns: must be a whole number, got True"),
        ("network: 1", "network: must be true or false, got 1"),
        ("reward_range: [0]", "reward_range: must be a list of 2, got [0]"),
        ("reward_range: [0, .inf]", "reward_range[1]: must be a number, got inf"),
        ("splits: []", "splits: must be a list of at least one, got []"),
        ("splits: train", "splits: must be a list of at least one, got 'train'"),
        ("timeouts: {step: 3}", "timeouts.step: unknown key. Did you mean 'step_s'?"),
        ("timeouts: 3", "timeouts: must be a mapping, got 3"),
        ("kind: box", "kind: must be one of step, agent, got 'box'"),
        ("summary: 3", "summary: must be text, got 3"),
        ("config: acme_maze.Config", "config: must be of the form 'module:Model'"),
    ],
)
def test_a_value_of_the_wrong_kind_says_what_is_allowed(line: str, reason: str) -> None:
    assert faults(with_env(line))[0].startswith(f"environments[0].{reason}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- a list", "must be a mapping"),
        ("a: b: c", "not YAML: mapping values"),
        ("licence: MIT\nlicence: MIT", "not YAML: key 'licence' is given twice"),
        ("contract_version: 2\nlicence: MIT", "it lists nothing. Known here: environments"),
        ("contract_version: 2\nlicence: MIT\nrewards: yes", "rewards: must be a list of mappings"),
        ("contract_version: 2\nlicence: MIT\nrewards: [maze]", "rewards[0]: must be a mapping"),
        ("contract_version: one\nlicence: MIT\nrewards: []", "contract_version: must be 2, got"),
        (MAZE.replace("acme/Maze-v1", "acme/Maze"), "environments[0].id: must be of the form"),
        (MAZE.replace("id: acme/Short-v1, ", ""), "rewards[0].id: is missing"),
        (MAZE + MAZE.splitlines()[-1], "rewards: id 'acme/Short-v1' is given 2 times"),
        ("x" * 300_000, "larger than"),
    ],
)
def test_a_manifest_that_cannot_be_read(text: str, reason: str) -> None:
    assert reason in faults(text)[0]


def test_a_newer_contract_is_told_before_its_unknown_keys() -> None:
    (only,) = faults("contract_version: 99\nlicence: MIT\nportals: []\n")
    assert only.startswith("contract version 99, this RollArt supports 1 and 2: upgrade rollart")


def test_a_wheel_is_read_without_importing_it(tmp_path: Path) -> None:
    wheel = tmp_path / "acme_maze-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("acme_maze/__init__.py", "raise SystemExit")
        archive.writestr("acme_maze/rollart.yaml", MAZE)
        archive.writestr("acme_maze-1.0.dist-info/METADATA", "Name: acme-maze")
    (package, read) = manifest.read_wheel_manifests(wheel).popitem()
    assert package == "acme_maze"
    assert read.specs["environments"][0].id == "acme/Maze-v1"
    assert "acme_maze" not in sys.modules


def test_what_is_no_wheel_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        manifest.read_wheel_manifests(tmp_path / "none.whl")
    not_zip = tmp_path / "a.whl"
    not_zip.write_text("no zip")
    with pytest.raises(UserError, match="cannot be read as a wheel"):
        manifest.read_wheel_manifests(not_zip)
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as archive:
        archive.writestr("acme/rollart.yaml", "licence: 3")
    with pytest.raises(UserError, match=r"b\.whl: acme/rollart\.yaml: contract_version"):
        manifest.read_wheel_manifests(tmp_path / "b.whl")


@pytest.mark.parametrize(("at", "byte"), [("data", 0xFF), ("flags", 1)], ids=["garbled", "secret"])
def test_a_wheel_that_cannot_be_unpacked(tmp_path: Path, at: str, byte: int) -> None:
    wheel = tmp_path / "acme_maze-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("acme/rollart.yaml", "licence: MIT" * 9)
    data = bytearray(wheel.read_bytes())
    data[30 + len("acme/rollart.yaml") if at == "data" else data.index(b"PK\1\2") + 8] = byte
    wheel.write_bytes(data)
    with pytest.raises(UserError, match="cannot be read as a wheel"):
        manifest.read_wheel_manifests(wheel)
    with pytest.raises(UserError, match="cannot be read as a wheel"):
        open_target(str(wheel), tmp_path / "scratch")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package whose hook module hands on its manifest."""
    folder = tmp_path / "manifest_maze"
    folder.mkdir()
    folder.joinpath("__init__.py").touch()
    folder.joinpath("plugin.py").write_text(
        "from rollart_core.plugins.hookspecs import hookimpl\n"
        "from rollart_core.plugins.manifest import specs\n"
        "@hookimpl\n"
        "def rollart_environments():\n"
        "    return specs(__package__, 'environments')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ROLLART_PLUGINS", "manifest_maze.plugin")
    for name in [n for n in sys.modules if n.startswith("manifest_maze")]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def test_a_hook_module_hands_on_what_the_manifest_lists(package: Path) -> None:
    package.joinpath("rollart.yaml").write_text(MAZE)
    found = plugins.load().registered("environments")["acme/Maze-v1"]
    assert found.spec == manifest.parse_manifest(MAZE, "here").specs["environments"][0]
    assert manifest.specs("manifest_maze", "trackers") == []
    with pytest.raises(PluginError, match="Did you mean 'environments'"):
        manifest.specs("manifest_maze", "enviroments")


def test_a_fault_in_a_manifest_breaks_its_plugin_and_nothing_else(package: Path) -> None:
    package.joinpath("rollart.yaml").write_text(MAZE.replace("max_turns", "max_turn") + "x: 1")
    loaded = plugins.load()
    assert "toy/FrozenLake-v1" in loaded.registered("environments")
    (broken,) = loaded.broken
    assert str(broken.broken).startswith("manifest_maze/rollart.yaml: x: unknown key. Known here")
    assert str(broken.broken).endswith("max_turn: unknown key. Did you mean 'max_turns'?")
    package.joinpath("rollart.yaml").unlink()
    (broken,) = plugins.load().broken
    assert "package 'manifest_maze' has no rollart.yaml" in str(broken.broken)
