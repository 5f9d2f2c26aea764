"""Environments and agent tasks are judged by the same checks."""

from __future__ import annotations

import pytest

from rollart_testing import CheckOutcome, FakeEnv, check_agent, check_env, sandbox_checks
from rollart_testing.agent_checks import AGENT_CHECKS
from rollart_testing.agents import FakeAgent
from rollart_testing.env_checks import CHECKS

BOTH = pytest.mark.parametrize(
    ("check", "made"), [(check_env, FakeEnv), (check_agent, FakeAgent)], ids=["env", "agent"]
)


def test_each_check_of_both_kinds_is_one_function_but_for_malformed_actions():
    common = [name for name in CHECKS if name in AGENT_CHECKS]
    assert len(common) == 19
    twins = [name for name in common if CHECKS[name] is not AGENT_CHECKS[name]]
    assert twins == ["malformed_actions"]


@BOTH
def test_a_folder_that_a_closed_sandbox_leaves_is_found(check, made, tmp_path, monkeypatch):
    sandboxes = iter([{}, {"box": [str(tmp_path)]}, {}])
    monkeypatch.setattr(sandbox_checks, "live_sandboxes_here", lambda: next(sandboxes))
    (result,) = check(made, only=["no_box_left"])
    assert (result.outcome, result.reason) == (
        CheckOutcome.FAIL,
        f"after close() there is still {tmp_path}",
    )


@BOTH
def test_one_object_is_not_played_beside_itself(check, made):
    results = check(made(), only=["interleaved_instances", "nothing_left_open"])
    assert [r.outcome for r in results] == [CheckOutcome.SKIP] * 2
    assert {r.reason for r in results} == {
        "it needs several instances: give a class or function that creates one"
    }
