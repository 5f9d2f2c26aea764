"""The trainer's report of one optimizer update, without torch, so that any process can read it.

Takes: nothing. Gives: a record that is sent between processes. Never: contains a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainStepReport:
    """The report of one optimizer update."""

    train_step: int
    """Number of applied updates in the whole run, including this one if it was applied."""
    policy_version: int
    """Version of the weights before the update."""
    metrics: Mapping[str, float]
    """Means over loss tokens, unless the name indicates otherwise."""
