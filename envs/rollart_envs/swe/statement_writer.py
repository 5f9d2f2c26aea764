"""Let a model write the statement of a task, from the facts of the one that is made of its tests.

Takes: the URL of an OpenAI-compatible server, and a statement. Gives: another text with the same
code blocks. Never: shows the model the patch, or drops a fact.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import urllib.request
from typing import Any, Final

from rollart_core.errors import UserError, first_line

_TIMEOUT_S: Final = 120.0
_BLOCK: Final = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ASKED: Final = (
    "Rewrite this report of a bug as a user of the library would write it. Keep each code block as"
    " it is, say which function is wrong, and name no cause. Answer with the report only.\n\n"
)


class StatementWriter:
    """A model behind ``URL/chat/completions``; the server's first model is used.

    Raises:
        UserError: If the server does not answer, or has no model.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        try:
            self._model = str(self._said("models", None)["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            why = first_line(str(error)) or type(error).__name__
            raise UserError(f"--statements {url}: {why}; give the URL before /models") from None

    async def write(self, facts: str) -> str:
        """Return a text with all code blocks of the facts; "" if the model gave none."""
        messages = [{"role": "user", "content": _ASKED + facts}]
        body = {"model": self._model, "messages": messages, "temperature": 0}
        try:
            said = await asyncio.to_thread(self._said, "chat/completions", body)
            text = str(said["choices"][0]["message"]["content"]).strip() + "\n"
        except (OSError, ValueError, LookupError, TypeError):
            return ""
        return text if all(block in text for block in _BLOCK.findall(facts)) else ""

    def _said(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", content, headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
