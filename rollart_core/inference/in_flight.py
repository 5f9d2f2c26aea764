"""``rollout.in_flight: restart``: a turn that new weights come under is generated again with them.

    generate ........ swap ............ answer       the tokens before the swap are dropped; turns
        prompt, a b c |  prompt, x y z  -> x y z     that had ended before stay as they are

Takes: any engine. Gives: the same engine, whose answers are each of one policy version. Never:
counts a restart as a failure: the caller only waits longer, within its own deadline.

It stands in the engine's own process, around the plugin, so that nobody else need know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollart_core.contracts.inference import (
    EngineStats,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    WeightSwap,
)


class RestartInFlight(InferenceEngine):
    """An engine that begins turns again when its weights change.

    Args:
        engine: The one that generates.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._in_flight: set[str] = set()
        self._overtaken: set[str] = set()
        self._num_restarted = self._num_dropped_tokens = 0

    async def start(self) -> None:
        """Start the engine."""
        await self._engine.start()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn; again from its beginning while weights change under it."""
        while True:
            self._in_flight.add(request.request_id)
            try:
                result = await self._engine.generate(request)
            finally:
                self._in_flight.discard(request.request_id)
                overtaken = request.request_id in self._overtaken
                self._overtaken.discard(request.request_id)
            is_mixed = len({span.policy_version for span in result.spans}) > 1
            if not (is_mixed or (overtaken and result.finish_reason == "abort")):
                return result
            self._num_restarted += 1
            self._num_dropped_tokens += len(result.token_ids)

    async def load_weights(self, policy_version: int) -> WeightSwap:
        """Swap, then end what was in flight; ``generate`` begins it again."""
        swap = await self._engine.load_weights(policy_version)
        overtaken = set(self._in_flight)
        self._overtaken |= overtaken
        await self._engine.abort(sorted(overtaken))
        return replace(swap, num_restarted=len(overtaken))

    async def pause(self) -> None:
        """Stop generating at the next token."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Go on after ``pause``."""
        await self._engine.resume()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests for good."""
        self._overtaken.difference_update(request_ids)
        await self._engine.abort(request_ids)

    async def release(self, session_id: str) -> None:
        """Forget a session."""
        await self._engine.release(session_id)

    async def stats(self) -> EngineStats:
        """Return those of the engine, with what was begun again."""
        stats = await self._engine.stats()
        more = {
            "restarted": float(self._num_restarted),
            "dropped_tokens": float(self._num_dropped_tokens),
        }
        return replace(stats, extra={**stats.extra, **more})

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()
