"""Where the time of an update goes: seconds by phase, measured by the device.

Takes: the end of each phase. Gives: the sum of the seconds of each phase. Never: makes the host
wait for the device before the sums are asked for.
"""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch


class PhaseClock:
    """Sums the time between the ends of phases, which may repeat.

    On a GPU, kernels run after the host has started them. Therefore it records CUDA events.

    Args:
        device: The device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._ends: list[tuple[str, Any]] = [("", self._now())]

    def end(self, phase: str) -> None:
        """End a phase, which began at the end of the one before, or when the clock was created."""
        self._ends.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Return ``{"PHASE_s": seconds}``."""
        sums = defaultdict[str, float](float)
        for (_, began), (phase, ended) in pairwise(self._ends):
            sums[f"{phase}_s"] += self._between(began, ended)
        return dict(sums)

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        if not self._is_cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
