"""mini-swe-agent from PyPI, unmodified, in sandboxes without a network: on functions, many at once,
each recorded, and on repositories."""

import asyncio
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.gateways import LIMITS, agent_parts
from support.sandbox_types import no_bubblewrap
from support.talks import result
from support.tool_templates import call_text, tool_tokenizer

from rollart_core.rollout.agent_episode import run_agent_episode
from rollart_core.rollout.env_pool import PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.types import Task, Ticket
from rollart_envs.swe.repair_episode import expert_commands
from rollart_envs.swe.taskbook import function_tasks, own_file, repair_tasks

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("AGENTS_VENV") or ROOT / ".venv-agents").absolute()
MOST_EPISODES = 20

pytestmark = [
    pytest.mark.agents,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(no_bubblewrap()), reason=no_bubblewrap() or "bubblewrap"),
]


def example(name: str) -> dict:
    """Return the options of a shipped example, with the test's own Python."""
    said = yaml.safe_load((ROOT / "examples/mini_swe_agent" / name).read_text())["env"]
    python = VENV / "bin/python"
    if not list(VENV.glob("lib/python*/site-packages/minisweagent")):
        pytest.skip("mini-swe-agent is not installed: `make agents` installs it")
    base = subprocess.check_output([python, "-c", "import sys; print(sys.base_prefix)"], text=True)
    said["program"] = [word.replace("/opt/mini", str(VENV)) for word in said["program"]]
    binds = [str(VENV)] + [base.strip()] * (not base.startswith("/usr"))
    said["sandbox"]["ro_binds"] = binds
    said["program_s"] = 2000.0  # of a machine with much else to do: each imports litellm
    said["pool"] = {"max_sandboxes": MOST_EPISODES + 2}
    return {key: value for key, value in said.items() if key != "id"}


class Engineer:
    """Carries out ``commands(text)``: with tool calls, as the tokenizer's family does.

    It answers nobody before ``num_at_once`` episodes have asked.
    """

    def __init__(self, tokenizer, commands, num_at_once=1):
        self.tokenizer, self.commands = tokenizer, commands
        self.requests, self.results = [], {}
        self.num_at_once, self.were_at_once = num_at_once, False
        self.opened = asyncio.Event()

    async def generate(self, request):
        self.requests.append(request)
        if len({each.session_id for each in self.requests}) == self.num_at_once:
            self.were_at_once |= not self.opened.is_set()
            self.opened.set()
        await self.opened.wait()
        text = self.tokenizer.decode(request.token_ids)
        turn = text.count("<|im_start|>assistant") - 1
        command = [*self.commands(text), "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"][turn]
        call = call_text("hermes", ("bash", json.dumps({"command": command})))
        said = f"I do step {turn}.\n{call}"
        ids = [*self.tokenizer.encode(said), self.tokenizer.stop_token_ids[0]]
        assert len(ids) <= request.max_new_tokens
        answer = result(ids, len(self.requests), "stop")
        self.results[request.request_id] = answer
        return answer

    async def release(self, session_id):
        pass


def mends_the_function(text):
    """Return the commands that look at the file and mend it."""
    tasks = function_tasks(own_file("function_tasks.jsonl")).tasks.values()
    name = re.search(r"The function `(\w+)` in the file", text)[1]
    gold = next(task.gold_code for task in tasks if task.entry_point == name)
    return ["cat solution.py", f"cat > solution.py <<'END'\n{gold}\nEND"]


def mends_the_repository(text):
    """Return the commands that run the tests, mend the repository and run them again."""
    tasks = repair_tasks(own_file("repair_tasks.jsonl")).tasks.values()
    repo = re.search(r"The repository (\S+) lies in", text)[1]
    task = next(task for task in tasks if task.repo == repo)
    tests = "pwd; python -m unittest"
    return [tests, *expert_commands(task), f"{tests}; git status --short"]


