"""Common code of all backends with the wire protocol: split calls, send them, read answers.

    RewardCall -> pieces within the platform's limits -> send() each -> WireAnswer -> RewardAnswer

Takes: calls of the scorer. Gives: answers, with their cost. Never: retries (the scorer does), sends
a request that contains one of its own secrets, or puts a secret in a message.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from rollart_core.contracts.reward import (
    RewardAnswer,
    RewardBackend,
    RewardCall,
    RewardCost,
    RewardRef,
    RewardRequest,
    RewardResult,
)
from rollart_core.errors import BackendFailure, ConfigError, DeadlineFailure, RewardFailure
from rollart_plugins.serverless import wire
from rollart_plugins.serverless.config import RemoteConfig
from rollart_plugins.serverless.wire import Outcome, WireAnswer

HIDDEN = "[secret]"
PROBE_S = 30.0
"""Maximum time for the start of a function, if its calls have less."""
_HEAD_BYTES = 1024
"""Number of bytes reserved for the fields of a call other than its requests."""
_WAY_BACK_S = 0.5
_SECRET_CHARS = 8

ConfigT = TypeVar("ConfigT", bound=RemoteConfig)


@dataclass(frozen=True, slots=True)
class Sent:
    """The response for one piece."""

    body: bytes
    cold: bool | None = None
    """None: as in the function's answer."""
    billed_gb_s: float = 0.0
    memory_gb: float = 0.0
    """Memory of the function, if the platform does not report the billed amount."""
    origin: object = None
    """Who answered, where a backend wants to know it later."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some requests of a call that are sent together."""

    places: tuple[int, ...]
    """Their indexes in the call."""
    ids: tuple[str, ...]
    """Ids that their results repeat."""
    requests: tuple[bytes, ...]


