"""Episodes as the checks play them: every answer is looked at, every call is timed.

Takes: an environment, or something that makes one, and its spec. Gives: players, policies and the
steps they lead to. Never: reads or writes the global random state, or judges more than the form of
an answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar, cast

from rollart_core.contracts.env import EnvSpec, TextEnv
from rollart_core.rollout.random_player import drawn_action
from rollart_core.rollout.tools.action import ToolAction
from rollart_core.rollout.tools.tool_set import ToolSet
from rollart_testing.answers import Step, checked_reset, checked_step
from rollart_testing.results import CheckFailed, SkipCheck, expect, raised

_T = TypeVar("_T")
Options: TypeAlias = dict[str, Any]
"""What ``reset`` gets as options."""

GARBAGE = (
    "",
    " \n\t",
    "é雪😀",
    "]][[ click[",
    "\x00\x1b[31m",
    "DROP TABLE x; --",
    "x" * 10_000,
    "0",
)
MAX_TURNS = 200
"""Turns after which an episode of the expert is given up."""
_MAX_DRAWS = 8
_NEVER_SAID = EnvSpec(id="unregistered/Env-v0", entry_point="unregistered:Env")


class Watch:
    """Knows which call an environment is in, and how long each kind of call took at most."""

    def __init__(self) -> None:
        self.longest_s: dict[str, float] = {}

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Time a block as one ``call``, such as ``"step"``."""
        began = time.monotonic()
        self.mark(call, began)
        try:
            yield
        finally:
            self.mark("", 0.0)
            took = time.monotonic() - began
            self.longest_s[call] = max(took, self.longest_s.get(call, 0.0))

    def mark(self, call: str, began: float) -> None:
        """Note that ``call`` begins; an empty one: that none is under way."""


