"""For plugin authors: deterministic fakes of every contract, and conformance checks.

Takes: its submodules. Gives: their public names. Never: is imported by a run.
"""

from rollart_testing.agent_checks import check_agent
from rollart_testing.algorithm_checks import check_algorithm, example_group
from rollart_testing.async_checks import (
    check_inference_engine,
    check_reward_backend,
    check_sandbox,
)
from rollart_testing.channel_checks import check_weight_channel
from rollart_testing.endpoint import ScriptedEndpoint
from rollart_testing.engine import ScriptedEngine, keyed_script, text_script
from rollart_testing.env_checks import check_env
from rollart_testing.envs import AsyncFakeEnv, FakeEnv
from rollart_testing.fakes import (
    FakeAlgorithm,
    FakeGroupReward,
    FakeMapper,
    FakeReward,
    FakeSandbox,
    FakeTracker,
    FakeWeightChannel,
    FaultyBackend,
)
from rollart_testing.plugin_checks import check_mapper, check_tracker
from rollart_testing.results import CheckOutcome, CheckResult, assert_checks
from rollart_testing.reward_checks import check_reward, example_request

__all__ = [
    "AsyncFakeEnv",
    "CheckOutcome",
    "CheckResult",
    "FakeAlgorithm",
    "FakeEnv",
    "FakeGroupReward",
    "FakeMapper",
    "FakeReward",
    "FakeSandbox",
    "FakeTracker",
    "FakeWeightChannel",
    "FaultyBackend",
    "ScriptedEndpoint",
    "ScriptedEngine",
    "assert_checks",
    "check_agent",
    "check_algorithm",
    "check_env",
    "check_inference_engine",
    "check_mapper",
    "check_reward",
    "check_reward_backend",
    "check_sandbox",
    "check_tracker",
    "check_weight_channel",
    "example_group",
    "example_request",
    "keyed_script",
    "text_script",
]
