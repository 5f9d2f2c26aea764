"""Records of a diagnosis: findings with their evidence, and the config keys to change.

Takes: nothing. Gives: records, and the advice for each kind of finding. Never: reads a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

Kind = Literal[
    "collapse",
    "vanishing_signal",
    "staleness",
    "mismatch",
    "length_drift",
    "reward_hacking",
    "overfitting",
    "plateau",
    "starved_trainer",
    "starved_rollouts",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Advice:
    """A config key, and how to change it."""

    key: str
    suggestion: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a run."""

    kind: Kind
    severity: Literal["error", "warning"]
    """``error``: the last weights are worse than earlier ones, or learn from wrong numbers."""
    first_version: int
    """policy_version of the first batch that shows it."""
    last_version: int
    """policy_version of the last batch that shows it."""
    evidence: tuple[str, ...]
    """Sentences."""
    keys: tuple[Advice, ...]
    """Config keys to change, the most likely first."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The evidence for programs."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What happened in a run."""

    run_dir: str
    num_batches: int
    first_version: int | None
    last_version: int | None
    ended: str | None
    """Why the run ended; None if it is in progress, or was killed."""
    summary: tuple[str, ...]
    """General events, one sentence each."""
    findings: tuple[Finding, ...]
    """The most severe first."""
    num_needed: int
    """Minimum number of batches for findings."""
    not_checked: tuple[str, ...] = ()
    """Problems that the run has too few values to detect, one sentence each."""

    @property
    def too_short(self) -> bool:
        """True if there are too few batches for any finding."""
        return self.num_batches < self.num_needed

    def as_dict(self) -> dict[str, object]:
        """Return it as plain JSON."""
        return {**asdict(self), "too_short": self.too_short}


ADVICE: Mapping[Kind, tuple[Advice, ...]] = {
    "collapse": (
        Advice("trainer.lr", "lower it, three times or more"),
        Advice("trainer.max_kl", "set it, so that a step that moves the policy too far is undone"),
        Advice("trainer.clip", "clip by a running quantile, so that an outlier is skipped"),
        Advice("trainer.schedule", "let the learning rate fall towards the end"),
        Advice("checkpoint.keep_best", "keep the best weights by validation, not the last"),
        Advice("guard", "turn it on: it rolls back to the last good checkpoint"),
    ),
    "vanishing_signal": (
        Advice("rollout.equal_groups", "replace: batches then hold only groups with an advantage"),
        Advice("curriculum", "add it: tasks that are never or always solved come less often"),
        Advice("warm_start", "add it where no episode succeeds, or give a denser reward"),
        Advice("rollout.group_size", "raise it: larger groups differ more often"),
        Advice("algorithm.min_effective_groups", "set it, so that few groups make no large step"),
    ),
    "staleness": (
        Advice("max_staleness", "lower it"),
        Advice("on_stale", "wait: no finished group is then dropped"),
        Advice("trainer.lr", "lower it: the policy then moves less per version"),
        Advice("trainer.updates_per_batch", "lower it"),
        Advice("algorithm.importance_correction", "use one that truncates the weights"),
    ),
    "mismatch": (
        Advice("engine", "give it the precision, sampling and attention of the trainer"),
        Advice("trainer.autocast", "off, or the precision of the engine"),
        Advice("rollout.temperature", "1: engines may report logprobs before the temperature"),
        Advice("algorithm.importance_correction", "use one that truncates the weights"),
    ),
    "length_drift": (
        Advice("shaping.overlong", "add it: long episodes then cost reward"),
        Advice("algorithm.loss_aggregation", "use one whose weights do not depend on the length"),
        Advice("algorithm.mask_truncated", "true: truncated episodes are then not trained"),
        Advice("rollout.max_new_tokens", "set it to what a turn needs"),
        Advice("algorithm.kl_coef", "raise it: the policy then stays near the reference"),
    ),
    "reward_hacking": (
        Advice("reward", "read episodes (`rollart export`), and score the success itself"),
        Advice("algorithm.kl_coef", "raise it: the policy then stays near the reference"),
        Advice("checkpoint.keep_best", "validation/success: keep weights by what you want"),
        Advice("stop.when", "stop by validation/success"),
    ),
    "overfitting": (
        Advice("stop.when", "stop when validation/success no longer gains"),
        Advice("checkpoint.keep_best", "validation/success: keep the best weights by validation"),
        Advice("rollout.split", "train on more tasks"),
        Advice("trainer.weight_decay", "raise it"),
        Advice("algorithm.kl_coef", "raise it: the policy then stays near the reference"),
    ),
    "plateau": (
        Advice("algorithm.entropy_coef", "raise it, if the entropy is near 0"),
        Advice("trainer.lr", "raise it, if gradients and KL are small; lower it, if they jump"),
        Advice("curriculum", "add it, so that tasks of medium difficulty come more often"),
        Advice("stop.when", "stop when validation/success no longer gains"),
    ),
    "starved_trainer": (
        Advice("runtime.num_engines", "raise it: more engines"),
        Advice("rollout.max_concurrent", "raise it, if engines have free capacity"),
        Advice("rollout.redundant", "raise it, if a few slow episodes hold batches up"),
        Advice("max_staleness", "raise it (mode: async), so that rollouts overlap training"),
    ),
    "starved_rollouts": (
        Advice("runtime.num_trainer_ranks", "raise it: more trainer ranks"),
        Advice("trainer.max_tokens_per_microbatch", "raise it, if memory allows"),
        Advice("mode", "async: rollouts then continue while the trainer works"),
        Advice("runtime.num_engines", "lower it: fewer engines are enough"),
    ),
}
"""Config keys to change, the most likely first."""
