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
    from rollart_core.contracts.tracker import TrackerSpec
    from rollart_core.contracts.weights import WeightChannelSpec
    from rollart_core.types import Group, Trajectory

hookspec = pluggy.HookspecMarker("rollart")
hookimpl = pluggy.HookimplMarker("rollart")


@hookspec
def rollart_environments() -> list[EnvSpec]:  # type: ignore[empty-body]
    """Return the environments this plugin brings."""


@hookspec
def rollart_rewards() -> list[RewardSpec]:  # type: ignore[empty-body]
    """Return the reward functions this plugin brings."""


@hookspec
def rollart_algorithms() -> list[AlgorithmSpec]:  # type: ignore[empty-body]
    """Return the training algorithms this plugin brings."""


@hookspec
def rollart_hardware_mappers() -> list[HardwareMapperSpec]:  # type: ignore[empty-body]
    """Return the hardware mappers this plugin brings."""


@hookspec
def rollart_inference_engines() -> list[InferenceEngineSpec]:  # type: ignore[empty-body]
    """Return the inference engines this plugin brings."""


@hookspec
def rollart_sandboxes() -> list[SandboxSpec]:  # type: ignore[empty-body]
    """Return the sandboxes this plugin brings."""


@hookspec
def rollart_reward_backends() -> list[RewardBackendSpec]:  # type: ignore[empty-body]
    """Return the backends this plugin brings to run reward functions on."""


@hookspec
def rollart_weight_channels() -> list[WeightChannelSpec]:  # type: ignore[empty-body]
    """Return the weight channels this plugin brings."""


@hookspec
def rollart_trackers() -> list[TrackerSpec]:  # type: ignore[empty-body]
    """Return the trackers this plugin brings."""


@hookspec
def rollart_env_adapters() -> list[EnvAdapterSpec]:  # type: ignore[empty-body]
    """Return the adapters this plugin brings for foreign kinds of environments."""


@hookspec
def rollart_runtimes() -> list[RuntimeSpec]:  # type: ignore[empty-body]
    """Return the runtimes this plugin brings to run the parts of a run on."""


@hookspec
def rollart_forward_passes() -> list[ForwardPassSpec]:  # type: ignore[empty-body]
    """Return the forward passes this plugin brings for the trainer, each for some models."""


@hookspec
def rollart_sandbox_services() -> list[SandboxServiceSpec]:  # type: ignore[empty-body]
    """Return the service this plugin brings to run environments in sandboxes."""


@hookspec
def rollart_commands() -> list[CommandSpec]:  # type: ignore[empty-body]
    """Return the commands this plugin adds to ``rollart``."""


@hookspec
def rollart_run_started(run_dir: Path, config: Mapping[str, object]) -> None:
    """Observe that a run began."""


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
    """Observe that a run ended, however it did."""


@hookspec(firstresult=True)
def rollart_filter_group(group: Group) -> bool | None:
    """Decide whether a finished group may be trained on: False drops it, None: others decide."""
