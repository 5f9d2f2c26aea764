"""Play episodes of environments for the checks, step by step; every return value is checked.

Takes: a subject, a policy and a task. Gives: the steps of the episode. Never: reads or writes the
global random state, or checks more than the form of a value.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias

from rollart_core.contracts.env import EnvSpec
from rollart_core.errors import first_line
from rollart_core.rollout.random_player import drawn_action, text_of
from rollart_core.rollout.tools.action import Call, ToolAction
from rollart_core.rollout.tools.draw import edge_calls
from rollart_core.types import Observation
from rollart_testing.answers import Step, plain, texts_of
from rollart_testing.play import (
    BRIEF_TURNS,
    EXPERT,
    GARBAGE,
    GOOD,
    MALFORMED,
    MAX_TURNS,
    NOOP,
    PROBES,
    Episode,
    Options,
    Player,
    Policy,
    Subject,
    View,
)
from rollart_testing.results import CheckFailed, expect

NUM_INSTANCES: Final = 64
_MAX_MEMORY_BYTES: Final = 8 * 2**30
_MAX_DRAWS: Final = 8

Act: TypeAlias = Callable[[Player, Step, int], str]
"""From (player, previous step, turn) to an action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvEpisode(Episode):
    """The steps of an episode; the first is that of ``reset``."""

    acts: ClassVar[str] = "actions"
    max_chars: ClassVar[int] = 60

    steps: Sequence[Step]
    actions: Sequence[str]

    @property
    def verdict(self) -> dict[str, object]:
        """Rewards, and the success of the last info."""
        last = self.steps[-1]
        return {
            "rewards": [step.reward for step in self.steps[1:]],
            "success": plain(last.info.get("success")),
            "components": plain(last.info.get("reward_components", {})),
        }

    def pages(self) -> Iterator[tuple[str, Any]]:
        """Yield each value of each step."""
        for turn, step in enumerate(self.steps):
            for name, value in step._asdict().items():
                yield f"turn {turn}: {name}", plain(value)

    def outcomes(self) -> list[Any]:
        """Return observations and rewards."""
        return [[plain(step.observation), step.reward] for step in self.steps]

    def notes(self) -> list[dict[str, Any]]:
        """Return each step with the action before it."""
        taken = zip(["", *self.actions], self.steps, strict=True)
        return [{"action": action, **plain(step._asdict())} for action, step in taken]


