"""``swe/FunctionRepair-v1`` in a box: what passes, what does not, and what answers try to leave."""

from __future__ import annotations

import json

import pytest
from support.sandbox_types import no_bubblewrap

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import SandboxFailure, UserError
from rollart_core.runtime.launch import launch
from rollart_envs.swe.function_env import FunctionRepairEnv
from rollart_envs.swe.taskbook import split_ids

SCALE = {
    "task_id": "scale",
    "entry_point": "scale",
    "declaration": "def scale(numbers, by):\n",
    "buggy_solution": "    return [n + by for n in numbers]\n",
    "canonical_solution": "    return [n * by for n in numbers]\n",
    "test": "def check(scale):\n    assert scale([4711, 2], 3) == [14133, 6]\n\ncheck(scale)\n",
    "instruction": "Multiply each number.",
}
GOOD = SCALE["declaration"] + SCALE["canonical_solution"]
BAD = SCALE["declaration"] + SCALE["buggy_solution"]


@pytest.fixture(scope="module", params=["process", "bubblewrap"])
def env(request, tmp_path_factory):
    if request.param == "bubblewrap" and (why := no_bubblewrap()):
        pytest.skip(why)
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    path.write_text(json.dumps(SCALE) + "\n")
    trusted = {"trusted": True} if request.param == "process" else {}
    made = FunctionRepairEnv(
        sandbox={"id": request.param, **trusted}, tasks=path, test_timeout_s=30.0
    )
    yield made
    made.close()


@pytest.fixture
def walled(env):
    if env.config.sandbox.id == "process":
        pytest.skip("there is no wall to try")
    return env


def judged(env, *answers):
    """Answer in turn in one episode; return each observation and reward."""
    env.reset(options={"instance": "scale"})
    return [env.step(f"Here:\n```python\n{answer}```\n")[:3] for answer in answers]


def test_the_oracle_passes_and_the_bug_does_not(env):
    observation, info = env.reset(options={"instance": "scale"})
    assert "n + by" in observation
    assert not any(secret in observation for secret in env.secrets())
    assert info["success"] is False
    (first, second) = judged(env, BAD, GOOD)
    assert "a wrong result. Attempts left: 2." in first[0]
    assert first[1:] == (0.0, False)
    assert second == ("The function is mended.", 1.0, True)
    assert env.oracle() is None


def test_three_failures_end_the_episode(env):
    said = judged(env, "x = 1\n", "scale = (\n", "def scale(a, b):\n    raise KeyError('x')\n")
    assert "does not define `scale`" in said[0][0]
    assert "it is not valid Python: '(' was never closed (line 1)" in said[1][0]
    assert "KeyError was raised. No attempt is left." in said[2][0]
    assert [over for *_, over in said] == [False, False, True]
    assert sum(reward for _, reward, _ in said) == 0.0


LEAVES = {
    "modules": "import os\nfor folder in ('.', '/tmp', '/work', os.environ.get('HOME', '.')):\n"
    "    for name in ('json', 'judge', 'function_judge', 'sitecustomize', 'usercustomize'):\n"
    "        try:\n            with open(f'{folder}/{name}.py', 'w') as file:\n"
    "                file.write('import os; os._exit(0)')\n        except OSError:\n"
    "            pass\n",
    "a full disk": "for folder in ('/tmp', '/work', '/dev/shm'):\n    try:\n"
    "        for n in range(2000):\n"
    "            with open(f'{folder}/{n}', 'wb') as file:\n"
    "                file.write(bytes(1 << 20))\n"
    "    except OSError:\n        pass\n",
    "a deep folder": "import os\nos.chdir('/work')\nfor _ in range(3000):\n"
    "    os.mkdir('d')\n    os.chdir('d')\n",
    "closed folders": "import os\nos.makedirs('/work/a/b')\nos.chmod('/work/a', 0)\n"
    "os.chmod('/work', 0o500)\n",
    "a daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True:\n"
    "        time.sleep(0.01)\n        try:\n            with open('/tmp/left', 'a') as file:\n"
    "                file.write('x')\n        except OSError:\n            pass\n",
    "a killed judge": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "kills all": "import os, signal\nos.kill(-1, signal.SIGKILL)\n",
    "a fork bomb": "import os\nfirst = os.getpid()\nwhile True:\n    try:\n        os.fork()\n"
    "    except OSError:\n        if os.getpid() == first:\n            break\n",
}


