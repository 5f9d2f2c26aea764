"""Exports for other trainers: messages, ShareGPT, and datasets of Hugging Face."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollart_core.cli import main
from rollart_core.errors import UserError
from rollart_core.store.journal import Journal
from rollart_core.types import Message, Task, Ticket, ToolCall, ToolSpec, Trajectory, Turn
from rollart_view.export import Filters, export, upload

CONFIG = {
    "mode": "async",
    "name": "test",
    "model": {"path": "/home/me/models/small"},
    "algorithm": {"id": "rollart/GRPO-v1"},
}
CALL: ToolCall = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
TOOLS: tuple[ToolSpec, ...] = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    },
)
CALLED = Message(role="assistant", content="I add.", reasoning_content="hm", tool_calls=[CALL])
ANSWER = Message(role="tool", content="1", tool_call_id="abcdefghi", name="add")
TALK = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="1?\udc80"),
    CALLED,
    ANSWER,
    Message(role="assistant", content="one"),
]


def trajectory(number: int, turns: tuple[Turn, ...], split: str = "train") -> Trajectory:
    group = f"g{number:07d}"
    ticket = Ticket(f"{group}.0", Task("toy/A-v1", split, number, 7), group, 0)
    return Trajectory(ticket, "finished", turns=turns, reward=0.5, score=0.5, success=number == 0)


def turn(observation: str, action: str, *messages: Message, **more: Any) -> Turn:
    return Turn(observation, action, 5, 2, "stop", 0.0, 0.1, 0.1, messages=messages, **more)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run-1"
    folder.mkdir()
    journal = Journal(folder, CONFIG)
    tools = (
        turn("system: Be brief.\nuser: 1?", "add", *TALK[:3], tools=TOOLS),
        turn("tool: 1", "one", *TALK[3:]),
    )
    texts = (turn("page", "<think>so</think>yes"),)
    for one in (trajectory(0, tools), trajectory(1, texts), trajectory(2, texts, "hold-out")):
        journal.dispatched(one.ticket, 0)
        journal.trajectory(one)
    journal.close()
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_messages_are_those_of_the_chat_api_with_tools_and_reasoning(
    run_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.jsonl"
    export([run_dir], "messages", out, Filters())
    first, second, _ = lines(out)
    assert first["messages"] == [TALK[0], Message(role="user", content="1??"), *TALK[2:]]
    assert first["tools"] == list(TOOLS)
    assert (first["reward"], first["success"], first["run"]) == (0.5, True, "run-1")
    assert second["messages"] == [
        {"role": "user", "content": "page"},
        {"role": "assistant", "content": "yes", "reasoning_content": "so"},
    ]
    assert "tools" not in second


def test_sharegpt_has_roles_calls_and_tools(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    export([run_dir], "sharegpt", out, Filters())
    first, second, _ = lines(out)
    assert first["system"] == "Be brief."
    assert [entry["from"] for entry in first["conversations"]] == [
        "human",
        "function_call",
        "observation",
        "gpt",
    ]
    call = first["conversations"][1]
    assert json.loads(call["value"]) == {"name": "add", "arguments": {"a": 1}}
    assert (call["content"], call["reasoning_content"]) == ("I add.", "hm")
    assert [tool["name"] for tool in json.loads(first["tools"])] == ["add"]
    assert second["conversations"] == [
        {"from": "human", "value": "page"},
        {"from": "gpt", "value": "yes", "reasoning_content": "so"},
    ]
    assert "system" not in second


def test_jsonl_has_the_messages_of_each_turn(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    export([run_dir], "jsonl", out, Filters())
    first = lines(out)[0]
    assert first["turns"][1]["messages"] == TALK[3:]
    assert first["turns"][0]["tools"] == list(TOOLS)
    assert first["context"] == {}


def test_a_dataset_opens_with_the_package_it_is_for(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is in rollart[bench]")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    out = tmp_path / "dataset"
    export([run_dir], "hf", out, Filters())
    loaded = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in loaded.items()} == {"train": 2, "hold_out": 1}
    first, second = loaded["train"]
    kept = [{k: v for k, v in m.items() if v is not None} for m in first["messages"]]
    assert kept == [TALK[0], {"role": "user", "content": "1??"}, *TALK[2:]]
    assert json.loads(first["tools"]) == list(TOOLS)
    assert second["tools"] is None
    assert second["messages"][1]["reasoning_content"] == "so"


def test_the_card_has_the_facts_and_leaves_the_license_to_the_user(
    run_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "dataset"
    export([run_dir], "hf", out, Filters())
    card = (out / "README.md").read_text()
    header = card.split("---")[1]
    assert "path: data/hold_out-*.parquet" in header
    assert "license" not in header
    assert "3 trajectories of the run `run-1`: model `small`, algorithm `rollart/GRPO-v1`" in card
    assert "/home/me" not in card
    assert "success 33.3% of 3" in card
    with pytest.raises(UserError, match="the file exists"):
        export([run_dir], "hf", out, Filters())
    with pytest.raises(UserError, match="nothing to export"):
        export([run_dir], "hf", tmp_path / "no", Filters(min_reward=9))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dataset", "run-1"]


class Hub(BaseHTTPRequestHandler):
    """Takes what the client of the hub uploads."""

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length).decode("utf-8", "replace")
        self.server.asked.append((self.path, self.headers["Authorization"], body))  # type: ignore[attr-defined]
        answer: dict[str, Any] = {"url": "https://huggingface.co/datasets/me/talks"}
        if "/preupload/" in self.path:
            files = [one["path"] for one in json.loads(body)["files"]]
            answer = {
                "files": [
                    {"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files
                ]
            }
        elif "/commit/" in self.path:
            answer = {
                "success": True,
                "commitOid": "0" * 40,
                "commitUrl": "https://huggingface.co/datasets/me/talks/commit/0",
            }
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"sha": "0" * 40, "id": "me/talks", "siblings": []})

    def _answer(self, answer: object) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """A server that answers as the hub does, and a token for it."""
    package = pytest.importorskip("huggingface_hub", reason="huggingface_hub is in rollart[hub]")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    real = package.HfApi
    monkeypatch.setattr(package, "HfApi", lambda token: real(endpoint=url, token=token))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    server.server_close()


def test_an_upload_makes_a_private_dataset_and_sends_every_file(
    run_dir: Path, tmp_path: Path, hub: Any
) -> None:
    out = tmp_path / "dataset"
    export([run_dir], "hf", out, Filters())
    upload(out, "me/talks")
    (_, authorization, created), *_ = hub.asked
    assert authorization == "Bearer hf_secret"
    assert json.loads(created).items() >= {"visibility": "private", "type": "dataset"}.items()
    (commit,) = [body for path, _, body in hub.asked if "/commit/" in path]
    for name in ("README.md", "train-00000-of-00001.parquet", "hold_out-00000-of-00001.parquet"):
        assert name in commit


def test_a_hub_that_cannot_be_reached_is_one_line_and_the_export_stays(
    run_dir: Path, tmp_path: Path, hub: Any
) -> None:
    out = tmp_path / "dataset"
    export([run_dir], "hf", out, Filters())
    hub.shutdown()
    hub.server_close()
    with pytest.raises(UserError, match=r"--push me/talks: the upload failed") as refused:
        upload(out, "me/talks")
    assert "\n" not in str(refused.value)
    assert (out / "README.md").exists()


def test_an_upload_without_a_token_is_refused_before_anything_is_written(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    out = tmp_path / "dataset"
    for more, why in ((("--to", "hf"), "set HF_TOKEN"), (("--to", "jsonl"), "needs --to hf")):
        asked = ["rollart", "export", str(run_dir), "--out", str(out), "--push", "me/x", *more]
        monkeypatch.setattr(sys, "argv", asked)
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code != 0
        assert why in capsys.readouterr().err
    assert not out.exists()
