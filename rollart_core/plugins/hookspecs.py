"""Every hook of RollArt, one sentence each.

Takes: nothing. Gives: the pluggy specifications that plugins implement with ``hookimpl``.
Never: loads a plugin; :mod:`rollart_core.plugins.manager` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from rollart_core.contracts.adapter import EnvAdapterSpec
    from rollart_core.contracts.algorithm import AlgorithmSpec
    from rollart_core.contracts.env import EnvSpec
    from rollart_core.contracts.forward_pass import ForwardPassSpec
    from rollart_core.contracts.hardware import HardwareMapperSpec
    from rollart_core.contracts.inference import InferenceEngineSpec
    from rollart_core.contracts.reward import RewardBackendSpec, RewardSpec
    from rollart_core.contracts.runtime import RuntimeSpec
    from rollart_core.contracts.sandbox import SandboxSpec
    from rollart_core.contracts.sandbox_service import SandboxServiceSpec
    from rollart_core.contracts.spec import CommandSpec
    from rollart_core.contracts.tool_format import ToolFormatSpec
    from rollart_core.contracts.tracker import TrackerSpec
    from rollart_core.contracts.weights import WeightChannelSpec
    from rollart_core.types import Group, Trajectory

hookspec = pluggy.HookspecMarker("rollart")
hookimpl = pluggy.HookimplMarker("rollart")


@hookspec
def rollart_environments() -> list[EnvSpec]:  # type: ignore[empty-body]
    """Return the environments that this plugin provides."""


@hookspec
def rollart_rewards() -> list[RewardSpec]:  # type: ignore[empty-body]
    """Return the reward functions that this plugin provides."""


@hookspec
def rollart_algorithms() -> list[AlgorithmSpec]:  # type: ignore[empty-body]
    """Return the training algorithms that this plugin provides."""


@hookspec
def rollart_hardware_mappers() -> list[HardwareMapperSpec]:  # type: ignore[empty-body]
    """Return the hardware mappers that this plugin provides."""


@hookspec
def rollart_inference_engines() -> list[InferenceEngineSpec]:  # type: ignore[empty-body]
    """Return the inference engines that this plugin provides."""


@hookspec
def rollart_sandboxes() -> list[SandboxSpec]:  # type: ignore[empty-body]
    """Return the sandboxes that this plugin provides."""


@hookspec
def rollart_reward_backends() -> list[RewardBackendSpec]:  # type: ignore[empty-body]
    """Return the backends that this plugin provides to run reward functions."""


@hookspec
def rollart_weight_channels() -> list[WeightChannelSpec]:  # type: ignore[empty-body]
    """Return the weight channels that this plugin provides."""


@hookspec
def rollart_trackers() -> list[TrackerSpec]:  # type: ignore[empty-body]
    """Return the trackers that this plugin provides."""


@hookspec
def rollart_env_adapters() -> list[EnvAdapterSpec]:  # type: ignore[empty-body]
    """Return the adapters that this plugin provides for environments of other libraries."""


@hookspec
def rollart_runtimes() -> list[RuntimeSpec]:  # type: ignore[empty-body]
    """Return the runtimes that this plugin provides for the workers of a run."""


@hookspec
def rollart_forward_passes() -> list[ForwardPassSpec]:  # type: ignore[empty-body]
    """Return the forward passes that this plugin provides for the trainer."""


@hookspec
def rollart_sandbox_services() -> list[SandboxServiceSpec]:  # type: ignore[empty-body]
    """Return the service that this plugin provides to run environments in sandboxes."""


@hookspec
def rollart_tool_formats() -> list[ToolFormatSpec]:  # type: ignore[empty-body]
    """Return the tool formats of model families that this plugin provides."""


@hookspec
def rollart_commands() -> list[CommandSpec]:  # type: ignore[empty-body]
    """Return the commands that this plugin adds to ``rollart``."""


@hookspec
def rollart_run_started(run_dir: Path, config: Mapping[str, object]) -> None:
    """Observe the start of a run."""


@hookspec
def rollart_trajectory_finished(trajectory: Trajectory) -> None:
    """Observe one finished, truncated or failed trajectory."""


@hookspec
def rollart_train_step_finished(
    train_step: int, policy_version: int, metrics: Mapping[str, float]
) -> None:
    """Observe one optimizer update and its metrics."""


@hookspec
def rollart_run_finished(run_dir: Path, report: Mapping[str, object]) -> None:
    """Observe the end of a run, successful or not."""


@hookspec(firstresult=True)
def rollart_filter_group(group: Group) -> bool | None:
    """Return True to train on a group, False to drop it, or None to let other plugins decide."""
