"""A deterministic fake agent task that fails on demand.

Takes: options for the faults. Gives: a program that requests words from its endpoint over HTTP with
the standard library. Never: needs an oracle; its prompts contain the expected words.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rollart_core.contracts.agent import AgentResult, AgentStart, Endpoint, Recorded
from rollart_core.types import Message
from rollart_testing.envs import SPLITS, WORDS

AgentTrouble = Literal[
    "raise", "exit", "hang", "block", "deaf", "silent", "greedy", "stubborn", "shrug", "nan"
]
"""The fault of its program after the first turn: raise, ``sys.exit``, wait forever, block its
thread forever, wait forever and ignore cancellation, end without a request, send requests until
refused and then raise, continue after a refusal, or end quietly after one; or ``finish`` returns
NaN."""


class FakeAgent:
    """Each turn asks for a word; each right answer earns ``1 / turns``.

    Args:
        turns: Number of turns in an episode.
        tasks: Number of tasks in each split.
        trouble: The fault to inject.
        trouble_every: Inject the fault only in every n-th episode of this object.
        cut: ``finish`` reports that the program was cut short.
    """

    def __init__(
        self,
        *,
        turns: int = 2,
        tasks: int = 64,
        trouble: AgentTrouble | None = None,
        trouble_every: int = 1,
        cut: bool = False,
    ) -> None:
        self.turns, self._tasks, self._cut = turns, tasks, cut
        self._trouble, self._trouble_every = trouble, trouble_every
        self._closing = threading.Event()
        self._words: list[str] = []
        self._right = self._num_episodes = 0
        self._in_trouble = False

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
        return self._tasks

    async def prepare(self, *, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Draw the words."""
        split = options.get("split", "train")
        index = options.get("task", random.Random(seed).randrange(self._tasks))
        self._words = self._drawn(split, index)
        self._right = 0
        self._num_episodes += 1
        self._in_trouble = self._num_episodes % self._trouble_every == 0
        return AgentStart(f"say {self.turns} words")

    async def run(self, endpoint: Endpoint) -> None:
        """Request one word after the other, in one conversation."""
        if self._has("silent"):
            return
        messages: list[Message] = []
        for turn, word in enumerate(self._words):
            try:
                await self._ask(endpoint, messages, self._text(turn, word))
            except RuntimeError:
                if self._has("shrug"):
                    return
                raise
            self._right += messages[-1]["content"].strip() == word
            await self._meet(endpoint, messages)

    async def finish(self, recorded: Recorded) -> AgentResult:
        """Return the share of right answers."""
        reward = float("nan") if self._has("nan") else self._right / self.turns
        parts, context = {"right": float(self._right)}, {"reference": " ".join(self._words)}
        return AgentResult(reward, self._right == self.turns, parts, self._cut, context)

    async def solve(self) -> None:
        """Return all words as the solution."""
        self._right = self.turns

    def close(self) -> None:
        """Release blocked threads; may be called twice."""
        self._closing.set()

    def corpus(self) -> Iterator[str]:
        """Yield the prompts and answers of every training task."""
        for index in range(self._tasks):
            for turn, word in enumerate(self._drawn("train", index)):
                yield self._text(turn, word)
                yield word

    def _drawn(self, split: str, index: int) -> list[str]:
        return random.Random(f"{split}/{index}").choices(WORDS, k=self.turns)

    def _text(self, turn: int, word: str) -> str:
        return f"turn {turn + 1} of {self.turns}: say {word}"

    def _has(self, trouble: AgentTrouble) -> bool:
        return self._in_trouble and self._trouble == trouble

    async def _meet(self, endpoint: Endpoint, messages: list[Message]) -> None:
        if self._has("raise"):
            raise RuntimeError("trouble on demand")
        if self._has("exit"):
            raise SystemExit(3)
        if self._has("hang"):
            await asyncio.Event().wait()
        if self._has("block"):
            self._closing.wait()
        while self._has("deaf") and not self._closing.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        while self._has("greedy"):
            await self._ask(endpoint, messages, "more")
        while self._has("stubborn"):
            try:
                await self._ask(endpoint, messages, "more")
            except RuntimeError:
                messages.pop()
                await asyncio.sleep(0.02)

    async def _ask(self, endpoint: Endpoint, messages: list[Message], text: str) -> None:
        messages.append({"role": "user", "content": text})
        messages.append(await asyncio.to_thread(_answer, endpoint, messages))


def _answer(endpoint: Endpoint, messages: list[Message]) -> Message:
    body = json.dumps({"model": endpoint.model, "messages": messages}).encode()
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        body,
        {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            said: Message = json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as e:
        with e:
            raise RuntimeError(f"the endpoint returned {e.code}: {e.read().decode()}") from None
    return {"role": "assistant", "content": said["content"] or ""}
