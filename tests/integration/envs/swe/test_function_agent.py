"""``swe/FunctionRepairAgent-v1``: programs in boxes without a network, at the real gateway."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.chat_templates import tokenizer_with
from support.gateways import LIMITS, Scripted, agent_parts
from support.sandbox_types import HELD, IN_DOCKER, missing, no_bubblewrap

from rollart_core.rollout.agent_episode import run_agent_episode
from rollart_core.rollout.env_pool import PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.types import FailureKind, Task, Ticket
from rollart_envs.swe.function_agent import FunctionRepairAgent

ID = "swe/FunctionRepairAgent-v1"
TICKET = Ticket("g0.0", Task(ID, "train", 0, 7), "g0", 0)

needs_isolation = pytest.mark.skipif(bool(no_bubblewrap()), reason=no_bubblewrap() or "bubblewrap")


@asynccontextmanager
async def boxed(answers, limits=None, **options):
    engine = Scripted(tokenizer_with("ours"), answers)
    env = EnvRef(ID, {"sandbox": "bubblewrap", **options})
    more = {"timeouts": PhaseTimeouts(60, 60), "max_new_tokens": 600, "episode_s": 100}
    full = replace(LIMITS, **{**more, **(limits or {})})
    async with agent_parts(env, engine, full, max_context_tokens=4000) as parts:
        yield parts, engine


def play(answers, **options):
    async def main():
        async with boxed(answers, **options) as (parts, engine):
            return await run_agent_episode(TICKET, 0, parts), engine

    return asyncio.run(main())


def gold():
    task = FunctionRepairAgent(sandbox="bubblewrap")
    book = task._book
    return book.tasks[book.ids("train")[0]].gold_code


@pytest.mark.parametrize("isolation", HELD)
def test_the_small_agent_mends_the_function_when_the_model_says_how(isolation):
    if why := missing(isolation):
        pytest.skip(why)
    sandbox = {"id": "docker", **IN_DOCKER} if isolation == "docker" else isolation
    answers = ["let me think", f"```python\n{gold()}\n```"]
    trajectory, engine = play(answers, sandbox=sandbox)
    assert (trajectory.status, trajectory.reward) == ("finished", 1.0), trajectory.failure
    assert [turn.action for turn in trajectory.turns] == answers
    assert "there is no ```python block" in trajectory.turns[1].observation
    assert len(trajectory.samples) == 1
    assert engine.released == ["g0.0#0"]


ASK = """
import json, os, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "text/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, key)).read()
"""


@needs_isolation
@pytest.mark.parametrize(
    ("then", "status", "reward", "words"),
    [
        ("echo why >&2; exit 3", "failed", None, "sh ended with exit code 3: why"),
        ("rm solution.py", "finished", 0.0, ""),
        pytest.param("sleep 100", "truncated", 0.0, "", marks=pytest.mark.slow),
    ],
)
def test_how_a_program_ends_decides_what_its_episode_is(then, status, reward, words):
    program = ("sh", "-c", f'python3 -c "$ASK" && {{ {then}; }}')
    program_s = 8.0 if "sleep" in then else 60.0
    trajectory, _ = play(["hello"], program=program, program_s=program_s, env={"ASK": ASK})
    assert (trajectory.status, trajectory.reward) == (status, reward), trajectory.failure
    assert len(trajectory.turns) == 1
    if trajectory.failure:
        assert trajectory.failure.kind == FailureKind.ENVIRONMENT
        assert words in trajectory.failure.message


@needs_isolation
def test_what_one_sandbox_has_capacity_for_is_judged_with_one_sandbox():
    kills = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    names = " ".join(
        task.entry_point for task in FunctionRepairAgent(sandbox="bubblewrap")._book.tasks.values()
    )
    program = ("sh", "-c", f'python3 -c "$ASK" && cat > solution.py <<EOF\n{kills}# {names}\nEOF')
    pool = {"max_sandboxes": 1, "wait_s": 30}
    trajectory, _ = play(["hello"], program=program, env={"ASK": ASK}, pool=pool)
    assert (trajectory.status, trajectory.reward) == ("finished", 0.0), trajectory.failure


@needs_isolation
def test_a_program_past_the_episodes_deadline_is_killed_with_its_sandbox():
    program = ("sh", "-c", "sleep 100")
    trajectory, _ = play([], program=program, limits={"episode_s": 2.5})
    assert trajectory.failure.kind == FailureKind.TIMEOUT
