"""Adapters: ids, options, tasks, prompts, global random state; on sessions made for the tests."""

from __future__ import annotations

import ast
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

import rollart_core
from rollart_core.cli import build_app
from rollart_core.config.load import validate
from rollart_core.config.resolve import resolve_run
from rollart_core.contracts.adapter import EnvAdapterSpec
from rollart_core.errors import ConfigError, PluginError, UnknownIdError
from rollart_core.plugins import manager as plugins
from rollart_core.plugins import registry
from rollart_core.plugins.hookspecs import hookimpl
from rollart_plugins.adapters.base import AdapterOptions, ForeignAdapter
from rollart_sandboxes.isolation import server

SESSION = """
import random
IMPORTS = ()
GLOBAL_RANDOM = True

def describe(env_id, options):
    if env_id != "Guess":
        raise LookupError(f"no game {env_id!r}")
    return {"reward_range": [0, 2], "max_turns": 3, "licence": "MIT"}

class Session:
    offers = ("oracle", "secrets")
    prompt = "Say the number."
    max_turns = 3
    def __init__(self, env_id, options):
        describe(env_id, options)
    def reset(self, seed, task):
        random.seed(seed)
        self.number = str(random.randrange(1000, 9999))
        return f"Seed {seed}.", {"task": task, "thing": object()}
    def step(self, action):
        right = action == self.number
        return str(random.random()), 2.0 * right, right, False, {"success": right}
    def oracle(self):
        return self.number
    def secrets(self):
        return [self.number]
    def close(self):
        self.number = None
"""
RUN = {"model": {"kind": "new"}, "stop": {"batches": 1}, "trackers": []}


class Options(AdapterOptions):
    level: int = 1


