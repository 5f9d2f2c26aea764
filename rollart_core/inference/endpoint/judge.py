"""A model that judges: asked from any thread, answered in text, a number or one of several words.

    judge = Judge("http://127.0.0.1:8000/v1", "some-model")
    judge.grade("How polite is this? ...", low=0, high=10)   -> 7.0
    judge.prefer("Which is more polite?", one, other)        -> 1.0

Takes: questions. Gives: answers. Never: takes an answer it cannot read for a bad grade (it asks
again, then raises), or shows the key.
"""

from __future__ import annotations

import math
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollart_core.errors import ConfigError, EndpointError, first_line
from rollart_core.inference.endpoint.client import EndpointClient, EndpointServer
from rollart_core.rollout.loop import LoopThread
from rollart_core.types import Message

T = TypeVar("T")

KEY_VARIABLE = "OPENAI_API_KEY"
NUM_TRIES = 3
_MARK = "Verdict:"
_CHOICES = ("first", "second", "tie")
TAGS = ("conversation", "reference", "task", "first", "second")
"""Between which judges are shown what they judge."""
_SET_TAG = re.compile(rf"<(/?(?:{'|'.join(TAGS)}))>", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)")
_AROUND = " \t\r\n*_`'\"."
"""What may stand around a verdict."""


class Judge:
    """A model behind an OpenAI-compatible server, for rewards.

    Its connections live on a loop in a thread of its own, which ends with :meth:`close`, with the
    object or with the process.

    Args:
        base_url: Such as ``http://127.0.0.1:8000/v1``.
        model: What the server calls it.
        api_key_env: The variable of the environment that holds the key; None: ``OPENAI_API_KEY``
            where it is set.
        max_new_tokens: Most tokens of an answer.
        temperature: Of the first try; a judge that is asked again because it could not be read is
            asked at 1.
        answer_s: How long one answer may take.
        extra: Added to every request, such as ``{"reasoning_effort": "low"}``.

    Raises:
        ConfigError: When ``base_url`` is none, or the variable is not there.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        answer_s: float = 60.0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        server = EndpointServer(base_url, api_key=key_from(api_key_env), answer_s=answer_s)
        self.model = model
        self._body = {"model": model, "max_tokens": max_new_tokens, **(extra or {})}
        if "max_completion_tokens" in self._body:  # no server takes both
            del self._body["max_tokens"]
        self._temperature = temperature
        self._loop = _BlockingClient(server)
        self._end = weakref.finalize(self, self._loop.end)

    def ask(
        self,
        question: str | Sequence[Message],
        *,
        system: str = "",
        temperature: float | None = None,
    ) -> str:
        """Ask and return the answer; blocks this thread alone.

        Args:
            question: A text, or a whole conversation.
            system: What the model is told first.
            temperature: Other than the judge's.

        Raises:
            EndpointError: When there is no answer.
        """
        messages = (
            [Message(role="user", content=question)] if isinstance(question, str) else question
        )
        told = [Message(role="system", content=system)] if system else []
        degree = self._temperature if temperature is None else temperature
        body = {"temperature": degree, **self._body, "messages": [*told, *messages]}
        answer = self._loop.post("chat/completions", body)
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as e:
            raise EndpointError("the judge answered no message", kind="malformed") from e
        return content if isinstance(content, str) else ""

    def grade(self, question: str, *, low: float, high: float, system: str = "") -> float:
        """Ask for a number from ``low`` to ``high``.

        Raises:
            EndpointError: When there is no answer.
            ValueError: When it holds no such number, several times over.
        """

        def read(text: str, marked: bool) -> float | None:
            bare = text.strip().lstrip("*_`'\"").rstrip(_AROUND)
            found = _NUMBER.search(text) if marked else _NUMBER.fullmatch(bare)
            value = float(found[0]) if found else math.nan
            return value if low <= value <= high else None

        wanted = f"a number from {low:g} to {high:g}"
        return self._verdict(question, system, wanted, read)

    def choose(self, question: str, answers: Sequence[str], *, system: str = "") -> str:
        """Ask for one of several words.

        Raises:
            EndpointError: When there is no answer.
            ValueError: When it is none of them, several times over.
        """

        def read(text: str, marked: bool) -> str | None:
            said = text.strip(_AROUND).casefold()
            return next((a for a in answers if a.casefold() == said), None)

        return self._verdict(question, system, "one of " + ", ".join(answers), read)

    def prefer(self, question: str, one: str, other: str, *, system: str = "") -> float:
        """Ask which of two texts is better, twice, with either of them first.

        Judges tend to prefer what they read first (arXiv:2306.05685, section 3.3), so a preference
        counts only if it stays when the order is swapped.

        Args:
            question: What the judge is told before the texts, and by what it is to choose.
            one: A text.
            other: The text it is compared with.
            system: What the model is told first.

        Returns:
            1 when ``one`` is preferred both times, 0 when ``other`` is, else 0.5.

        Raises:
            EndpointError: When there is no answer.
            ValueError: When an answer cannot be read, several times over.
        """
        straight = self.choose(_pair(question, one, other), _CHOICES, system=system)
        swapped = self.choose(_pair(question, other, one), _CHOICES, system=system)
        return {("first", "second"): 1.0, ("second", "first"): 0.0}.get((straight, swapped), 0.5)

    def close(self) -> None:
        """Hang up; may be called twice."""
        self._end()

    def _verdict(
        self, question: str, system: str, wanted: str, read: Callable[[str, bool], T | None]
    ) -> T:
        """Ask until what follows the mark can be read.

        An answer without the mark may have been cut off: it is read only if it is a verdict and
        nothing else, which ``read`` sees to.
        """
        ending = f"\n\nEnd your answer with a line `{_MARK} X`, where X is {wanted}."
        said = ""
        for attempt in range(NUM_TRIES):
            said = self.ask(question + ending, system=system, temperature=1.0 if attempt else None)
            lines = [line for line in said.splitlines() if _MARK.casefold() in line.casefold()]
            tail = lines[-1].casefold().rpartition(_MARK.casefold())[2] if lines else said
            found = read(tail, bool(lines))
            if found is not None:
                return found
        raise ValueError(
            f"the judge was asked {NUM_TRIES} times for {wanted} and said {first_line(said, 80)!r}"
        )


def fenced(tag: str, text: str) -> str:
    """Return a text between tags; the tags that judges are shown cannot be set inside it.

    Args:
        tag: One of ``TAGS``.
        text: Anything.
    """
    inner = _SET_TAG.sub("<\u2060\\1>", text)
    return f"<{tag}>\n{inner}\n</{tag}>"


def _pair(question: str, first: str, second: str) -> str:
    return f"{question}\n\n{fenced('first', first)}\n\n{fenced('second', second)}"


def key_from(variable: str | None) -> str:
    """Return the key that a variable of the environment holds.

    Args:
        variable: Its name; None: ``OPENAI_API_KEY``, or no key where that is not set.

    Raises:
        ConfigError: When a variable that was named is not set.
    """
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"api_key_env: the environment has no variable {variable}")
    return os.environ.get(variable or KEY_VARIABLE, "")


class _BlockingClient:
    """A client on a loop in a thread, begun by the first request."""

    def __init__(self, server: EndpointServer) -> None:
        self._client = EndpointClient(server)
        self._loop = LoopThread("judge")

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._loop.is_closed:
            raise EndpointError("the judge is closed", kind="refused")
        return self._loop.run(self._client.post(path, body))

    def end(self) -> None:
        """End what is in flight, whose callers are told, then the connections."""
        self._loop.close(self._client.close, wait_s=5.0)
