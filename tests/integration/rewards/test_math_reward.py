"""Mathematics compared by math-verify, in processes that an answer may bring down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import wait_gone

from rollart_core.errors import ConfigError
from rollart_core.plugins import registry
from rollart_rewards import math_equal, math_processes
from rollart_rewards.examples import asked
from rollart_rewards.math_equal import Math

pytest.importorskip("math_verify", reason="pip install 'rollart[math]'")
pytestmark = pytest.mark.timeout(600)


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
    with pytest.raises(RuntimeError, match=r"gone|ended with -9"):
        reward.score(asked("1", reference="1"))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: reward.score(asked(f"{n}", reference="2")), range(4)))
    assert [result.value for result in found] == [0, 0, 1, 0]
    assert len(reward.processes.idle) == 1


def test_threads_that_take_the_last_idle_process_at_once_do_not_collide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Compares:
        def ask(self, comparison: object, wall_s: float) -> dict[str, object]:
            time.sleep(0.1)
            return {"right": True}

        def end(self) -> None:
            pass

    class Slow(list[object]):
        def __len__(self) -> int:
            found = super().__len__()
            time.sleep(0.05)
            return found

    monkeypatch.setattr(math_processes, "_Process", Compares)
    processes = math_processes.MathProcesses(4)
    processes.idle = Slow([Compares()])  # type: ignore[assignment]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: processes.compare({}, wall_s=1), range(4)))
    assert found == [{"right": True}] * 4


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
