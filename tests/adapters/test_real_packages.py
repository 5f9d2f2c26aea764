"""Every adapter's examples on the package it is for: `make adapters` runs these."""

from __future__ import annotations

import importlib.metadata
from functools import partial

import pytest

from rollart_core.contracts.adapter import EnvAdapterSpec
from rollart_core.plugins import registry
from rollart_core.plugins.manager import plugins
from rollart_testing import assert_checks, check_env

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.filterwarnings("ignore"),  # those of other people's packages
]


OPTIONS: dict[str, dict[str, object]] = {
    # As they are, their reward tells an oracle from chance badly: see docs/guides/adapters.md.
    "gymnasium::CliffWalking-v1": {"reward": "relative", "max_turns": 40},
    "gymnasium::Taxi-v4": {"reward": "relative", "max_turns": 40},
}
BY_THEMSELVES = ("skyrl-gym", "openenv")
"""They need rows and servers, and have test files of their own."""


def examples() -> list[str]:
    found = []
    for registered in plugins().registered("env_adapters").values():
        spec = registered.spec
        if isinstance(spec, EnvAdapterSpec) and spec.alias not in BY_THEMSELVES:
            found += [f"{spec.alias}::{example}" for example in spec.examples]
    return found


EACH = pytest.mark.parametrize("env_id", examples())


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    alias = request.getfixturevalue("env_id").partition("::")[0]
    package = registry.spec("env_adapters", alias).package
    try:
        importlib.metadata.version(package or "rollart")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed here: `make adapters` runs this where it is")


@EACH
def test_an_example_keeps_the_contract(env_id: str) -> None:
    options = OPTIONS.get(env_id, {})
    spec = registry.env_spec(env_id, options)
    assert_checks(check_env(partial(registry.make, env_id, **options), spec=spec, num_tasks=2))
