"""The built-in engines, weight channels, mappers, trackers, sandboxes, runtimes and the like.

Takes: ``rollart.yaml`` in this package. Gives: the specs, and the commands of RollArt's other
packages. Never: imports what they name.
"""

from typing import Final

from rollart_core.contracts.adapter import EnvAdapterSpec
from rollart_core.contracts.forward_pass import ForwardPassSpec
from rollart_core.contracts.hardware import HardwareMapperSpec
from rollart_core.contracts.inference import InferenceEngineSpec
from rollart_core.contracts.reward import RewardBackendSpec
from rollart_core.contracts.runtime import RuntimeSpec
from rollart_core.contracts.sandbox import SandboxSpec
from rollart_core.contracts.sandbox_service import SandboxServiceSpec
from rollart_core.contracts.spec import CommandSpec
from rollart_core.contracts.tool_format import ToolFormatSpec
from rollart_core.contracts.tracker import TrackerSpec
from rollart_core.contracts.weights import WeightChannelSpec
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manifest import specs


@hookimpl
def rollart_inference_engines() -> list[InferenceEngineSpec]:
    """Return the built-in inference engines."""
    return specs(__package__, "inference_engines")


@hookimpl
def rollart_weight_channels() -> list[WeightChannelSpec]:
    """Return the built-in weight channels."""
    return specs(__package__, "weight_channels")


@hookimpl
def rollart_hardware_mappers() -> list[HardwareMapperSpec]:
    """Return the built-in hardware mappers."""
    return specs(__package__, "hardware_mappers")


@hookimpl
def rollart_trackers() -> list[TrackerSpec]:
    """Return the built-in trackers."""
    return specs(__package__, "trackers")


@hookimpl
def rollart_sandboxes() -> list[SandboxSpec]:
    """Return the built-in sandboxes."""
    return specs(__package__, "sandboxes")


@hookimpl
def rollart_reward_backends() -> list[RewardBackendSpec]:
    """Return the built-in reward backends."""
    return specs(__package__, "reward_backends")


@hookimpl
def rollart_runtimes() -> list[RuntimeSpec]:
    """Return the built-in runtimes, besides the core's ``inline``."""
    return specs(__package__, "runtimes")


@hookimpl
def rollart_forward_passes() -> list[ForwardPassSpec]:
    """Return the built-in forward passes, besides those of the core."""
    return specs(__package__, "forward_passes")


@hookimpl
def rollart_sandbox_services() -> list[SandboxServiceSpec]:
    """Return the built-in sandbox service."""
    return specs(__package__, "sandbox_services")


@hookimpl
def rollart_env_adapters() -> list[EnvAdapterSpec]:
    """Return the built-in adapters of foreign environments."""
    return specs(__package__, "env_adapters")


@hookimpl
def rollart_tool_formats() -> list[ToolFormatSpec]:
    """Return the built-in tool formats."""
    return specs(__package__, "tool_formats")


_COMMANDS: Final = (
    CommandSpec(
        name="serve-reward",
        entry_point="rollart_plugins.serverless.serve_command:app",
        summary="Serve one reward as an HTTP function.",
    ),
    CommandSpec(
        name="sft",
        entry_point="rollart_plugins.sft.run:sft",
        summary=(
            "Fine-tune a model on conversations, questions with answers, or exported trajectories."
        ),
    ),
    CommandSpec(
        name="new-env",
        entry_point="rollart_plugins.new:new_env",
        summary="Create a package with an environment that passes its own tests.",
    ),
    CommandSpec(
        name="new-reward",
        entry_point="rollart_plugins.new:new_reward",
        summary="Create a package with a reward function.",
    ),
    CommandSpec(
        name="new-algorithm",
        entry_point="rollart_plugins.new:new_algorithm",
        summary="Create a package with a training algorithm.",
    ),
    CommandSpec(
        name="new-mapper",
        entry_point="rollart_plugins.new:new_mapper",
        summary="Create a package with a hardware mapper.",
    ),
    CommandSpec(
        name="play",
        entry_point="rollart_testing.terminal:play",
        summary="Play an environment in the terminal.",
    ),
    CommandSpec(
        name="check",
        entry_point="rollart_testing.cli:check_command",
        summary="Run static, runtime and semantic checks on a plugin, a project folder or a wheel.",
    ),
    CommandSpec(
        name="audit",
        entry_point="rollart_view.audit:audit",
        summary="Report what happened to every ticket of a run.",
    ),
    CommandSpec(
        name="eval",
        entry_point="rollart_evals.cli:evaluate",
        summary="Score models, OpenAI-compatible endpoints and baselines on held-out tasks.",
    ),
    CommandSpec(
        name="diagnose",
        entry_point="rollart_view.diagnosis.diagnose:diagnose_command",
        summary="Find problems in a run, such as a collapse, and suggest what to change.",
    ),
    CommandSpec(
        name="plot",
        entry_point="rollart_view.plot:plot_command",
        summary="Plot the reward, success, staleness, tokens per second and loss of runs.",
    ),
    CommandSpec(
        name="export",
        entry_point="rollart_view.export:export_command",
        summary="Export the trajectories of runs as records, conversations or datasets.",
    ),
    CommandSpec(
        name="rescore",
        entry_point="rollart_view.rescore:rescore_command",
        summary="Score the recorded trajectories of a run again, with any reward.",
    ),
    CommandSpec(
        name="plan",
        entry_point="rollart_planner.cli:plan",
        summary="Show where each worker would run on a cluster, and the expected rates.",
    ),
    CommandSpec(
        name="registry",
        entry_point="rollart_registry.cli:app",
        summary="Host a community registry, publish packages to it, or install packages from it.",
    ),
    CommandSpec(
        name="bench",
        entry_point="rollart_bench.cli:bench",
        summary="Run a benchmark. If no name is given, list all benchmarks.",
    ),
    CommandSpec(
        name="info",
        entry_point="rollart_plugins.info:info",
        summary="Show the spec and the options of a plugin.",
    ),
    CommandSpec(
        name="scale",
        entry_point="rollart_plugins.scale:scale",
        summary="Change the number of engines and env workers in a live run.",
    ),
    CommandSpec(
        name="sandbox",
        entry_point="rollart_sandboxes.cli:app",
        summary="List live sandboxes, remove those of killed runs, and test which types work here.",
    ),
    CommandSpec(
        name="model",
        entry_point="rollart_plugins.model:app",
        summary="Create a small model, or check which parts can train and serve a model.",
    ),
    CommandSpec(
        name="build",
        entry_point="rollart_sandboxes.isolation.image:build",
        summary="Build the Docker image for an environment that runs with `isolation: docker`.",
    ),
    CommandSpec(
        name="doctor",
        entry_point="rollart_plugins.doctor:doctor",
        summary="Check on every machine whether a run can work there, and say what to fix.",
    ),
)


@hookimpl
def rollart_commands() -> list[CommandSpec]:
    """Return the commands of RollArt's other packages."""
    return list(_COMMANDS)
