"""``rollart diagnose``: report what happened in a run, with the config keys to change.

Takes: a run directory. Gives: a :class:`~rollart_view.diagnosis.findings.Diagnosis`. Never:
changes a run.

Effects after a lasting collapse are its consequences, so the other detectors
(:mod:`rollart_view.diagnosis.detectors`) use only the batches before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from rollart_core.cli.output import print_json, visible
from rollart_view.diagnosis.detectors import DETECTORS, MIN_BATCHES
from rollart_view.diagnosis.findings import ADVICE, Advice, Diagnosis, Finding, Kind
from rollart_view.diagnosis.history import History, Measure, read_history
from rollart_view.diagnosis.series import FALL_SHARE, MIN_VALUES, Fall, find_fall, smoothed

_HIDES: dict[Kind, frozenset[Kind]] = {
    "plateau": frozenset({"vanishing_signal", "reward_hacking", "overfitting"}),
    "staleness": frozenset({"mismatch"}),
}
"""A finding -> findings that explain it, in which case it is left out."""


def diagnose(run_dir: Path) -> Diagnosis:
    """Read the journal of a run and return its diagnosis.

    Raises:
        JournalError: If ``run_dir`` holds no journal, or one that cannot be read.
    """
    history = read_history(run_dir)
    versions = history.versions
    return Diagnosis(
        run_dir=str(run_dir),
        num_batches=len(versions),
        first_version=int(versions[0]) if len(versions) else None,
        last_version=int(versions[-1]) if len(versions) else None,
        ended=history.ended,
        summary=tuple(_summary(history)),
        findings=find(history),
        num_needed=MIN_BATCHES,
        not_checked=tuple(_not_checked(history)),
    )


def diagnose_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find problems in a run, and show the evidence and the config keys to change.

    It reads only the journal, and also works while the run continues or after it was killed.

    Example: rollart diagnose runs/webshop-20260101-120000
    """
    found = diagnose(run_dir)
    if as_json:
        print_json(found.as_dict())
        return
    for line in _lines(found):
        typer.echo(visible(line))


def _lines(found: Diagnosis) -> Iterator[str]:
    versions = f", policy_version {found.first_version} to {found.last_version}"
    batches = f"{found.num_batches:,} batches{versions if found.num_batches else ''}"
    yield f"{found.run_dir}: {batches}"
    yield f"Ended: {found.ended}" if found.ended else "The run is in progress, or was killed."
    yield from found.summary
    yield ""
    if found.too_short:
        yield f"The run is too short for findings: they need at least {found.num_needed} batches."
    elif not found.findings:
        yield "No finding."
    for finding in found.findings:
        yield from _finding(finding)
    yield from found.not_checked


def _finding(finding: Finding) -> Iterator[str]:
    versions = f"policy_version {finding.first_version} to {finding.last_version}"
    yield f"{finding.severity}: {finding.kind}, {versions}"
    yield from (f"  {sentence}" for sentence in finding.evidence)
    yield "  Change:"
    width = max(len(advice.key) for advice in finding.keys)
    yield from (f"    {a.key:{width}}  {a.suggestion}" for a in finding.keys)
    yield ""


def find(history: History) -> tuple[Finding, ...]:
    """Return the findings of a run, the most severe first; none if the run is too short."""
    if len(history.versions) < MIN_BATCHES:
        return ()
    collapse = find_collapse(history)
    if collapse is not None and collapse.severity == "error":
        history = history.before(collapse.first_version)
    found = [collapse] if collapse else []
    if len(history.versions) >= MIN_BATCHES:
        found += [f for detect in DETECTORS if (f := detect(history)) is not None]
    kinds = {f.kind for f in found}
    found = [f for f in found if not kinds & _HIDES.get(f.kind, frozenset())]
    return tuple(sorted(found, key=lambda f: f.severity))


def find_collapse(history: History) -> Finding | None:
    """Detect a lasting fall of success, with its onset and the largest update near it.

    The reward must fall too. Otherwise reward and success differ, which is not a collapse
    (:func:`find_reward_hacking`).
    """
    measure = history.measure()
    fall = find_fall(measure.series.values, num_samples=measure.num_samples, low=measure.low)
    if fall is None:
        return None
    versions = measure.series.versions
    onset, split = int(versions[fall.onset]), int(versions[fall.split])
    if not _reward_fell(history, onset, split):
        return None
    evidence = [
        f"{measure.name.capitalize()} fell from {measure.show(fall.before)} to "
        f"{measure.show(fall.after)} (medians, {fall.z:.0f} standard errors apart); the first "
        f"batch of the fall is policy_version {onset}.",
    ]
    largest = _largest_update(history, onset, split + 5)
    numbers = {"onset": float(onset), "before": fall.before, "after": fall.after, **largest[0]}
    evidence += [*largest[1], *_clipped(history.before(onset)), _aftermath(measure, fall)]
    keys = ADVICE["collapse"]
    if history.setting("algorithm.zero_advantage") == "drop":
        why = "keep: the divisor then counts all sampled tokens, not only those of live groups"
        keys = (Advice("algorithm.zero_advantage", why), *keys)
    return Finding(
        kind="collapse",
        severity="warning" if fall.has_recovered else "error",
        first_version=onset,
        last_version=split + 5 if fall.has_recovered else int(versions[-1]),
        evidence=tuple(evidence),
        keys=keys,
        numbers=numbers,
    )


