"""The program: it has its own loop, and it only gets a URL and a key from RollArt.

You can use any other program. With the `openai` package, replace `Chat` with
`AsyncOpenAI(base_url=..., api_key=...)`. RollArt records all tokens of its requests.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

from {{ cookiecutter.module }}.game import Game

Message = dict[str, Any]


class Chat:
    """A client of an OpenAI-compatible server that uses only the standard library.

    Args:
        base_url: The server's URL, such as http://127.0.0.1:8000/v1.
        api_key: The key of this episode.
        model: The model name of the requests.
    """

    def __init__(self, base_url: str, api_key: str, model: str) -> None:
        self._url, self._key, self._model = f"{base_url}/chat/completions", api_key, model

    async def ask(self, messages: list[Message]) -> Message | None:
        """Return the assistant's message; None if the server rejects further requests."""
        # Runs in a thread, so that the program can be cancelled while it waits.
        return await asyncio.to_thread(self._ask, messages)

    def _ask(self, messages: list[Message]) -> Message | None:
        body = json.dumps({"model": self._model, "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                message: Message = json.load(answer)["choices"][0]["message"]
        except urllib.error.HTTPError as e:
            with e:
                if 400 <= e.code < 500:  # the budget of this episode is spent
                    return None
            raise
        return message


async def play(chat: Chat, game: Game, num_guesses: int) -> None:
    """Let the model guess until it is right or has no guesses left."""
    messages: list[Message] = [{"role": "user", "content": game.question}]
    while not game.found and game.num_guesses < num_guesses:
        answer = await chat.ask(messages)
        if answer is None:
            return
        reply = game.guess(answer.get("content") or "")
        messages += [answer, {"role": "user", "content": reply}]
