"""Foreign packages in another Python: shared, failing, hanging, printing, and gone at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.pace import scaled, wait_until

from rollart_core.errors import EnvironmentFailure, PluginError, UnknownIdError
from rollart_plugins.adapters.base import AdapterOptions, ForeignAdapter
from rollart_plugins.adapters.process import HostProcess
from rollart_testing import assert_checks, check_env

SESSION = """
import os, sys, time
print("printed at import")
IMPORTS = ()

def describe(env_id, options):
    if env_id == "Missing":
        raise LookupError("no game 'Missing'")
    return {"reward_range": [0, 1], "max_turns": 5}

class Session:
    offers = ("oracle",)
    max_turns = 5
    def __init__(self, env_id, options):
        describe(env_id, options)
        if env_id == "Needy":
            import a_package_that_is_not_there
    def reset(self, seed, task):
        self.seed = seed
        print("printed by reset", flush=True)
        return f"{seed} in {os.getpid()}", {"python": list(sys.version_info[:2])}
    def step(self, action):
        if action == "raise":
            raise RuntimeError("as told")
        if action == "die":
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        if action == "hang":
            time.sleep(3600)
        return "ok", float(action == "win"), action == "win", False, {}
    def oracle(self):
        return "win"
    def close(self):
        pass
"""


@pytest.fixture
def adapter(tmp_path: Path) -> ForeignAdapter:
    (tmp_path / "acme_session.py").write_text(SESSION)

    class Acme(ForeignAdapter):
        session: ClassVar[str] = str(tmp_path / "acme_session")
        options: ClassVar[type[AdapterOptions]] = AdapterOptions

    return Acme()


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HostProcess]]:
    """Every process that was started; none may be left."""
    found: list[HostProcess] = []
    start = HostProcess.__init__

    def noted(self: HostProcess, *args: Any) -> None:
        start(self, *args)
        found.append(self)

    monkeypatch.setattr(HostProcess, "__init__", noted)
    yield found
    assert not [process for process in found if process.alive]
    assert not [t for t in threading.enumerate() if t.name == "rollart-adapter"]


def make(adapter: ForeignAdapter, env_id: str = "Game", python: str = sys.executable) -> Any:
    return adapter.make(env_id, {"python": python})


def pid_in(page: str) -> int:
    return int(page.rpartition(" ")[2])


def test_another_process_keeps_the_contract(adapter: ForeignAdapter) -> None:
    # The page names its process: the same within one life of the environment only.
    spec = adapter.spec("Game", {"python": sys.executable, "splits": {"train": (0, 9)}})
    env = make(adapter)
    results = check_env(env, spec=spec, num_tasks=1)
    assert_checks([r for r in results if r.name in {"reset", "step", "close_twice"}])
    env.close()


def test_environments_share_one_process_and_end_it_with_the_last(
    adapter: ForeignAdapter, started: list[HostProcess]
) -> None:
    envs = [make(adapter) for _ in range(3)]
    pages = [env.reset(options={"task": i})[0] for i, env in enumerate(envs)]
    assert len({pid_in(page) for page in pages}) == 1
    assert pid_in(pages[0]) != os.getpid()
    assert [page.split()[0] for page in pages] == ["0", "1", "2"]
    envs[0].close()
    assert envs[1].step(envs[1].oracle())[:4] == ("ok", 1.0, True, False)
    assert len(started) == 1
    for env in envs:
        env.close()
    assert not started[0].alive


def test_an_error_of_the_environment_is_told_with_its_trace(adapter: ForeignAdapter) -> None:
    env = make(adapter)
    env.reset(seed=0)
    with pytest.raises(EnvironmentFailure, match=r"env\.step: RuntimeError: as told") as caught:
        env.step("raise")
    assert "acme_session.py" in caught.value.detail
    assert env.step("on")[0] == "ok"
    env.close()


def test_a_process_that_dies_fails_its_episodes_and_the_next_reset_starts_anew(
    adapter: ForeignAdapter, started: list[HostProcess]
) -> None:
    one, two = make(adapter), make(adapter)
    first = pid_in(one.reset(seed=0)[0])
    two.reset(seed=0)
    with pytest.raises(EnvironmentFailure, match=r"gone, exit code 7: last words"):
        one.step("die")
    with pytest.raises(EnvironmentFailure, match="gone"):
        two.step("on")
    assert pid_in(one.reset(seed=0)[0]) != first
    assert pid_in(two.reset(seed=0)[0]) != first
    assert len(started) == 2
    os.kill(pid_in(one.reset(seed=0)[0]), signal.SIGKILL)
    with pytest.raises(EnvironmentFailure, match="gone"):
        one.step("on")
    one.close()
    two.close()


def test_one_that_hangs_is_left_behind(adapter: ForeignAdapter, started: list[HostProcess]) -> None:
    hung, other = make(adapter), make(adapter)
    hung.reset(seed=0)
    other.reset(seed=0)
    failures: list[Exception] = []

    def step() -> None:
        try:
            hung.step("hang")
        except EnvironmentFailure as e:
            failures.append(e)

    thread = threading.Thread(target=step)
    thread.start()
    wait_until(lambda: not hung._remote._pending.done(), "the call that hangs")
    assert other.step("on")[0] == "ok"
    hung.close()
    fresh = make(adapter)  # nobody new sits beside a thread that hangs
    assert len(started) == 2
    assert other.step("on")[0] == "ok"
    for env in (other, fresh):
        env.close()
    thread.join(scaled(60))
    assert not thread.is_alive()
    assert len(failures) == 1


def test_what_a_person_can_mend_is_told(adapter: ForeignAdapter) -> None:
    with pytest.raises(UnknownIdError, match="no game 'Missing'"):
        make(adapter, "Missing")
    with pytest.raises(UnknownIdError, match="no game 'Missing'"):
        adapter.spec("Missing", {"python": sys.executable})
    with pytest.raises(PluginError, match="a_package_that_is_not_there"):
        make(adapter, "Needy")
    with pytest.raises(PluginError, match="/bin/cat"):
        make(adapter, python="/bin/cat")


OTHERS = ("python3.8", "python3.9", "python3.10", "python3.12", "python3.13")


def other_pythons() -> list[str]:
    """Interpreters besides this one: on the path, or beside this one's own version folder."""
    base = Path(sys.base_prefix).parent
    found = [shutil.which(name) for name in OTHERS]
    found += [str(p) for name in OTHERS for p in base.glob(f"{name[6:]}.*/bin/{name}")]
    return [path for path in found if path and runs(path)]


def runs(python: str) -> bool:
    """Version switchers leave programs on the path that only say that there is no such version."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def test_an_older_python_without_our_packages_will_do(adapter: ForeignAdapter) -> None:
    pythons = other_pythons()
    if not pythons:
        pytest.skip("there is no other Python here")
    env = make(adapter, python=pythons[0])
    page, info = env.reset(seed=0)
    assert page
    assert tuple(info["python"]) != sys.version_info[:2]
    assert env.step("win")[1:3] == (1.0, True)
    env.close()
