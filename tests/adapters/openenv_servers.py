"""Two environments on OpenEnv's own server: `python openenv_servers.py NAME FD SESSIONS`."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class EchoAction(Action):
    message: str = Field(...)


class EchoObservation(Observation):
    echoed_message: str = ""
    message_length: int = 0


class Echo(Environment):  # type: ignore[misc]
    """Says what it is told, five times; longer messages earn more, up to 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
        self._state = State(step_count=0)
        return EchoObservation(echoed_message="Say something.")

    def step(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> Any:
        self._state.step_count += 1
        if action.message == "raise":
            raise RuntimeError("as told")
        if action.message == "hang":
            time.sleep(2)
        if action.message == "die":
            os._exit(7)
        length = len(action.message)
        return EchoObservation(
            echoed_message=action.message,
            message_length=length,
            reward=min(length / 10, 1.0),
            done=self._state.step_count >= 5,
        )

    @property
    def state(self) -> State:
        return self._state


class GuessAction(Action):
    number: int = Field(..., ge=0, le=100)
    loud: bool = False


class GuessObservation(Observation):
    hint: str = ""
    say: str = ""
    turn: int = 0


class Guess(Environment):  # type: ignore[misc]
    """Higher or lower, by seed, in seven turns."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(step_count=0)
        self._secret = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
        self._state = State(step_count=0)
        self._secret = random.Random(seed).randrange(101)
        return GuessObservation(hint="none yet", say="Guess my number, 0 to 100.")

    def step(self, action: GuessAction, timeout_s: float | None = None, **_: Any) -> Any:
        self._state.step_count += 1
        turn, right = self._state.step_count, action.number == self._secret
        hint = "right" if right else "higher" if action.number < self._secret else "lower"
        said = {"hint": hint.upper() if action.loud else hint, "say": "Well.", "turn": turn}
        return GuessObservation(**said, reward=float(right), done=right or turn >= 7)

    @property
    def state(self) -> State:
        return self._state


ENVIRONMENTS = {
    "echo": (Echo, EchoAction, EchoObservation),
    "guess": (Guess, GuessAction, GuessObservation),
}

if __name__ == "__main__":
    name, fd, sessions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    app = create_app(*ENVIRONMENTS[name], env_name=name, max_concurrent_envs=sessions)
    uvicorn.run(app, fd=fd, log_level="error")
