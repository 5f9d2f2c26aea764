"""`rollart eval`: whole evaluations, against real servers and with a model in files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.openai_server import OpenAIServer, failing, obedient

from rollart_core.cli import main
from rollart_core.config.load import load_mapping
from rollart_core.config.model import NewModel
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import ConfigError
from rollart_core.models.new import new_model
from rollart_core.models.tokenizer import load_tokenizer
from rollart_testing.envs import FakeEnv

ENV = "rollart_testing:AsyncFakeEnv"
Eval = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def rollart_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Eval:
    """Run ``rollart eval`` in this process; return exit code, its JSON and stderr."""

    def inner(*arguments: str) -> tuple[int, Any, str]:
        own = [f"runs_dir={tmp_path}", "--json"]
        own += [] if "runtime=ray" in arguments else ["runtime.env_processes=0"]
        monkeypatch.setattr(sys, "argv", ["rollart", "eval", *arguments, *own])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), json.loads(out) if out else None, err

    return inner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    spec = NewModel(kind="new", num_layers=1, width=16, ffn_width=16, vocab_size=300)
    return str(new_model(tmp_path_factory.mktemp("model"), spec, FakeEnv().corpus(), seed=0))


def of(url: str) -> tuple[str, ...]:
    return ("--env", ENV, "--model", url, "env.turns=2", "evaluation.tasks=5")


def test_any_endpoint_is_scored_in_text(rollart_eval: Eval) -> None:
    with OpenAIServer() as server:
        code, report, _ = rollart_eval(*of(server.url))
    assert code == 0
    assert (report["ok"], report["model"]) == (True, server.url)
    assert report["success"] == {
        "mean": 1.0,
        "low": pytest.approx(0.566, abs=1e-3),
        "high": 1,
        "n": 5,
        "num_clusters": 5,
    }
    assert report["greedy"]["success"]["mean"] == 1
    assert (report["attempts"], report["failures"], report["mean_turns"]) == (10, {}, 2)
    assert report["tokens"] == {"prompt": 220, "new": 60}
    bodies = server.bodies("/v1/chat/completions")
    assert {body["temperature"] for body in bodies} == {0.0, 1.0}
    assert len({body["seed"] for body in bodies}) == 20
    folder = Path(report["run_dir"])
    episodes = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    assert [e["status"] for e in episodes] == ["finished"] * 10
    assert episodes[0]["turns"][0]["observation"].endswith(episodes[0]["turns"][0]["action"])
    assert json.loads((folder / "report.json").read_text()) == report
    assert "kind: remote" in (folder / "config.yaml").read_text()


def test_with_its_tokenizer_a_server_is_asked_in_tokens(rollart_eval: Eval, model: str) -> None:
    tokenizer = load_tokenizer(model)
    with OpenAIServer(tokenizer=tokenizer) as server:
        settings = ("--tokenizer", model, "rollout.max_context_tokens=512")
        code, report, _ = rollart_eval(*of(server.url), *settings, "evaluation.greedy=false")
    assert (code, report["success"]["mean"], report["mean_loss_tokens"] > 2) == (0, 1, True)
    card = report["card"]  # what was scored is the server's, and no file here
    assert (report["model"], card["tokenizer"], card["model_hash"]) == (server.url, model, None)
    assert not server.bodies("/v1/chat/completions")
    longest = max((b["prompt"] for b in server.bodies("/v1/completions")), key=len)
    assert tokenizer.decode(longest).count("say ") == 2  # the whole conversation, as it was sampled


def test_a_server_by_url_keeps_what_the_config_says_of_servers(
    rollart_eval: Eval, tmp_path: Path
) -> None:
    engine = "{id: openai, base_url: 'http://127.0.0.1:9/v1', omit: [seed]}"
    config = tmp_path / "c.yaml"
    config.write_text(f"name: c\nmodel: {{kind: remote}}\nenv: {{id: '{ENV}'}}\nengine: {engine}\n")
    with OpenAIServer() as server:
        settings = ("--model", server.url, "evaluation.tasks=1", "evaluation.greedy=false")
        code, _, err = rollart_eval(str(config), *settings)
    assert code == 0, err
    (body, *_) = server.bodies("/v1/chat/completions")
    assert "seed" not in body


def test_failed_attempts_are_made_again_and_outgrown_conversations_truncated(
    rollart_eval: Eval,
) -> None:
    with OpenAIServer() as server:
        server.script += [(200, {"choices": []}, {})] * 2
        server.script.append(failing(400, "maximum context length is 8", "context_length_exceeded"))
        settings = ("evaluation.greedy=false", "rollout.max_concurrent=1")
        code, report, _ = rollart_eval(*of(server.url), *settings)
    assert (code, report["success"]["n"], report["failures"]) == (0, 5, {"inference": 2})
    assert report["why_failed"] == "the server answered no choice"
    assert (report["truncated"], report["failed"], report["attempts"]) == (1, 0, 7)
    assert report["success"]["mean"] == 0.8


@pytest.mark.slow
def test_an_evaluation_in_which_nearly_all_fails_stops_and_says_why(rollart_eval: Eval) -> None:
    with OpenAIServer() as server:
        server.script += [failing(400, "no such thing")] * 1000
        code, report, err = rollart_eval(*of(server.url), "failures.window=4")
        assert (code, report) == (1, None)
        assert "100% of the last 4 attempts failed" in err
        assert "no such thing" in err
        assert len(server.bodies("/v1/chat/completions")) < 20
        code, report, err = rollart_eval(*of(server.url), "evaluation.greedy=false")
    assert (code, report["ok"], report["success"]["n"], report["failed"]) == (1, False, 0, 5)
    assert "every episode failed: " in err


def test_what_never_had_a_turn_is_no_figure(rollart_eval: Eval) -> None:
    with OpenAIServer() as server:
        full = failing(400, "maximum context length is 8", "context_length_exceeded")
        server.script += [full] * 10
        code, report, err = rollart_eval(*of(server.url))
    assert (code, report["ok"]) == (1, False)
    assert [(c["success"], c["score"], c["truncated"]) for c in report["cells"]] == [
        (None, None, 5)
    ] * 2
    assert report["score"]["mean"] is None
    assert err.count("every episode was truncated before its first turn") == 2


@pytest.mark.slow
def test_a_model_in_files_is_scored_by_the_embedded_engine(rollart_eval: Eval, model: str) -> None:
    settings = ("rollout.max_context_tokens=128", "rollout.max_new_tokens=4")
    code, report, err = rollart_eval(*of(model), *settings, "evaluation.greedy=false")
    assert code == 0, err
    assert (report["model"], report["success"]["n"]) == (model, 5)
    assert report["mean_loss_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--env", ENV, "--model", "http://127.0.0.1:9/v1"), "start the server, or correct"),
        (("--env", ENV, "--model", "http://"), "is not a server URL"),
        (("--env", ENV, "--model", "no-such-folder/x/y"), "there is no folder"),
        (("--env", ENV, "--model", "nope"), "model.path: there is no folder nope, and a hub id is"),
        (("--env", "nothing", "--model", "http://h/v1"), "no environment 'nothing' is installed"),
        (
            ("--env", ENV, "--model", "http://h/v1", "rollout.max_context_tokens=9"),
            "max_context_tokens: has no effect with model.kind: remote",
        ),
        (("--env", ENV, "--model", "http://h/v1", "engine.modle=x"), "engine.modle"),
        (
            ("--env", ENV, "--model", "http://h/v1", "tasks=2"),
            "tasks: unknown key. Did you mean 'evaluation.tasks'?",
        ),
        (("--env", ENV, "--model", "http://h/v1", "engine=embedded"), "needs a model's files"),
        (("--env", ENV, "--model", "http://h/v1", "runtime=ray"), "use runtime=inline"),
        (("--env", ENV, "--model", "m", "--tokenizer", "t"), "--tokenizer requires --model URL"),
        (("no-such.yaml",), "there is no such file"),
        (("examples/hello.yaml",), "new: it is untrained"),
    ],
)
def test_mistakes_are_one_line_and_start_nothing(
    rollart_eval: Eval, arguments: tuple[str, ...], says: str
) -> None:
    code, report, err = rollart_eval(*arguments)
    assert (code, report) == (1, None)
    assert says in err
    assert len(err.strip().splitlines()) <= 2
    assert err.startswith("Error: ") or "set up" in err


def test_neither_file_nor_environment_is_a_usage_error(rollart_eval: Eval) -> None:
    code, _, err = rollart_eval("--env", ENV)
    assert (code, "or --env with --model or --baseline" in err) == (2, True)


@pytest.mark.parametrize(
    ("model", "says"),
    [({"kind": "remote"}, "no local weights to train"), ("some/model", "cannot follow training")],
)
def test_what_only_a_server_holds_cannot_be_trained(model: object, says: str) -> None:
    mapping = {
        "env": "frozenlake",
        "model": model,
        "engine": {"id": "openai", "base_url": "http://h/v1"},
        "stop": {"batches": 1},
    }
    config = load_mapping(mapping, Path("run.yaml"))
    with pytest.raises(ConfigError, match=says):
        resolve_run(config)
    run = resolve_run(config, trains=False)
    assert load_mapping(run.as_dict(), Path("again.yaml")).model == config.model


def test_the_answer_of_the_fake_model_is_the_word_it_is_asked_for() -> None:
    assert obedient("turn 1 of 2: say red<|im_end|>") == "red"
