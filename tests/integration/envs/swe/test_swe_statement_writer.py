"""Statements that a model writes: with all facts, or not used; the server is on the loopback."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rollart_core.errors import UserError
from rollart_envs.swe.make_command import StatementWriter

FACTS = "It is wrong.\n\n```python\nassert f(1) == 2\n```\n\nIt gives:\n\n```\n3\n```\n"
GOOD = "f is off by one.\n```python\nassert f(1) == 2\n```\nI get\n```\n3\n```"


class Server(ThreadingHTTPServer):
    """Answers with a text, and keeps what it was asked."""

    answer: str | None = GOOD
    models: tuple[str, ...] = ("small",)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.say({"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"], json.loads(body)))
        text = self.server.answer
        self.say({"choices": [{"message": {"content": text}}]} if text is not None else {})

    def say(self, said: object) -> None:
        content = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *values: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_model_writes_a_statement_from_the_facts(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert asyncio.run(StatementWriter(server.url + "/").write(FACTS)) == GOOD + "\n"
    ((path, key, body),) = server.asked
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "small")
    assert body["messages"][0]["content"].endswith(FACTS)


@pytest.mark.parametrize("answer", [None, "", "f is off by one.", GOOD.replace("3", "4")])
def test_a_text_that_lacks_a_fact_is_not_used(server: Server, answer: str | None) -> None:
    writer = StatementWriter(server.url)
    server.answer = answer
    assert asyncio.run(writer.write(FACTS)) == ""


def test_a_server_that_is_not_there_or_has_no_model_is_a_users_error(server: Server) -> None:
    server.models = ()
    with pytest.raises(UserError, match=r"--statements http://127\.0\.0\.1:\d+/v1: .*give the URL"):
        StatementWriter(server.url)
    with pytest.raises(UserError, match="--statements nowhere: unknown url type"):
        StatementWriter("nowhere")
