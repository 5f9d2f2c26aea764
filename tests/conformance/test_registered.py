"""Every registered plugin keeps its contract: a new built-in is tested the day it is registered."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import BaseModel
from support.openai_server import OpenAIServer
from support.sandbox_types import IN_DOCKER, no_bubblewrap, no_docker

from rollart_core.contracts.adapter import EnvAdapter, EnvAdapterSpec
from rollart_core.contracts.algorithm import Algorithm
from rollart_core.contracts.hardware import HardwareMapper
from rollart_core.contracts.inference import InferenceEngine
from rollart_core.contracts.reward import GroupReward, Reward, RewardBackend
from rollart_core.contracts.sandbox import Sandbox
from rollart_core.contracts.sandbox_service import SandboxService
from rollart_core.contracts.tool_format import ToolFormat
from rollart_core.contracts.tracker import Tracker
from rollart_core.contracts.weights import WeightChannel
from rollart_core.errors import PluginError
from rollart_core.plugins import registry
from rollart_core.plugins.manager import KINDS, plugins
from rollart_core.plugins.registry import load_object
from rollart_core.runtime.workers import WorkersRuntime
from rollart_core.training.policy import Policy
from rollart_testing import CheckOutcome, CheckResult, assert_checks, check_env
from rollart_testing.agent_checks import run_agent_checks
from rollart_testing.agent_play import AgentSubject
from rollart_testing.check.child import PART_CHECKS, check_part
from rollart_testing.env_checks import run_env_checks
from rollart_testing.env_play import EnvSubject

BASES: dict[str, tuple[type, ...]] = {
    "rewards": (Reward, GroupReward),
    "algorithms": (Algorithm,),
    "hardware_mappers": (HardwareMapper,),
    "inference_engines": (InferenceEngine,),
    "sandboxes": (Sandbox,),
    "reward_backends": (RewardBackend,),
    "weight_channels": (WeightChannel,),
    "trackers": (Tracker,),
    "env_adapters": (EnvAdapter,),
    "runtimes": (WorkersRuntime,),
    "forward_passes": (Policy,),
    "sandbox_services": (SandboxService,),
    "tool_formats": (ToolFormat,),
}
NO_EXAMPLES = {
    "openenv": "it needs a running server: tests/adapters/test_real_openenv.py",
    "roll-gem": "it adapts classes, not a package",
    "verifiers": "it needs a taskset: tests/verifiers/test_real_verifiers.py",
    "skyrl-gym": "it needs tasks: tests/adapters/test_real_skyrl_gym.py",
}
"""Adapters without an id that can be tried alone, and where they are tried."""


def check_one_adapter(adapter_id: str) -> list[CheckResult]:
    """Check the first of its examples; where the foreign package is missing, that it says so."""
    spec = registry.spec("env_adapters", adapter_id)
    assert isinstance(spec, EnvAdapterSpec)
    assert spec.alias
    if not spec.examples:
        why = NO_EXAMPLES[spec.alias]
        return [CheckResult("examples", CheckOutcome.SKIP, why)]
    env_id = f"{spec.alias}::{spec.examples[0]}"
    try:
        said = registry.env_spec(env_id)
    except PluginError as e:
        assert f"pip install '{spec.package}'" in str(e)  # noqa: PT017 - a missing package
        return [CheckResult("says what to install", CheckOutcome.PASS)]
    return check_env(partial(registry.make, env_id), spec=said, num_tasks=1)


def check_one_env(env_id: str) -> list[CheckResult]:
    """Check an environment; one that needs a wall gets the light one."""
    said = registry.env_spec(env_id)
    if said.sandbox is None:
        return check_env(env_id)
    if why := no_bubblewrap():
        return [CheckResult("reset", CheckOutcome.SKIP, why)]
    make = partial(registry.make, env_id, sandbox="bubblewrap")
    # Boxes take their time: a task of each split, and little of it for those that play many.
    if said.kind == "agent":
        return run_agent_checks(AgentSubject(make, said, num_tasks=1, budget_s=0.5))
    return run_env_checks(EnvSubject(make, said, num_tasks=1, budget_s=0.5))


def check_one(kind: str, plugin_id: str, folder: Path) -> list[CheckResult]:
    """Run what one process can check; `rollart check` adds what needs several."""
    if kind == "environments":
        return check_one_env(plugin_id)
    if kind == "env_adapters":
        return check_one_adapter(plugin_id)
    if plugin_id == "rollart/UnitTests-v1" and (why := no_bubblewrap()):
        return [CheckResult("make", CheckOutcome.SKIP, why)]
    if plugin_id == "rollart/Bubblewrap-v1" and (why := no_bubblewrap()):
        return [CheckResult("start", CheckOutcome.SKIP, why)]
    if plugin_id == "rollart/Docker-v1" and (why := no_docker()):
        return [CheckResult("start", CheckOutcome.SKIP, why)]
    if (package := TRACKERS.get(plugin_id)) and find_spec(package) is None:
        return [CheckResult("logs", CheckOutcome.SKIP, f"{package} is in rollart[{package}]")]
    if plugin_id in NEEDS_A_SERVER:
        return [CheckResult("start", CheckOutcome.SKIP, NEEDS_A_SERVER[plugin_id])]
    if plugin_id in JUDGES:
        with OpenAIServer(lambda text: f"Verdict: {JUDGES[plugin_id]}") as server:
            options = {**OPTIONS[plugin_id], "base_url": server.url}
            return check_part(kind, plugin_id, folder, options)
    return check_part(kind, plugin_id, folder, OPTIONS.get(plugin_id))


TRACKERS = {
    "rollart/Wandb-v1": "wandb",
    "rollart/Mlflow-v1": "mlflow",
    "rollart/Trackio-v1": "trackio",
}
NEEDS_A_SERVER = {
    "rollart/SGLang-v1": "it needs SGLang: tests/sglang_cpu",
    "rollart/RewardModel-v1": "it needs a model: tests/integration/rewards/test_reward_model.py",
    "rollart/OpenAI-v1": "a server: tests/integration/plugins/engines/test_openai_engine.py",
    "rollart/VLLM-v1": "it needs vLLM: tests/vllm_cpu",
    "rollart/Http-v1": "it needs a function: tests/conformance/test_reward_backends.py",
    "rollart/Lambda-v1": "it needs a function: tests/conformance/test_reward_backends.py",
    "rollart/Fc-v1": "it needs a function: tests/conformance/test_reward_backends.py",
    "rollart/RayServe-v1": "it starts a cluster: tests/conformance/test_reward_backends.py",
}
JUDGES = {
    "rollart/Judge-v1": "7",
    "rollart/JudgeCompare-v1": "first",
    "rollart/JudgeGroup-v1": "tie",
}
"""What a judge is told by a model that does not read."""
_JUDGE = {"base_url": "http://127.0.0.1:9/v1", "model": "parrot", "rubric": "Good?"}
OPTIONS = {
    **dict.fromkeys(JUDGES, _JUDGE),
    "rollart/Process-v1": {"trusted": True},
    "rollart/Wandb-v1": {"mode": "offline"},
    "rollart/Docker-v1": IN_DOCKER,
    "rollart/OpenAI-v1": {"base_url": "http://127.0.0.1:9/v1"},
    "rollart/VLLM-v1": {"base_url": "http://127.0.0.1:9/v1"},
    "rollart/Http-v1": {"url": "http://127.0.0.1:9"},
    "rollart/Lambda-v1": {"function": "none"},
    "rollart/Fc-v1": {"function": "none", "endpoint": "127.0.0.1:9"},
    "rollart/RewardModel-v1": {"model": "no-such-folder"},
    "rollart/UnitTests-v1": {"sandbox": "bubblewrap"},
    "rollart/Regex-v1": {"pattern": "red"},
    "rollart/Format-v1": {"form": {"tags": ["think", "answer"]}},
    "rollart/LengthPenalty-v1": {"free": 1, "limit": 9},
    "rollart/Function-v1": {"function": "support.plain_reward:is_short"},
    "rollart/Weighted-v1": {
        "parts": {
            "right": {"reward": "exact-match"},
            "short": {"reward": {"id": "length-penalty", "free": 1, "limit": 9}, "weight": 0.1},
        }
    },
    "rollart/WeightedGroup-v1": {
        "parts": {"right": {"reward": "numeric"}, "other": {"reward": "group-diversity"}}
    },
}
"""What a plugin has to be told before it works at all."""


COMMANDS = list(plugins().registered("commands"))
"""They have no options and no contract but to be there and to say what they do."""


def case(kind: str, plugin_id: str) -> object:
    """Return a parameter; what runs in boxes takes its time, and waits for others' boxes."""
    spec = registry.spec(kind, plugin_id)
    boxed = getattr(spec, "sandbox", None)
    marks = [pytest.mark.timeout(600), pytest.mark.slow] if boxed else []
    return pytest.param(kind, plugin_id, marks=marks)


