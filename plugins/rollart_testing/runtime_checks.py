"""Is an environment a good neighbour: to gymnasium, to its siblings, and to the process it is in?

Takes: a subject. Gives: checks that raise. Never: leaves the process's random state changed, or
what it opened open.
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

import numpy as np

from rollart_testing.answers import Step, first_difference
from rollart_testing.left_open import expect_nothing_left
from rollart_testing.play import (
    Options,
    Player,
    Policy,
    Subject,
    good_action,
    play,
    random_policy,
    recorded,
)
from rollart_testing.results import SkipCheck, expect

NUM_INSTANCES: Final = 64
_MAX_MEMORY_BYTES: Final = 8 * 2**30
_NUM_ROUNDS: Final = 5
_NUM_WARM_UPS: Final = 2
_MAX_TURNS: Final = 30
# Gymnasium only warns of these; all its other warnings are about rendering and habits.
_GRAVE: Final = ("not within the observation space", "share an object")


def check_gymnasium(subject: Subject) -> None:
    """Gymnasium's own ``check_env`` accepts it; its seeds are held to, where its spec says so."""
    import gymnasium
    from gymnasium.utils.env_checker import check_env

    with subject.open() as player, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not isinstance(player.env, gymnasium.Env):
            raise SkipCheck(f"{type(player.env).__name__} is not a gymnasium.Env")
        with _said_to_be(player.env, deterministic=subject.spec.deterministic):
            check_env(player.env, skip_render_check=True, skip_close_check=True)
    for warning in caught:
        text = str(warning.message)
        expect(not any(grave in text for grave in _GRAVE), text)


@contextmanager
def _said_to_be(env: Any, *, deterministic: bool) -> Iterator[None]:
    """Give an environment that gymnasium did not make a spec, so that its checker asks for more."""
    from gymnasium.envs.registration import EnvSpec

    if env.spec is not None:
        yield
        return
    with suppress(AttributeError):  # a wrapper's spec cannot be set
        env.spec = EnvSpec("rollart/Checked-v0", nondeterministic=not deterministic)
    try:
        yield
    finally:
        with suppress(AttributeError):
            env.spec = None