def test_what_one_sandbox_has_capacity_for_is_judged_with_one_sandbox(walled):
    pool = {"max_sandboxes": 1, "wait_s": 30}
    given = {"tasks": walled.config.tasks, "test_timeout_s": 30.0, "pool": pool}
    env = FunctionRepairEnv(sandbox="bubblewrap", num_attempts=2, **given)
    try:
        killed, good = judged(env, f"{LEAVES['a killed judge']}\n{BAD}", GOOD)
        assert killed[1:] == (0.0, False)
        assert good[1:] == (1.0, True)
    finally:
        env.close()


@pytest.mark.parametrize("name", LEAVES)
def test_nothing_that_an_answer_leaves_changes_the_next_judgement(walled, name):
    first, bad, good = judged(walled, f"{LEAVES[name]}\n{BAD}", BAD, GOOD)
    assert first[1:] == (0.0, False), first
    assert "a wrong result" in bad[0]
    assert good[1:] == (1.0, True), good


def test_what_a_test_asks_does_not_come_back_to_the_agent(walled):
    by_name = "def scale(numbers, by):\n    raise type(f'E{numbers[0]}', (Exception,), {})('x')\n"
    keeps = (
        "def scale(numbers, by):\n    with open('/tmp/kept', 'w') as file:\n"
        "        file.write(str(numbers))\n    raise ValueError(str(numbers))\n"
    )
    notifies = "kept = open('/tmp/kept').read()\nraise SystemExit(kept)\n#scale\n"
    said = [text for text, *_ in judged(walled, by_name, keeps, notifies)]
    assert not any("4711" in text for text in said), said
    assert "RuntimeError was raised" in said[0]
    assert "ValueError was raised" in said[1]
    assert "it does not load: FileNotFoundError" in said[2]


def test_answers_outside_the_language_of_generated_tasks_are_judged_in_a_sandbox(walled):
    env = FunctionRepairEnv(
        sandbox="bubblewrap", num_generated=40, num_attempts=2, test_timeout_s=30.0
    )
    try:
        env.reset(options={"task": 0, "split": "test"})
        assert env.sandbox is None
        wrong, reward, over, *_ = env.step(f"{env.task.declaration}    return int('four')\n")
        assert (reward, over) == (0.0, False)
        assert "ValueError was raised. Attempts left: 1." in wrong
        assert env.sandbox is not None
        assert env.step(env.oracle())[:3] == ("The function is mended.", 1.0, True)
        assert env.sandbox is None
    finally:
        env.close()


def test_a_sandbox_that_cannot_judge_is_a_failure_and_no_reward(walled):
    env = FunctionRepairEnv(sandbox="bubblewrap", python="/usr/bin/no-python")
    env.reset(options={"task": 0})
    with pytest.raises(SandboxFailure, match="its own solution is judged error") as caught:
        env.step(env.oracle())
    assert caught.value.retryable is False
    assert env._sandbox is None
    env.close()


def test_a_gone_sandbox_is_a_failure_and_the_next_episode_goes_on(walled):
    walled.reset(options={"instance": "scale"})
    import os
    import signal

    os.kill(walled._sandbox.agent_pid, signal.SIGKILL)
    with pytest.raises(SandboxFailure):
        walled.step(f"```python\n{GOOD}```")
    assert judged(walled, GOOD)[0][1] == 1.0


def test_a_task_file_that_is_not_there_is_said_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl: No such file"):
        FunctionRepairEnv(tasks=tmp_path / "none.jsonl")


def test_splits_follow_from_the_ids_alone():
    ids = [f"t{n}" for n in range(40)]
    splits = split_ids(ids)
    assert {name: len(found) for name, found in splits.items()} == {
        "train": 27,
        "warm": 5,
        "test": 8,
    }
    assert sorted(sum(splits.values(), ())) == sorted(ids)
    other = split_ids(ids[::-1])
    assert {name: set(found) for name, found in other.items()} == {
        name: set(found) for name, found in splits.items()
    }
    assert split_ids(["a", "b"]) == dict.fromkeys(("train", "warm", "test"), ("a", "b"))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_example_learns_to_repair_functions_it_has_not_seen(seed, tmp_path, repo_root):
    if why := no_bubblewrap():
        pytest.skip(why)
    settings = [f"seed={seed}", "trackers=[]", f"runs_dir={tmp_path / 'runs'}"]
    config = load_config(repo_root / "examples/function_repair.yaml", settings)
    report = launch(resolve_run(config))
    assert report.before.success.mean < 0.2
    assert report.after.success.mean > 0.5
    assert report.batches <= config.stop.batches
