from __future__ import annotations

import ast
import datetime
import io
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.pace import scaled

from rollart_bench.cli import _module, benchmarks
from rollart_bench.skip import BenchSkipped
from rollart_core.cli import COMMANDS, main, progress
from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.spec import CommandSpec
from rollart_core.errors import TooManyFailures
from rollart_core.plugins import manager as plugins
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manager import RESERVED_COMMANDS
from rollart_core.scheduling.observer import RunObserver
from rollart_core.scheduling.tasks import TaskSourceState
from rollart_core.store.audit import audit
from rollart_core.store.journal import Journal
from rollart_core.store.run_dir import RunState

Run = Callable[..., tuple[int, str, str]]
FROZEN_LAKE = "rollart_envs.toy.frozen_lake:FrozenLakeEnv"


@pytest.fixture
def rollart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; return exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def inner(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollart", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return inner


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config that can run."""
    path = tmp_path / "x.yaml"
    path.write_text(
        "env: frozenlake\nmodel: {kind: new}\nwarm_start: {}\nstop: {batches: 2}\n"
        f"runs_dir: {tmp_path}\n"
    )
    return path


@pytest.mark.parametrize("command", [*COMMANDS, "model new"])
def test_every_command_has_help_with_an_example_of_itself(rollart: Run, command: str) -> None:
    code, out, _ = rollart(*command.split(), "--help")
    assert code == 0
    assert f"Example: rollart {command}" in out


@pytest.mark.parametrize("command", ["", "list", "run", "model new", "registry add-owner", "swe"])
def test_h_is_help(rollart: Run, command: str) -> None:
    code, out, _ = rollart(*command.split(), "-h")
    assert (code, out) == rollart(*command.split(), "--help")[:2]
    assert "-h, --help" in out


def test_our_command_names_are_taken() -> None:
    assert set(COMMANDS) <= RESERVED_COMMANDS


def test_an_unknown_command_is_a_usage_error_that_names_the_nearest(rollart: Run) -> None:
    code, out, err = rollart("lisst")
    assert (code, out) == (2, "")
    assert "Did you mean 'list'?" in err


def test_a_users_mistake_is_one_line_without_a_traceback(rollart: Run) -> None:
    code, out, err = rollart("info", "webshp")
    assert (code, out) == (1, "")
    assert err == (
        "Error: no plugin 'webshp' is installed. Did you mean 'webshop'? Try `rollart list`.\n"
    )


def test_list_shows_both_what_works_and_what_is_broken_and_why(rollart: Run) -> None:
    @hookimpl
    def rollart_environments() -> list[EnvSpec]:
        return [EnvSpec(id="acme/Maze-v1", entry_point="a:B", contract_version=99)]

    with plugins.using({"acme": SimpleNamespace(rollart_environments=rollart_environments)}):
        _, text, _ = rollart("list")
        code, printed, _ = rollart("list", "--json")
    assert code == 0
    assert "webshop/WebShop-v1" in text
    assert "upgrade rollart" in text
    listed = json.loads(printed)
    assert {"id", "alias", "version"} <= set(listed["environments"][0])
    assert listed["broken"][0]["plugin"] == "acme"


@pytest.mark.parametrize("kind", ["algorithms", "algorithm", "hardware-mappers"])
def test_list_of_one_kind(rollart: Run, kind: str) -> None:
    code, out, _ = rollart("list", kind, "--json")
    assert code == 0
    assert set(json.loads(out)) == {kind.replace("-", "_").rstrip("s") + "s", "broken"}


def test_list_of_no_kind(rollart: Run) -> None:
    code, _, err = rollart("list", "algorythms")
    assert code == 1
    assert "Did you mean 'algorithms'?" in err


@pytest.mark.parametrize("env", ["toy/FrozenLake-v1", "rollart_testing.envs:FakeEnv"])
def test_info_shows_a_config_that_trains_on_an_environment(
    env: str, rollart: Run, tmp_path: Path
) -> None:
    _, out, _ = rollart("info", env)  # the second one has no split `warm`
    config = tmp_path / "run.yaml"
    config.write_text(textwrap.dedent(out.partition("`rollart run run.yaml`:\n")[2]))
    code, out, err = rollart("run", str(config), "--dry-run")
    assert (code, err) == (0, "")
    assert env in out
    assert "run.yaml" not in rollart("info", "grpo")[1]


def test_info_shows_the_options_with_their_meaning(rollart: Run) -> None:
    code, out, _ = rollart("info", "grpo", "--json")
    (found,) = json.loads(out)["found"]
    assert code == 0
    assert found["id"] == "rollart/GRPO-v1"
    options = {o["name"]: o for o in found["options"]}
    assert options["clip_high"]["default"] == "0.2"
    assert options["clip_high"]["help"]


def test_info_of_a_class_that_no_plugin_registers(
    rollart: Run, monkeypatch: pytest.MonkeyPatch, repo_root: Path
) -> None:
    monkeypatch.syspath_prepend(repo_root / "examples/custom_env")
    for path, kind in (
        ("guess_number:GuessNumber", "environment"),
        ("rollart_rewards.exact_match:ExactMatch", "reward"),
    ):
        code, out, _ = rollart("info", path, "--json")
        (found,) = json.loads(out)["found"]
        assert (code, found["is"], found["entry_point"]) == (0, kind, path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("info", "nope"), "no plugin 'nope' is installed. Try"),
        (("info", "no_such_module:X"), "cannot import 'no_such_module'"),
        (("info", "rollart_rewards.exact_match:Exact"), "Did you mean 'ExactMatch'?"),
        (("run", "suite.yaml"), "environments: run it with `rollart eval suite.yaml`"),
        (("run", "."), ".: is a folder; give a file"),
        (("run", "done"), "done is a run directory: use `rollart run --resume done`"),
        (("run", "bytes"), "bytes: is not a text file"),
        (("run", "missing.yaml"), "missing.yaml: there is no such file\n"),
        (("run", "x.yaml", "name=../../x"), "command line: name: '../../x' cannot be part of"),
        (("model", "new", "m", "--split", "foo"), "has no split 'foo'. It has train, warm, test."),
        (
            ("model", "new", "m", "--env", FROZEN_LAKE, "--split", "foo"),
            "--split foo: split 'foo' is not one of train",
        ),
        (("model", "new", "bytes/x", "--env", "frozenlake"), "bytes/x: cannot be created: Not"),
        (("bench", "engine", "--case", "nope"), "bench engine has no 'case'. It takes: pairs, "),
        (("bench", "start", "round=2"), "has no 'round'. Did you mean 'rounds'? It takes: "),
        (("swe", "mine", ".", "--sandbox", "nope"), "no sandbox 'nope' is installed"),
        (("swe", "mine", ".", "--set", "foo=1"), "bubblewrap: foo: unknown key"),
        (("swe", "validate", "nope"), "nope: there is no such file"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    rollart: Run,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(config.parent)
    Path("suite.yaml").write_text("suite: s\nenvs: [{id: frozenlake}]\n")
    Path("bytes").write_bytes(b"\xff\x00\xfe")
    Path("done").mkdir()
    Path("done/journal.db").touch()
    before = sorted(Path.cwd().iterdir())
    code, out, err = rollart(*arguments)
    assert (code, out) == (1, "")
    assert says in err
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.parametrize("port", ["-1", "65536", "99999999"])
def test_serve_reward_takes_no_port_that_there_cannot_be(rollart: Run, port: str) -> None:
    code, _, err = rollart("serve-reward", "exact-match", "--port", port)
    assert code == 2
    assert "Invalid value for '--port'" in err


def test_a_plugins_command_is_called_by_its_name(
    rollart: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greet(name: str) -> None:
        """Greet."""
        print(f"Hello {name}")

    monkeypatch.setitem(sys.modules, "acme_cli", SimpleNamespace(greet=greet))

    @hookimpl
    def rollart_commands() -> list[CommandSpec]:
        return [CommandSpec(name="greet", entry_point="acme_cli:greet")]

    with plugins.using({"acme": SimpleNamespace(rollart_commands=rollart_commands)}):
        assert rollart("greet", "Ada") == (0, "Hello Ada\n", "")
        assert "NAME" in rollart("greet", "--help")[1].upper()


def test_a_command_of_ours_without_its_plugin_is_one_line(rollart: Run) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_current", plugins.load(found=[]))
        code, out, err = rollart("plan", "x.yaml")
    assert (code, out) == (1, "")
    assert err == "Error: no working plugin provides the command 'plan', see `rollart list`\n"


def test_run_refuses_a_config_in_one_line_a_problem(rollart: Run, config: Path) -> None:
    code, out, err = rollart("run", str(config), "trainer.lr=fast", "rollout.group_sise=4")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 2
    assert "Did you mean 'group_size'?" in err
    code, _, err = rollart("run", str(config), "env.siz=4", "algorithm.clip_hi=1")
    assert code == 1
    assert len(err.splitlines()) == 2
    assert "Error: command line: algorithm.clip_hi: unknown key. Did you mean 'clip_high'?" in err


def test_run_without_a_config_is_a_usage_error(rollart: Run) -> None:
    assert rollart("run")[0] == 2


def report(ok: bool = True) -> SimpleNamespace:
    half = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 100}
    as_dict = {
        "run_dir": "runs/x-1",
        "success_before": half,
        "success_after": half | {"mean": 0.875},
        "greedy_after": {"success": half},
        "train_steps": 7,
        "skipped_updates": 2,
        "wall_s": float("nan"),
        "tokens_per_s": 12345.6,
        "step_s": {"wait": 3.0, "forward": 1.0, "publish": 0.0},
        "staleness": {"0": 10, "1": 30},
        "failures": {"timeout": 3},
    }
    return SimpleNamespace(ok=ok, stop_reason="that was enough", as_dict=lambda: as_dict)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replace the launch; return what it was called with."""
    calls: list[object] = []

    def launch(run: object, *, resume: Path | None, observer: RunObserver) -> object:
        calls.append((run, resume))
        observer.phase("train", "2 batches")
        observer.progress(0.5, {"loss": 0.25})
        if getattr(run, "config").name == "bad":  # noqa: B009 - the config is not typed here
            raise TooManyFailures("60% of the last 64 attempts failed")
        return report(ok=getattr(run, "config").name != "stopped")  # noqa: B009

    name = "rollart_core.runtime.launch"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(launch=launch))
    return calls