class RemoteBackend(RewardBackend, Generic[ConfigT]):
    """Base class of the backends with the wire protocol.

    Args:
        reward: The reward. A function must serve the same reward with the same options.
        reward_range: Smallest and largest value that it can return.
        timeout_s: Maximum seconds for one call.
        options: The fields of ``config_model``.

    Raises:
        ConfigError: If something that the options name is missing.
    """

    name: ClassVar[str]
    """Name of the backend in messages."""
    config_model: type[ConfigT]
    """Model of its options."""

    def __init__(
        self,
        *,
        reward: RewardRef,
        reward_range: tuple[float, float],
        timeout_s: float,
        **options: object,
    ) -> None:
        self.config = self.config_model.model_validate(options)
        self.reward = reward
        self._range = reward_range
        self._timeout_s = timeout_s
        self._limits = self.config.limits
        self._slots = asyncio.Semaphore(self._limits.concurrent)
        self._secrets: tuple[str, ...] = ()
        for value in hidden_values(reward.options):
            self.hide(value)
        self._closed = False
        self.prepare()

    def prepare(self) -> None:
        """Create the state of the backend; called last in the constructor.

        Raises:
            ConfigError: If something that the options name is missing.
        """

    @abstractmethod
    async def send(self, body: bytes, *, key: str, deadline_s: float, weight: int) -> Sent:
        """Send one call, and return the response.

        Args:
            body: The call.
            key: Its idempotency key.
            deadline_s: Seconds after which it is cancelled.
            weight: Number of its requests.

        Raises:
            BackendFailure: If there is no response.
        """

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score each request; a group reward receives one whole group.

        Raises:
            RewardFailure: If one of them cannot be scored.
            DeadlineFailure: If scoring took too long.
        """
        if self._closed:
            raise self._is_closed()
        if not requests:
            return []
        key, group = uuid.uuid4().hex, self.reward.group
        answer = await self.invoke(RewardCall(tuple(requests), key, self._timeout_s, group))
        results = []
        for result in answer.results:
            if not isinstance(result, RewardResult):
                raise result
            results.append(result)
        return results

    async def invoke(self, call: RewardCall) -> RewardAnswer:
        """Answer a call, in as many pieces as necessary.

        Raises:
            BackendFailure: If no request could be answered.
            DeadlineFailure: If all requests took too long.
        """
        if self._closed:
            raise self._is_closed()
        results: dict[int, Outcome] = {}
        pieces = list(self._packed(call, results))
        answers = await asyncio.gather(
            *(self._ask(call, number, piece) for number, piece in enumerate(pieces))
        )
        costs = [cost for _, cost in answers if cost is not None]
        for piece, (outcomes, _) in zip(pieces, answers, strict=True):
            results.update(zip(piece.places, outcomes, strict=True))
        ordered = tuple(results[place] for place in range(len(call.requests)))
        unasked = [r for r in ordered if isinstance(r, BackendFailure | DeadlineFailure)]
        if unasked and not costs and len(unasked) == len(ordered):
            raise unasked[0]
        return RewardAnswer(ordered, _sum(costs, len(pieces)))

    async def close(self) -> None:
        """Accept no more calls; can be called twice."""
        self._closed = True

    async def probe(self, hint: str = "") -> None:
        """Send a call without requests, to check the function.

        Args:
            hint: How to fix it if there is no response.

        Raises:
            ConfigError: If the function is not reachable, rejects the call, or serves another
                reward.
        """
        key = uuid.uuid4().hex
        deadline_s = max(self._timeout_s, PROBE_S)
        body = wire.call_bytes(self.reward, [], group=False, key=key, deadline_s=deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                sent = await self.send(body, key=key, deadline_s=deadline_s, weight=0)
            wire.read_answer(sent.body, key, (), self._range)
        except (BackendFailure, TimeoutError) as e:
            why = self.clean(str(e)) or f"no answer within {deadline_s:g} s"
            more = f"; {hint}" if hint else ""
            raise ConfigError(f"reward {self.reward.id} on {self.name}: {why}{more}") from e

    def noted(self, sent: Sent, answer: WireAnswer) -> None:
        """Inspect an answer; by default, do nothing."""

    def piece_of(self, num_requests: int) -> int:
        """Return how many of a call's requests can be sent together."""
        return self._limits.num_requests

    # For subclasses

    def secret(self, variable: str) -> str:
        """Return the value of an environment variable, and exclude it from payloads and messages.

        Raises:
            ConfigError: If it is not set.
        """
        value = os.environ.get(variable, "")
        if not value:
            raise ConfigError(f"{self.name}: the environment variable {variable} is not set")
        self.hide(value)
        return value

    def hide(self, value: str) -> None:
        """Exclude a secret from payloads and messages; short values (`none`) are not secrets."""
        if len(value) >= _SECRET_CHARS:
            self._secrets = (*self._secrets, value)

    def clean(self, text: str) -> str:
        """Return a text with the secrets replaced."""
        for value in self._secrets:
            text = text.replace(value, HIDDEN)
        return text

    # Internal

    def _clean_failure(self, failure: RewardFailure | DeadlineFailure) -> None:
        failure.args = (self.clean(str(failure)),)
        failure.detail = self.clean(failure.detail)

    def _packed(self, call: RewardCall, failed: dict[int, Outcome]) -> Iterable[_Piece]:
        """Yield pieces within the limits; requests that are too large fail individually."""
        encoded: dict[int, bytes] = {}
        for place, request in enumerate(call.requests):
            try:
                encoded[place] = self._encoded(request)
            except RewardFailure as e:
                failed[place] = e
        if call.group:
            yield from self._whole(call, encoded, failed)
            return
        places: list[int] = []
        most = self.piece_of(len(encoded))
        limit, used = self._limits.request_bytes - _HEAD_BYTES, 0
        for place, body in encoded.items():
            if places and (used + len(body) > limit or len(places) >= most):
                yield self._piece(call, encoded, places)
                places, used = [], 0
            places.append(place)
            used += len(body) + 1
        if places:
            yield self._piece(call, encoded, places)

    def _piece(self, call: RewardCall, encoded: dict[int, bytes], places: list[int]) -> _Piece:
        ids = tuple(wire.request_id(call.requests[place]) for place in places)
        return _Piece(tuple(places), ids, tuple(encoded[place] for place in places))

    def _whole(
        self, call: RewardCall, encoded: dict[int, bytes], failed: dict[int, Outcome]
    ) -> Iterable[_Piece]:
        num_bytes = sum(map(len, encoded.values()))
        if failed:
            why = next(iter(failed.values()))
        elif num_bytes > self._limits.request_bytes - _HEAD_BYTES:
            why = self._too_large("the group", num_bytes)
        else:
            yield self._piece(call, encoded, list(encoded))
            return
        failed.update(dict.fromkeys(range(len(call.requests)), why))

    def _encoded(self, request: RewardRequest) -> bytes:
        try:
            body = wire.request_bytes(request)
        except ValueError as e:
            raise RewardFailure(f"a request for a reward is not valid JSON: {e}") from e
        if len(body) > self._limits.request_bytes - _HEAD_BYTES:
            raise self._too_large("a request", len(body))
        for value in self._secrets:
            if json.dumps(value)[1:-1].encode() in body:
                message = f"{self.name} does not send a request that contains its own token or key"
                raise BackendFailure(message, again=False)
        return body

    def _too_large(self, what: str, num_bytes: int) -> BackendFailure:
        most = self._limits.request_bytes
        message = (
            f"{what} of {num_bytes / 1e6:.1f} MB: the limit of {self.name} is {most / 1e6:.1f} MB"
        )
        return BackendFailure(message, again=False)

    async def _ask(
        self, call: RewardCall, number: int, piece: _Piece
    ) -> tuple[tuple[Outcome, ...], RewardCost | None]:
        """Return the results of a piece and their cost; the cost is None without an answer."""
        deadline_s = min(call.deadline_s, self._timeout_s)
        until_s = asyncio.get_running_loop().time() + deadline_s
        key, weight = f"{call.idempotency_key}.{number}", len(piece.places)
        try:
            async with asyncio.timeout(deadline_s), self._slots:
                left_s = max(0.001, until_s - asyncio.get_running_loop().time())
                # The function answers before this timeout, so that only a hanging request fails.
                answers_in_s = left_s - min(_WAY_BACK_S, left_s / 5)
                body = wire.call_bytes(
                    self.reward, piece.requests, group=call.group, key=key, deadline_s=answers_in_s
                )
                sent = await self.send(body, key=key, deadline_s=left_s, weight=weight)
            return self._results_of(sent, key, piece)
        except TimeoutError:
            message = f"{self.name} did not answer within {deadline_s:g} s"
            late = DeadlineFailure(message, boundary="reward.score")
            return (late,) * weight, None
        except BackendFailure as e:
            self._clean_failure(e)
            return (e,) * weight, None

    def _results_of(
        self, sent: Sent, key: str, piece: _Piece
    ) -> tuple[tuple[Outcome, ...], RewardCost]:
        """Return the results in a response, and their cost.

        Raises:
            BackendFailure: If it is not an answer to this call.
        """
        if len(sent.body) > self._limits.answer_bytes:
            raise BackendFailure(f"its answer has {len(sent.body)} bytes, above the limit")
        answer = wire.read_answer(sent.body, key, piece.ids, self._range)
        self.noted(sent, answer)
        for result in answer.results:
            if not isinstance(result, RewardResult):
                self._clean_failure(result)
        billed = sent.billed_gb_s or sent.memory_gb * answer.run_s
        cold = answer.cold if sent.cold is None else sent.cold
        return answer.results, RewardCost(1, cold, billed, answer.run_s)

    def _is_closed(self) -> BackendFailure:
        return BackendFailure("the reward backend is closed", again=False)


def _sum(costs: Sequence[RewardCost], num_sent: int) -> RewardCost:
    if len(costs) == 1 and num_sent == 1:
        return costs[0]
    return RewardCost(
        num_invocations=num_sent,
        cold=any(cost.cold for cost in costs) if costs else None,
        billed_gb_s=sum(cost.billed_gb_s for cost in costs),
        run_s=max((cost.run_s or 0.0 for cost in costs), default=None),
    )


def hidden_values(options: Mapping[str, object]) -> list[str]:
    """Return the values of the environment variables that a reward's options name (``*_env``)."""
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            found += hidden_values(value)
        elif name.endswith("_env") and isinstance(value, str) and os.environ.get(value):
            found.append(os.environ[value])
    return found