async def play(tickets, engine, limits, name="run.yaml"):
    env = EnvRef(tickets[0].task.env_id, example(name))
    async with agent_parts(env, engine, limits, max_context_tokens=30_000) as parts:
        episodes = [asyncio.create_task(run_agent_episode(t, 0, parts)) for t in tickets]
        for episode in episodes:  # one that fails before it asks holds up no other
            episode.add_done_callback(lambda _: engine.opened.set())
        return await asyncio.gather(*episodes)


def tickets(num, env_id="swe/FunctionRepairAgent-v1", split="train"):
    tasks = [Task(env_id, split, i % 20, i) for i in range(num)]
    return [Ticket(f"g{i}.0", task, f"g{i}", 0) for i, task in enumerate(tasks)]


def limits(**more):
    slow = {"timeouts": PhaseTimeouts(300, 300), "episode_s": 2100, "max_new_tokens": 4000}
    return replace(LIMITS, **{**slow, **more})


@pytest.mark.parametrize("num", [3, pytest.param(MOST_EPISODES, marks=pytest.mark.nightly)])
def test_episodes_at_once_each_recorded_whole(num):
    tokenizer = tool_tokenizer("hermes")
    engine = Engineer(tokenizer, mends_the_function, num)
    found = asyncio.run(play(tickets(num), engine, limits()))
    assert [t.failure for t in found] == [None] * num
    assert [(t.status, t.reward) for t in found] == [("finished", 1.0)] * num
    assert engine.were_at_once
    for trajectory in found:
        own = [r for r in engine.requests if r.session_id == f"{trajectory.ticket.ticket_id}#0"]
        assert len(own) == len(trajectory.turns) == 3
        (sample,) = trajectory.samples
        row = sample.token_ids.tolist()
        for turn, request in enumerate(own):
            said = engine.results[request.request_id]
            start, stop = len(request.token_ids), len(request.token_ids) + len(said.token_ids)
            assert row[:start] == list(request.token_ids)
            assert row[start:stop] == said.token_ids
            assert sample.loss_mask[start:stop].all()
            assert set(sample.turn_ids[start:stop].tolist()) == {turn}
            assert sample.inference_logprobs[start:stop].tolist() == pytest.approx(
                said.inference_logprobs
            )
        assert sample.num_loss_tokens == sum(t.num_new_tokens for t in trajectory.turns)
        assert "def " in trajectory.turns[1].observation  # what `cat solution.py` gave


def test_one_that_is_out_of_turns_is_truncated_and_judged():
    tokenizer = tool_tokenizer("hermes")
    engine = Engineer(tokenizer, mends_the_function)
    found = asyncio.run(play(tickets(1), engine, limits(max_turns=2)))
    assert found[0].failure is None
    assert (found[0].status, found[0].reward, len(found[0].turns)) == ("truncated", 1.0, 2)


def repair(num, commands):
    """Play repository tasks; return their trajectories."""
    tokenizer = tool_tokenizer("hermes")
    engine = Engineer(tokenizer, commands)
    asked = tickets(num, "swe/RepairAgent-v1", "all")
    found = asyncio.run(play(asked, engine, limits(), "repair.yaml"))
    assert [t.failure for t in found] == [None] * num
    assert [t.status for t in found] == ["finished"] * num
    return found


@pytest.mark.parametrize("num", [1, pytest.param(5, marks=pytest.mark.nightly)])
def test_repositories_that_are_mended_are_paid(num):
    found = repair(num, mends_the_repository)
    assert [t.reward for t in found] == [1.0] * num
    for trajectory in found:
        before, after = trajectory.turns[1].observation, trajectory.turns[-1].observation
        assert "/work/repo" in before
        assert "OK" in before  # the hidden tests are not there
        assert " M " in after
        (sample,) = trajectory.samples
        assert sample.num_loss_tokens == sum(t.num_new_tokens for t in trajectory.turns)


def test_a_repository_that_is_only_looked_at_is_not_paid():
    (trajectory,) = repair(1, lambda text: ["git log --all --oneline; ls"])
    assert trajectory.reward == 0.0
    assert trajectory.success is False
