"""`rollart eval`: suites, baselines, several attempts, and evaluations that were killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.openai_server import OpenAIServer, obedient
from support.pace import scaled, wait_until

from rollart_core.cli import main
from rollart_core.scheduling.observer import NobodyWatches
from rollart_evals.cells import pass_at_k
from rollart_evals.prepare import EvalRequest, begin
from rollart_evals.run import run_evaluation
from rollart_testing import AsyncFakeEnv

FAKE = "rollart_testing:AsyncFakeEnv"
SHY = "support.shy_env:ShyEnv"
Eval = Callable[..., tuple[int, str, str]]
SUITE = f"""\
suite: two
tasks: 3
envs:
  - {{id: "{FAKE}", name: long, options: {{turns: 2}}, attempts: 4}}
  - {{id: "{FAKE}", name: short, options: {{turns: 1, tasks: 2}}}}
"""


@pytest.fixture
def rollart_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Eval:
    """Run ``rollart eval`` in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def inner(*arguments: str) -> tuple[int, str, str]:
        own = ["runtime.env_processes=0"] if {"--env", "suite.yaml"} & set(arguments) else []
        monkeypatch.setattr(sys, "argv", ["rollart", "eval", *arguments, *own])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return inner


def cells_of(report: Any) -> dict[tuple[str, str], Any]:
    return {(cell["env"], cell["column"]): cell for cell in report["cells"]}


def lines_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