class EnvSubject(Subject):
    """An environment under check, or a factory of one."""

    default_spec = EnvSpec(id="unregistered/Env-v0", entry_point="unregistered:Env")
    expert = advice = "oracle"
    compared = (GOOD, Policy("random", "splits/0"), Policy("random", "splits/1"))
    few_turns = 3
    num_warm_ups, num_rounds, rounds = 2, 5, "5 times open, play, close"
    noun, begin_call, good_acts = "environment", "reset", "good actions"
    returns, its_expert = "return", "its oracle"
    no_secrets = no_sandbox = "it has no sandbox, or no secrets()"

    @property
    def max_turns(self) -> int:
        """The maximum number of turns in an episode."""
        return self.spec.max_turns

    @property
    def limits_s(self) -> dict[str, float]:
        """The time limit in seconds that the spec gives to each call."""
        timeouts = self.spec.timeouts
        return {"reset": timeouts.reset_s, "step": timeouts.step_s, "close": timeouts.close_s}

    def begin(
        self, player: Player, options: Options | None = None, seed: int | None = None
    ) -> Observation:
        """Begin an episode, and return its first page."""
        given = {} if options is None else {"options": options}
        return player.reset(seed=self.seed if seed is None else seed, **given).observation

    def play(
        self,
        player: Player,
        policy: Policy,
        options: Options,
        *,
        seed: int | None = None,
        max_turns: int | None = None,
    ) -> EnvEpisode:
        """Play one episode."""
        at, most = self.seed if seed is None else seed, max_turns or MAX_TURNS
        act, actions = acting(policy), list[str]()
        steps = [player.reset(seed=at, options=options)]
        while not steps[-1].over and len(steps) <= most:
            actions.append(act(player, steps[-1], len(steps) - 1))
            steps.append(player.step(actions[-1]))
        return _episode(policy, options, at, steps, actions)

    def verdict_again(self, player: Player, episode: EnvEpisode) -> str | None:
        """Take the same actions again; return the difference in rewards, if any."""
        steps = [player.reset(seed=episode.seed, options=episode.options)]
        for action in episode.actions:
            if steps[-1].over:
                break
            steps.append(player.step(action))
        policy, options, seed = episode.policy, episode.options, episode.seed
        again = _episode(policy, options, seed, steps, episode.actions)
        if episode.verdict == again.verdict:
            return None
        return f"{episode.verdict}, but for the same actions {again.verdict}"

    def players(self, player: Player) -> Iterator[Policy]:
        """Yield the policies for checks of results and returns."""
        yield from (GOOD, Policy("random", "verdict"), MALFORMED)
        if player.tools.specs:  # known after the first policy has played
            yield Policy("calls", "verdict")

    def random_players(self, player: Player) -> Iterator[tuple[Literal["random", "calls"], str]]:
        """Yield random actions; if there are tools, also tool calls only."""
        yield "random", "actions"
        if player.tools.specs:
            yield "calls", "calls"

    def play_varied(self, player: Player) -> None:
        """Play well and at random, and begin an episode without a seed."""
        for policy in (GOOD, Policy("random", 0)):
            self.play(player, policy, {}, max_turns=BRIEF_TURNS)
        player.reset()

    def instances(self) -> Iterator[tuple[Policy, int]]:
        """Yield policy and seed of each instance, within memory and half of the budget."""
        for n in self.paced(range(self._num_instances), least=2, share=0.5):
            yield Policy("random", n) if n % 2 else GOOD, n

    def play_together(self, alone: Sequence[EnvEpisode]) -> list[EnvEpisode]:
        """Take the same actions, a step of each instance in turn."""
        with ExitStack() as stack:
            players: list[Player] = []
            for _ in alone:
                players.append(self.fresh())
                stack.callback(players[-1].close)
            episodes = [
                [player.reset(seed=one.seed, options=one.options)]
                for player, one in zip(players, alone, strict=True)
            ]
            for turn in range(max(len(one.actions) for one in alone)):
                for player, one, steps in zip(players, alone, episodes, strict=True):
                    if turn < len(one.actions) and not steps[-1].over:
                        steps.append(player.step(one.actions[turn]))
        return [
            _episode(one.policy, one.options, one.seed, steps, one.actions)
            for one, steps in zip(alone, episodes, strict=True)
        ]

    def fewer(self, num_played: int, slowest_s: float) -> str | None:
        """Return why fewer instances were played than wanted; None if all were."""
        if num_played == NUM_INSTANCES:
            return None
        return (
            f"{num_played} instances, not {NUM_INSTANCES}: an episode takes {slowest_s:.2g} s, "
            f"an instance {self.spec.resources.memory_bytes // 2**20} MiB"
        )

    def open_and_close(self) -> Player:
        """Open, play and close a new one; it must not be freed before the last round."""
        player = self.fresh()
        try:
            self.play(player, GOOD, {}, max_turns=self.few_turns)
        finally:
            player.close()
        return player

    def views(self, player: Player, tasks: Iterable[Options]) -> Iterator[View]:
        """Yield every observation, and the result of each tool call."""
        ways = (MALFORMED, Policy("probe"), Policy("random", "secrets"), GOOD)
        acts = [acting(policy) for policy in ways]  # draws continue in the next task
        for options in tasks:
            for act in acts:
                yield from self._acted_upon(player, act, options)
            for call, step in self.called(player, options):
                if not step.over:
                    given = [str(value) for value in call.arguments.values()]
                    yield _view(step, f"{options}, after {_call_text(call)}", given)

    def _acted_upon(self, player: Player, act: Act, options: Options) -> Iterator[View]:
        step, said = player.reset(seed=self.seed, options=options), list[str]()
        for turn in range(max(self.long_turns, len(PROBES))):
            if step.over:
                return
            yield _view(step, f"{options}, turn {turn}", said)
            said.append(act(player, step, turn))
            step = player.step(said[-1])

    def called(self, player: Player, options: Options) -> Iterator[tuple[Call, Step]]:
        """Yield each call with edge values of the schemas, and its result.

        An episode continues until it is over or time is up.
        """
        step = player.reset(seed=self.seed, options=options)
        tools = player.tools.specs
        for call in self.paced(edge_calls(tools), least=len(tools)):
            if step.over:
                step = player.reset(seed=self.seed, options=options)
            try:
                step = player.step(ToolAction("", (call,)).text())
            except CheckFailed as e:
                raise CheckFailed(f"after {_call_text(call)}: {e}") from e
            yield call, step

    def early_pages(self, player: Player, options: Options) -> Iterator[tuple[str, Observation]]:
        """Yield the first observation, and the next one."""
        step = player.reset(seed=self.seed, options=options)
        for turn in range(2):
            if step.over:
                return
            yield f"{options}, turn {turn}", step.observation
            step = player.step("?")

    @property
    def _num_instances(self) -> int:
        memory_bytes = max(1, self.spec.resources.memory_bytes)
        return min(NUM_INSTANCES, max(2, _MAX_MEMORY_BYTES // memory_bytes))


def acting(policy: Policy) -> Act:
    """Return the action function of a policy."""
    if policy.way == "random":
        return random_policy(policy.key)
    return calling_policy(policy.key) if policy.way == "calls" else _ACTS[policy.way]


def good_action(player: Player, step: Step, turn: int) -> str:
    """Take the oracle's action; without an oracle, the offered actions in turn."""
    action = player.call("oracle") if player.has("oracle") else None
    offered = step.info.get("available_actions") or ["ok"]
    return action or str(offered[turn % len(offered)])


def oracle_action(player: Player, step: Step, turn: int) -> str:
    """Take the oracle's action, which must exist."""
    action = player.call("oracle")
    expect(isinstance(action, str), f"turn {turn}: oracle() is {action!r} before the end")
    return str(action)


def garbage_action(player: Player, step: Step, turn: int) -> str:
    """Take malformed actions."""
    return GARBAGE[turn % len(GARBAGE)]


def noop_action(player: Player, step: Step, turn: int) -> str:
    """Take empty actions."""
    return ""


def random_policy(key: object, *, share_of_calls: float = 0.5) -> Act:
    """Return the random policy of evaluations: it draws offered actions, calls or words.

    Calls that do not match their schema are drawn again, because a run handles those itself.

    Args:
        key: Seed of the draws.
        share_of_calls: Share of turns with a tool call instead of a word, if there are tools.
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


def calling_policy(key: object) -> Act:
    """Return a random policy that calls a tool in every turn, if there are tools.

    Args:
        key: Seed of the draws.
    """
    return random_policy(f"calls/{key}", share_of_calls=1.0)


def _probe(player: Player, step: Step, turn: int) -> str:
    return PROBES[turn % len(PROBES)]


_ACTS: Final[dict[str, Act]] = {
    GOOD.way: good_action,
    EXPERT.way: oracle_action,
    NOOP.way: noop_action,
    MALFORMED.way: garbage_action,
    "probe": _probe,
}


def _episode(
    policy: Policy, options: Options, seed: int, steps: Sequence[Step], actions: Sequence[str]
) -> EnvEpisode:
    return EnvEpisode(
        policy=policy,
        options=options,
        seed=seed,
        earned=sum(step.reward for step in steps),
        success=steps[-1].info.get("success"),
        num_turns=len(steps) - 1,
        over=steps[-1].over,
        infos=[step.info for step in steps],
        steps=steps,
        actions=actions,
    )


def _view(step: Step, where: str, said: Sequence[str]) -> View:
    shown = {key: value for key, value in step.info.items() if key != "reward_context"}
    places = [("observation", text_of(step.observation)), *texts_of("info", shown)]
    return View(where, places, said, step.info.get("available_actions") or ())


def _call_text(call: Call) -> str:
    return first_line(f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})", 80)