def test_run_prints_progress_and_a_table(
    rollart: Run, config: Path, launched: list[object]
) -> None:
    code, out, err = rollart("run", str(config))
    assert (code, err) == (0, "")
    assert "loss 0.25" in out
    assert "87.5% [40.0%, 60.0%] of 100" in out
    assert "12,346" in out
    assert "4.00 s: wait 75%, forward 25%, publish 0%" in out
    assert "no reward differed within a group" not in out
    assert "7, 2 skipped" in out
    assert "timeout 3" in out
    assert "runs/x-1" in out


def test_run_with_json_prints_one_object_and_progress_on_stderr(
    rollart: Run, config: Path, launched: list[object]
) -> None:
    code, out, err = rollart("run", str(config), "--json")
    assert code == 0
    assert json.loads(out)["success_after"]["mean"] == 0.875
    assert json.loads(out)["wall_s"] is None
    assert "loss 0.25" in err


@pytest.mark.parametrize(
    ("name", "said"), [("bad", "60% of the last 64"), ("stopped", "that was enough")]
)
def test_a_run_that_stopped_itself_is_exit_code_1_with_the_reason(
    rollart: Run, config: Path, launched: list[object], name: str, said: str
) -> None:
    code, _, err = rollart("run", str(config), f"name={name}")
    assert code == 1
    assert err.startswith("Error: ")
    assert said in err


