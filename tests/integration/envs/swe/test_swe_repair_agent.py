"""``swe/RepairAgent-v1``: programs in a repository of a sandbox, at the real gateway."""

import asyncio
import json
from dataclasses import replace

import pytest
from support.chat_templates import tokenizer_with
from support.gateways import LIMITS, Scripted, agent_parts
from support.sandbox_types import no_bubblewrap
from support.swe_repositories import shapes_task

from rollart_core.rollout.agent_episode import run_agent_episode
from rollart_core.rollout.env_pool import PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.types import FailureKind, Task, Ticket
from rollart_envs.swe.repair_agent import RepairAgent

ID = "swe/RepairAgent-v1"
TICKET = Ticket("g0.0", Task(ID, "train", 0, 7), "g0", 0)
MEND = "sed -i 's/return w + h/return w * h/' shapes/__init__.py"

pytestmark = pytest.mark.skipif(bool(no_bubblewrap()), reason=no_bubblewrap() or "bubblewrap")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repair")
    row = shapes_task(folder / "repos")
    (folder / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "tasks.jsonl"


def play(tasks, answers, *, episode_s=100.0, **options):
    engine = Scripted(tokenizer_with("ours"), answers)
    env = EnvRef(ID, {"sandbox": "bubblewrap", "tasks": tasks, **options})
    more = {"timeouts": PhaseTimeouts(60, 60), "max_new_tokens": 600}
    limits = replace(LIMITS, episode_s=episode_s, **more)

    async def main():
        async with agent_parts(env, engine, limits, max_context_tokens=8000) as parts:
            return await run_agent_episode(TICKET, 0, parts)

    return asyncio.run(main())


def bash(command):
    return f"```bash\n{command}\n```"


def test_the_small_agent_mends_the_repository_when_the_model_says_how(tasks):
    answers = ["I think.", bash("python -m unittest; exit 3"), bash(MEND), bash("submit")]
    trajectory = play(tasks, answers)
    assert (trajectory.status, trajectory.reward) == ("finished", 1.0), trajectory.failure
    assert trajectory.success is True
    said = [turn.observation for turn in trajectory.turns]
    assert "The area of a rectangle is wrong." in said[0]
    assert "Your answer has 0 commands." in said[1]
    assert "OK\n(exit code 3)" in said[2]
    assert "(no output)" in said[3]


def test_a_repository_that_is_not_changed_is_not_paid(tasks):
    trajectory = play(tasks, [bash("ls"), bash("submit")])
    assert (trajectory.status, trajectory.reward) == ("finished", 0.0), trajectory.failure
    assert trajectory.success is False


def test_the_small_agent_ends_if_the_model_never_answers_with_a_command(tasks):
    trajectory = play(tasks, [bash(MEND), *["hm"] * 9])
    assert (trajectory.status, trajectory.reward) == ("finished", 1.0), trajectory.failure
    assert len(trajectory.turns) == 4


ASK = """
import json, os, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "text/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, key)).read()
"""


@pytest.mark.parametrize(
    ("then", "status", "reward", "words"),
    [
        (MEND, "finished", 1.0, ""),
        ("echo why >&2; exit 3", "failed", None, "sh ended with exit code 3: why"),
        ("rm -rf .git", "finished", 0.0, ""),
        # its own Python must not import the packages of the task
        ('test -z "$PYTHONPATH" && ' + MEND, "finished", 1.0, ""),
        ("python -c 'import shapes' && cd / && ! python -c 'import shapes'", "finished", 0.0, ""),
        pytest.param(f"{MEND}; sleep 100", "truncated", 1.0, "", marks=pytest.mark.slow),
    ],
)
def test_how_a_program_ends_decides_what_its_episode_is(tasks, then, status, reward, words):
    program = ("sh", "-c", f'python3 -c "$ASK" && {{ {then}; }}')
    program_s = 8.0 if "sleep" in then else 60.0
    trajectory = play(tasks, ["hi"], program=program, program_s=program_s, env={"ASK": ASK})
    assert (trajectory.status, trajectory.reward) == (status, reward), trajectory.failure
    if trajectory.failure:
        assert trajectory.failure.kind == FailureKind.ENVIRONMENT
        assert words in trajectory.failure.message


def test_what_one_sandbox_has_capacity_for_is_judged_with_one_sandbox(tasks):
    pool = {"max_sandboxes": 1, "wait_s": 30}
    trajectory = play(tasks, [bash(MEND), bash("submit")], pool=pool)
    assert (trajectory.status, trajectory.reward) == ("finished", 1.0), trajectory.failure


def test_a_task_that_does_not_exist_is_refused(tasks):
    made = RepairAgent(sandbox="bubblewrap", tasks=tasks)
    try:
        with pytest.raises(ValueError, match="no task 'none' in the file"):
            asyncio.run(made.prepare(seed=0, options={"instance": "none"}))
    finally:
        made.close()
