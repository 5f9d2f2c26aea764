"""The SGLang engine: a server of its own beside this process, or one that runs already.

    generate() -> HTTP /generate -> the server batches, samples, says which weights sampled what
    load_weights(): fetch from the channel while tokens are generated -> pause -> send -> continue
    the watch:      the server has ended, or answers no more -> everything raises EngineDied

Takes: token ids. Gives: token ids, logprobs and the policy_version of each span. Never: tokenizes,
starts a dead server again by itself (whoever holds the engine does, with the newest weights), or
lets weights through that came from somebody else.

Every swap has a tag of its own, ``<policy_version>/<number of the swap>``, which the server calls
its weight version: a version that is published again, by a trainer that was taken back, is another
one to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rollart_core.contracts.inference import (
    EngineStats,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    KvOnSwap,
    WeightSwap,
)
from rollart_core.contracts.weights import WeightChannel
from rollart_core.errors import ConfigError, EngineDied, InferenceFailure, first_line
from rollart_plugins.engines import sglang_dialect as dialect
from rollart_plugins.engines.config import SGLangConfig
from rollart_plugins.engines.hub_names import as_in_files
from rollart_plugins.engines.incoming import Incoming, fetch
from rollart_plugins.engines.requests import check_request
from rollart_plugins.engines.sglang_checks import ModelFacts, Needs, check_server, model_facts
from rollart_plugins.engines.sglang_client import SGLangClient
from rollart_plugins.engines.sglang_server import (
    SGLangServer,
    free_port,
    launch_argv,
    launch_environment,
)
from rollart_plugins.engines.sglang_weights import WeightTransport, new_transport

if TYPE_CHECKING:
    import torch

_ASK_AGAIN_S = 0.2
_ABORT_AGAIN_S = 0.5
_ABORTS = 60

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Flight:
    """One ``generate`` that waits for the server."""

    rid: str
    """What the server calls it."""
    num_tokens: int
    """Of its prompt."""
    num_swaps: int
    """Of weights, before it was sent."""
    ended: asyncio.Future[None]
    """Done: its caller is to be told that it was aborted, whatever the server says."""


class SGLangEngine(InferenceEngine):
    """One SGLang server, launched and watched, or attached to."""

    def __init__(
        self,
        config: SGLangConfig | None = None,
        *,
        model_path: str,
        dtype: str = "float32",
        device: str = "auto",
        channel: WeightChannel | None = None,
        deterministic: bool = False,
        kv_on_swap: KvOnSwap = "recompute",
        max_context_tokens: int = 2048,
        policy_version: int = 0,
        engine_index: int = 0,
        has_own_devices: bool = False,
        **options: object,
    ) -> None:
        """Take note of what to run; :meth:`start` brings the server up.

        Args:
            config: The engine's own options.
            model_path: A Hugging Face model folder, or a hub id.
            dtype: ``float32`` or ``bfloat16``.
            device: ``auto``, ``cpu`` or ``cuda``.
            channel: Where :meth:`load_weights` fetches from.
            deterministic: Refused: what SGLang samples depends on what it is batched with.
            kv_on_swap: Whether the cache is computed again after a weight swap.
            max_context_tokens: Longest prompt and answer together.
            policy_version: What the server's first weights are called.
            engine_index: Which of the run's engines this is.
            has_own_devices: Whether this process sees the GPUs of its server and no others.
            options: The fields of ``config`` one by one, as the registry gives them.

        Raises:
            ConfigError: When it cannot run like this.
        """
        self._config = config or SGLangConfig.model_validate(options)
        if deterministic:
            raise ConfigError(
                "deterministic: true needs engine: embedded; SGLang's sampling is not"
            )
        _check_url(self._config, engine_index)
        self._model_path, self._dtype, self._device = model_path, dtype, device
        self._channel, self._index = channel, engine_index
        self._first_gpu = (
            0 if has_own_devices else self._config.first_gpu + engine_index * self._config.tp_size
        )
        self._keep_kv, self._max_tokens = kv_on_swap == "keep", max_context_tokens
        self._version, self._num_swaps = policy_version, 0
        self._versions: dict[str, int] = {}
        self._facts = ModelFacts()
        self._server: SGLangServer | None = None
        self._client: SGLangClient | None = None
        self._road: WeightTransport | None = None
        self._watching: asyncio.Task[None] | None = None
        self._paused = False
        self._flights: dict[str, _Flight] = {}
        self._rids, self._tags = itertools.count(), itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefill_tokens = self._cached_tokens = self._decode_tokens = 0
        self._busy_s, self._busy_since = 0.0, 0.0

    # Life and death

    async def start(self) -> None:
        """Bring the server up, or find it, and make sure that it is the right one.

        Raises:
            ConfigError: When it cannot be, or answers for another model.
            EngineDied: When it ended over its start.
        """
        if self._client is not None:
            return
        loop = asyncio.get_running_loop()
        self._death: asyncio.Future[str] = loop.create_future()
        self._swap_lock, self._open = asyncio.Lock(), asyncio.Event()
        self._open.set()
        self._facts = await asyncio.to_thread(model_facts, self._model_path)
        config = self._config
        try:
            if config.url:
                self._client = SGLangClient(config.url[self._index], self._api_key())
            else:
                self._client = self._launch()
            await self._until_up(self._client)
            needs = Needs(self._max_tokens, self._keep_kv)
            launched = self._server is not None
            seen = await check_server(self._client, self._facts, needs, launched=launched)
            self._road = new_transport(config, self._client, seen, self._model_path)
        except BaseException:
            await self.close()
            raise
        self._versions[seen.weight_version] = self._version
        self._watching = asyncio.create_task(self._watch(self._client), name="watch SGLang")

    def _api_key(self) -> str:
        variable = self._config.api_key_variable
        if variable is not None and not os.environ.get(variable):
            raise ConfigError(f"engine.api_key_variable: {variable} is not set")
        return os.environ[variable] if variable else ""

    def _launch(self) -> SGLangClient:
        on_cpu = self._device == "cpu" or (self._device == "auto" and not _has_cuda())
        model = {
            "model_path": self._model_path,
            "dtype": self._dtype,
            "context_length": str(self._max_tokens + dialect.CONTEXT_MARGIN),
            "weight_version": self._tag(self._version),
        }
        if self._keep_kv:
            # a step in flight would give its tokens to the weights that come while it is
            model["disable_overlap_schedule"] = True  # type: ignore[assignment]
        port = free_port()
        first_gpu = None if on_cpu else self._first_gpu
        argv = launch_argv(self._config, port=port, first_gpu=first_gpu, model=model)
        self._server = SGLangServer(argv, launch_environment(self._config, on_cpu=on_cpu))
        self._server.start()
        return SGLangClient(f"http://127.0.0.1:{port}")

    async def _until_up(self, client: SGLangClient) -> None:
        began = time.monotonic()
        if self._server is None:
            await self._revive(client)
        while not await client.alive(limit_s=self._config.silent_s):
            how = self._server.ended() if self._server else None
            if how is not None:
                raise EngineDied(f"the SGLang server ended over its start ({how}); see the log")
            if time.monotonic() - began > self._config.start_s:
                raise ConfigError(
                    f"engine: no SGLang server answers at {client.url} after "
                    f"{self._config.start_s:g} s"
                )
            await asyncio.sleep(_ASK_AGAIN_S)
            if self._server is None:
                await self._revive(client)

    async def _revive(self, client: SGLangClient) -> None:
        """End what an engine that died in mid-swap has left a running server in."""
        for path in (dialect.END_UPDATE, dialect.CONTINUE):
            with contextlib.suppress(EngineDied, InferenceFailure, TimeoutError):
                await client.post(path)

    async def _watch(self, client: SGLangClient) -> None:
        """Find out that the server is gone; a paused one gives no sign of life, and is let be."""
        looked = heard = time.monotonic()
        while not self._death.done():
            await asyncio.sleep(_ASK_AGAIN_S)
            how = self._server.ended() if self._server else None
            if how is not None:
                self._die(f"the SGLang server ended ({how})")
            elif time.monotonic() - looked >= self._config.look_every_s:
                is_held = self._paused or self._swap_lock.locked()
                if is_held or await client.alive(limit_s=self._config.silent_s):
                    heard = time.monotonic()
                elif time.monotonic() - heard >= self._config.silent_s:
                    self._die(f"the SGLang server at {client.url} does not answer any more")
                looked = time.monotonic()

    def _die(self, why: str) -> None:
        if not self._death.done():
            self._death.set_result(why)
            if self._server is not None:
                self._server.kill()  # this process may be about to end too

    def _ready(self) -> SGLangClient:
        if self._client is None or self._road is None:
            raise InferenceFailure("the engine is not running", boundary="engine.generate")
        if self._death.done():
            raise EngineDied(self._death.result(), boundary="sglang")
        return self._client

    async def _or_death(
        self, work: Coroutine[Any, Any, T], ended: asyncio.Future[None] | None = None
    ) -> T | None:
        """Return what the work gives, or None when ``ended`` comes first.

        Raises:
            EngineDied: When the server is gone, before or meanwhile.
        """
        task = asyncio.ensure_future(work)
        others: set[asyncio.Future[Any]] = {self._death} | ({ended} if ended else set())
        try:
            await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._death.done():
                raise EngineDied(self._death.result(), boundary="sglang")
            return None
        except EngineDied as e:
            self._die(first_line(str(e)))
            raise
        finally:
            task.cancel()

    # Requests

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See :meth:`InferenceEngine.generate`.

        Raises:
            EngineDied: When the server is gone, before or meanwhile.
        """
        self._ready()
        if request.request_id in self._flights:
            raise InferenceFailure(f"request id {request.request_id!r} is in flight already")
        prompt = check_request(
            request, vocab_size=self._facts.vocab_size, max_tokens=self._max_tokens
        )
        body = dialect.generate_body(request, f"{request.request_id}~{next(self._rids)}")
        params = body["sampling_params"]
        params["max_new_tokens"] = min(request.max_new_tokens, self._max_tokens - len(prompt))
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        flight = _Flight(body["rid"], len(prompt), self._num_swaps, ended)
        if not self._flights:
            self._busy_since = time.monotonic()
        self._flights[request.request_id] = flight
        try:
            answer = await self._or_death(self._answer(body), ended)
            if answer is None and ended.done():
                return GenerateResult([], [], (), "abort")
            return self._result(answer, flight)
        except asyncio.CancelledError:
            self._spawn(self._abort_at_server(flight.rid))
            raise
        finally:
            del self._flights[request.request_id]
            if not self._flights:
                self._busy_s += time.monotonic() - self._busy_since

    async def _answer(self, body: dialect.Json) -> Any:
        await self._open.wait()
        return await self._ready().post(dialect.GENERATE, body, limit_s=None)

    def _result(self, answer: Any, flight: _Flight) -> GenerateResult:
        computed, cached = dialect.num_read(answer)
        first: dialect.KvOrigin = "fresh"
        is_late = flight.num_swaps < self._num_swaps and dialect.num_spans(answer) == 1
        if self._keep_kv and (is_late or (cached and flight.num_swaps > 1)):
            first = "kept"  # at least part of what was read may be of older weights
        later: dialect.KvOrigin = "kept" if self._keep_kv else "recomputed"
        result = dialect.generate_result(answer, self._versions, (first, later))
        self._cached_tokens += cached
        self._prefill_tokens += computed
        self._decode_tokens += len(result.token_ids)
        return result

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; unknown ids are fine.

        A server that is paused gives nothing back: then they return without tokens.
        """
        flights = [self._flights[i] for i in request_ids if i in self._flights]
        if self._paused:
            for flight in flights:
                self._give_up(flight)
            return
        await asyncio.gather(*(self._abort_at_server(flight.rid) for flight in flights))

    def _give_up(self, flight: _Flight) -> None:
        if not flight.ended.done():
            flight.ended.set_result(None)
        self._spawn(self._abort_at_server(flight.rid, when_open=True))

    async def _abort_at_server(self, rid: str, *, when_open: bool = False) -> None:
        """Abort until the server has answered: it does not know what is still on its way to it."""
        if when_open:
            await self._open.wait()
        for _ in range(_ABORTS):
            with contextlib.suppress(EngineDied, InferenceFailure, TimeoutError):
                await self._or_death(self._ready().post(dialect.ABORT, {"rid": rid}))
            if all(flight.rid != rid for flight in self._flights.values()):
                return
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def release(self, session_id: str) -> None:
        """Do nothing: the server's prefix cache drops what was not used for longest."""

    # Weights

    async def load_weights(self, policy_version: int) -> WeightSwap:
        """See :meth:`InferenceEngine.load_weights`.

        Raises:
            LookupError: When the channel holds neither that version nor a newer one.
            ValueError: When the tensors do not fit the model, or are damaged; the old ones stay.
            EngineDied: When the server does not take them (nobody knows what it holds then), or
                they cannot be written where it would read them.
        """
        client, road, channel = self._ready(), self._road, self._channel
        assert road is not None
        if channel is None:
            raise InferenceFailure("the engine has no weight channel", boundary="load_weights")
        async with self._swap_lock:
            moved = -channel.moved_bytes
            try:
                incoming, ready = await asyncio.to_thread(
                    self._prepared, channel, road, policy_version
                )
            except InferenceFailure as e:
                raise self._without_weights(str(e)) from e
            tag = self._tag(incoming.policy_version)
            self._versions[tag] = incoming.policy_version
            began = time.monotonic()
            # of whose weights a running server's cache is nobody knows: the first swap empties it
            keep = self._keep_kv and self._num_swaps > 0
            await self._swap(client, partial(road.send, ready, tag, keep_kv=keep), keep_kv=keep)
            stall_s = time.monotonic() - began
            lost = 0 if keep else sum(f.num_tokens for f in self._flights.values())
            self._version = incoming.policy_version
            return WeightSwap(
                incoming.policy_version,
                stall_s,
                incoming.num_bytes,
                lost,
                fetch_s=incoming.fetch_s,
                moved_bytes=moved + channel.moved_bytes,
            )

    async def _swap(
        self, client: SGLangClient, send: Callable[[], Coroutine[Any, Any, None]], *, keep_kv: bool
    ) -> None:
        """Pause, send, go on; a server that does not take all of it is as good as dead."""
        mode = "in_place" if keep_kv else "retract"
        try:
            async with asyncio.timeout(self._config.update_s):
                await self._or_death(client.post(dialect.PAUSE, {"mode": mode}))
                self._num_swaps += 1
                await self._or_death(send())
                if not self._paused:
                    await self._or_death(client.post(dialect.CONTINUE))
        except (InferenceFailure, TimeoutError, RuntimeError) as e:
            late = f"it did not take them within {self._config.update_s:g} s"
            raise self._without_weights(str(e) or late) from e

    def _without_weights(self, why: str) -> EngineDied:
        self._die(f"new weights failed: {first_line(why)}")
        return EngineDied(self._death.result(), boundary="load_weights")

    def _prepared(
        self, channel: WeightChannel, road: WeightTransport, policy_version: int
    ) -> tuple[Incoming, Any]:
        """Fetch weights, and prepare each tensor for the transport as it comes; in a thread."""
        ready: list[Any] = []

        def stage(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
            shapes: dict[str, tuple[int, ...]] = {}
            num_bytes = 0

            def seen() -> Iterator[tuple[str, torch.Tensor]]:
                nonlocal num_bytes
                for name, tensor in as_in_files(tensors, self._facts.architectures):
                    shapes[name] = tuple(tensor.shape)
                    num_bytes += tensor.nbytes
                    yield name, tensor
                self._facts.check_fit(shapes)

            ready[:] = [road.prepare(seen())]
            return num_bytes

        return fetch(channel, policy_version, stage), ready[0]

    def _tag(self, policy_version: int) -> str:
        return f"{policy_version}/{os.getpid()}.{next(self._tags)}"

    async def pause(self) -> None:
        """Stop generating at the next token; requests in flight wait."""
        self._paused = True
        self._open.clear()
        await self._or_death(self._ready().post(dialect.PAUSE, {"mode": "in_place"}))

    async def resume(self) -> None:
        """Go on after ``pause``."""
        self._paused = False
        await self._or_death(self._ready().post(dialect.CONTINUE))
        self._open.set()

    # Facts

    async def stats(self) -> EngineStats:
        """Return counters of this side, and the server's own gauges.

        Raises:
            EngineDied: When the server is gone.
        """
        load = await self._or_death(self._ready().get(dialect.LOADS))
        running, waiting, kv_used = dialect.load_of(load)
        busy_s = self._busy_s + (time.monotonic() - self._busy_since if self._flights else 0.0)
        return EngineStats(
            policy_version=self._version,
            num_running=running,
            num_waiting=waiting,
            prefill_tokens=self._prefill_tokens,
            cached_tokens=self._cached_tokens,
            decode_tokens=self._decode_tokens,
            busy_s=busy_s,
            kv_used=kv_used,
            extra={"in_flight": float(len(self._flights)), "swaps": float(self._num_swaps)},
        )

    async def close(self) -> None:
        """End the server if it was launched here; requests in flight fail. May be called twice."""
        client, self._client = self._client, None
        if self._channel is not None:
            self._channel.close()
        if client is None and self._server is None:
            return
        if not self._death.done():
            self._death.set_result("the engine was closed")
        tasks = [*self._tasks, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._road is not None and self._server is None:
            await self._road.leave()  # a running server goes on without us
        if client is not None:
            await client.close()
        if self._server is not None:
            await self._server.close()
        if self._road is not None:
            await asyncio.to_thread(self._road.close)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _check_url(config: SGLangConfig, engine_index: int) -> None:
    """Raise unless a config with servers names one for this engine.

    Raises:
        ConfigError: It names too few.
    """
    if config.url and engine_index >= len(config.url):
        raise ConfigError(
            f"engine.url names {len(config.url)} servers, and this is engine "
            f"{engine_index + 1}: name one for each, or have fewer engines"
        )