def test_dry_run_checks_the_classes_too_and_starts_nothing(
    rollart: Run, config: Path, launched: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Part:
        min_group_size = 4

    monkeypatch.setitem(sys.modules, "parts", SimpleNamespace(Part=Part))
    kinds = ("algorithm", "engine", "weights", "mapper")
    dry = (
        "run",
        str(config),
        "--dry-run",
        "--json",
        "trackers=[]",
        *(f"{k}=parts:Part" for k in kinds),
    )
    code, out, _ = rollart(*dry, "rollout.min_group_size=4")
    assert code == 0
    resolved = json.loads(out)["config"]
    assert resolved["env"]["id"] == "toy/FrozenLake-v1"
    assert resolved["resolved_with"]["rollart"]
    code, _, err = rollart(*dry, "weights=parts:Prat")
    assert code == 1
    assert "rollout.min_group_size: 2 is too few for parts:Part, which needs 4" in err
    assert "Did you mean 'Part'?" in err
    assert launched == []


def test_resume_takes_the_runs_own_config(
    rollart: Run, config: Path, launched: list[object]
) -> None:
    folder = config.parent
    text = config.read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(f"{text}\ntask_seeds: by_split\n", encoding="utf-8")
    code, _, err = rollart("run", "--resume", str(folder))
    assert (code, "it has no journal.db" in err) == (1, True)
    recorded = resolve_run(load_config(folder / "config.yaml")).as_dict()
    Journal(folder, recorded | {"resolved_with": {"rollart": "0.0.1"}}).close()
    code, _, err = rollart("run", "--resume", str(folder))
    assert (code, "contains no checkpoint" in err) == (1, True)
    (folder / "checkpoints" / "v000004").mkdir(parents=True)
    source = TaskSourceState(0)
    RunState(4, 4, source, 0, 0, {}, 1.0).write(folder / "checkpoints" / "v000004", {})
    assert rollart("run", "--resume", str(folder), "stop.batches=9")[0] == 0
    ((run, resume),) = launched
    assert resume == folder.resolve()
    assert run.config.stop.batches == 9
    code, _, err = rollart("run", "--resume", str(folder), "rollout.group_size=3")
    assert code == 1
    assert "rollout.group_size (8 in the run, 3 now)" in err
    code, _, err = rollart("run", "other.yaml", "--resume", str(folder))
    assert code == 1
    assert "other.yaml" in err
    code, _, err = rollart("run", "--resume", str(folder / "none"))
    assert code == 1
    assert "not a run directory" in err


def test_resume_auto_continues_the_newest_run_of_the_name_or_starts_one(
    rollart: Run, config: Path, launched: list[object]
) -> None:
    runs = config.parent / "runs"
    command = ("run", str(config), "--resume", "auto", "name=job-7", f"runs_dir={runs}")
    code, out, _ = rollart(*command)
    assert (code, "Starts a new run" in out) == (0, True)
    recorded = resolve_run(load_config(config, command[4:]))
    names = ["20260101-120000", "20260101-120000-2", "20260101-120000-10"]
    for name in [f"job-7-{n}" for n in names] + ["job-7-b-20270101-120000"]:
        checkpoint = runs / name / "checkpoints" / "v000004"
        checkpoint.mkdir(parents=True)
        (runs / name / "config.yaml").write_text(recorded.to_yaml())
        Journal(runs / name, recorded.as_dict()).close()
        RunState(4, 4, TaskSourceState(0), 0, 0, {}, 1.0).write(checkpoint, {})
    (runs / "job-7-20270101-120000").mkdir()  # it was preempted before its first checkpoint
    assert rollart(*command)[0] == 0
    code, _, err = rollart("run", "--resume", "auto")
    assert (code, "auto" in err) == (1, True)
    assert [resume for _, resume in launched] == [None, runs / "job-7-20260101-120000-10"]


def test_a_run_of_an_earlier_release_goes_on_with_its_seeds(
    rollart: Run, config: Path, launched: list[object]
) -> None:
    folder = config.parent
    config.rename(folder / "config.yaml")  # says nothing of task_seeds, nor does the journal
    recorded = resolve_run(load_config(folder / "config.yaml")).as_dict()
    assert recorded.pop("task_seeds") == "by_split"
    Journal(folder, recorded).close()
    checkpoint = folder / "checkpoints" / "v000004"
    checkpoint.mkdir(parents=True)
    RunState(4, 4, TaskSourceState(0), 0, 0, {}, 1.0).write(checkpoint, {})
    assert rollart("run", "--resume", str(folder))[0] == 0
    ((run, _),) = launched
    assert run.config.task_seeds == "by_index"
    code, _, err = rollart("run", "--resume", str(folder), "task_seeds=by_split")
    assert (code, "task_seeds ('by_index' in the run, 'by_split' now)" in err) == (1, True)


def test_play_to_the_end(rollart: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        def reset(
            self, *, seed: int, options: Mapping[str, object]
        ) -> tuple[str, dict[str, object]]:
            return f"say {options['task']}", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
            return "well said", 1.0, action == "3", False, {"success": True}

        def oracle(self) -> str:
            return "try 3"

        def close(self) -> None:
            print("closed")

    monkeypatch.setitem(sys.modules, "counting", SimpleNamespace(Counting=Counting))
    monkeypatch.setattr(sys, "stdin", io.StringIO("?\n2\n3\n"))
    code, out, _ = rollart("play", "counting:Counting", "--task", "3")
    assert code == 0
    assert "The expert's action: try 3" in out
    assert "Return: 2" in out
    assert "closed" in out
    monkeypatch.setattr(sys, "stdin", io.StringIO("2\n"))
    code, out, _ = rollart("play", "counting:Counting")
    assert code == 0
    assert "closed" in out


@pytest.mark.parametrize(
    ("env", "option", "given", "says"),
    [
        ("frozenlake", "--split", "tset", "has no split 'tset'. Did you mean 'test'?"),
        ("frozenlake", "--split", "nope", "has no split 'nope'. It has train, warm, test."),
        ("frozenlake", "--task", "999999999", "task 999999999 is not in split 'train'"),
        ("function-repair-agent", "--split", "nope", "has no split 'nope'. It has train, "),
        ("function-repair-agent", "--task", "999999999", "task: 999999999 is not an index"),
    ],
)
def test_play_of_a_split_or_task_that_is_not_there_is_one_line(
    rollart: Run, env: str, option: str, given: str, says: str
) -> None:
    code, out, err = rollart("play", env, option, given)
    assert (code, out) == (1, "")
    assert says in err
    assert err.count("\n") == 1


def test_play_leaves_the_splits_of_an_unregistered_class_to_the_class(
    rollart: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    env = "rollart_envs.toy.frozen_lake:FrozenLakeEnv"
    code, out, _ = rollart("play", env, "--split", "warm")
    assert (code, "Left before the end." in out) == (0, True)
    code, _, err = rollart("play", env, "--split", "nope")
    assert (code, err) == (1, "Error: split 'nope' is not one of train, warm, test\n")


def test_plain_progress_prints_every_few_seconds_and_the_last_line_of_a_phase() -> None:
    now = [0.0]
    console = Console(file=io.StringIO(), width=100)
    shown = progress.PlainDisplay(console, clock=lambda: now[0])
    shown.phase("train")
    for second in range(1, 8):
        now[0] = second
        shown.progress(second / 10, {"step": second})
    shown.phase("evaluate")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("] ")[1].strip() for line in lines] == [
        "train",
        "50%  step 5",
        "70%  step 7",
        "evaluate",
    ]


def test_live_progress_shows_a_bar_for_each_phase() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with progress.display(console) as shown:
        shown.phase("warm start", "supervised")
        shown.progress(0.5, {"loss": 1.5})
        shown.message("half way [done]")
        shown.phase("evaluate before", "100 tasks, sampled and then some that have no room here")
        shown.phase("train")
        shown.progress(None, {"reward": float("nan")})
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "half way [done]" in text
    assert "warm start" in text
    assert "evaluate before" in text
    assert "reward -" in text


def test_benchmarks_are_the_modules_that_can_run(
    rollart: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = rollart("bench")
    assert code == 0
    assert "engine" in out.split()
    assert "rows" not in out.split()
    assert rollart("bench", "engin")[2].startswith("Error: there is no benchmark 'engin'. Did you")
    ratio = {"min": 1.0, "median": 2.125, "max": 3.0}
    rows = [{"case": "a", "ours": 2.0, "peer": 1.0, "peer_name": "them", "unit": "tokens/s"}]
    rows[0] |= {"ratio": ratio, "mark": 1.5, "meets_mark": True}
    asked: list[object] = []

    def run(options: dict[str, object]) -> dict[str, object]:
        asked.append(options)
        return {"name": "engine", "machine": {"cores": 2}, "rows": rows}

    fake = SimpleNamespace(run=run, TAKES=("pairs",))
    monkeypatch.setitem(sys.modules, "rollart_bench.engine", fake)
    code, out, _ = rollart("bench", "engine", "pairs=2")
    assert (code, asked) == (0, [{"pairs": 2}])
    assert "2.12 (1 to 3)" in out
    assert "1 them" in out
    assert json.loads(rollart("bench", "engine", "--json")[1])["rows"] == rows


def test_a_benchmark_that_lacks_something_is_skipped_with_a_code_of_its_own(
    rollart: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(options: dict[str, object]) -> dict[str, object]:
        raise BenchSkipped("no Docker engine answers")

    fake = SimpleNamespace(run=run, TAKES=("short",))
    monkeypatch.setitem(sys.modules, "rollart_bench.engine", fake)
    code, out, err = rollart("bench", "engine")
    assert (code, out) == (77, "")
    assert err == "bench engine is skipped: no Docker engine answers\n"
    code, out, _ = rollart("bench", "engine", "--json")
    said = {"name": "engine", "skipped": "no Docker engine answers", "rows": []}
    assert (code, json.loads(out)) == (77, said)


def test_cases_that_a_benchmark_skips_are_told(
    rollart: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"name": "engine", "machine": {}, "rows": [], "skipped_cases": {"large": "no room"}}
    fake = SimpleNamespace(run=lambda options: result, TAKES=())
    monkeypatch.setitem(sys.modules, "rollart_bench.engine", fake)
    assert "skipped: large: no room\n" in rollart("bench", "engine")[1]


LOUD_BENCH = """
import atexit, os, subprocess, sys, types
from rollart_core.cli import main
from rollart_core.errors import UserError

def run(options):
    print("a library")
    subprocess.run([sys.executable, "-c", "print('a child')"], check=True)
    if options:
        raise UserError("broken")
    return {"name": "engine", "machine": {}, "rows": []}

fake = types.SimpleNamespace(run=run, TAKES=("short",))
sys.modules["rollart_bench.engine"] = fake
atexit.register(os.system, "echo afterwards")
main()
"""


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        ((), {"command": "rollart bench engine", "name": "engine", "machine": {}, "rows": []}),
        (("short=1",), None),
    ],
)
def test_nothing_but_its_object_is_on_the_stdout_of_a_benchmark(
    arguments: tuple[str, ...], out: object
) -> None:
    command = [sys.executable, "-c", LOUD_BENCH, "bench", "engine", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
    printed, _, afterwards = done.stdout.rpartition("afterwards\n")  # stdout is as it was, too
    found = json.loads(printed) if printed else None
    if found is not None:
        datetime.date.fromisoformat(found.pop("date"))
    assert found == out
    assert afterwards == ""
    assert sorted(done.stderr.splitlines())[-2:] == ["a child", "a library"]


def test_the_help_of_bench_says_what_short_and_the_exit_codes_are(rollart: Run) -> None:
    text = " ".join(rollart("bench", "--help")[1].split())
    assert "rollart bench scale short=true --json" in text
    assert "The exit code is 77 if" in text


@pytest.mark.parametrize("name", benchmarks())
def test_a_benchmark_names_every_option_that_it_reads(name: str, repo_root: Path) -> None:
    path = repo_root / "plugins/rollart_bench" / f"{_module(name)}.py"
    text = path.read_text("utf-8")
    (said,) = re.findall(r"^TAKES: Final = (\(.*?\))\n", text, flags=re.MULTILINE | re.DOTALL)
    takes = ast.literal_eval(said)
    assert "short" in takes
    reads = r"""asked\.(?:flag|integer|number|text|path|choice|names)\(\s*"(\w+)\""""
    assert set(re.findall(reads, text)) <= set(takes)
    assert "options.get(" not in text  # Options reads them, and refuses wrong values
    run = re.split(r"\n\n\n", text[text.index("def run(") :])[0]
    documented = run.split('"""')[1]
    assert [option for option in takes if f"``{option}``" not in documented] == []


@pytest.mark.parametrize("name", benchmarks())
@pytest.mark.parametrize("value", ["maybe", "2", "", "[true]", "{a: 1}"])
def test_a_benchmark_refuses_a_short_that_is_neither_true_nor_false(
    rollart: Run, name: str, value: str
) -> None:
    code, out, err = rollart("bench", name, f"short={value}", "--json")
    assert (code, out) == (1, "")
    assert err.startswith(f"Error: bench {name}: short=")
    assert err.endswith(": must be true or false, such as short=true\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option)
        for name in benchmarks()
        for option in import_module(f"rollart_bench.{_module(name)}").TAKES
    ],
)
def test_a_benchmark_refuses_a_value_of_a_wrong_type_before_it_starts(
    rollart: Run, name: str, option: str
) -> None:
    code, out, err = rollart("bench", name, f"{option}={{a: 1}}", "--json")
    assert (code, out) == (1, "")
    assert err.startswith(f"Error: bench {name}: {option}={{'a': 1}}: must be ")
    assert err.count("\n") == 1


WRONG = {
    "flag": ("maybe", "2"),
    "integer": ("abc", "-1", "1.5", "1.0e+30", "true", "[1]", "''"),
    "number": ("abc", "-1", "0", ".nan", ".inf", "1.0e+30", "true", "[1]"),
    "text": ("3", "[a]", "''"),
    "path": ("3", "[a]", "''"),
    "choice": ("nope", "3", "[]", "[{a: 1}]"),
    "names": ("3", "[]", "[{a: 1}]"),
}
"""Kind of an option -> values that are none."""


def _options_read(name: str) -> list[tuple[str, str]]:
    """Return kind and name of each option that a benchmark's module reads."""
    text = Path(str(import_module(f"rollart_bench.{_module(name)}").__file__)).read_text()
    pattern = r"""asked\.(flag|integer|number|text|path|choice|names)\(\s*"(\w+)\""""
    return sorted(set(re.findall(pattern, text)))


def _refused(rollart: Run, name: str, option: str, value: str, *more: str) -> None:
    code, out, err = rollart("bench", name, f"{option}={value}", *more, "--json")
    assert (code, out) == (1, ""), (option, value)
    assert err.startswith(f"Error: bench {name}: {option}"), (option, value, err)
    assert err.count("\n") == 1, err


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("short=true",)], ids=["", "short"])
@pytest.mark.parametrize("name", benchmarks())
def test_a_benchmark_refuses_a_wrong_value_before_it_starts(
    rollart: Run, name: str, more: tuple[str, ...]
) -> None:
    for kind, option in _options_read(name):
        for value in WRONG[kind]:
            _refused(rollart, name, option, value, *more)


