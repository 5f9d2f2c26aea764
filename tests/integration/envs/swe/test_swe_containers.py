"""The SWE environments in containers, with a repository of ours and with one in the image."""

from __future__ import annotations

import json
import subprocess
import uuid

import pytest
from support.sandbox_types import IMAGE, no_docker
from support.swe_repositories import git, shapes_task

from rollart_core.rollout import loop
from rollart_envs.swe.function_env import FunctionRepairEnv
from rollart_envs.swe.repair_env import RepairEnv
from rollart_envs.swe.validate import validate
from rollart_sandboxes.pool.source import sandbox_source

ISOLATION = {"id": "docker", "image": IMAGE, "pull": "never"}
pytestmark = pytest.mark.docker


def docker(*arguments: str) -> str:
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, check=True, timeout=120, text=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def engine():
    """Skip without an engine that answers and has the image."""
    if why := no_docker():
        pytest.skip(why)


def bash(command: str) -> str:
    return f"```bash\n{command}\n```"


def played(env: RepairEnv | FunctionRepairEnv, **options: object) -> float:
    env.reset(options=options)
    reward = 0.0
    while (action := env.oracle()) is not None:
        reward = env.step(action)[1]
    return reward


@pytest.mark.parametrize("kind", [FunctionRepairEnv, RepairEnv])
def test_our_own_tasks_play(kind):
    env = kind(sandbox=ISOLATION)
    try:
        assert played(env, task=0) == 1.0
        assert env.sandbox is None
    finally:
        env.close()


def test_nothing_that_an_answer_leaves_stays():
    env = FunctionRepairEnv(sandbox=ISOLATION, test_timeout_s=5)
    try:
        env.reset(options={"task": 0})
        name, bad = env.task.entry_point, env.task.buggy_code
        leaves = (
            "import os\nfor folder in ('/work', '/tmp', '/dev/shm'):\n    try:\n"
            "        open(folder + '/left', 'wb').write(bytes(1 << 20))\n"
            "        os.chmod(folder, 0)\n    except OSError:\n        pass\n"
        )
        told = env.step(f"```python\n{leaves}\n{bad}\n```")
        assert told[1:3] == (0.0, False)
        looks = "import os\nif os.path.exists('/work/left'):\n    raise KeyError\n"
        told = env.step(f"```python\n{looks}\n{bad}\n```")
        assert "it does not load" not in told[0], name
        assert env.step(env.oracle())[1] == 1.0
    finally:
        env.close()


@pytest.fixture
def testbed(tmp_path):
    """A task whose repository, history and all, is in an image."""
    row = shapes_task(tmp_path / "repos")
    folder = tmp_path / "repos" / "acme__shapes"
    git(folder, "checkout", "-q", str(row["base_commit"]))
    image = f"rollart-testbed:{uuid.uuid4().hex[:12]}"
    container = docker("create", "--network", "none", IMAGE, "true")
    try:
        docker("cp", f"{folder}/.", f"{container}:/testbed")
        docker("commit", container, image)
    finally:
        docker("rm", "-f", container)
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({**row, "image": image}) + "\n")
    yield path.rename(tmp_path / "alone.jsonl"), tmp_path / "no-repos"
    docker("rmi", "-f", image)


def test_a_repository_in_the_image_is_mended_there_and_its_history_is_gone(testbed):
    path, nowhere = testbed
    env = RepairEnv(sandbox=ISOLATION, tasks=path, repos_dir=nowhere)
    try:
        assert played(env, task=0) == 1.0
        env.reset(options={"task": 0})
        said = env.step(bash("pwd; git log --all --format=%s; ls -d /testbed/.git"))[0]
        assert said.split() == ["/testbed", "base", "/testbed/.git"]
        said = env.step(bash("git cat-file --batch-all-objects --batch | grep -c SECRETLY"))[0]
        assert said.startswith("0")
        assert env.step(bash("submit"))[1] == 0.0
    finally:
        env.close()


def test_a_task_in_an_image_is_validated(testbed):
    path, nowhere = testbed
    source = sandbox_source(ISOLATION)
    (verdict,) = loop.run(validate(path, source, repos_dir=nowhere))
    loop.run(source.close())
    assert verdict.is_sound, verdict