def _reward_fell(history: History, onset: int, split: int) -> bool:
    """Return whether the reward, if known, lost at least half of FALL_SHARE of its level."""
    reward = history.get("rollout/reward_mean")
    before, after = (
        reward.between(onset - 50, onset).values,
        reward.between(split, split + 20).values,
    )
    if not len(before) or not len(after):
        return True
    level = float(np.median(before))
    low = history.rewards[0] if history.rewards else 0.0
    return level - float(np.median(after)) >= FALL_SHARE / 2 * (level - low)


def _largest_update(
    history: History, onset: int, stop: int
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the largest update from five batches before the onset on, as numbers and a sentence.

    The largest has the largest gradient norm (or KL, or ratio, if that is missing).
    """
    names = {"grad_norm": "gradient norm", "approx_kl": "KL", "is_ratio_max": "largest ratio"}
    known = {name: history.get(f"train/{name}") for name in names}
    near = [s.between(onset - 5, stop) for s in known.values() if len(s.between(onset - 5, stop))]
    if not near:
        return {}, ()
    version = int(near[0].versions[int(np.argmax(near[0].values))])
    numbers, said = {"largest_update": float(version)}, list[str]()
    for name, series in known.items():
        at = series.between(version, version + 1).values
        usual = series.between(onset - 50, onset).values
        if len(at):
            numbers[name] = float(at[0])
            of = f" (median of the batches before: {np.median(usual):.2g})" if len(usual) else ""
            said.append(f"{names[name]} {at[0]:.3g}{of}")
    return numbers, (f"The largest update is that of policy_version {version}: {', '.join(said)}.",)


def _clipped(before: History) -> Iterator[str]:
    """Yield the number of updates that exceeded the gradient norm's bound, if most did."""
    norms, bound = before.get("train/grad_norm").values, before.setting("trainer.grad_clip")
    if isinstance(bound, int | float) and len(norms) and (norms > bound).mean() > 0.5:
        yield (
            f"{(norms > bound).sum()} of the {len(norms)} updates before had a gradient norm above "
            f"trainer.grad_clip ({bound:g}), so that the bound set their size."
        )


def _aftermath(measure: Measure, fall: Fall) -> str:
    if fall.has_recovered:
        return f"It recovered: the last batches are at {measure.show(fall.last)}."
    lowest = float(smoothed(measure.series.values[fall.split :], 5).min())
    return (
        f"It did not recover: the lowest median of five batches is {measure.show(lowest)}, the "
        f"last batches are at {measure.show(fall.last)}."
    )


def _not_checked(history: History) -> Iterator[str]:
    """Yield the problems for which a run of sufficient length lacks values."""
    num = len(history.get("validation/success"))
    if len(history.versions) >= MIN_BATCHES and num < MIN_VALUES:
        yield f"Overfitting was not checked: it needs {MIN_VALUES} validations, the run has {num}."


def _summary(history: History) -> Iterator[str]:
    """Yield general events of the run."""
    equal, groups = (
        history.get(f"train/{name}") for name in ("zero_advantage_groups", "batch_groups")
    )
    if len(groups) and equal.values.sum() == groups.values.sum():
        yield (
            "No group had an advantage: the rewards within every group were equal, so the policy "
            "learned nothing. Add warm_start, use easier tasks, or raise rollout.group_size."
        )
    measure = history.measure()
    size = min(50, len(measure.series) // 2)
    if size:
        values = measure.series.values
        best = float(smoothed(values, size).max())
        first, last = (float(np.median(part)) for part in (values[:size], values[-size:]))
        yield (
            f"{measure.name.capitalize()} went from {measure.show(first)} (median of the first "
            f"{size} batches) to {measure.show(last)} (of the last {size}); the best {size} in a "
            f"row had {measure.show(best)}."
        )
    validation = history.get("validation/success", "validation/score")
    if len(validation):
        # Of equal values the latest counts, as in the run.
        best_at = len(validation) - 1 - int(np.argmax(validation.values[::-1]))
        yield (
            f"The best of {len(validation)} validations is {validation.values[best_at]:.1%}, at "
            f"policy_version {validation.versions[best_at]}; the last is "
            f"{validation.values[-1]:.1%}."
        )
    for times in history.went_back:
        yield f"The run was rolled back {times}."