def check_global_random_state(subject: Subject) -> None:
    """It neither draws from nor seeds ``random``, ``numpy.random`` or torch's generator."""
    with subject.open() as player:  # what is seeded once, at an import, is not the episode's
        play(player, good_action, subject.seed, {}, _MAX_TURNS)
    with random_state_kept(), subject.open() as player:
        play(player, good_action, subject.seed, {}, _MAX_TURNS)
        play(player, random_policy(0), subject.seed, {}, _MAX_TURNS)
        player.reset()


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Fail when a block changes a global random state; it is put back in any case."""
    before = _random_states()
    try:
        yield
        after = _random_states()
    finally:
        _restore(before)
    changed = [name for name in before if not _same_state(before[name], after[name])]
    expect(
        not changed,
        f"an episode changes the global state of {' and '.join(changed)}: draw from "
        "self.np_random, or from a random.Random of its own",
    )


def check_interleaved(subject: Subject) -> str | None:
    """Episodes of many instances, a step each in turn, are those that each plays alone."""
    if not subject.spec.deterministic:
        raise SkipCheck("its spec says that it is not deterministic")
    wanted = min(
        NUM_INSTANCES, max(2, _MAX_MEMORY_BYTES // max(1, subject.spec.resources.memory_bytes))
    )
    alone, took_s = _play_alone(subject, wanted)
    with ExitStack() as stack:
        together = _play_together(subject, alone, stack)
    for index, ((options, _, expected), got) in enumerate(zip(alone, together, strict=True)):
        found = first_difference(expected, got)
        expect(
            found is None,
            f"instance {index} of {len(alone)} ({options}) plays otherwise beside others: {found}",
        )
    if len(alone) == NUM_INSTANCES:
        return None
    return f"{len(alone)} instances, not {NUM_INSTANCES}: an episode takes {took_s:.2g} s, " + (
        f"an instance {subject.spec.resources.memory_bytes // 2**20} MiB"
    )


_Alone = tuple[Options, list[str], list[Step]]
"""Options, actions and steps of an episode that was played alone."""


def _play_alone(subject: Subject, wanted: int) -> tuple[list[_Alone], float]:
    """Return episodes, as many as half of the budget allows, and the seconds of the slowest."""
    played: list[_Alone] = []
    split, began, slowest_s = subject.spec.splits[0], time.monotonic(), 0.0
    with subject.open() as player:
        num_tasks = player.num_tasks(split) or wanted
    while len(played) < wanted:
        if len(played) >= 2 and time.monotonic() - began > subject.budget_s / 2:
            break
        index = len(played)
        options = {"split": split, "task": index % num_tasks}
        policy: Policy = good_action if index % 2 == 0 else random_policy(index)
        actions: list[str] = []
        episode_began = time.monotonic()
        player = subject.fresh()
        try:
            steps = play(player, recorded(policy, actions), index, options, _MAX_TURNS)
        finally:
            player.close()
        slowest_s = max(slowest_s, time.monotonic() - episode_began)
        played.append((options, actions, steps))
    return played, slowest_s


def _play_together(subject: Subject, alone: list[_Alone], stack: ExitStack) -> list[list[Step]]:
    players: list[Player] = []
    for _ in alone:
        players.append(subject.fresh())
        stack.callback(players[-1].close)
    episodes = [
        [player.reset(seed=index, options=options)]
        for index, (player, (options, _, _)) in enumerate(zip(players, alone, strict=True))
    ]
    for turn in range(max(len(actions) for _, actions, _ in alone)):
        for player, (_, actions, _), steps in zip(players, alone, episodes, strict=True):
            if turn < len(actions) and not steps[-1].over:
                steps.append(player.step(actions[turn]))
    return episodes


def check_nothing_left_open(subject: Subject) -> str | None:
    """No thread, process or file stays behind ``close``, round after round."""
    closed: list[Player] = []  # kept, so that close() frees things and not the garbage collector

    def once() -> None:
        closed.append(_open_play_close(subject))

    for _ in range(_NUM_WARM_UPS):
        once()
    return expect_nothing_left(once, _NUM_ROUNDS, f"{_NUM_ROUNDS} times open, play, close")


def _open_play_close(subject: Subject) -> Player:
    player = subject.fresh()
    try:
        play(player, good_action, subject.seed, {}, 3)
    finally:
        player.close()
    return player


def check_timeouts(subject: Subject) -> str | None:
    """Every call so far returned within the seconds that its spec gives it."""
    with subject.open() as player:
        play(player, good_action, subject.seed, {}, _MAX_TURNS)
    limits = limits_s(subject)
    took = subject.watch.longest_s
    for call, limit_s in limits.items():
        expect(
            took.get(call, 0.0) <= limit_s,
            f"the slowest {call} took {took.get(call, 0.0):.2f} s, its spec allows {limit_s:g} s",
        )
    slowest = ", ".join(f"{call} {took[call]:.2g} s" for call in limits if call in took)
    return f"slowest: {slowest}" if slowest else None


def limits_s(subject: Subject) -> dict[str, float]:
    """Return the seconds that the spec gives to each call."""
    timeouts = subject.spec.timeouts
    return {"reset": timeouts.reset_s, "step": timeouts.step_s, "close": timeouts.close_s}


def _random_states() -> dict[str, Any]:
    states = {"random": random.getstate(), "numpy.random": np.random.get_state()}
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state()
    return states


def _same_state(one: Any, two: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(_same_state, one, two))
    return bool(np.array_equal(one, two)) if hasattr(one, "shape") else bool(one == two)


def _restore(states: dict[str, Any]) -> None:
    restore: dict[str, Callable[[Any], object]] = {
        "random": random.setstate,
        "numpy.random": np.random.set_state,
    }
    for name, state in states.items():
        if name == "torch":
            sys.modules["torch"].set_rng_state(state)
        else:
            restore[name](state)