def test_baselines_play_a_suite_without_a_model(rollart_eval: Eval, tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(SUITE)
    baselines = [f"--baseline={name}" for name in ("noop", "oracle", "random")]
    code, out, err = rollart_eval("suite.yaml", *baselines, "--json", "attempts=2")
    assert code == 0, err
    report = json.loads(out)
    cells = cells_of(report)
    assert (report["model"], report["columns"]) == (None, ["oracle", "noop", "random"])
    for env in ("long", "short"):
        assert cells[env, "oracle"]["success"]["mean"] == 1
        assert cells[env, "noop"]["success"]["mean"] == 0
        assert list(cells[env, "oracle"]["pass_at"]) == ["1"]  # it does not draw: once a task
    assert [cells["long", c]["episodes"] for c in report["columns"]] == [3, 3, 12]
    assert [cells["short", c]["episodes"] for c in report["columns"]] == [2, 2, 4]  # all there are
    assert [env["tasks"] for env in report["card"]["envs"]] == [3, 2]
    assert list(cells["long", "random"]["pass_at"]) == ["1", "2", "4"]
    folder = Path(report["run_dir"])
    assert folder.parent == tmp_path / "evals"
    assert json.loads((folder / "report.json").read_text()) == report
    config = (folder / "config.yaml").read_text()
    assert "\nmodel:" not in config
    assert "\nengine:" not in config
    card = (folder / "card.md").read_text()
    assert "| `long` | 3 | 100.0% [43.9, 100.0] |" in card
    assert report["card"]["config_hash"] in card


def test_intervals_are_clustered_where_the_environment_has_clusters(
    rollart_eval: Eval, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--env", FAKE, "--baseline", "oracle", "evaluation.tasks=12", "env.tasks=12")
    alone = json.loads(rollart_eval(*asked, "--json", "--out", "a")[1])

    def task_clusters(self: object, split: str) -> list[str]:
        return [f"{split} {index // 3}" for index in range(12)]

    monkeypatch.setattr(AsyncFakeEnv, "task_clusters", task_clusters, raising=False)
    code, out, err = rollart_eval(*asked, "--json", "--out", "b")
    assert code == 0, err
    report = json.loads(out)
    for found in (report["success"], report["cells"][0]["success"], report["cells"][0]["score"]):
        assert (found["n"], found["num_clusters"]) == (12, 4)
    assert alone["success"]["num_clusters"] == 12
    assert report["success"]["low"] < alone["success"]["low"]
    assert "| 12 in 4 clusters |" in Path("b/card.md").read_text()
    assert "in 4 clusters" in rollart_eval("--resume", "b")[1]


def test_random_players_do_the_same_again_and_other_than_with_another_seed(
    rollart_eval: Eval,
) -> None:
    def said(seed: int, out: str) -> list[tuple[str, str]]:
        asked = ("--env", FAKE, "--baseline", "random", "evaluation.tasks=4", f"seed={seed}")
        assert rollart_eval(*asked, "--out", out)[0] == 0
        return sorted((e["ticket"], t["action"]) for e in lines_of(Path(out)) for t in e["turns"])

    assert said(1, "a") == said(1, "b")
    assert said(1, "c") != said(2, "d")


def test_what_cannot_be_measured_is_a_dash_with_the_reason(rollart_eval: Eval) -> None:
    baselines = [f"--baseline={name}" for name in ("noop", "oracle", "random")]
    asked = ("--env", SHY, "evaluation.tasks=4", *baselines)
    code, out, err = rollart_eval(*asked, "--markdown", "--out", "x")
    assert code == 1
    assert f"Error: noop in {SHY}: every episode failed: env.step: ValueError" in err
    assert f"| `{SHY}` | 4 | - | - | score 0." in out
    assert f"- `{SHY}`, oracle: it has no oracle()" in out
    assert f"- `{SHY}`, random: the environment does not report success" in out
    cells = cells_of(json.loads(Path("x/report.json").read_text()))
    noop = cells[SHY, "noop"]
    assert (noop["success"], noop["episodes"], noop["failed"]) == (None, 0, 4)
    assert noop["failures"] == {"environment": 12}  # each was made again twice
    assert json.loads(Path("x/report.json").read_text())["success"]["n"] == 0  # none was said


class _Watches(NobodyWatches):
    fraction: float | None = None

    def progress(self, fraction: float | None, line: object) -> None:
        self.fraction = fraction


def test_progress_counts_episodes_that_failed_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("evaluation.tasks=4", "runtime.env_processes=0")
    begun = begin(EvalRequest(env=SHY, baselines=["noop"], settings=settings))
    observer = _Watches()
    report = run_evaluation(begun.run, begun.plan, begun.folder, observer=observer)
    assert (len(report.episodes), observer.fraction) == (12, 1.0)


@pytest.mark.parametrize("of_model", ["{path: base}", "{kind: new}"])
def test_a_run_that_has_not_ended_has_no_model_to_score(
    rollart_eval: Eval, tmp_path: Path, of_model: str
) -> None:
    (tmp_path / "run").mkdir()
    config = f"name: r\nmodel: {of_model}\nenv: {{id: '{FAKE}'}}\nevaluation: {{tasks: 2}}\n"
    (tmp_path / "run" / "config.yaml").write_text(config)
    code, _, err = rollart_eval("run")
    assert (code, "run: has no model-trained yet" in err) == (1, True)
    code, out, err = rollart_eval("run", "--baseline", "noop", "--json", "runtime.env_processes=0")
    assert (code, json.loads(out)["columns"]) == (0, ["noop"]), err


def test_several_attempts_give_pass_at_k(rollart_eval: Eval, tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(SUITE)
    asked: Counter[str] = Counter()

    def sometimes(text: str) -> str:
        # Of the four attempts at a task and the greedy one, the first two to ask are wrong.
        asked[text] += 1
        return "wrong" if text.startswith("turn 1 of 2") and asked[text] <= 2 else obedient(text)

    with OpenAIServer(sometimes) as server:
        settings = ("--model", server.url, "--out", "e", "--baseline", "noop", "greedy=true")
        code, out, err = rollart_eval("suite.yaml", *settings, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["columns"] == ["noop", "model", "greedy"]
    by_task: dict[int, list[bool]] = {}
    for line in lines_of(Path("e")):
        if (line["env"], line["column"]) == ("long", "model"):
            by_task.setdefault(line["task"], []).append(line["success"])
    cell = cells_of(report)["long", "model"]
    assert {len(tries) for tries in by_task.values()} == {4}
    assert any(any(tries) and not all(tries) for tries in by_task.values())
    for k in (1, 2, 4):
        mean = sum(pass_at_k(4, sum(tries), k) for tries in by_task.values()) / 3
        assert cell["pass_at"][str(k)]["mean"] == pytest.approx(mean)
    assert cell["success"]["mean"] == pytest.approx(cell["pass_at"]["1"]["mean"])
    assert (report["card"]["model"], report["card"]["temperature"]) == (server.url, 1.0)


def test_one_environment_that_breaks_does_not_take_the_others_along(
    rollart_eval: Eval, tmp_path: Path
) -> None:
    broken = f'  - {{id: "{FAKE}", name: broken, options: {{trouble: raise}}}}\n'
    (tmp_path / "suite.yaml").write_text(SUITE + broken)
    with OpenAIServer() as server:
        settings = ("--model", server.url, "--out", "e", "failures.window=4")
        code, out, err = rollart_eval("suite.yaml", *settings, "--markdown")
    assert code == 1
    assert "Error: model in broken: 100% of the last 4 attempts failed" in err
    assert "| `broken` | - | - |" in out
    assert "| `long` | 3 | 100.0%" in out


@pytest.mark.timeout(300)
def test_a_killed_evaluation_goes_on_and_asks_nothing_again_that_had_ended(
    rollart_eval: Eval, tmp_path: Path
) -> None:
    stuck, answered = threading.Event(), iter(range(1, 10_000))
    folder = tmp_path / "e"
    with OpenAIServer() as server:

        def say(text: str) -> str:
            if next(answered) == 12:
                server.delay_s = 600.0  # all that is asked from now on hangs until the kill
                stuck.set()
            return obedient(text)

        server.say = say
        program = "from rollart_core.cli import main; main()"
        command = [sys.executable, "-c", program, "eval", "--env", FAKE]
        settings = ["env.turns=2", "evaluation.tasks=12", "evaluation.greedy=false"]
        settings += ["runtime.env_processes=0", "rollout.max_concurrent=3"]
        command += ["--model", server.url, "--out", str(folder), *settings]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            try:
                assert stuck.wait(scaled(200))
                wait_until(
                    lambda: run.poll() is not None or len(_whole_lines(folder)) >= 4, "4 episodes"
                )
                assert run.poll() is None
            finally:
                os.kill(run.pid, signal.SIGKILL)
        before = {line["ticket"] for line in lines_of(folder)}
        assert 4 <= len(before) < 12
        assert not (folder / "report.json").exists()
        with (folder / "episodes.jsonl").open("a") as file:
            file.write('{"ticket": "eval-mod')  # as a kill in mid-write leaves it
        server.delay_s, first = 0.0, len(server.requests)
        code, out, err = rollart_eval("--resume", str(folder), "--json")
        assert code == 0, err
        again = server.requests[first:]
    report = json.loads(out)
    assert report["success"]["n"] == 12
    tickets = [line["ticket"] for line in lines_of(folder)]
    assert len(tickets) == len(set(tickets)) == 12
    assert len([path for path, _ in again if path.endswith("completions")]) == 2 * (
        12 - len(before)
    )
    assert rollart_eval("--resume", str(folder), "--json")[0] == 0  # nothing is left to ask
    assert len(lines_of(folder)) == 12


def _whole_lines(folder: Path) -> list[str]:
    path = folder / "episodes.jsonl"
    return [x for x in path.read_text().splitlines(keepends=True) if x[-1:] == "\n"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("suite.yaml",), "there is no player: set a model with --model, or a --baseline"),
        (("suite.yaml", "--baseline", "best"), "must be one of oracle, noop, random"),
        (
            ("suite.yaml", "--baseline", "noop", "rollout.temperature=0"),
            "no effect without a model",
        ),
        (("suite.yaml", "--baseline", "noop", "--env", FAKE), "a suite defines its environments"),
        (("--env", FAKE, "--baseline", "noop", "--out", "full"), "the folder is not empty"),
        (("--resume", "full"), "not the folder of an evaluation"),
        (("--with", "full"), "has no report.json"),
        (("--with", "x=full", "--markdown", "--json"), "use only one of them"),
    ],
)
def test_mistakes_are_one_line_and_start_nothing(
    rollart_eval: Eval, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "suite.yaml").write_text(SUITE)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("x")
    code, out, err = rollart_eval(*arguments)
    assert (code in (1, 2), out) == (True, "")
    assert says in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "suite.yaml"]


def test_columns_that_cannot_stand_together_are_told_before_anything_is_played(
    rollart_eval: Eval,
) -> None:
    asked = ("--env", FAKE, "--baseline", "noop", "evaluation.tasks=2")
    assert rollart_eval(*asked, "--out", "a")[0] == 0
    code, _, err = rollart_eval(*asked, "--out", "b", "--with", "a")
    assert (code, "has a column 'noop'" in err, Path("b").exists()) == (1, True, False)
    code, out, _ = rollart_eval("--with", "a", "--json")
    assert (code, json.loads(out)["columns"]) == (0, ["noop"])


def test_all_tasks_can_be_evaluated(tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    process = "{id: process, trusted: true}"  # the only sandbox that works everywhere
    entry = f"{{id: swe/Repair-v1, options: {{sandbox: {process}}}}}"
    suite.write_text(f"suite: whole\nsplit: all\nenvs:\n  - {entry}\n")
    started = begin(EvalRequest(str(suite), baselines=["oracle"], out=tmp_path / "suite"))
    assert started.run.envs[0].evaluation_split == "all"
    settings = ["evaluation.split=all", f"env.sandbox={process}"]
    alone = EvalRequest(None, settings, "repair", baselines=["oracle"], out=tmp_path / "one")
    assert begin(alone).run.envs[0].evaluation_split == "all"


def test_what_decides_about_figures_cannot_change_in_the_middle(rollart_eval: Eval) -> None:
    asked = ("--env", FAKE, "--baseline", "noop", "evaluation.tasks=2", "--out", "e")
    assert rollart_eval(*asked)[0] == 0
    code, _, err = rollart_eval("--resume", "e", "seed=3")
    assert (code, "seed=3 would change the results" in err) == (1, True)


def test_baselines_play_agents(rollart_eval: Eval, tmp_path: Path) -> None:
    """In the place of their program, but for what draws: that one it is answered by."""
    agent = '  - {id: "rollart_testing.agents:FakeAgent", name: agent, options: {turns: 2}}\n'
    (tmp_path / "suite.yaml").write_text(SUITE + agent)
    baselines = [f"--baseline={name}" for name in ("noop", "oracle", "random")]
    code, out, err = rollart_eval("suite.yaml", *baselines, "--json", "attempts=2", "tasks=8")
    assert code == 0, err
    report = json.loads(out)
    cells = cells_of(report)
    oracle, noop, drawn = (cells["agent", c] for c in ("oracle", "noop", "random"))
    assert (oracle["success"]["mean"], oracle["episodes"], oracle["mean_turns"]) == (1, 8, 0)
    assert (noop["success"]["mean"], noop["episodes"], noop["mean_turns"]) == (0, 8, 0)
    assert (drawn["episodes"], drawn["mean_turns"], drawn["failed"]) == (16, 2, 0)
    assert 0 <= drawn["score"]["mean"] < 1
    lines = lines_of(Path(report["run_dir"]))
    words = [turn["action"] for e in lines if e["column"] == "random" for turn in e["turns"]]
    assert len(set(words)) > 4, "they are drawn"
    again = rollart_eval("suite.yaml", *baselines, "--json", "attempts=2", "tasks=8")[1]
    assert cells_of(json.loads(again))["agent", "random"]["score"] == drawn["score"]


def test_an_agent_that_cannot_be_solved_has_no_oracle(
    rollart_eval: Eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mute_agent.py").write_text(
        "from rollart_testing.agents import FakeAgent\nclass Mute(FakeAgent):\n    solve = None\n"
    )
    suite = 'suite: one\ntasks: 2\nenvs:\n  - {id: "mute_agent:Mute", name: mute}\n'
    (tmp_path / "suite.yaml").write_text(suite)
    code, out, err = rollart_eval("suite.yaml", "--baseline=oracle", "--baseline=noop", "--json")
    assert code == 0, err
    cells = cells_of(json.loads(out))
    assert cells["mute", "oracle"]["success"] is None
    assert "solve()" in cells["mute", "oracle"]["why"]
    assert cells["mute", "noop"]["success"]["mean"] == 0