@pytest.mark.parametrize("broken", [(), ("ticket g1.0 was trained twice",)])
def test_audit_prints_the_account_and_fails_when_a_promise_was_broken(
    rollart: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: tuple[str, ...]
) -> None:
    Journal(tmp_path, {"mode": "sync"}).close()
    outcomes = {"trained": 5, "rolled back": 0, "unrecorded": 2}
    found = replace(audit(tmp_path), num_tickets=8, lost={"timeout": 1}, violations=broken)
    found = replace(found, attempts=7, outcomes=outcomes)
    monkeypatch.setattr("rollart_core.store.audit.audit", lambda run_dir: found)
    code, out, _ = rollart("audit", str(tmp_path))
    assert code == (1 if broken else 0)
    assert "timeout: 1" in out
    assert "= 5 trained + 2 unrecorded" in out
    assert "at most 0 " in out  # and nothing after it, where nothing was trained
    assert ("trained twice" in out) == bool(broken)
    code, out, _ = rollart("audit", str(tmp_path), "--json")
    assert code == (1 if broken else 0)
    assert json.loads(out)["num_tickets"] == 8


def test_audit_of_no_run_directory(rollart: Run, tmp_path: Path) -> None:
    code, _, err = rollart("audit", str(tmp_path))
    assert code == 1
    assert "not a run directory" in err


