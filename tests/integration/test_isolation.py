"""Environments in boxes and venvs of their own; the docker cases have the mark ``docker``."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart_core import registry
from rollart_core.boxes import loop
from rollart_core.errors import (
    ConfigError,
    DeadlineFailure,
    EnvironmentFailure,
    PluginError,
    SandboxFailure,
    UnknownIdError,
)
from rollart_core.isolation import box as box_module
from rollart_core.isolation import seats
from rollart_core.rollout.env_worker import EnvRef, EnvWorker

ODD = "odd_env:OddEnv"
TESTS = Path(__file__).resolve().parent.parent

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing")
KINDS = [
    "venv",
    pytest.param("bubblewrap", marks=needs_bwrap),
    pytest.param("docker", marks=pytest.mark.docker),
]
WALLS = KINDS[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the odd environment, readable for whoever a box is."""
    path = tmp_path_factory.mktemp("odd")
    shutil.copy(TESTS / "odd_env.py", path)
    for each in (path, *path.parents):
        if each.owner() == path.owner() and str(each).startswith("/tmp/"):
            each.chmod(each.stat().st_mode | 0o055)
    return path


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not seats._boxes, "a box is still there"


def isolation(kind: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Return the isolation of a kind whose Python finds the odd environment, and no RollArt."""
    said: dict[str, Any] = {"kind": kind, "env": {"PYTHONPATH": str(folder)}, **more}
    if kind == "venv":
        return {"python": "/usr/bin/python3", **said}
    said["ro_binds"] = [str(folder)]
    if kind == "docker":
        return {"image": "rollart-test:latest", "python": "/usr/bin/python3", **said}
    return {"python": "/usr/bin/python3", **said}


def make(kind: str, folder: Path, **more: Any) -> Any:
    options = {k: more.pop(k) for k in ("name", "making") if k in more}
    return registry.make(ODD, isolation=isolation(kind, folder, **more), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_speaks_as_an_environment_of_ours_does(kind: str, folder: Path) -> None:
    env = make(kind, folder, name="boxed")
    try:
        observation, info = env.reset(seed=3, options={"task": 1, "split": "train"})
        said = "boxed 3 {'task': 1, 'split': 'train'} é漢\U0001f600\ud800\u2028"
        assert observation == said
        assert info == {"available_actions": ["go"]}
        assert env.step("print hello")[0] == "still here"
        assert env.step("messages")[:4] == (
            [{"role": "user", "content": "hello"}],
            1.0,
            False,
            True,
        )
        assert env.step("end") == ("nothing", 0.5, True, False, {"success": True})
        assert (env.oracle(), env.num_tasks("train")) == ("end", 3)
        assert not hasattr(env, "secrets")
        assert not hasattr(env, "corpus")
        with pytest.raises(EnvironmentFailure, match="ZeroDivisionError: of all things") as raised:
            env.step("raise")
        assert "in do_raise" in raised.value.detail
        with pytest.raises(EnvironmentFailure, match="SystemExit: out of here"):
            env.step("quit")
        with pytest.raises(EnvironmentFailure, match="step must return"):
            env.step("wrong")
        assert env.reset()[0].startswith("boxed None None"), "it goes on after an error"
    finally:
        env.close()
        env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_an_environment_that_ends_its_process_fails_with_a_type(kind: str, folder: Path) -> None:
    env = make(kind, folder)
    try:
        env.reset()
        with pytest.raises(SandboxFailure, match="ended its own process, exit code 7"):
            env.step("exit 7")
        with pytest.raises(SandboxFailure, match="exit code 7"):
            env.step("turn")
        assert env.reset()[0].startswith("odd"), "the next reset finds another box"
    finally:
        env.close()


@pytest.mark.parametrize("kind", WALLS)
def test_memory_has_an_end(kind: str, folder: Path) -> None:
    env = make(kind, folder, memory_bytes=192 << 20)
    try:
        env.reset()
        with pytest.raises((SandboxFailure, EnvironmentFailure), match=r"memory|Memory"):
            env.step("eat")
        assert env.reset()[0].startswith("odd")
    finally:
        env.close()


@pytest.mark.parametrize("kind", WALLS)
def test_files_of_the_host_are_not_there(kind: str, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    env = make(kind, folder)
    try:
        env.reset()
        for path in (secret, Path.home() / ".bashrc", "/etc/shadow"):
            with pytest.raises(EnvironmentFailure, match=r"FileNotFound|Permission"):
                env.step(f"read {path}")
        with pytest.raises(EnvironmentFailure, match=r"Read-only|Permission"):
            env.step(f"write {folder}/odd_env.py")
        assert env.step("write /tmp/here")[0] == "written"
    finally:
        env.close()
    assert not Path("/tmp/here").exists()


def worked(work: Callable[[EnvWorker], Awaitable[None]]) -> None:
    async def main() -> None:
        worker = EnvWorker(num_threads=4)
        try:
            await work(worker)
        finally:
            await worker.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_hangs_is_killed_and_others_go_on(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_module, "GRACE_S", 0.2)
    ref = EnvRef(ODD, {"isolation": isolation(kind, folder, num_seats=1)})

    async def work(worker: EnvWorker) -> None:
        for name in ("a", "b"):
            await worker.reset(name, ref, seed=0, options={}, timeout_s=60.0)
        with pytest.raises(DeadlineFailure):
            await worker.step("a", "hang", timeout_s=0.3)
        began = time.monotonic()
        await worker.end("a", reusable=False)
        assert time.monotonic() - began < 5.0
        assert await worker.num_hung() == 0
        assert (await worker.step("b", "turn", timeout_s=60.0)).observation == "1"
        await worker.reset("a", ref, seed=0, options={}, timeout_s=60.0)
        assert (await worker.step("a", "turn", timeout_s=60.0)).observation == "1"

    worked(work)


def test_a_making_that_hangs_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_module, "GRACE_S", 0.1)
    ref = EnvRef(ODD, {"isolation": isolation("venv", folder), "making": "hang"})

    async def work(worker: EnvWorker) -> None:
        with pytest.raises(DeadlineFailure):
            await worker.reset("a", ref, seed=0, options={}, timeout_s=1.0)
        await worker.end("a", reusable=False)
        assert await worker.num_hung() == 0
        for _ in range(100):
            if not seats._boxes:
                return
            await asyncio.sleep(0.05)

    worked(work)


def test_an_answer_that_comes_late_costs_no_box(folder: Path) -> None:
    ref = EnvRef(ODD, {"isolation": isolation("venv", folder)})

    async def work(worker: EnvWorker) -> None:
        for name in ("a", "b"):
            await worker.reset(name, ref, seed=0, options={}, timeout_s=60.0)
        pid = (await worker.step("b", "pid", timeout_s=60.0)).observation
        with pytest.raises(DeadlineFailure):
            await worker.step("a", "sleep 0.5", timeout_s=0.1)
        await worker.end("a", reusable=False)
        assert (await worker.step("b", "pid", timeout_s=60.0)).observation == pid

    worked(work)


def test_a_box_has_so_many_seats_and_so_many_episodes(folder: Path) -> None:
    given = isolation("venv", folder, num_seats=2, episodes_per_box=3)
    envs = [registry.make(ODD, isolation=given) for _ in range(3)]
    try:
        pids = []
        for env in envs:
            env.reset()
            pids.append(env.step("pid")[0])
        assert pids[0] == pids[1] != pids[2]
        envs[1].reset()
        assert envs[1].step("pid")[0] == pids[0], "the third episode"
        envs[1].reset()
        assert envs[1].step("pid")[0] == pids[2], "the box with a free seat"
        envs[0].reset()
        assert envs[0].step("pid")[0] not in pids, "the third box, since that is full"
    finally:
        for env in envs:
            env.close()


def test_state_of_an_episode_is_fresh(folder: Path) -> None:
    env = make("venv", folder)
    try:
        for _ in range(2):
            env.reset()
            assert [env.step("turn")[0] for _ in range(2)] == ["1", "2"]
    finally:
        env.close()


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_another_python(version: str, folder: Path) -> None:
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    python = str(found[0]) if found else shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], check=False).returncode:
        pytest.skip(f"there is no Python {version}")
    env = make("venv", folder, python=python)
    try:
        env.reset()
        assert env.step("python")[0] == version
    finally:
        env.close()


def test_what_is_wrong_is_said(folder: Path) -> None:
    venv = isolation("venv", folder)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"isolation": "dokcer"}, ConfigError, "isolation.kind"),
        ({"isolation": {}}, ConfigError, "isolation.kind"),
        ({"isolation": "venv"}, ConfigError, "one of venv, requires and python"),
        ({"isolation": {"kind": "venv", "venv": "/nowhere"}}, ConfigError, "no virtual env"),
        ({"isolation": {"kind": "venv", "python": "pyhton"}}, ConfigError, "is no program"),
        ({"isolation": {"kind": "venv", "requires": ["-e ."]}}, ConfigError, "option of pip"),
        ({"isolation": {**venv, "memory_byte": 1}}, ConfigError, "memory_bytes"),
        ({"isolation": {**venv, "num_seats": 0}}, ConfigError, "isolation.num_seats"),
        ({"isolation": {"kind": "docker", "requires": ["a"]}}, ConfigError, "in the image"),
        ({"isolation": venv, "colour": "red"}, ConfigError, "colour: unknown key"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            registry.checked_options("environments", ODD, options)
    for env_id, error, message in (
        ("toy/Sokoban-v1", UnknownIdError, "the box has no RollArt"),
        ("odd_env:Nothing", UnknownIdError, "has no 'Nothing'"),
        ("no_such_module:X", PluginError, "No module named"),
    ):
        with pytest.raises(error, match=message):
            registry.env_spec(env_id, {"isolation": venv})
    with pytest.raises(EnvironmentFailure, match="it cannot be made"):
        registry.make(ODD, isolation=venv, making="raise")


def test_a_python_with_rollart_knows_ids_and_tells_their_specs() -> None:
    given = {"isolation": {"kind": "venv", "python": sys.executable}}
    here = registry.env_spec("gymnasium::FrozenLake-v1")
    spec = registry.env_spec("gymnasium::FrozenLake-v1", given)
    assert (spec.id, spec.splits, spec.max_turns) == (here.id, here.splits, here.max_turns)
    assert spec.timeouts.reset_s > here.timeouts.reset_s
    asked = {**given, "xyz": 1}
    problems = registry.option_problems("environments", "gymnasium::FrozenLake-v1", asked)
    assert [p.path for p in problems] == [("xyz",)]
    checked = registry.checked_options("environments", "gymnasium::FrozenLake-v1", given)
    assert checked["reward"] == "native"
    assert checked["isolation"] == given["isolation"]
    assert registry.checked_options("environments", "gymnasium::FrozenLake-v1", checked) == checked


def test_a_box_that_lies_about_itself_is_refused() -> None:
    from rollart_core.isolation.describe import read_spec

    assert read_spec("a:B", {"max_turns": 7, "licence": "x" * 5000}).max_turns == 7
    for lie in (
        {"max_turns": "7"},
        {"max_turns": 0},
        {"splits": ["train", 3]},
        {"reward_range": [0.0]},
        {"timeouts": {"reset_s": None}},
        {"deterministic": 1},
    ):
        with pytest.raises((TypeError, ValueError)):
            read_spec("a:B", lie)


def test_a_box_outside_the_protocol_fails_what_waits(folder: Path) -> None:
    env = make("venv", folder)
    try:
        env.reset()
        box = next(iter(next(iter(seats._boxes.values()))._starts))
        future = loop.submit(env._seat.call("step", "sleep 60"))
        loop.run(_say(box, b"no JSON\n"))
        with pytest.raises(SandboxFailure, match="outside the protocol"):
            future.result(10)
    finally:
        env.close()


async def _say(box: Any, data: bytes) -> None:
    box._take(data)


CONFIG = """
name: isolated
model: {{kind: new, num_layers: 1, width: 32, ffn_width: 48, vocab_size: 320}}
env: {env}
runtime: {{kind: inline, env_processes: 1}}
trackers: []
deadlines: {{step_s: 2, reset_s: 60}}
rollout: {{groups_per_batch: 2, group_size: 4, max_turns: 1, max_new_tokens: 4,
          max_context_tokens: 128}}
failures: {{max_rate: 0.9}}
evaluation: {{tasks: 4, greedy: false}}
stop: {{batches: 4}}
runs_dir: {runs}
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_on_an_environment_in_boxes(kind: str, folder: Path, tmp_path: Path) -> None:
    given = {"trouble": {"0": "exit 3", "3": "hang"}}
    env = {"id": "odd_env:VowelEnv", **given, "isolation": isolation(kind, folder, num_seats=2)}
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(env=json.dumps(env), runs=tmp_path / "runs"))
    done = subprocess.run(
        [sys.executable, "-c", "from rollart_core.cli import main; main()", "run", path, "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["train_steps"] == 4
    assert set(report["failures"]) & {"sandbox", "timeout"}, report["failures"]
