"""Every check of agent tasks can fail: for each there is a task that breaks its rule alone."""

from __future__ import annotations

import agent_zoo
import pytest
import zoo

from rollart_core.contracts.env import Timeouts
from rollart_core.plugins.manager import using
from rollart_testing import CheckOutcome, agent_play, runtime_checks
from rollart_testing.agent_checks import AGENT_CHECKS, run_agent_checks
from rollart_testing.agent_play import AgentSubject
from rollart_testing.check import check, offline
from rollart_testing.check.catalogue import AGENTS, PARTS

BROKEN: list[tuple[type, str, dict[str, object]]] = [
    (agent_zoo.CannotBeMade, "make", {}),
    (agent_zoo.PromptAlone, "prepare", {}),
    (agent_zoo.SaysNothing, "prepare", {}),
    (agent_zoo.NumberAlone, "finish", {}),
    (agent_zoo.NotANumber, "finish", {}),
    (agent_zoo.NeverAsks, "run", {}),
    (agent_zoo.AsksAStranger, "run", {}),
    (agent_zoo.Stumbles, "run", {}),
    (agent_zoo.NoTasks, "tasks", {}),
    (agent_zoo.LacksASplit, "tasks", {}),
    (agent_zoo.Numbered, "same_seed_same_episode", {}),
    (agent_zoo.SeedsTheWorld, "global_random_state", {}),
    (agent_zoo.SharesItsKey, "interleaved_instances", {}),
    (agent_zoo.NeverGivesUp, "refused_requests", {}),
    (agent_zoo.WillNotEnd, "ends_when_cancelled", {}),
    (agent_zoo.NoCorpus, "corpus", {}),
    (agent_zoo.LeavesThePrograms, "nothing_left_open", {}),
    (agent_zoo.LeavesASandbox, "no_box_left", {}),
    (agent_zoo.OneListForAll, "splits_differ", {}),
    (agent_zoo.PoorSolution, "oracle_reaches_the_top", {}),
    (agent_zoo.PaysIdlers, "noop_stays_at_the_floor", {}),
    (agent_zoo.PaysAnyone, "random_stays_below_the_oracle", {}),
    (agent_zoo.PaysOnce, "same_verdict_twice", {}),
    (agent_zoo.AnswersOnlyErrors, "secrets_are_hidden", {}),
    (agent_zoo.SecretsInInfo, "secrets_are_hidden", {}),
    (agent_zoo.SecretsInTheSandbox, "box_hides_secrets", {}),
    (agent_zoo.Fragile, "malformed_actions", {}),
    (agent_zoo.Divides, "malformed_actions", {}),
    (agent_zoo.Fines, "reward_in_range", {}),
    (agent_zoo.SlowToJudge, "within_timeouts", {"timeouts": Timeouts(step_s=0.05)}),
    (agent_zoo.ClosesOnce, "close_twice", {}),
]


@pytest.fixture(autouse=True)
def swept():
    """Take away what leaky tasks leave behind."""
    yield
    zoo.sweep()


def ended(results, outcome):
    return [r.name for r in results if r.outcome is outcome]


def checked(cls: type, **said: object):
    spec = agent_zoo.env_spec(cls.__name__, **said)
    return run_agent_checks(AgentSubject(cls, spec, run_s=60.0, budget_s=0.1, num_tasks=1))


def test_the_good_one_passes_every_check_of_check_agent():
    results = checked(agent_zoo.Good)
    assert ended(results, CheckOutcome.PASS) == list(AGENT_CHECKS), results


def test_a_program_that_blocks_its_loop_is_as_good():
    results = checked(agent_zoo.BlocksTheLoop)
    assert ended(results, CheckOutcome.FAIL) == [], results


@pytest.mark.parametrize(
    ("broken", "name", "said"), BROKEN, ids=lambda v: getattr(v, "__name__", "")
)
def test_exactly_that_check_fails(broken, name, said, monkeypatch):
    if name == "nothing_left_open":  # what stays for good is not waited for
        monkeypatch.setattr(runtime_checks, "GRACE_S", 0.0)
    if name == "ends_when_cancelled":
        monkeypatch.setattr(agent_play, "time", broken)
    results = checked(broken, **said)
    assert ended(results, CheckOutcome.FAIL) == [name], results


# --- In several processes -----------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch):
    """The zoo, registered as a plugin under development is."""
    monkeypatch.setenv("ROLLART_PLUGINS", "agent_zoo")
    with using({}):
        yield


def failed(name: str, *only: str) -> dict[str, str]:
    report = check(f"agentzoo/{name}-v1", only=only or ("runtime", "semantic"), timeout_s=100)
    return {r.name: r.reason for r in report.results if r.outcome is CheckOutcome.FAIL}


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_another_process_or_no_network_shows_what_one_process_hides():
    found = failed("HashOrder", "fresh_processes_agree", "works_offline")
    assert list(found) == ["fresh_processes_agree"]
    assert "request" in found["fresh_processes_agree"]
    if not offline.prefix()[0]:
        pytest.skip(offline.prefix()[1])
    found = failed("CallsHome", "fresh_processes_agree", "works_offline")
    assert list(found) in (["works_offline"], ["fresh_processes_agree"])  # the latter: no network
    assert "run raised" in found.popitem()[1]


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_a_program_that_hangs_or_crashes_is_named():
    assert failed("Hangs") == {"within_timeouts": "finish did not return within 0.1 s (in finish)"}
    assert failed("Crashes") == {"run": "its process ended with code 3: out of order"}


@pytest.mark.slow
def test_a_class_that_nobody_registers_is_known_for_what_it_is():
    report = check("agent_zoo:Good", only=["run", "finish"])
    assert report.counts == {"PASS": 2, "FAIL": 0, "SKIP": 0}


def test_there_is_a_broken_one_for_every_check():
    assert {name for _, name, _ in BROKEN} == set(AGENT_CHECKS)
    elsewhere = {"fresh_processes_agree", "works_offline"}
    every = {name for names in PARTS[AGENTS].values() for name in names}
    assert every == set(AGENT_CHECKS) | elsewhere
