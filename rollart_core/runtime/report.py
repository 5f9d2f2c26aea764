"""What a run comes to: the object that ``--json`` prints and ``report.json`` keeps.

Takes: numbers. Gives: :class:`RunReport`. Never: computes or renders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rollart_core.scheduling.evaluate import EvaluationResult, paired_gain

Sampled = tuple[EvaluationResult | None, EvaluationResult | None]
"""Before and after."""
EstimateDict = Mapping[str, float | int]


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run, finished or stopped."""

    run_dir: str
    name: str
    stop_reason: str
    ok: bool
    """False when the run stopped itself or was interrupted."""
    train_steps: int
    """Updates taken: ``skipped_updates`` are not among them."""
    batches: int
    """Weight publications of the RL phase."""
    wall_s: float
    """All of it."""
    train_wall_s: float
    """The RL phase alone."""
    tokens_per_s: float
    """Tokens of finished trajectories, prompt and generated, per second of the RL phase."""
    generated_tokens_per_s: float
    trained_tokens_per_s: float
    staleness: Mapping[str, int]
    """Versions -> trained samples."""
    failures: Mapping[str, int]
    """Kind -> failed attempts of the RL phase."""
    skipped_updates: int = 0
    """Updates not taken: no sample had an advantage, a gradient was not finite or an outlier, or
    the step was too large; the metrics of each say which."""
    rolled_back: Mapping[str, int] = field(default_factory=dict)
    """``batches``, ``train_steps`` and ``trajectories`` that were undone since the trainer was
    lost, or the guard tripped; no other count here holds them."""
    guard: Mapping[str, object] | None = None
    """``trips``, one after another, ``rollbacks`` and the ``lr_factor`` at the end; None: off."""
    scheduler: Mapping[str, object] = field(default_factory=dict)
    before: EvaluationResult | None = None
    after: EvaluationResult | None = None
    greedy_before: EvaluationResult | None = None
    greedy_after: EvaluationResult | None = None
    score_gain: EstimateDict | None = None
    """Mean over tasks of score after minus score before, paired, with its 95% interval, clustered
    as those of the evaluations."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    warm_start: Mapping[str, object] | None = None
    length_bias: Mapping[str, float] = field(default_factory=dict)
    """Mean tokens and turns, dispatched against trained."""
    engine: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Engine -> what its weight swaps cost, in the RL phase."""
    placement: Mapping[str, object] = field(default_factory=dict)
    """Where the hardware mapper put everything, and why."""
    rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Reward -> what its scores have cost, evaluations included: calls, seconds, cold starts."""
    validations: Sequence[Mapping[str, object]] = ()
    """Those that stand: policy version, success and score with their intervals, episodes."""
    best: Mapping[str, object] | None = None
    """The best of them: ``policy_version``, ``metric``, ``value`` with its interval; of equal ones
    the latest."""
    last: Mapping[str, object] | None = None
    """The last one, likewise."""
    model_policy_version: int | None = None
    """Whose weights ``model-trained/`` holds and ``after`` measures."""
    choice: str = ""
    """How that was chosen."""
    fell: str = ""
    """By how much the last validation fell below the best, if by more than its 95% interval."""
    envs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Each environment: see :mod:`rollart_core.runtime.env_reports`."""

    def as_dict(self) -> dict[str, object]:
        """Return it as plain JSON."""
        plain = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("before", "after", "greedy_before", "greedy_after")
        }
        for name in ("before", "after"):
            sampled = getattr(self, name)
            plain[f"success_{name}"] = sampled.success.as_dict() if sampled else None
            plain[f"score_{name}"] = sampled.score.as_dict() if sampled else None
            greedy = getattr(self, f"greedy_{name}")
            plain[f"greedy_{name}"] = greedy.as_dict() if greedy else None
        return plain


def score_gain(sampled: Sampled) -> EstimateDict | None:
    """Return the mean over tasks of score after minus score before, paired and clustered."""
    before, after = sampled
    if before is None or after is None:
        return None
    return paired_gain(before, after).as_dict()
