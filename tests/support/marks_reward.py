"""A reward and a group reward for tests of backends: written once, they run unchanged on each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence

from rollart_core.contracts.reward import GroupReward, Reward, RewardRequest, RewardResult

MISBEHAVE = ("raise", "nan", "high", "hang", "text", "quit")


class Marks(Reward):
    """Half for the right answer, half for a short one; or what the context tells it to do."""

    def __init__(
        self,
        *,
        limit: int = 20,
        wait_s: float = 0.0,
        key_env: str | None = None,
        closed: str | None = None,
    ) -> None:
        if limit < 0:
            raise ValueError(f"limit is {limit}: below 0")
        self._limit, self._wait_s, self._closed = limit, wait_s, closed

    def score(self, request: RewardRequest) -> RewardResult:
        print("a reward may print", flush=True)
        time.sleep(self._wait_s)
        how = request.context.get("how")
        if how == "raise":
            raise LookupError(f"no such task: {request.task_index}")
        if how == "hang":
            time.sleep(20)
        if how == "quit":
            sys.exit(2)
        if how == "exit":
            os._exit(3)
        if how == "leave a process":  # without our environment, and so without its marks
            left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})
            return RewardResult(0.0, {"pid": float(left.pid)})
        if how == "stuck":  # in C, with the interpreter's lock: no other thread runs meanwhile
            re.match(r"(a+)+$", "a" * 60 + "b")
        if how == "text":
            return "0.5"
        if how in ("nan", "high"):
            return RewardResult({"nan": float("nan"), "high": 7.0}[how])
        right = float(request.answer == request.context.get("reference"))
        short = float(len(request.answer) <= self._limit)
        return RewardResult((right + short) / 2, {"right": right, "short": short})

    def close(self) -> None:
        if self._closed:
            with open(self._closed, "a") as file:
                file.write("closed\n")
        raise OSError("what goes wrong here is nobody's business")


class Rank(GroupReward):
    """The share of the group that returned less."""

    def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        returns = [request.env_return for request in requests]
        return [RewardResult(sum(r > o for o in returns) / len(returns)) for r in returns]