@pytest.fixture(autouse=True, scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register the adapters acme, and lost, whose package is not installed."""
    path = tmp_path_factory.mktemp("acme") / "acme_session.py"
    path.write_text(SESSION)

    class Acme(ForeignAdapter):
        session: ClassVar[str] = str(path.with_suffix(""))
        options: ClassVar[type[AdapterOptions]] = Options

    class Lost(Acme):
        module: ClassVar[str] = "nowhere_to_be_found"
        package: ClassVar[str] = "nowhere"

    module = ModuleType("acme_adapters")
    module.__dict__.update(Acme=Acme, Lost=Lost, Options=Options)

    @hookimpl
    def rollart_env_adapters() -> list[EnvAdapterSpec]:
        return [
            EnvAdapterSpec(
                id=f"acme/{name}-v1",
                alias=name.lower(),
                entry_point=f"acme_adapters:{name}",
                config="acme_adapters:Options",
            )
            for name in ("Acme", "Lost")
        ]

    extra = {"acme": SimpleNamespace(rollart_env_adapters=rollart_env_adapters)}
    with pytest.MonkeyPatch.context() as patch, plugins.using(extra):
        patch.setitem(sys.modules, "acme_adapters", module)
        yield


def make(**options: object) -> Any:
    return rollart_core.make("acme::Guess", **options)


def test_the_spec_says_what_the_session_module_and_the_options_say() -> None:
    spec = registry.env_spec("acme/Acme-v1::Guess")
    assert (spec.id, spec.config) == ("acme::Guess", "acme_adapters:Options")
    assert (spec.reward_range, spec.max_turns, spec.licence) == ((0, 2), 3, "MIT")
    assert spec.splits == ("train", "warm", "test")
    options = {"reward_scale": 0.5, "max_turns": 7, "splits": {"all": [0, 5]}}
    spec = registry.env_spec("acme::Guess", options)
    assert (spec.reward_range, spec.max_turns, spec.splits) == ((0, 1), 7, ("all",))
    assert registry.env_spec("acme::Guess", {"reward_range": [-1, 3]}).reward_range == (-1, 3)


@pytest.mark.parametrize(
    ("env_id", "error", "words"),
    [
        ("acmee::Guess", UnknownIdError, "Did you mean 'acme'"),
        ("acme::Gess", UnknownIdError, "no game 'Gess'"),
        ("acme::", UnknownIdError, "ADAPTER::FOREIGN_ID"),
        ("::Guess", UnknownIdError, "ADAPTER::FOREIGN_ID"),
        ("lost::Guess", PluginError, "pip install 'nowhere'"),
    ],
)
def test_a_wrong_id_is_told(env_id: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        registry.env_spec(env_id)
    with pytest.raises(error, match=words):
        rollart_core.make(env_id)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"levl": 2}, "levl: unknown key. Did you mean 'level'"),
        ({"splits": {"train": [0, 10], "test": [9, 20]}}, "train and test overlap"),
        ({"splits": {"train": [3, 3]}}, "must be"),
        ({"python": "/no/such/python"}, "'/no/such/python' is not a program"),
    ],
)
def test_wrong_options_are_told(options: dict[str, object], words: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=words):
        make(**options)


def resolved(env: object) -> Any:
    config, problems = validate({**RUN, "env": env})
    assert config is not None, problems
    assert not problems
    return resolve_run(config)


def test_a_config_names_adapter_and_id_in_one_key_or_in_two() -> None:
    one = resolved({"id": "acme::Guess", "level": 2})
    two = resolved({"adapter": "acme", "id": "Guess", "level": 2})
    assert one.env == two.env
    assert one.max_turns == 3
    assert one.env.options["level"] == 2
    assert "resolved_with" in one.as_dict()  # a record, and no setting: the same run comes back
    again, problems = validate(json.loads(json.dumps(one.as_dict())))
    assert not problems
    assert again is not None
    assert resolve_run(again).env == one.env


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"adapter": "acme"}, "adapter needs an id"),
        ({"adapter": "acme", "id": "acme::Guess"}, "already names an adapter"),
        ({"adapter": "acne", "id": "Guess"}, "Did you mean 'acme'"),
        ({"adapter": "acme", "id": "Gess"}, "no game 'Gess'"),
        ({"adapter": "lost", "id": "Guess"}, "pip install 'nowhere'"),
        ({"adapter": "acme", "id": "Guess", "levl": 2}, "Did you mean 'level'"),
        ({"adapter": "acme", "id": "Guess", "splits": {"a": [0, 9]}}, "no split 'train'"),
    ],
)
def test_a_wrong_config_is_told_before_anything_starts(env: object, words: str) -> None:
    config, problems = validate({**RUN, "env": env})
    if config is None:
        assert words in " ".join(p.within() for p in problems)
        return
    with pytest.raises(ConfigError, match=words):
        resolve_run(config)


def test_a_task_is_a_seed_of_its_split() -> None:
    env = make(splits={"train": [10, 20], "test": [20, 30]}, num_tasks=4, prompt="")
    assert (env.num_tasks("train"), env.num_tasks("test")) == (4, 4)
    assert env.reset(options={"split": "test", "task": 3})[0] == "Seed 23."
    assert env.reset(seed=5)[0] == env.reset(seed=5)[0]
    for options in ({"task": 4}, {"task": -1}, {"split": "other"}):
        with pytest.raises(ValueError, match=r"task|split"):
            env.reset(options=options)
    env.close()


@pytest.mark.parametrize(
    ("prompt", "page"),
    [
        (None, "Say the number.\n\nSeed 0."),
        ("", "Seed 0."),
        ("Play.", "Play.\n\nSeed 0."),
        ("Now: {observation} Go!", "Now: Seed 0. Go!"),
    ],
)
def test_the_prompt_stands_before_or_around_the_first_observation(
    prompt: str | None, page: str
) -> None:
    env = make(prompt=prompt)
    assert env.reset(options={"task": 0})[0] == page
    assert "Say" not in env.step("1")[0]
    env.close()


def test_turns_rewards_and_info_are_ours() -> None:
    env = make(max_turns=2, reward_scale=0.25)
    _, info = env.reset(options={"task": 0, "split": "test"})
    assert info == {"task": {"split": "test", "index": 0}}  # what is no plain value is left out
    assert env.step("wrong")[1:4] == (0.0, False, False)
    assert env.step("wrong")[1:4] == (0.0, False, True)
    with pytest.raises(RuntimeError, match=r"reset\(\) first"):
        env.step("wrong")
    env.reset(options={"task": 0})
    assert env.secrets() == [env.oracle()]
    assert env.step(env.oracle())[1:4] == (0.5, True, False)
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()


def test_global_random_state_is_lent_and_taken_back() -> None:
    one, two = make(prompt=""), make(prompt="")
    random.seed(3)
    np.random.seed(3)
    expected = random.Random(3).random(), np.random.RandomState(3).random()
    alone = make(prompt="")
    alone.reset(options={"task": 0})
    pages = [alone.step("x")[0] for _ in range(3)]
    one.reset(options={"task": 0})
    together = []
    for _ in range(3):
        two.reset(options={"task": 1})
        together.append(one.step("x")[0])
    assert together == pages
    assert (random.random(), np.random.random()) == expected
    for env in (one, two, alone):
        env.close()


@pytest.mark.parametrize("kind", ["python", "numpy", "normal"])
def test_states_are_lent_whole(kind: str) -> None:
    """Whatever a session draws, it draws as if alone, and so do we."""
    draws = {
        "python": random.random,
        "numpy": np.random.random,
        "normal": np.random.normal,  # draws two numbers and keeps one
    }
    guard = server._OwnRandom()

    def reset() -> object:
        random.seed(5)
        np.random.seed(5)
        return draws[kind]()

    def episode(run: Any) -> list[object]:
        return [run("reset", reset), *(run("step", draws[kind]) for _ in range(3))]

    def outer() -> tuple[float, float]:
        return random.random(), np.random.normal()

    alone = episode(lambda _, function: function())
    random.seed(1)
    np.random.seed(1)
    undisturbed = [outer() for _ in range(6)]
    random.seed(1)
    np.random.seed(1)
    seen = []
    for _ in range(6):
        assert episode(guard.run) == alone
        seen.append(outer())
    assert seen == undisturbed


def test_info_shows_a_foreign_environment_and_its_options() -> None:
    done = CliRunner().invoke(build_app(), ["info", "acme::Guess", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)["found"][0]
    assert found["max_turns"] == 3
    assert "level" in [option["name"] for option in found["options"]]


def test_play_plays_a_foreign_environment() -> None:
    done = CliRunner().invoke(build_app(), ["play", "acme::Guess", "level=2"], input="?\nx\ny\nz\n")
    assert done.exit_code == 0, done.output
    assert "The end. Return: 0" in done.output


ADAPTERS = Path(sys.modules[ForeignAdapter.__module__].__file__ or "").parent
IN_OTHER_PYTHONS = [
    *(Path(server.__file__).with_name(name) for name in ("server.py", "session.py")),
    *sorted((ADAPTERS / "sessions").glob("*.py")),
]


@pytest.mark.parametrize("path", IN_OTHER_PYTHONS, ids=lambda p: p.name)
def test_what_runs_in_other_pythons_is_old_enough_and_needs_no_package(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {a.name for n in top if isinstance(n, ast.Import) for a in n.names}
    names |= {str(n.module) for n in top if isinstance(n, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names
