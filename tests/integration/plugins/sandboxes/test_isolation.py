"""Environments in boxes and venvs of their own; the docker cases have the mark ``docker``."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import start_program
from support.pace import scaled, until
from support.processes import wait_gone
from support.sandbox_types import HELD, IMAGE, missing

from rollart_bench import isolation as bench
from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import (
    ConfigError,
    DeadlineFailure,
    EnvironmentFailure,
    PluginError,
    SandboxFailure,
    UnknownIdError,
    UserError,
)
from rollart_core.plugins import registry
from rollart_core.rollout import loop
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_sandboxes.isolation import env as isolated
from rollart_sandboxes.isolation.config import Isolation
from rollart_sandboxes.isolation.env import open_env
from rollart_sandboxes.isolation.image import Build, build_image, find_project
from rollart_sandboxes.isolation.recipe import made_venv, recipe_of

ODD = "odd_env:OddEnv"
SUPPORT = Path(__file__).resolve().parents[3] / "support"

KINDS = [
    "venv",
    *HELD,
]
ISOLATIONS = KINDS[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the odd environment, readable for whoever a box is."""
    path = tmp_path_factory.mktemp("odd")
    shutil.copy(SUPPORT / "odd_env.py", path)
    for each in (path, *path.parents):
        if each.owner() == path.owner() and str(each).startswith("/tmp/"):
            each.chmod(each.stat().st_mode | 0o055)
    return path


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    kinds = getattr(getattr(request.node, "callspec", None), "params", {})
    isolation = "docker" if request.node.get_closest_marker("docker") else kinds.get("kind", "venv")
    if isolation != "venv" and (why := missing(isolation)):
        pytest.skip(why)
    yield
    loop.run(isolated.close_idle())
    assert not isolated._sandboxes, "a box is still there"


