"""What weight swaps cost: for each batch in the journal, and over a run in its report.

Takes: the swaps of engines and the publications of the trainer. Gives: numbers by engine. Never:
mixes the stall of one engine with another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rollart_core.contracts.inference import WeightSwap
from rollart_core.contracts.weights import Publication


@dataclass(slots=True)
class EngineSwaps:
    """Of one engine."""

    num_swaps: int = 0
    stall_s: float = 0.0
    """How long it generated nothing because of them, together."""
    stall_s_max: float = 0.0
    fetch_s: float = 0.0
    num_bytes: int = 0
    moved_bytes: int = 0
    num_recomputed_tokens: int = 0
    num_restarted: int = 0
    """Generations that began again (``rollout.in_flight: restart``)."""

    def add(self, swap: WeightSwap) -> None:
        """Count one more."""
        self.num_swaps += 1
        self.stall_s += swap.stall_s
        self.stall_s_max = max(self.stall_s_max, swap.stall_s)
        self.fetch_s += swap.fetch_s
        self.num_bytes += swap.num_bytes
        self.moved_bytes += swap.moved_bytes
        self.num_recomputed_tokens += swap.num_recomputed_tokens
        self.num_restarted += swap.num_restarted


class SwapLedger:
    """The swaps of a run."""

    def __init__(self) -> None:
        self._new: list[WeightSwap] = []
        self._engines: dict[str, EngineSwaps] = {}

    def add(self, swaps: Sequence[WeightSwap]) -> None:
        """Take note of a swap of each engine."""
        self._new.extend(swaps)
        for swap in swaps:
            self._engines.setdefault(swap.engine or "engine", EngineSwaps()).add(swap)

    def batch_metrics(self, publication: Publication) -> dict[str, float]:
        """Return metrics of a publication, and of the swaps since this was last asked for."""
        swaps, self._new = self._new, []
        moved = publication.moved_bytes
        metrics = {
            "time/publish_s": publication.publish_s,
            "time/swap_stall_s": sum(s.stall_s for s in swaps),
            "weights/bytes": float(publication.num_bytes),
            "weights/moved_bytes": float(publication.num_bytes if moved is None else moved),
            "weights/restarted": float(sum(s.num_restarted for s in swaps)),
        }
        for swap in swaps:
            name = f"weights/{swap.engine or 'engine'}"
            metrics[f"{name}/stall_s"] = metrics.get(f"{name}/stall_s", 0.0) + swap.stall_s
            metrics[f"{name}/fetch_s"] = metrics.get(f"{name}/fetch_s", 0.0) + swap.fetch_s
            metrics[f"{name}/version"] = float(swap.policy_version)
        return metrics

    def begin_again(self) -> None:
        """Forget the swaps since the last batch: it was undone."""
        self._new.clear()

    def totals(self) -> dict[str, dict[str, float]]:
        """Return the sums of each engine."""
        return {name: asdict(engine) for name, engine in sorted(self._engines.items())}
