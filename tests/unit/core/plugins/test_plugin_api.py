"""Plugins of today's version of the plugin API, of the one before, and of one still to come."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import rollart_core
from rollart_core import OLDEST_PLUGIN_API, PLUGIN_API
from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.reward import RewardBackendSpec
from rollart_core.errors import PluginError
from rollart_core.plugins import manager as plugins
from rollart_core.plugins import registry
from rollart_core.plugins.api_version import PluginApiWarning, version_fault
from rollart_core.plugins.hookspecs import hookimpl

HERE = "test_plugin_api"


class Old:
    """An algorithm of version 1, as far as versions go."""

    def extra_modules(self) -> dict[str, object]:
        return {"values": self}


class Today:
    def extra_modules(self, hidden_size: int) -> dict[str, object]:
        return {"values": hidden_size}


class Backend:
    def __init__(self, *, reward: object) -> None:
        self.reward = reward


def module(*specs: object, kind: str = "algorithms", **said: object) -> SimpleNamespace:
    """Return a hook module that registers these specs and says these things at its top."""

    def hook() -> list[object]:
        return list(specs)

    hook.__name__ = f"rollart_{kind}"
    return SimpleNamespace(__name__="made_up", **{hook.__name__: hookimpl(hook)}, **said)


def algorithm(name: str, **said: int) -> AlgorithmSpec:
    return AlgorithmSpec(id=f"acme/{name}-v1", entry_point=f"{HERE}:{name}", **said)


def broken(target: object) -> str:
    (plugin,) = plugins.load({"a": target}, found=[]).broken
    return str(plugin.broken)


def test_one_version_back_is_spoken() -> None:
    assert PLUGIN_API - OLDEST_PLUGIN_API == 1
    assert [version_fault(v) for v in range(OLDEST_PLUGIN_API, PLUGIN_API + 1)] == [None, None]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (3, "speaks contract version 3, this RollArt supports 1 and 2: upgrade rollart"),
        (-1, "contract version -1 is not a version: use 2"),
        ("2", "contract version '2' is not a version: use 2"),
        (True, "contract version True is not a version: use 2"),
    ],
)
def test_a_version_that_is_not_spoken_breaks_the_plugin_and_says_why(
    said: object, why: str
) -> None:
    assert why in broken(module(algorithm("Old"), CONTRACT_VERSION=said))
    assert why in broken(module(algorithm("Old", contract_version=said)))  # type: ignore[arg-type]


def test_a_version_that_is_no_longer_spoken_says_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollart_core.plugins.api_version.OLDEST_PLUGIN_API", 2)
    assert "this RollArt supports 2: install a newer version of the plugin" in str(version_fault(1))


def test_a_plugin_for_a_newer_version_bricks_no_other() -> None:
    newer = module(EnvSpec(id="acme/Far-v1", entry_point="a:B", contract_version=3))
    newer.rollart_environments = newer.__dict__.pop("rollart_algorithms")
    with plugins.using({"newer": newer, "today": module(algorithm("Today"))}) as loaded:
        assert [p.name for p in loaded.broken] == ["newer"]
        assert registry.resolve("algorithms", "acme/Today-v1") is Today


def test_a_spec_says_its_version_or_its_module_does_or_it_is_the_first() -> None:
    specs = (algorithm("Old"), algorithm("Today", contract_version=2))
    for said, expected in (({}, [1, 2]), ({"CONTRACT_VERSION": 2}, [2, 2])):
        found = plugins.load({"a": module(*specs, **said)}, found=[]).registered("algorithms")
        assert [r.spec.contract_version for r in found.values()] == expected  # type: ignore[union-attr]


def test_every_built_in_speaks_todays_version() -> None:
    loaded = plugins.load()
    kinds = [kind for kind in plugins.KINDS if kind != "commands"]
    ours = [r.spec for k in kinds for r in loaded.registered(k).values()]
    said = {s.id: s.contract_version for s in ours}  # type: ignore[union-attr]
    assert said
    assert [i for i, v in said.items() if v != rollart_core.PLUGIN_API] == []


def test_an_algorithm_of_version_1_is_asked_without_a_size_and_told_what_replaces_it() -> None:
    with plugins.using({"a": module(algorithm("Old"))}):
        with pytest.warns(PluginApiWarning, match=r"acme/Old-v1 .* extra_modules\(self, hidden_si"):
            cls = registry.resolve("algorithms", "acme/Old-v1")
        with pytest.warns(PluginApiWarning):
            assert registry.resolve("algorithms", "acme/Old-v1") is cls
    made = cls()
    assert isinstance(made, Old)
    assert cls.__name__ == "Old"
    assert made.extra_modules(64) == {"values": made}


def test_what_version_1_has_in_common_with_today_is_left_alone_and_not_warned_of() -> None:
    with plugins.using({"a": module(algorithm("Today"))}), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.resolve("algorithms", "acme/Today-v1") is Today


def test_who_says_version_2_keeps_to_it() -> None:
    with plugins.using({"a": module(algorithm("Old", contract_version=2))}):
        assert registry.resolve("algorithms", "acme/Old-v1") is Old


def test_a_backend_of_version_1_is_built_around_the_reward_itself() -> None:
    spec = RewardBackendSpec(id="acme/Backend-v1", entry_point=f"{HERE}:Backend")
    for version, in_process in ((1, True), (2, False)):
        target = module(spec, kind="reward_backends", CONTRACT_VERSION=version)
        with plugins.using({"a": target}):
            found = registry.spec("reward_backends", "acme/Backend-v1")
            assert isinstance(found, RewardBackendSpec)
            assert found.in_process is in_process
            if version == 1:
                with pytest.warns(PluginApiWarning, match="set in_process: true"):
                    registry.resolve("reward_backends", "acme/Backend-v1")


def test_code_that_nobody_registers_is_of_today() -> None:
    assert registry.spec("algorithms", f"{HERE}:Old").contract_version == PLUGIN_API
    assert registry.resolve("algorithms", f"{HERE}:Old") is Old


def test_a_manifest_for_a_newer_version_is_told_like_a_hook() -> None:
    from rollart_core.plugins.manifest import parse_manifest

    with pytest.raises(PluginError, match=r"contract version 3, this RollArt supports 1 and 2"):
        parse_manifest("contract_version: 3\nlicence: MIT\nportals: []\n", "here")


def test_the_page_says_which_versions_are_spoken_and_what_changed(repo_root: Path) -> None:
    text = (repo_root / "docs/reference/plugin-api.md").read_text(encoding="utf-8")
    words = " ".join(text.split())
    assert f"supports **version {PLUGIN_API}**" in words
    assert f"**version {OLDEST_PLUGIN_API}** still load" in words
    assert f"## What changed from {PLUGIN_API - 1} to {PLUGIN_API}" in text
    assert f"contract_version: {PLUGIN_API}\n" in text
    for template in (repo_root / "cookiecutter").rglob("rollart.yaml"):
        assert f"contract_version: {PLUGIN_API}\n" in template.read_text(encoding="utf-8")
