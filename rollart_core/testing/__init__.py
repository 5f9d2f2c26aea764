"""For plugin authors: deterministic fakes of every contract."""

from rollart_core.testing.engine import ScriptedEngine, keyed_script, text_script
from rollart_core.testing.envs import AsyncFakeEnv, FakeEnv
from rollart_core.testing.parts import (
    FakeAlgorithm,
    FakeGroupReward,
    FakeMapper,
    FakeReward,
    FakeTracker,
    FakeWeightChannel,
)
from rollart_core.testing.sandbox import FakeSandbox

__all__ = [
    "AsyncFakeEnv",
    "FakeAlgorithm",
    "FakeEnv",
    "FakeGroupReward",
    "FakeMapper",
    "FakeReward",
    "FakeSandbox",
    "FakeTracker",
    "FakeWeightChannel",
    "ScriptedEngine",
    "keyed_script",
    "text_script",
]
