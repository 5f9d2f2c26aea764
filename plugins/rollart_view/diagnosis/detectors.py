"""Detectors of problems in a run, one function each.

Takes: a :class:`~rollart_view.diagnosis.history.History`. Gives: a finding, or None. Never: reads
a file.

A detector asks whether an effect is certain (in units of the series' own noise,
:mod:`rollart_view.diagnosis.series`), and whether it is large enough to matter (the constants
below, each with its reason).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from rollart_core.store.estimates import wilson
from rollart_view.diagnosis.findings import ADVICE, Advice, Finding, Kind
from rollart_view.diagnosis.history import BUSY, History, Series
from rollart_view.diagnosis.series import (
    CERTAIN_Z,
    FloatArray,
    last_run_above,
    mostly_above,
    mostly_below,
    smoothed,
    trend,
)

MIN_BATCHES = 20
"""With fewer batches a median of five and the noise of differences mean little."""
SOLVED = 0.9
"""Tasks are solved at this success: equal rewards and no further gain are expected then."""
LITTLE_SIGNAL = 0.2
"""Share of groups with an advantage: below it, four of five groups teach nothing."""
LARGE_MISMATCH = 0.05
"""Mean difference of logprobs: a factor of 1.05 in probability, the most that NeMo RL allows in
the checks of its own training runs. Rounding to bfloat16 gives less."""
SMALL_SAMPLE = 0.5
"""Effective share of a sample: below it, importance weights are degenerate (the usual limit for
resampling; Doucet and Johansen 2009, section 3.5)."""
MUCH_CLIPPED = 0.25
"""Share of clipped tokens. Ratios of tokens clip below 1%, ratios of sequences about 15% by design
(GSPO, arXiv:2507.18071, section 5.1)."""
MUCH_DROPPED = 0.1
"""Share of finished groups that were dropped as too stale."""
LENGTH_FACTOR = 1.5
"""Change of the sampled tokens per episode that counts as a drift."""
LARGE_GAP = 0.1
"""Growth of the difference between success on training tasks and on validation."""
LARGE_CHANGE = 0.05
"""Change of success, or of the reward as a share of its range, that counts."""
WAITED_SHARE = 5 / 6
"""Share of the time that the trainer waits: five seconds for each second of training. Episodes of
agents usually take most of the time, so that waiting alone is no fault."""
BUSY_SHARE = 1 / 3
"""Share of the time in which any episode runs: below it, rollouts wait for the trainer."""
MIN_STALLED = 75
"""Batches of a plateau: fewer are often followed by a rise, also in sound runs."""
STALLED_SHARE = 0.25
"""On a plateau, the same number of further batches would close at most this share of the gap."""
PROBABLE_Z = 2.33
"""One-sided 1% quantile of the normal distribution, where CERTAIN_Z asks too much: of validations,
which are few, and of the question whether success rises at all."""


def find_vanishing_signal(history: History) -> Finding | None:
    """Detect that few groups have an advantage, although the tasks are not solved.

    If they are solved, equal rewards are expected. The upper end of Wilson's interval
    must be below LITTLE_SIGNAL.
    """
    first = _recent(history)
    equal = history.get("train/zero_advantage_groups").between(first)
    groups = history.get("train/batch_groups").between(first)
    num_groups, num_live = groups.values.sum(), groups.values.sum() - equal.values.sum()
    where = f"From policy_version {first} on"
    if (dropped := history.dropped.get("equal", 0)) > 0:
        num_groups, num_live = history.num_groups + dropped, history.num_groups
        where = "Of all groups"
    measure = history.measure()
    level = _mean(measure.series.between(first))
    if measure.name == "success" and history.success is not None:
        level = history.success  # Of dropped groups too.
    share = wilson(round(num_live), round(num_groups))
    if num_groups == 0 or share.high >= LITTLE_SIGNAL or measure.is_solved(level, SOLVED):
        return None
    why = "most tasks are never solved" if level < 0.1 else "most tasks are always or never solved"
    evidence = (
        f"{where}, {num_live:.0f} of {num_groups:.0f} groups have an advantage ({share.mean:.0%}, "
        f"95% interval {share.low:.0%} to {share.high:.0%}); the rewards of the others are equal.",
        f"The {measure.name} is {measure.show(level)}: {why}, so that they give no gradient.",
    )
    numbers = {"live_share": share.mean, "level": level}
    found = _finding(history, "vanishing_signal", first, evidence, numbers)
    if history.setting("warm_start") is None:
        return found
    why = "raise it where no episode succeeds, or give a denser reward"
    longer = Advice("warm_start.until_success", why)
    return replace(found, keys=tuple(longer if a.key == "warm_start" else a for a in found.keys))


def find_mismatch(history: History) -> Finding | None:
    """Detect that trainer and engine give different logprobs with the same weights.

    Only tokens of the newest version count. A batch without such tokens has a difference of exactly
    0, and is left out.
    """
    series = history.get("train/logprob_diff_fresh_mean")
    series = Series(series.versions[series.values > 0], series.values[series.values > 0])
    recent = series.between(_recent(history))
    if not mostly_above(recent.values, LARGE_MISMATCH):
        return None
    first = int(series.versions[last_run_above(series.values, LARGE_MISMATCH)])
    median = float(np.median(recent.values))
    evidence = [
        f"On tokens that the newest weights sampled, the logprobs of trainer and engine differ by "
        f"{median:.3g} on average (median of {len(recent.values)} batches): a factor of "
        f"{math.exp(median):.2f} in probability. Rounding alone stays below {LARGE_MISMATCH}."
    ]
    before = series.between(0, first).values
    if len(before) >= 5:
        evidence.append(f"Before policy_version {first} it was {np.median(before):.3g}.")
    numbers = {"logprob_diff_fresh_mean": median}
    return _finding(history, "mismatch", first, evidence, numbers, severity="error")


def find_staleness(history: History) -> Finding | None:
    """Detect that samples are too old: degenerate weights, much clipping, or dropped groups.

    A large staleness alone is not a problem: the change of the policy since sampling counts.
    """
    first, evidence, numbers = _recent(history), list[str](), dict[str, float]()
    stale = _mean(history.get("staleness/mean").between(first))
    for name, limit, is_worse, what in (
        ("effective_sample_size", SMALL_SAMPLE, mostly_below, "The effective sample size"),
        ("clip_fraction", MUCH_CLIPPED, mostly_above, "The share of clipped tokens"),
    ):
        values = history.get(f"train/{name}").between(first).values
        if stale > 0 and is_worse(values, limit):
            numbers[name] = float(np.median(values))
            evidence.append(f"{what} is {numbers[name]:.0%} (median; the limit is {limit:.0%}).")
    dropped = history.dropped.get("too_stale", 0)
    share = wilson(dropped, dropped + history.num_groups)
    if dropped and share.low > MUCH_DROPPED:
        numbers["dropped_share"] = share.mean
        evidence.append(
            f"{dropped} of {share.n} finished groups ({share.mean:.0%}) were dropped as too stale."
        )
    if not evidence:
        return None
    evidence.insert(0, f"Samples are {stale:.2g} versions old on average.")
    return _finding(history, "staleness", first, evidence, numbers)


def find_length_drift(history: History) -> Finding | None:
    """Detect that episodes become longer or shorter, but success does not rise.

    The gain and one standard error must be small, because success may need longer episodes.
    """
    measure = history.measure()
    for first in _spans(history):
        length = trend(history.get("rollout/loss_tokens_mean").between(first).values)
        level = trend(measure.series.between(first).values)
        if length is None or level is None or min(length.first, length.last) <= 0:
            continue
        factor = length.last / length.first
        is_large = abs(math.log(factor)) >= math.log(LENGTH_FACTOR)
        size = measure.high - measure.low
        small = max(LARGE_CHANGE * size, STALLED_SHARE * (measure.high - level.first))
        if not is_large or not (length.rises or length.falls) or level.gain + level.error > small:
            continue
        evidence = [
            f"Sampled tokens per episode went from {length.first:.4g} to {length.last:.4g} "
            f"({factor:.2g} times), while {measure.name} went from {measure.show(level.first)} to "
            f"{measure.show(level.last)}.",
        ]
        for name in ("rollout/truncated_share", "rollout/repeated_share"):
            other = trend(history.get(name).between(first).values)
            if other is not None and other.rises:
                evidence.append(f"{name} went from {other.first:.1%} to {other.last:.1%}.")
        return _finding(history, "length_drift", first, evidence, {"factor": factor})
    return None


def find_reward_hacking(history: History) -> Finding | None:
    """Detect that the reward, or a component of it, rises while success or validation falls."""
    success, validation = history.get("rollout/success_mean"), history.get("validation/success")
    names = [n for n in history.series if n.startswith("reward/") and n != "reward/success"]
    low, high = history.rewards or (0.0, 0.0)
    for first in _spans(history):
        goal, of = trend(success.between(first).values), "success on training tasks"
        is_validation = not np.any(success.values > 0)
        if is_validation:
            goal, of = trend(validation.between(first).values), "validation/success"
        certain = PROBABLE_Z if is_validation else CERTAIN_Z
        if goal is None or goal.z > -certain or goal.first - goal.last < LARGE_CHANGE:
            continue
        for name in ("rollout/reward_mean", *names):
            up = trend(history.get(name).between(first).values)
            size = max(high - low, abs(up.first)) if up else 0.0
            if up is None or not up.rises or up.last - up.first < LARGE_CHANGE * size:
                continue
            evidence = (
                f"{name} rose from {up.first:.3g} to {up.last:.3g}, while {of} fell from "
                f"{goal.first:.1%} to {goal.last:.1%}: the policy may have learned to score "
                "without doing the task.",
            )
            numbers = {"reward_gain": up.last - up.first, "success_gain": goal.last - goal.first}
            return _finding(history, "reward_hacking", first, evidence, numbers, severity="error")
    return None


def find_overfitting(history: History) -> Finding | None:
    """Detect that success rises on training tasks, but not in validation."""
    validation = history.get("validation/success")
    train = history.get("rollout/success_mean")
    if len(validation) == 0 or len(train) < MIN_BATCHES:
        return None
    at = np.searchsorted(train.versions, validation.versions)
    near = np.array([train.values[max(0, n - 5) : n + 5].mean() for n in at])
    gap, rise, own = (trend(x) for x in (near - validation.values, near, validation.values))
    third = len(validation) // 3
    if gap is None or rise is None or own is None:
        return None
    late, middle = validation.values[-third:], validation.values[-2 * third : -third]
    stalls = late.mean() <= middle.mean() + late.std() / math.sqrt(third)
    grows = gap.z > PROBABLE_Z and gap.last - gap.first >= LARGE_GAP
    if not (grows and stalls and rise.z > PROBABLE_Z):
        return None
    best = int(np.argmax(validation.values))
    first = int(validation.versions[best])
    evidence = (
        f"Success on training tasks rose from {rise.first:.1%} to {rise.last:.1%}, validation from "
        f"{own.first:.1%} to {own.last:.1%}: the gap grew by {gap.last - gap.first:.1%}.",
        f"The best validation is {validation.values[best]:.1%}, at policy_version {first}; the "
        f"last is {validation.values[-1]:.1%}.",
    )
    numbers = {"gap": gap.last, "best_validation": float(validation.values[best])}
    return _finding(history, "overfitting", first, evidence, numbers)


def find_plateau(history: History) -> Finding | None:
    """Detect that success no longer rises, and is not near the maximum.

    An equivalence test on the last half: the upper end of the 95% interval of its gain must be
    small, so that a short or noisy run gives no finding.
    """
    measure = history.measure()
    first = int(history.versions[len(history.versions) // 2])
    level = trend(measure.series.between(first).values)
    if level is None or len(history.versions) < 2 * MIN_STALLED:
        return None
    mean = _mean(measure.series.between(first))
    missing = measure.high - mean
    if measure.is_solved(mean, SOLVED) or missing <= 0:
        return None
    if level.z > PROBABLE_Z or level.gain_high >= STALLED_SHARE * missing:
        return None
    evidence = [
        f"From policy_version {first} on, {measure.name} stays at {measure.show(mean)}: it gains "
        f"at most {measure.show(max(0.0, level.gain_high))} over the last half of the run (95%).",
    ]
    entropy = history.get("train/entropy").between(first).values
    numbers = {"level": mean, "gain_high": level.gain_high}
    if len(entropy):
        numbers["entropy"] = float(np.median(entropy))
        evidence.append(f"The entropy is {numbers['entropy']:.3g} nats per token (median).")
    return _finding(history, "plateau", first, evidence, numbers)


def find_starved_trainer(history: History) -> Finding | None:
    """Detect that the trainer waits for rollouts most of the time."""
    first = _recent(history)
    train, waited = _times(history, first)
    total = train.sum() + waited.sum()
    if total <= 0 or waited.sum() / total < WAITED_SHARE:
        return None
    evidence = (
        f"From policy_version {first} on, the trainer waited {waited.sum():.1f} s for batches and "
        f"trained {train.sum():.1f} s: it waited {waited.sum() / total:.0%} of the time.",
    )
    numbers = {"waited_share": float(waited.sum() / total)}
    return _finding(history, "starved_trainer", first, evidence, numbers)


def find_starved_rollouts(history: History) -> Finding | None:
    """Detect that rollouts wait for the trainer most of the time.

    The journal records when each episode ran. Without these records, the trainer's times must show
    twenty seconds of training for each second of waiting.
    """
    first = _recent(history)
    train, waited = _times(history, first)
    total = train.sum() + waited.sum()
    busy = history.get(BUSY).between(first).values
    if total <= 0:
        return None
    if len(busy):
        if not mostly_below(busy, BUSY_SHARE) or waited.sum() > train.sum():
            return None
        seen = f"Episodes ran during only {np.median(busy):.0%} of the time (median)"
        numbers = {"busy_share": float(np.median(busy))}
    elif train.sum() >= 20 * waited.sum():
        seen, numbers = "Rollouts were always ready", {}
    else:
        return None
    evidence = (
        f"{seen}, from policy_version {first} on: the trainer trained {train.sum():.1f} s and "
        f"waited {waited.sum():.1f} s.",
    )
    return _finding(history, "starved_rollouts", first, evidence, numbers)


DETECTORS: tuple[Callable[[History], Finding | None], ...] = (
    find_vanishing_signal,
    find_mismatch,
    find_staleness,
    find_length_drift,
    find_reward_hacking,
    find_overfitting,
    find_plateau,
    find_starved_trainer,
    find_starved_rollouts,
)


def _finding(
    history: History,
    kind: Kind,
    first: int,
    evidence: Sequence[str],
    numbers: Mapping[str, float],
    *,
    severity: Literal["error", "warning"] = "warning",
) -> Finding:
    last = int(history.versions[-1])
    return Finding(kind, severity, first, last, tuple(evidence), ADVICE[kind], numbers)


def _recent(history: History) -> int:
    """Return the first version of the last third of the batches, with at least 20 batches."""
    versions = history.versions
    return int(versions[-max(MIN_BATCHES, len(versions) // 3)])


def _spans(history: History) -> Iterator[int]:
    """Yield start versions: of the run, after its best batches, of its last half and third."""
    series = history.measure().series
    size, levels = len(series), smoothed(series.values, 20)
    starts = [0, int(np.argmax(levels)) if len(levels) else 0, size // 2, size * 2 // 3]
    yield from (int(series.versions[n]) for n in starts if size - n >= 2 * MIN_BATCHES)


def _mean(series: Series) -> float:
    return float(series.values.mean()) if len(series) else 0.0


def _times(history: History, first: int) -> tuple[FloatArray, FloatArray]:
    """Return the seconds that the trainer trained and waited, for each batch."""
    names = ("time/train_s", "time/trainer_waited_s")
    train, waited = (history.get(name).between(first).values for name in names)
    return train, waited