REGISTERED = [
    (kind, plugin_id)
    for kind in KINDS
    if kind != "commands"
    for plugin_id in plugins().registered(kind)
]
EACH = pytest.mark.parametrize(("kind", "plugin_id"), [case(*pair) for pair in REGISTERED])


def test_there_is_a_check_for_every_kind_that_has_members():
    assert {"environments", "env_adapters", "commands", *PART_CHECKS} == set(KINDS)
    assert len(REGISTERED) >= 10


def test_no_built_in_is_broken():
    broken = [f"{p}: {p.broken}" for p in plugins().broken if p.name.startswith("rollart-")]
    assert broken == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_does(name):
    spec = plugins().registered("commands")[name].spec
    assert spec.name == name
    assert spec.summary.endswith(".")
    assert load_object(spec.entry_point, name)


@EACH
def test_keeps_its_contract(kind, plugin_id, tmp_path):
    assert_checks(check_one(kind, plugin_id, tmp_path))


@EACH
def test_says_what_it_is(kind, plugin_id):
    spec = registry.spec(kind, plugin_id)
    made = registry.resolve(kind, plugin_id)
    bases = BASES.get(kind)
    assert bases is None or issubclass(made, bases)
    assert spec.summary.endswith(".")
    assert made.__doc__
    if spec.config is not None:
        model = registry.config_model(kind, plugin_id)
        assert model is not None
        needed = {k: v for k, v in OPTIONS.get(plugin_id, {}).items() if _is_required(model, k)}
        defaults = registry.checked_options(kind, plugin_id, needed)
        assert defaults == model(**needed).model_dump()


def _is_required(model: type[BaseModel], name: str) -> bool:
    return name in model.model_fields and model.model_fields[name].is_required()


@EACH
def test_an_unknown_option_is_refused(kind, plugin_id):
    assert registry.option_problems(kind, plugin_id, {"no_such_option": 1})


def test_config_models_import_no_torch():
    modules = {
        spec.config.split(":")[0]
        for kind, plugin_id in REGISTERED
        if (spec := registry.spec(kind, plugin_id)).config
    }
    code = f"import sys, {', '.join(sorted(modules))}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_custom_env_example_passes(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(str(repo_root / "examples" / "custom_env"))
    assert_checks(check_env(partial(registry.make, "guess_number:GuessNumber")))
    source = Path(importlib.import_module("guess_number").__file__).read_text()
    assert len(source.splitlines()) < 50
    page = (repo_root / "examples/custom_env/README.md").read_text(encoding="utf-8")
    snippet = page.partition("Check it before you train:")[2]
    assert "assert_checks(" in snippet
    exec(dedent(snippet), {})