class Player:
    """One environment whose every answer is looked at."""

    def __init__(self, env: Any, watch: Watch) -> None:
        self.env = env
        self.tools = ToolSet(())
        """What the task of the last ``reset`` offers to call."""
        self.watch = watch

    def has(self, method: str) -> bool:
        """Return whether the environment has an optional method."""
        return hasattr(self.env, method)

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Time a block as one ``call``; what the block raises is named with its file and line.

        Raises:
            CheckFailed: When the block raised.
        """
        try:
            with self.watch.during(call):
                yield
        except Exception as e:
            raise CheckFailed(f"{call} raised {raised(e)}") from e

    def call(self, method: str, *arguments: object) -> Any:
        """Call an optional method."""
        with self.during(f"{method}()"):
            return getattr(self.env, method)(*arguments)

    def reset(self, **arguments: Any) -> Step:
        """Begin an episode."""
        with self.during("reset"):
            answer = self.env.reset(**arguments)
        step = checked_reset(answer)
        self.tools = ToolSet(step.info.get("tools") or ())
        return step

    def step(self, action: str) -> Step:
        """Act."""
        with self.during("step"):
            answer = self.env.step(action)
        return checked_step(answer)

    def close(self) -> None:
        """Close the environment."""
        with self.during("close"):
            self.env.close()

    def num_tasks(self, split: str) -> int | None:
        """Return how many tasks a split has; None: unlimited."""
        if not self.has("num_tasks"):
            return None
        num_tasks = self.call("num_tasks", split)
        expect(
            num_tasks is None or (isinstance(num_tasks, int) and num_tasks > 0),
            f"num_tasks({split!r}) is {num_tasks!r}, neither None nor a positive int",
        )
        return num_tasks if isinstance(num_tasks, int) else None

    def task_clusters(self, split: str) -> list[str] | None:
        """Return the cluster of each task of a split; None: it has none."""
        names = self.call("task_clusters", split) if self.has("task_clusters") else None
        if names is None:
            return None
        num_tasks = self.num_tasks(split)
        expect(
            len(names) == num_tasks and all(isinstance(name, str) for name in names),
            f"task_clusters({split!r}) returns {len(names)} values for {num_tasks} tasks, such as "
            f"{list(names[:2])!r}: return a text for each task",
        )
        return list(names)


Policy: TypeAlias = Callable[[Player, Step, int], str]
"""From (player, the step before, turn) to an action."""


class Subject:
    """The environment under check: how to open it, and what it says of itself.

    Args:
        env: A class or function that makes a fresh one, or one environment, which stays open
            between checks.
        spec: What it says of itself; None: the defaults.
        seed: Seed of the episodes.
        num_tasks: Tasks of each split that are played.
        watch: Times the calls; None for one that only keeps the longest.
        budget_s: Seconds after which a check that plays many episodes goes on with fewer.
    """

    def __init__(
        self,
        env: TextEnv | Callable[[], TextEnv],
        spec: EnvSpec | None = None,
        *,
        seed: int = 0,
        num_tasks: int = 3,
        watch: Watch | None = None,
        budget_s: float = 5.0,
    ) -> None:
        is_made = not isinstance(env, type) and (hasattr(env, "reset") or hasattr(env, "prepare"))
        self.given = Player(env, watch or Watch()) if is_made else None
        self._make = cast("Callable[[], TextEnv]", env)
        self.spec = spec or _NEVER_SAID
        self.seed, self.num_tasks, self.budget_s = seed, num_tasks, budget_s
        self.watch = watch or Watch()

    def fresh(self) -> Player:
        """Make an environment, which the caller closes.

        Raises:
            SkipCheck: When there is only the given one.
        """
        if self.given is not None:
            raise SkipCheck("it needs several instances: give a class or function that makes one")
        with self.watch.during("make"):
            env = self._make()
        return Player(env, self.watch)

    @contextmanager
    def open(self) -> Iterator[Player]:
        """Open a fresh environment and close it at the end; the given one stays open."""
        if self.given is not None:
            yield self.given
            return
        player = self.fresh()
        try:
            yield player
        finally:
            player.close()

    def tasks(self, player: Player, num_tasks: int | None = None) -> list[Options]:
        """Return reset options of the first tasks, the splits taking turns."""
        wanted = self.num_tasks if num_tasks is None else num_tasks
        counts = {s: min(wanted, player.num_tasks(s) or wanted) for s in self.spec.splits}
        return [
            {"split": split, "task": index}
            for index in range(wanted)
            for split, count in counts.items()
            if index < count
        ]

    def paced(self, options: Sequence[_T], least: int | None = None) -> Iterator[_T]:
        """Yield what is given until the budget is used up, but ``least`` of it (a task a split)."""
        began = time.monotonic()
        floor = len(self.spec.splits) if least is None else least
        for n, given in enumerate(options):
            if n >= floor and time.monotonic() - began > self.budget_s:
                return
            yield given


def play(
    player: Player, policy: Policy, seed: int | None, options: Options, max_turns: int = MAX_TURNS
) -> list[Step]:
    """Play one episode; the first step is that of ``reset``."""
    steps = [player.reset(seed=seed, options=options)]
    while not steps[-1].over and len(steps) <= max_turns:
        steps.append(player.step(policy(player, steps[-1], len(steps) - 1)))
    return steps


def replay(
    player: Player, actions: Sequence[str], seed: int | None, options: Options
) -> list[Step]:
    """Play given actions, as long as the episode lasts."""
    steps = [player.reset(seed=seed, options=options)]
    for action in actions:
        if steps[-1].over:
            break
        steps.append(player.step(action))
    return steps


def recorded(policy: Policy, actions: list[str]) -> Policy:
    """Return a policy that does the same and notes its actions."""

    def act(player: Player, step: Step, turn: int) -> str:
        actions.append(policy(player, step, turn))
        return actions[-1]

    return act


def good_action(player: Player, step: Step, turn: int) -> str:
    """Do what the oracle says, or else what is offered, in turn."""
    action = player.call("oracle") if player.has("oracle") else None
    offered = step.info.get("available_actions") or ["ok"]
    return action or str(offered[turn % len(offered)])


def oracle_action(player: Player, step: Step, turn: int) -> str:
    """Do what the oracle says; it must say something."""
    action = player.call("oracle")
    expect(isinstance(action, str), f"turn {turn}: oracle() is {action!r} before the end")
    return str(action)


def garbage_action(player: Player, step: Step, turn: int) -> str:
    """Do what no environment expects."""
    return GARBAGE[turn % len(GARBAGE)]


def noop_action(player: Player, step: Step, turn: int) -> str:
    """Say nothing."""
    return ""


def random_policy(key: object, *, share_of_calls: float = 0.5) -> Policy:
    """Return the random player of evaluations: it draws what is offered, calls or words.

    Calls that do not fit their schema are drawn again: a run answers those itself.

    Args:
        key: What the draws follow from.
        share_of_calls: How often it calls a tool where there are any, and not says a word.
    """
    rng = random.Random(f"random policy/{key}")

    def act(player: Player, step: Step, turn: int) -> str:
        info = {**step.info, "tools": player.tools.specs}
        share = share_of_calls
        for attempt in range(_MAX_DRAWS):
            if attempt == _MAX_DRAWS - 1:
                share = 0.0
            drawn = rng.getrandbits(64)
            action = drawn_action(player.env, step.observation, info, drawn, share_of_calls=share)
            calls = ToolAction.read(action).calls if player.tools.specs else ()
            if not any(player.tools.problem(call.name, call.arguments) for call in calls):
                break
        return action

    return act


def calling_policy(key: object) -> Policy:
    """Return a random player that calls a tool in every turn, where there are tools.

    Args:
        key: What the draws follow from.
    """
    return random_policy(f"calls/{key}", share_of_calls=1.0)
