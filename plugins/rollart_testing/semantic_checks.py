"""Check that a plugin rewards the right behaviour, and does not reveal its answers.

Takes: a subject, an environment or an agent task. Gives: checks that raise, the same for both.
Never: calls a model; expert, empty and random policies play.

Limits:

- The floor is the low end of the reward range, or 0 if the range includes negative values: an idle
  policy earns nothing. ``FLOOR_SLACK`` of the range is allowed above it (a little shaping).
- Random policies may earn ``RANDOM_SHARE`` of the way from the floor to the expert. A yes-or-no
  question gives them half, and 48 episodes of it are above three quarters in about one of three
  thousand seeds; a verifier that accepts anything gives them all. If there are tools, policies with
  tool calls only are scored separately, because a word would end many episodes before a call.
- A secret shorter than ``MIN_SECRET_CHARS`` counts as leaked only if a line or a value of info
  equals it: "3" is in many observations by chance.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from rollart_testing.play import EXPERT, NOOP, Options, Player, Policy, Subject, View
from rollart_testing.results import SkipCheck, expect
from rollart_testing.runtime_checks import expect_deterministic

FLOOR_SLACK: Final = 0.01
RANDOM_SHARE: Final = 0.75
NUM_RANDOM: Final = 48
MIN_SECRET_CHARS: Final = 4
_REVEALING: Final = re.compile(r"answer|solution|oracle|expert|hidden|secret|test", re.IGNORECASE)
_CLOSE: Final = 1e-6


def check_oracle(subject: Subject) -> str | None:
    """The expert earns the top of the reward range on the first tasks of every split."""
    top = subject.spec.reward_range[1]
    if math.isinf(top):
        raise SkipCheck("its reward range has no top")
    with subject.open() as player:
        if not player.has(subject.expert):
            raise SkipCheck(f"it has no {subject.expert}()")
        tasks = subject.tasks(player)
        played = 0
        for options in subject.paced(tasks):
            _expect_top(subject, player, options, top)
            played += 1
    return None if played == len(tasks) else f"{played} of {len(tasks)} tasks: they are slow"


def _expect_top(subject: Subject, player: Player, options: Options, top: float) -> None:
    played, expert = subject.play(player, EXPERT, options), subject.its_expert
    expect(played.over, f"{options}: not over after {played.num_turns} turns of {expert}")
    expect(
        math.isclose(played.earned, top, abs_tol=_CLOSE),
        f"{options}: {expert} earned {played.earned:g}, but the top is {top:g}",
    )
    expect(played.success in (None, True), f"{options}: top reward, but success is False")
    said = not subject.spec.reports_success and any("success" in info for info in played.infos)
    expect(not said, "its spec has reports_success: false, but an info has 'success'")


def check_noop(subject: Subject) -> None:
    """An empty policy earns no more than the floor."""
    floor, slack = _floor_of(subject)  # raises before any episode if there is no floor
    with subject.open() as player:
        played = [
            subject.play(player, NOOP, options, max_turns=subject.max_turns)
            for options in subject.paced(subject.tasks(player))
        ]
    mean = sum(one.earned for one in played) / len(played)
    expect(
        mean <= floor + slack,
        f"empty {played[0].acts} earn {mean:g} on average of {len(played)} tasks; "
        f"the floor is {floor:g}",
    )


def check_random(subject: Subject) -> str:
    """Random policies earn clearly less than the expert, or than the top without an expert."""
    with subject.open() as player:
        said = []
        for way, what in subject.random_players(player):
            earned = [
                subject.play(
                    player, Policy(way, n), options, seed=n, max_turns=subject.max_turns
                ).earned
                for n, options in _random_tasks(subject, player)
            ]
            said.append(_expect_far_from_top(subject, earned, what))
    return "; ".join(said)


def _random_tasks(subject: Subject, player: Player) -> Iterator[tuple[int, Options]]:
    """Yield the number and the task of each random episode, while time lasts."""
    _floor_of(subject)
    if math.isinf(subject.spec.reward_range[1]):
        raise SkipCheck("its reward range has no top to compare with")
    tasks = subject.tasks(player, math.ceil(NUM_RANDOM / len(subject.spec.splits)))
    rounds = [tasks[n % len(tasks)] for n in range(NUM_RANDOM)]
    return enumerate(subject.paced(rounds, least=8))


def _expect_far_from_top(subject: Subject, earned: Sequence[float], what: str) -> str:
    """Check that random actions or responses earn clearly less than the top."""
    floor, _ = _floor_of(subject)
    share = (sum(earned) / len(earned) - floor) / (subject.spec.reward_range[1] - floor)
    said = f"random {what} earn {share:.0%} of the way from the floor to the top"
    expect(
        share <= RANDOM_SHARE,
        f"{said} in {len(earned)} episodes, more than {RANDOM_SHARE:.0%}: its reward depends "
        "little on the actions",
    )
    return f"{said} ({len(earned)} episodes)"


def _floor_of(subject: Subject) -> tuple[float, float]:
    """Return the floor of the returns and the slack above it."""
    low, high = subject.spec.reward_range
    if math.isinf(low) or high <= low:
        raise SkipCheck(f"its reward range, {low:g} to {high:g}, has no floor")
    floor = 0.0 if low <= 0 < high else low
    width = 0.0 if math.isinf(high) else high - floor
    return floor, FLOOR_SLACK * width + _CLOSE


def check_same_verdict(subject: Subject) -> None:
    """The same actions earn the same again on one instance, with other episodes in between."""
    expect_deterministic(subject)
    with subject.open() as player:
        tasks = subject.tasks(player)[: max(2, len(subject.spec.splits))]
        for options in subject.paced(tasks):
            played = [
                subject.play(player, policy, options, max_turns=subject.long_turns)
                for policy in subject.players(player)
            ]
            for one in played:
                found = subject.verdict_again(player, one)
                expect(found is None, f"{options}: {found}")


def check_secrets(subject: Subject) -> None:
    """The agent can read neither a secret of the task nor the expert's next action."""
    with subject.open() as player:
        has_secrets = player.has("secrets")
        if not has_secrets and not _has_advice(subject, player):
            either = f"neither secrets() nor {subject.advice}()"
            raise SkipCheck(f"it has {either if subject.advice else 'no secrets()'}")
        for view in subject.views(player, subject.paced(subject.tasks(player))):
            _look(subject, player, view)
    if not has_secrets:
        raise SkipCheck("it has no secrets(); no key of info revealed the expert's action")


