"""How far a run's inference logprobs are from the trainer's, by the weights behind each token.

The trajectories come from the run directory, the weights of every version from a copy of its disk
channel, the trainer's logprobs from the trainer's own policy with those weights.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollart_core.scheduling.observer import NobodyWatches


class WeightKeeper(NobodyWatches):
    """Copies the weights of all versions before the run removes them; needs ``weights: disk``."""

    def __init__(self, copy: Path) -> None:
        self.copy = copy

    def phase(self, name: str, detail: str = "") -> None:
        if name == "save":
            (found,) = Path("/dev/shm").glob(f"rollart-run-{os.getpid()}-*/weights")
            shutil.copytree(found, self.copy)


@dataclass(slots=True)
class Mismatch:
    """Absolute differences of logprobs, one a token."""

    one_version: list[float] = field(default_factory=list)
    """Of trajectories wholly of one version."""
    crossing: list[float] = field(default_factory=list)
    """Of those that weights came under, each token by the version of its span."""
    num_one_version: int = 0
    num_crossing: int = 0
    num_crossing_turns: int = 0
    versions: set[int] = field(default_factory=set)

    def summary(self) -> Mapping[str, float]:
        return {
            "trajectories of one version": self.num_one_version,
            "mean": float(np.mean(self.one_version)),
            "max": float(np.max(self.one_version)),
            "trajectories that cross": self.num_crossing,
            "turns that cross": self.num_crossing_turns,
            "mean of those": float(np.mean(self.crossing)) if self.crossing else 0.0,
            "max of those": float(np.max(self.crossing)) if self.crossing else 0.0,
            "versions": len(self.versions),
        }


def measure(run_dir: Path, weights: Path, scratch: Path, temperature: float = 1.0) -> Mismatch:
    """Score every trajectory of a finished run again."""
    from rollart_core.store.journal_reader import read_trajectories

    rows = defaultdict(list)
    found = Mismatch()
    for trajectory in read_trajectories(run_dir):
        versions = {int(v) for s in trajectory.samples for v in s.policy_versions[s.loss_mask]}
        if not versions:
            continue
        found.versions |= versions
        found.num_one_version += len(versions) == 1
        found.num_crossing += len(versions) > 1
        for sample in trajectory.samples:
            turns = set(sample.turn_ids[sample.loss_mask].tolist())
            found.num_crossing_turns += sum(
                len(set(sample.policy_versions[sample.turn_ids == t].tolist())) > 1 for t in turns
            )
            for version in versions:
                rows[version].append((sample, len(versions) == 1))
    for version, samples in sorted(rows.items()):
        policy = _policy(run_dir / "model", weights, version, scratch, temperature)
        for sample, is_whole in samples:
            values = policy.logprobs([sample])[0].detach().numpy()
            mask = sample.loss_mask
            off = np.abs(values - sample.inference_logprobs[mask])
            off = off[sample.policy_versions[mask] == version]
            (found.one_version if is_whole else found.crossing).extend(off.tolist())
    return found


def _policy(model: Path, weights: Path, version: int, scratch: Path, temperature: float):
    """The trainer's policy with the weights of a version."""
    from safetensors.torch import save_file

    from rollart_algorithms.grpo import GRPO
    from rollart_core.config.run import Trainer as TrainerConfig
    from rollart_core.training.trainer import Trainer
    from rollart_plugins.weights.disk import DiskChannel

    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(model, scratch)
    channel = DiskChannel(str(weights))
    tensors = {name: tensor.clone() for name, tensor in channel.fetch(version)}
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    trainer = Trainer(
        TrainerConfig(), GRPO(), model_path=str(scratch), device="cpu", temperature=temperature
    )
    return trainer._policy
