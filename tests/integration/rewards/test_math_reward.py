"""Mathematics compared by math-verify, in processes that an answer may bring down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import wait_gone

from rollart_core.errors import ConfigError
from rollart_core.plugins import registry
from rollart_rewards import math_equal
from rollart_rewards.examples import asked
from rollart_rewards.math_equal import Math

pytest.importorskip("math_verify", reason="pip install 'rollart[math]'")
# What is imported counts against the memory of a process that compares.
pytestmark = [pytest.mark.timeout(600), pytest.mark.starts_normally]


@pytest.fixture(scope="module")
def reward() -> Iterator[Math]:
    made = Math(cpu_s=2.0, num_processes=1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("reference", "said", "value"),
    [
        ("x^2+2x+1", "that is $(x+1)^2$", 1.0),
        (r"\frac{\pi}{4}", r"so \boxed{\pi/4}", 1.0),
        ("1,000", "1000 in all", 1.0),
        (["7", "50%"], "$0.5$", 1.0),
        ("(1,2)", "$(2, 1)$", 0.0),
        ("x + 3", "3", 0.0),
        ("2", "", 0.0),
    ],
)
def test_what_is_equal(reward: Math, reference: object, said: str, value: float) -> None:
    assert reward.score(asked(said, reference=reference)).value == value


def test_a_right_answer_that_is_no_mathematics_is_no_zero(reward: Math) -> None:
    with pytest.raises(ValueError, match="'' cannot be read as mathematics"):
        reward.score(asked("$1$", reference=""))


def test_many_threads_share_a_process_that_was_killed_and_came_back(reward: Math) -> None:
    reward.score(asked("1", reference="1"))
    (process,) = reward.processes.idle
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"the math process is gone \(signal SIGKILL\)"):
        reward.score(asked("1", reference="1"))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: reward.score(asked(f"{n}", reference="2")), range(4)))
    assert [result.value for result in found] == [0, 0, 1, 0]
    assert len(reward.processes.idle) == 1


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT])
def test_an_answer_that_brings_its_process_down_is_undecided(reward: Math, number: int) -> None:
    reward.score(asked("1", reference="1"))
    (process,) = reward.processes.idle
    os.kill(process.pid, number)
    result = reward.score(asked("1", reference="1"))
    assert (result.value, result.components["undecided"]) == (0.0, 1.0)
    assert reward.score(asked("1", reference="1")).value == 1.0


def test_a_comparison_that_takes_too_long_by_the_clock_is_no_zero(reward: Math) -> None:
    reward.score(asked("1", reference="1"))
    (process,) = reward.processes.idle
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"did not finish within 0\.1 s of wall-clock"):
        reward.processes.compare({}, wall_s=0.1)
    wait_gone(process.pid)
    assert reward.score(asked("1", reference="1")).value == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("said", ["$9^{9^{9^{9}}}$", "$" + "(" * 3000 + "1" + ")" * 3000 + "$"])
def test_an_answer_without_end_is_undecided_and_harms_no_other(reward: Math, said: str) -> None:
    result = reward.score(asked(said, reference="1"))
    assert (result.value, result.components["undecided"]) == (0.0, 1.0)
    assert reward.score(asked("$0.5$", reference="1/2")).value == 1.0


def test_processes_end_with_the_reward_and_with_their_parent() -> None:
    code = (
        "from rollart_rewards.examples import asked\n"
        "from rollart_rewards.math_equal import Math\n"
        "import os, signal\n"
        "reward = Math()\n"
        "reward.score(asked('1', reference='1'))\n"
        "print(reward.processes.idle[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    wait_gone(int(ran.stdout))
    reward = Math()
    reward.score(asked("1", reference="1"))
    pid = reward.processes.idle[0].pid
    del reward
    wait_gone(pid)


def test_without_math_verify_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_equal, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rollart\[math\]'"):
        registry.build("rewards", "math")
