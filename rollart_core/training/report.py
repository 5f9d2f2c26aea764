"""What the trainer says of one optimizer update; free of torch, so that any process can read it.

Takes: nothing. Gives: a record that travels between processes. Never: holds a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainStepReport:
    """One optimizer update."""

    train_step: int
    """Updates taken so far, over the whole run, this one among them if it was taken."""
    policy_version: int
    """Version of the weights it started from."""
    metrics: Mapping[str, float]
    """Means over loss tokens unless the name says otherwise."""