def isolation(kind: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Return the isolation of a kind whose Python finds the odd environment, and no RollArt."""
    said: dict[str, Any] = {"kind": kind, "env": {"PYTHONPATH": str(folder)}, **more}
    if kind == "venv":
        return {"python": "/usr/bin/python3", **said}
    said["ro_binds"] = [str(folder)]
    if kind == "docker":
        return {"image": IMAGE, "python": "/usr/bin/python3", **said}
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


@pytest.mark.parametrize("kind", ISOLATIONS)
def test_memory_has_an_end(kind: str, folder: Path) -> None:
    env = make(kind, folder, memory_bytes=192 << 20)
    try:
        env.reset()
        with pytest.raises((SandboxFailure, EnvironmentFailure), match=r"memory|Memory"):
            env.step("eat")
        assert env.reset()[0].startswith("odd")
    finally:
        env.close()


@pytest.mark.parametrize("kind", ISOLATIONS)
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
    monkeypatch.setattr(isolated, "GRACE_S", 0.2)
    ref = EnvRef(ODD, {"isolation": isolation(kind, folder, num_slots=1)})

    async def work(worker: EnvWorker) -> None:
        for name in ("a", "b"):
            await worker.reset(name, ref, seed=0, options={}, timeout_s=60.0)
        with pytest.raises(DeadlineFailure):
            await worker.step("a", "hang", timeout_s=0.3)
        await worker.end("a", reusable=False)
        assert await worker.num_hung() == 0
        assert (await worker.step("b", "turn", timeout_s=60.0)).observation == "1"
        await worker.reset("a", ref, seed=0, options={}, timeout_s=60.0)
        assert (await worker.step("a", "turn", timeout_s=60.0)).observation == "1"

    worked(work)


def test_a_making_that_hangs_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "GRACE_S", 0.1)
    ref = EnvRef(ODD, {"isolation": isolation("venv", folder), "making": "hang"})

    async def work(worker: EnvWorker) -> None:
        with pytest.raises(DeadlineFailure):
            await worker.reset("a", ref, seed=0, options={}, timeout_s=1.0)
        await worker.end("a", reusable=False)
        assert await worker.num_hung() == 0
        await until(lambda: not isolated._sandboxes, "the end of the box")

    worked(work)


def test_an_answer_that_comes_late_costs_no_sandbox(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "GRACE_S", 60.0)
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


def test_a_sandbox_has_so_many_seats_and_so_many_episodes(folder: Path) -> None:
    given = isolation("venv", folder, num_slots=2, episodes_per_sandbox=3)
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


LEAVES = """
import json, os, signal, sys
from rollart_core import registry
how, given = sys.argv[1], json.loads(sys.argv[2])
env = registry.make("odd_env:OddEnv", isolation=given)
env.reset()
print(env.step("pid")[0], flush=True)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", "forgetful"])
def test_a_process_that_ends_without_closing_leaves_nothing(how: str, folder: Path) -> None:
    given = json.dumps(isolation("venv", folder))
    command = [sys.executable, "-c", LEAVES, how, given]
    done = subprocess.run(command, capture_output=True, timeout=scaled(100), check=False)
    assert done.returncode == (-9 if how == "killed" else 0), done.stderr
    wait_gone(int(done.stdout))


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
        ({"isolation": {"kind": "venv", "venv": "/nowhere"}}, ConfigError, "not a virtual env"),
        ({"isolation": {"kind": "venv", "python": "pyhton"}}, ConfigError, "is not a program"),
        ({"isolation": {"kind": "venv", "requires": ["-e ."]}}, ConfigError, "option of pip"),
        ({"isolation": {**venv, "memory_byte": 1}}, ConfigError, "memory_bytes"),
        ({"isolation": {**venv, "num_slots": 0}}, ConfigError, "isolation.num_slots"),
        ({"isolation": {"kind": "docker", "requires": ["a"]}}, ConfigError, "in the image"),
        ({"isolation": venv, "colour": "red"}, ConfigError, "colour: unknown key"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            registry.checked_options("environments", ODD, options)
    for env_id, error, message in (
        ("toy/Sokoban-v1", UnknownIdError, "the sandbox has no RollArt"),
        ("odd_env:Nothing", UnknownIdError, "has no 'Nothing'"),
        ("no_such_module:X", PluginError, "No module named"),
    ):
        with pytest.raises(error, match=message):
            registry.env_spec(env_id, {"isolation": venv})
    with pytest.raises(EnvironmentFailure, match="it cannot be made"):
        registry.make(ODD, isolation=venv, making="raise")


def test_a_python_with_rollart_knows_ids_and_notifies_their_specs() -> None:
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


def test_a_run_config_is_checked_with_what_its_sandbox_says(folder: Path, tmp_path: Path) -> None:
    def faults(**more: Any) -> str:
        isolated = {**isolation("venv", folder), **more.pop("isolation", {})}
        env = {"id": "odd_env:VowelEnv", "isolation": isolated, **more}
        path = tmp_path / "run.yaml"
        path.write_text(config(env, tmp_path))
        try:
            found = resolve_run(load_config(path), source="x.yaml", import_classes=True)
        except ConfigError as e:
            return str(e)
        path.write_text(found.to_yaml())
        assert resolve_run(load_config(path)).as_dict() == found.as_dict()
        return ""

    assert faults() == ""
    assert faults(colour="red") == "x.yaml: env.colour: unknown key"
    assert "x.yaml: env.isolation.kind: " in faults(isolation={"kind": "jail"})
    assert "env.isolation.ttl_s: 900 s: must be more than twice" in faults(isolation={"ttl_s": 900})
    as_long_as_a_reset = {"pool": {"wait_s": scaled(60)}}
    assert "env.isolation.pool.wait_s: " in faults(isolation=as_long_as_a_reset)
    assert "env: odd_env:VowelEnv: in its sandbox (" in faults(isolation={"env": {}})


def test_a_sandbox_that_lies_about_itself_is_refused() -> None:
    from rollart_sandboxes.isolation.describe import read_spec

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


def test_a_sandbox_outside_the_protocol_fails_what_waits(folder: Path) -> None:
    env = make("venv", folder)
    try:
        env.reset()
        sandbox = next(iter(next(iter(isolated._sandboxes.values()))._starts))
        future = loop.submit(env._slot.call("step", "sleep 60"))
        loop.run(_say(sandbox, b"no JSON\n"))
        with pytest.raises(SandboxFailure, match="violates the protocol"):
            future.result(10)
    finally:
        env.close()


@pytest.mark.parametrize("lie", [None, 5, {"offers": 5}, {"offers": "secrets"}])
@pytest.mark.parametrize("how", ["make", "open_env", "begin"])
def test_a_sandbox_that_lies_in_open_is_left(
    how: str, lie: object, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"isolation": isolation("venv", folder)}
    honest = isolated.EnvSandbox.call
    lies = how != "begin"

    async def call(sandbox: isolated.EnvSandbox, slot: int, call: str, *args: object) -> Any:
        said = await honest(sandbox, slot, call, *args)
        return lie if call == "open" and lies else said

    monkeypatch.setattr(isolated.EnvSandbox, "call", call)
    with pytest.raises(SandboxFailure, match="cannot be read"):
        if how == "make":
            registry.make(ODD, **given)
        elif how == "open_env":
            asyncio.run(open_env(ODD, given))
        else:
            env = registry.make(ODD, **given)
            loop.run(env._slot._leave())
            lies = True
            env.reset()
    assert [b.num_slots for each in isolated._sandboxes.values() for b in each._starts] == [0]


def test_a_seat_is_left_when_what_stands_for_the_environment_cannot_be_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(slot: isolated.EnvSlot) -> None:
        raise RuntimeError("of all things")

    monkeypatch.setattr("rollart_sandboxes.isolation.env.IsolatedEnv", broken)
    given = {"isolation": isolation("venv", folder)}
    with pytest.raises(RuntimeError, match="of all things"):
        registry.make(ODD, **given)
    with pytest.raises(RuntimeError, match="of all things"):
        asyncio.run(open_env(ODD, given))
    assert [b.num_slots for each in isolated._sandboxes.values() for b in each._starts] == [0]


def test_an_answer_that_is_no_json_is_an_error_of_its_call(folder: Path) -> None:
    env = make("venv", folder)
    try:
        env.reset()
        assert loop.submit(env._slot.call("num_tasks", "scalar")).result(scaled(60)) == 7
        with pytest.raises(EnvironmentFailure, match="tolist"):
            loop.submit(env._slot.call("num_tasks", "odd")).result(scaled(60))
        with pytest.raises(EnvironmentFailure, match="Mute: its message cannot be read"):
            loop.submit(env._slot.call("step", "unspeakable")).result(scaled(60))
        assert env.step("turn")[0] == "2"
    finally:
        env.close()


def test_a_sandbox_that_is_about_to_close_is_not_closed_under_who_sits_down(folder: Path) -> None:
    env = make("venv", folder)
    slot = env._slot

    async def look_then_lend() -> None:
        sandboxes, sandbox = slot._sandboxes, slot._sandbox
        await slot._leave()
        sandboxes._look(sandbox, sandbox.num_opened)
        assert await sandboxes.lend() is sandbox
        await asyncio.sleep(0.05)
        assert sandbox.alive
        await sandboxes.take_back(sandbox)
        await asyncio.gather(sandboxes.close_idle(), sandboxes.close_idle())

    loop.run(look_then_lend())
    env.close()


async def _say(sandbox: Any, data: bytes) -> None:
    sandbox._take(data)


def wheel(folder: Path, name: str, version: str, text: str, requires: str = "") -> None:
    """Write a wheel of one module by hand: no build backend, no network."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if requires:
        metadata += f"Requires-Dist: {requires}\n"
    content = {
        f"{name}.py": text,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, said in content.items():
            archive.writestr(path, said)


@pytest.mark.slow
def test_environments_with_conflicting_dependencies_live_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (SUPPORT / "odd_env.py").read_text()
    for number, name in (("1", "alpha_env"), ("2", "beta_env")):
        wheel(tmp_path, "shared_dependency", number, f"VERSION = {number!r}\n")
        wheel(tmp_path, name, "1.0", text, f"shared-dependency=={number}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    envs: list[Any] = []
    try:
        for name in ("alpha_env", "beta_env"):
            isolated = {"kind": "venv", "requires": [name.replace("_", "-")]}
            env = {"id": f"{name}:OddEnv", "isolation": isolated}
            path = tmp_path / f"{name}.yaml"
            path.write_text(config(env, tmp_path))
            resolved = resolve_run(load_config(path), import_classes=True)
            envs.append(registry.make(resolved.env.spec.id, **resolved.env.options))
        for made in envs:
            made.reset()
        assert [made.step("version")[0] for made in envs] == ["1", "2"]
    finally:
        for made in envs:
            made.close()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))  # made once, and kept
    assert made_venv(["alpha-env"]) == made_venv(["alpha-env"])
    with pytest.raises(PluginError, match=r"isolation.requires: .*no-such-package"):
        made_venv(["no-such-package"])
    kept = [p for p in (tmp_path / "cache/rollart/venvs").iterdir() if p.is_dir()]
    assert len(kept) == 2, "nothing half made is left"


DOCKERFILE = """
ARG BASE
FROM ${BASE}
COPY odd_env.py /usr/lib/python3/dist-packages/
"""
BUILT = f"odd/Odd{uuid.uuid4().hex[:12]}-v3"
"""Of this process alone: its image bears the name, and other processes build one too."""
MANIFEST = f"""
contract_version: 2
licence: MIT
environments:
  - {{id: {BUILT}, entry_point: odd_env:OddEnv}}
"""


def project(tmp_path: Path, dockerfile: str = DOCKERFILE) -> Path:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/rollart.yaml").write_text(MANIFEST)
    (tmp_path / "Dockerfile").write_text(dockerfile)
    shutil.copy(SUPPORT / "odd_env.py", tmp_path)
    return tmp_path


BUILD = Build((), None, (f"BASE={IMAGE}",), "none")


@pytest.mark.docker
def test_an_image_is_built_and_an_environment_runs_in_it(tmp_path: Path) -> None:
    lines: list[str] = []
    found = find_project(str(project(tmp_path)))
    assert found.ids == (BUILT,)
    tags = build_image(found, BUILD, lines.append)
    try:
        assert tags == (f"rollart-env/{BUILT.removesuffix('-v3').replace('/', '-').lower()}:v3",)
        assert any("COPY odd_env.py" in line for line in lines)
        env = registry.make(ODD, isolation={"kind": "docker", "image": tags[0]})
        try:
            assert env.reset()[0].startswith("odd")
        finally:
            env.close()
        with pytest.raises(UnknownIdError, match="the sandbox has no RollArt"):
            registry.env_spec(BUILT, {"isolation": "docker"})
    finally:
        subprocess.run(["docker", "rmi", "-f", *tags], capture_output=True, check=True)
    with pytest.raises(PluginError, match=f"`rollart build {BUILT}` makes the image"):
        registry.env_spec(BUILT, {"isolation": {"kind": "docker", "num_slots": 2}})


@pytest.mark.docker
def test_a_build_that_fails_says_at_which_step(tmp_path: Path) -> None:
    folder = project(tmp_path, DOCKERFILE + "RUN echo first >&2; echo the reason >&2; exit 4\n")
    with pytest.raises(UserError, match=r"Step 4/4 : RUN echo first[^$]*the reason[^$]*code: 4"):
        build_image(find_project(str(folder)), BUILD, lambda line: None)


def test_what_keeps_an_image_from_being_built_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no such folder"):
        find_project("./nowhere")
    with pytest.raises(UserError, match="'nowhere' is installed"):
        find_project("nowhere")
    with pytest.raises(UserError, match="give a --tag"):
        build_image(find_project(str(tmp_path)), BUILD, print)
    found = find_project(str(project(tmp_path)))
    with pytest.raises(UserError, match="there is no such file: write a Dockerfile"):
        build_image(found, replace(BUILD, dockerfile=tmp_path / "Dockerfle"), print)
    with pytest.raises(ConfigError, match=r"set isolation.image"):
        registry.env_spec(ODD, {"isolation": "docker"})
    recipe = recipe_of(Isolation(kind="docker"), "frozenlake")
    assert recipe.needs["image"] == "rollart-env/toy-frozenlake:v1"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    if shutil.which("docker"):
        with pytest.raises(UserError, match="no Docker engine answers"):
            build_image(found, BUILD, print)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="docker is not installed"):
        build_image(found, BUILD, print)


CONFIG = """
name: isolated
model: {{kind: new, num_layers: 1, width: 32, ffn_width: 48, vocab_size: 320}}
env: {env}
runtime: {{kind: inline, env_processes: 1}}
trackers: []
max_staleness: 0
deadlines: {{step_s: {step_s}, reset_s: {reset_s}}}
rollout: {{groups_per_batch: 2, group_size: 4, max_turns: 1, max_new_tokens: 4,
          max_context_tokens: 128}}
failures: {{max_rate: 1.0, max_retries: 0}}
evaluation: {{tasks: 4, greedy: false}}
stop: {{batches: 4}}
runs_dir: {runs}
"""


def config(env: dict[str, Any], runs: Path, step_s: float = 60.0) -> str:
    """Return the config of a run on an environment."""
    return CONFIG.format(env=json.dumps(env), runs=runs, step_s=step_s, reset_s=scaled(60))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_on_an_environment_in_sandboxes(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    # Six of eight tasks can be trained on: eight groups of one after the other meet all of them.
    given = {"trouble": {"0": "exit 3", "3": "sleep 600"}}
    env = {"id": "odd_env:VowelEnv", **given, "isolation": isolation(kind, folder, num_slots=2)}
    path = tmp_path / "run.yaml"
    path.write_text(config(env, tmp_path / "runs", step_s=scaled(4)))
    run = start_program("run", str(path), "--json")
    out, err = run.communicate()
    assert run.returncode == 0, err[-3000:]
    report = json.loads(out)
    assert report["batches"] == 4
    assert set(report["failures"]) >= {"sandbox", "timeout"}, report["failures"]


def test_the_benchmark_has_a_row_for_a_step_and_says_what_it_could_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    result = bench.run({"kinds": ["venv", "docker"], "steps": 20})
    rows, skipped = result["rows"], result["skipped_cases"]
    assert isinstance(rows, list)
    assert isinstance(skipped, dict)
    by_case = {row["case"]: row for row in rows}
    assert by_case["venv: env.step, p50"]["ours"] > by_case["venv: env.step, p50"]["peer"]
    assert by_case["venv: 16 episodes"]["ours"] > 0
    assert list(skipped) == ["docker"]
    assert "no Docker engine answers" in skipped["docker"]