def test_model_new_refuses_a_folder_in_use_and_a_wrong_shape(rollart: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is not empty" in rollart("model", "new", str(tmp_path), "--env", "frozenlake")[2]
    new = ("model", "new", str(tmp_path / "new"), "--env", "frozenlake")
    assert "Did you mean 'width'?" in rollart(*new, "widht=3")[2]
    code, _, err = rollart(*new, "env.siz=3")
    assert code == 1
    assert "siz: unknown key" in err
    assert not (tmp_path / "new").exists()


def test_a_plugin_of_rollart_passes_its_check_with_the_reserved_commands(rollart: Run) -> None:
    code, out, _ = rollart("check", "exact-match", "--json")
    assert (code, json.loads(out)["passed"]) == (0, True)


def test_the_dry_run_loads_the_tokenizer_and_its_template(
    rollart: Run, repo_root: Path, tmp_path: Path
) -> None:
    hello = repo_root / "examples/hello.yaml"
    model = tmp_path / "model"
    assert rollart("model", "new", str(model), "--env", "frozenlake", "num_layers=1")[0] == 0
    asked = ("run", str(hello), f"model={model}", "warm_start=null", "--dry-run")
    assert rollart(*asked)[0] == 0
    (model / "chat_template.jinja").unlink()
    code, _, err = rollart(*asked)
    assert (code, "has no chat template" in err) == (1, True)
    (model / "tokenizer.json").write_text("{")
    code, _, err = rollart(*asked)
    assert (code, "model.path: " in err, err.count("\n")) == (1, True, 1)