def _has_advice(subject: Subject, player: Player) -> bool:
    return bool(subject.advice) and player.has(subject.advice)


def _look(subject: Subject, player: Player, view: View) -> None:
    for secret in _secrets_of(player):
        if any(secret.casefold() in said.casefold() for said in view.said):
            continue  # the agent sent it before: observations may quote it
        for place, text in view.places:
            shown = f"{view.where}: {place} shows the secret {secret[:40]!r}"
            expect(not _shows(text, secret), shown)
    if not _has_advice(subject, player):
        return
    action = player.call(subject.advice)
    for place, text in view.places:
        reveals = place != "observation" and _REVEALING.search(place) and text.strip() == action
        expect(
            not reveals or action in view.offered,
            f"{view.where}: {place} is {action!r}, which equals the expert's next action",
        )


def _secrets_of(player: Player) -> list[str]:
    """Return the non-empty secrets of the current task."""
    if not player.has("secrets"):
        return []
    secrets = player.call("secrets")
    is_texts = not isinstance(secrets, str) and all(isinstance(s, str) for s in secrets)
    expect(is_texts, f"secrets() is {secrets!r:.60}, not a sequence of strings")
    return [secret.strip() for secret in secrets if secret.strip()]


def _shows(text: str, secret: str) -> bool:
    """Return whether a text reveals a secret."""
    text, secret = text.casefold(), secret.casefold()
    if len(secret) < MIN_SECRET_CHARS:
        return secret in (line.strip() for line in text.splitlines())
    return re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text) is not None


def check_reward_range(subject: Subject) -> None:
    """The return of every episode is within the declared range."""
    low, high = subject.spec.reward_range
    with subject.open() as player:
        for options in subject.paced(subject.tasks(player)):
            for policy in chain(subject.players(player), [NOOP]):
                played = subject.play(player, policy, options, max_turns=subject.long_turns)
                expect(
                    low - _CLOSE <= played.earned <= high + _CLOSE,
                    f"{options}: a {subject.returns} of {played.earned:g} is outside "
                    f"{low:g} to {high:g}",
                )
