"""The engines of inference servers: processes that are launched here, or servers already running.

    generate() -> HTTP -> the server batches, samples, and returns the version of each token
    load_weights(): fetch from the channel during generation -> pause -> send -> continue
    the watch:      the server has ended, or does not respond -> all calls raise EngineDied

Takes: token ids. Gives: token ids, logprobs and the policy_version of each span. A subclass is the
protocol of one kind of server.
Never: tokenizes, restarts a dead server (the owner of the engine does, with the newest weights), or
accepts weights of another run.

Every swap has a unique tag, ``<policy_version>/<number of the swap>``, which is the server's weight
version. If a trainer was rolled back and publishes a version again, it gets another tag. LoRA
adapters (``lora.sync: adapter``) have such tags as names: the server does not pause, and a request
ends with the adapter that it began with.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from rollart_core.config.training import LoRA
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
from rollart_core.rollout.asyncio_tasks import cancel_and_wait, keep_until_done
from rollart_plugins.engines.config import EngineServerConfig
from rollart_plugins.engines.incoming import Incoming, fetch, request_broadcast
from rollart_plugins.engines.requests import check_request
from rollart_plugins.engines.server_adapters import (
    AdapterTransport,
    adapter_name,
    check_adapters,
    empty_adapter,
    matrices,
)
from rollart_plugins.engines.server_answers import (
    Answer,
    KvOrigin,
    generate_result,
    of_adapter,
)
from rollart_plugins.engines.server_checks import (
    ModelFacts,
    ServerFacts,
    check_router,
    check_url,
    model_facts,
)
from rollart_plugins.engines.server_client import ServerClient, ServerRefusal
from rollart_plugins.engines.server_process import ServerProcess, free_port
from rollart_plugins.engines.weight_transport import WeightTransport

if TYPE_CHECKING:
    import torch

_ASK_AGAIN_S = 0.2
_ABORT_AGAIN_S = 0.5
_ABORTS = 60
_TAG = re.compile(r"-?\d+/\d+\.\d+")

SleepingPart = Literal["weights", "kv_cache"]
"""A part of a server's memory that is allocated again by itself; both servers use these names."""
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Flight:
    """One ``generate`` call that waits for the server."""

    rid: str
    """Request id on the server."""
    num_tokens: int
    """Length of its prompt."""
    num_swaps: int
    """Number of weight swaps before it was sent."""
    ended: asyncio.Future[None]
    """Done: the call returns as aborted, regardless of the server's answer."""
    adapter: str = ""
    """Tag of the adapter that the request names. Empty: none, or not sent yet."""


class ServerEngine(InferenceEngine):
    """One inference server, launched or already running, with health checks."""

    server: ClassVar[str]
    """The name of the server's program, for errors."""
    adapter_endpoints: ClassVar[tuple[str, str]]
    """The endpoints that load and unload a LoRA adapter."""
    adapter_flags: ClassVar[str]
    """What a running server must be started with for LoRA adapters; ``{rank}`` is their rank."""
    answers_in_pause: ClassVar[bool]
    """Whether a paused server answers aborts and health checks."""
    config_type: ClassVar[type[EngineServerConfig]]
    _config: EngineServerConfig
    _process: ServerProcess | None = None
    _client: ServerClient | None = None
    _transport: WeightTransport | None = None
    _adapters: AdapterTransport | None = None
    """The transport, if it is of adapters."""
    _watching: asyncio.Task[None] | None = None
    _paused = False
    _asleep = False

    def __init__(
        self,
        config: EngineServerConfig | None = None,
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
        lora: LoRA | None = None,
        sleeps: bool = False,
        **options: object,
    ) -> None:
        """Store the options; :meth:`start` launches the server or connects to it.

        Args:
            config: Options of the engine.
            model_path: A Hugging Face model folder, or a hub id.
            dtype: ``float32`` or ``bfloat16``.
            device: ``auto``, ``cpu`` or ``cuda``.
            channel: Channel from which :meth:`load_weights` fetches.
            deterministic: Rejected, because the samples of a server depend on the batch.
            kv_on_swap: Whether the cache is computed again after a weight swap.
            max_context_tokens: Maximum length of prompt and answer together.
            policy_version: Version of the server's initial weights.
            engine_index: Index of this engine in the run.
            has_own_devices: Whether this process sees the GPUs of its server and no others.
            lora: If given, the channel has only LoRA adapters, which the server loads as such.
            sleeps: Whether the server must be able to free the memory of its GPU.
            options: The fields of ``config`` as keyword arguments, as the registry passes them.

        Raises:
            ConfigError: If the engine does not support these options.
        """
        self._config = config or self.config_type.model_validate(options)
        if deterministic:
            raise ConfigError(
                f"deterministic: true requires engine: embedded, not {self.server.lower()}"
            )
        check_url(self._config, engine_index)
        self._model_path, self._dtype, self._device = model_path, dtype, device
        self._channel, self._index, self._sleeps = channel, engine_index, sleeps
        shift = self._config.first_gpu + engine_index * self._config.tp_size
        self._first_gpu = 0 if has_own_devices else shift
        self._keep_kv, self._max_tokens = kv_on_swap == "keep", max_context_tokens
        self._version, self._num_swaps = policy_version, 0
        self._versions: dict[str, int] = {}
        self._tag = ""  # of the weights in use; with adapters, of the base model
        self._lora, self._adapter = lora, ""
        self._facts = ModelFacts()
        self._flights: dict[str, _Flight] = {}
        self._rids, self._tags = itertools.count(), itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefill_tokens = self._cached_tokens = self._decode_tokens = 0
        self._busy_s, self._busy_since = 0.0, 0.0

    # The protocol of a kind of server

    @abstractmethod
    def _command_line(self, port: int, first_gpu: int | None) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the environment variables of a launched server.

        Args:
            port: Port on which it listens, on this machine only.
            first_gpu: Index of the first of its ``tp_size`` GPUs among those visible to this
                process. None: it has no GPU.
        """

    @abstractmethod
    async def _check(self, client: ServerClient) -> ServerFacts:
        """Check that the server is the right one, and return its properties.

        Raises:
            ConfigError: If it has another model, another tokenizer or too little limit, or cannot
                be used for training.
        """

    @abstractmethod
    def _new_transport(self, client: ServerClient, seen: ServerFacts) -> WeightTransport:
        """Return the transport of new weights to the server."""

    @abstractmethod
    async def _ask(
        self,
        client: ServerClient,
        request: GenerateRequest,
        rid: str,
        max_new_tokens: int,
        adapter: str,
    ) -> Answer:
        """Generate one turn on the server, with the adapter of this name if it is not empty."""

    @abstractmethod
    async def _ask_abort(self, client: ServerClient, rid: str) -> None:
        """End a request on the server; an unknown id is ignored."""

    @abstractmethod
    async def _ask_pause(self, client: ServerClient, *, keep_kv: bool) -> None:
        """Stop at the next token. If ``keep_kv`` is False, the cache is computed again later."""

    @abstractmethod
    async def _ask_continue(self, client: ServerClient) -> None:
        """Continue after a pause."""

    @abstractmethod
    async def _ask_sleep(self, client: ServerClient) -> None:
        """Free the memory of weights and KV cache on a paused server."""

    @abstractmethod
    async def _ask_wake(self, client: ServerClient, part: SleepingPart) -> None:
        """Allocate the memory of a part again, without its content."""

    @abstractmethod
    async def _end_swap(self, client: ServerClient) -> None:
        """End a swap that a dead engine left unfinished on a running server."""

    @abstractmethod
    async def _load(self, client: ServerClient) -> tuple[int, int, float]:
        """Return the numbers of running and waiting requests, and the share of the cache in use."""

    async def _is_alive(self, client: ServerClient) -> bool:
        """Return whether the server responds."""
        return await client.alive(limit_s=self._config.silent_s)

    # Start and end

    async def start(self) -> None:
        """Launch the server or connect to it, and check that it is the right one.

        Raises:
            ConfigError: If the server cannot be started or reached, or has another model.
            EngineDied: If the server ended during its start.
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
                url, key = config.url[self._index], self._api_key()
                self._client = ServerClient(url, key, self.server)
            else:
                self._client = self._launch()
            await self._until_up(self._client)
            if self._process is None:
                await check_router(self._client)
            seen = await self._check(self._client)
            if self._lora is None:
                self._transport = self._new_transport(self._client, seen)
            else:
                self._transport = self._adapters = await self._served_adapters(self._lora)
        except BaseException:
            await self.close()
            raise
        self._tag = seen.weight_version
        self._versions[self._tag] = self._version
        self._watching = asyncio.create_task(self._watch(self._client), name=f"watch {self.server}")

    async def _served_adapters(self, lora: LoRA) -> AdapterTransport:
        """Return the transport of adapters, after a test on the server.

        Raises:
            ConfigError: If the server does not load an adapter.
        """
        assert self._client is not None
        adapters = AdapterTransport(
            self._client,
            self.server.lower(),
            self._config.weights_folder,
            self.adapter_endpoints,
        )
        if self._process is None:
            await adapters.take_over()
        tensors = empty_adapter(self._facts.shapes, lora)
        if not tensors:
            return adapters  # the model is not a local folder: the first adapter is the test
        flags = "" if self._process else f"; start it with {self.adapter_flags}"
        try:
            async with asyncio.timeout(self._config.update_s):
                await adapters.test(tensors, self._new_tag(self._version))
        except (ServerRefusal, TimeoutError) as e:
            raise ConfigError(
                f"lora.sync: adapter: the {self.server} server does not load an adapter of rank "
                f"{lora.rank} for {', '.join(matrices(tensors))}: "
                f"{first_line(str(e)) or type(e).__name__}{flags.format(rank=lora.rank)}; or use "
                "lora.sync: merged"
            ) from e
        return adapters

    def _changed_base(self, weight_version: str) -> str | None:
        """Return what is wrong with a running server that has weights of an earlier run."""
        if self._lora is None or not _TAG.fullmatch(weight_version):
            return None
        return (
            f"has the weights {weight_version!r} of an earlier run, but adapters need those of the "
            "model: restart it, or use lora.sync: merged"
        )

    def _api_key(self) -> str:
        variable = self._config.api_key_variable
        if variable is not None and not os.environ.get(variable):
            raise ConfigError(f"engine.api_key_variable: {variable} is not set")
        return os.environ[variable] if variable else ""

    def _launch(self) -> ServerClient:
        on_cpu = self._device == "cpu" or (self._device == "auto" and not _has_cuda())
        port = free_port()
        argv, environment = self._command_line(port, None if on_cpu else self._first_gpu)
        self._process = ServerProcess(argv, environment)
        self._process.start()
        return ServerClient(f"http://127.0.0.1:{port}", server=self.server)

    async def _until_up(self, client: ServerClient) -> None:
        began = time.monotonic()
        if self._process is None:
            await self._revive(client)
        while not await client.alive(limit_s=self._config.silent_s):
            how = self._process.ended() if self._process else None
            if how is not None:
                error = self._process.last_error() if self._process else ""
                raise EngineDied(
                    f"the {self.server} server ended during its start ({how})"
                    f"{error and f': {error}'}; see the log"
                )
            if time.monotonic() - began > self._config.start_s:
                raise ConfigError(
                    f"engine: no {self.server} server answers at {client.url} after "
                    f"{self._config.start_s:g} s"
                )
            await asyncio.sleep(_ASK_AGAIN_S)
            if self._process is None:
                await self._revive(client)

    async def _revive(self, client: ServerClient) -> None:
        with contextlib.suppress(EngineDied, InferenceFailure, TimeoutError):
            await self._end_swap(client)

    async def _watch(self, client: ServerClient) -> None:
        """Detect the end of the server; a paused server may not respond, and is not checked."""
        looked = heard = time.monotonic()
        while not self._death.done():
            await asyncio.sleep(_ASK_AGAIN_S)
            how = self._process.ended() if self._process else None
            if how is not None:
                self._die(f"the {self.server} server ended ({how})")
            elif time.monotonic() - looked >= self._config.look_every_s:
                is_stopped = self._paused or self._asleep
                is_held = self._swap_lock.locked() or (is_stopped and not self.answers_in_pause)
                if is_held or await self._is_alive(client):
                    heard = time.monotonic()
                elif time.monotonic() - heard >= self._config.silent_s:
                    self._die(f"the {self.server} server at {client.url} does not answer any more")
                looked = time.monotonic()

    def _die(self, why: str) -> None:
        if not self._death.done():
            self._death.set_result(why)
            if self._process is not None:
                self._process.kill()  # this process can be about to end too

    def _ready(self) -> ServerClient:
        if self._client is None or self._transport is None:
            raise InferenceFailure("the engine is not running", boundary="engine.generate")
        if self._death.done():
            raise self._died()
        return self._client

    def _died(self, boundary: str = "") -> EngineDied:
        return EngineDied(self._death.result(), boundary=boundary or self.server.lower())

    async def _or_death(
        self, work: Coroutine[Any, Any, T], ended: asyncio.Future[None] | None = None
    ) -> T | None:
        """Return the result of the work, or None if ``ended`` is done first.

        Raises:
            EngineDied: If the server has ended, or ends meanwhile.
        """
        task = asyncio.ensure_future(work)
        others: set[asyncio.Future[Any]] = {self._death} | ({ended} if ended else set())
        try:
            await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._death.done():
                raise self._died()
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
            EngineDied: If the server has ended, or ends meanwhile.
        """
        self._ready()
        if request.request_id in self._flights:
            raise InferenceFailure(f"request id {request.request_id!r} is already in flight")
        prompt = check_request(
            request, vocab_size=self._facts.vocab_size, max_tokens=self._max_tokens
        )
        most = min(request.max_new_tokens, self._max_tokens - len(prompt))
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rid = f"{request.request_id}~{next(self._rids)}"
        flight = _Flight(rid, len(prompt), self._num_swaps, ended)
        if not self._flights:
            self._busy_since = time.monotonic()
        self._flights[request.request_id] = flight
        try:
            answer = await self._or_death(self._answer(request, flight, most), ended)
            if answer is None:
                return GenerateResult([], [], (), "abort")
            return self._result(answer, flight)
        except asyncio.CancelledError:
            self._spawn(self._abort_at_server(flight.rid))
            raise
        finally:
            del self._flights[request.request_id]
            if not self._flights:
                self._busy_s += time.monotonic() - self._busy_since

    async def _answer(self, request: GenerateRequest, flight: _Flight, most: int) -> Answer:
        await self._open.wait()
        flight.adapter = self._adapter
        name = adapter_name(flight.adapter) if flight.adapter else ""
        answer = await self._ask(self._ready(), request, flight.rid, most, name)
        return of_adapter(answer, flight.adapter, self._tag) if flight.adapter else answer

    def _result(self, answer: Answer, flight: _Flight) -> GenerateResult:
        first: KvOrigin = "fresh"
        is_late = flight.num_swaps < self._num_swaps and len(answer.weights) == 1
        if self._keep_kv and (is_late or (answer.num_cached_tokens and flight.num_swaps > 1)):
            first = "kept"  # a part of the prompt's KV can be of older weights
        later: KvOrigin = "kept" if self._keep_kv else "recomputed"
        result = generate_result(answer, self._versions, (first, later))
        self._cached_tokens += answer.num_cached_tokens
        self._prefill_tokens += answer.num_computed_tokens
        self._decode_tokens += len(result.token_ids)
        return result

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; unknown ids are ignored.

        If a paused server returns nothing, its requests return without tokens. So do requests that
        are not sent yet.
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
        self._spawn(self._abort_at_server(flight.rid, when_open=not self.answers_in_pause))

    async def _abort_at_server(self, rid: str, *, when_open: bool = False) -> None:
        """Abort until the server answers, because it ignores ids that it has not received yet."""
        if when_open:
            await self._open.wait()
        for _ in range(_ABORTS):
            with contextlib.suppress(EngineDied, InferenceFailure, TimeoutError):
                await self._or_death(self._ask_abort(self._ready(), rid))
            if all(flight.rid != rid for flight in self._flights.values()):
                return
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def release(self, session_id: str) -> None:
        """Do nothing: the server's prefix cache evicts the least recently used entries."""

    # Weights

    async def load_weights(self, policy_version: int) -> WeightSwap:
        """See :meth:`InferenceEngine.load_weights`.

        Raises:
            LookupError: If the channel has neither this version nor a newer one.
            ValueError: If the tensors do not fit the model, or are corrupt. The old weights stay in
                use.
            EngineDied: If the server rejects the weights (its state is then unknown), or they
                cannot be written.
        """
        client, transport, channel = self._ready(), self._transport, self._channel
        assert transport is not None
        if channel is None:
            raise InferenceFailure("the engine has no weight channel", boundary="load_weights")
        async with self._swap_lock:
            moved = -channel.moved_bytes
            try:
                incoming, ready = await asyncio.to_thread(
                    self._prepared, channel, transport, policy_version
                )
            except InferenceFailure as e:
                raise self._without_weights(str(e)) from e
            tag = self._new_tag(incoming.policy_version)
            self._versions[tag] = incoming.policy_version
            began = time.monotonic()
            # a running server's cache can be of any weights, so the first swap flushes it
            can_keep = self._keep_kv and self._num_swaps > 0 and not self._asleep
            keep = self._lora is not None or can_keep
            await self._swap(
                client, partial(self._send, client, transport, ready, tag, keep), keep_kv=keep
            )
            stall_s = time.monotonic() - began
            lost = 0 if keep else sum(f.num_tokens for f in self._flights.values())
            self._version = incoming.policy_version
            if self._adapters is None:
                self._tag = tag
            else:
                self._adapter = tag
                await self._unload_adapters(self._adapters)
            return WeightSwap(
                incoming.policy_version,
                stall_s,
                incoming.num_bytes,
                lost,
                fetch_s=incoming.fetch_s,
                moved_bytes=moved + channel.moved_bytes,
            )

    async def _swap(
        self, client: ServerClient, send: Callable[[], Coroutine[Any, Any, None]], *, keep_kv: bool
    ) -> None:
        """Pause, send, continue; a server that does not accept all of it counts as dead.

        Adapters are sent without a pause.
        """
        pauses = self._adapters is None
        try:
            async with asyncio.timeout(self._config.update_s):
                if pauses and not self._asleep:
                    await self._or_death(self._ask_pause(client, keep_kv=keep_kv))
                self._num_swaps += 1
                await self._or_death(send())
                if pauses and not self._paused:
                    await self._or_death(self._ask_continue(client))
                    self._open.set()
                self._asleep = False
        except (InferenceFailure, TimeoutError, RuntimeError) as e:
            late = f"the server did not load them within {self._config.update_s:g} s"
            raise self._without_weights(str(e) or late) from e

    async def _unload_adapters(self, adapters: AdapterTransport) -> None:
        """Unload the adapters of no request.

        SGLang does this after the last request that uses it, even an aborted one, so never in a
        pause, in which no request ends.
        """
        if not self._paused:
            used = {self._adapter, *(f.adapter for f in self._flights.values())}
            await adapters.keep_only(used)

    async def _send(
        self,
        client: ServerClient,
        transport: WeightTransport,
        ready: Any,
        tag: str,
        keep_kv: bool,
    ) -> None:
        """Send prepared weights to a paused server, and wake one that sleeps."""
        if self._asleep:
            await self._ask_wake(client, "weights")
        await transport.send(ready, tag, keep_kv=keep_kv)
        if self._asleep:
            await self._ask_wake(client, "kv_cache")

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache on the server's device.

        Raises:
            EngineDied: If the server does not do it.
        """
        client = self._ready()
        async with self._swap_lock:
            self._open.clear()
            try:
                async with asyncio.timeout(self._config.update_s):
                    await self._or_death(self._ask_pause(client, keep_kv=False))
                    await self._or_death(self._ask_sleep(client))
            except (InferenceFailure, TimeoutError) as e:
                late = f"no answer within {self._config.update_s:g} s"
                self._die(f"the server did not release its memory: {first_line(str(e)) or late}")
                raise self._died("sleep") from e
            self._asleep = True

    async def wake(self, policy_version: int) -> WeightSwap:
        """Load weights, and allocate the memory for them; see :meth:`load_weights`."""
        return await self.load_weights(policy_version)

    def _without_weights(self, why: str) -> EngineDied:
        self._die(f"new weights failed: {first_line(why)}")
        return self._died("load_weights")

    def _prepared(
        self,
        channel: WeightChannel,
        transport: WeightTransport,
        policy_version: int,
    ) -> tuple[Incoming, Any]:
        """Fetch weights, and prepare each tensor for the transport as it arrives; in a thread."""
        if transport.num_ranks:
            incoming = request_broadcast(channel, policy_version, transport.num_ranks)
            if incoming is not None:
                assert incoming.broadcast is not None
                rows = [row for bucket in incoming.broadcast.buckets for row in bucket]
                self._facts.check_fit({name: shape for name, _, shape in rows})
                return incoming, incoming.broadcast
        ready: list[Any] = []

        def stage(tensors: Iterable[tuple[str, torch.Tensor]], files: Sequence[Path] | None) -> int:
            shapes: dict[str, tuple[int, ...]] = {}
            num_bytes = 0

            def seen() -> Iterator[tuple[str, torch.Tensor]]:
                nonlocal num_bytes
                for name, tensor in tensors:
                    shapes[name] = tuple(tensor.shape)
                    num_bytes += tensor.nbytes
                    yield name, tensor
                if self._lora is None:
                    self._facts.check_fit(shapes)
                else:
                    check_adapters(shapes, self._facts.shapes)

            # a server of another user may not read the channel's folder
            is_ours = self._process is not None
            ready[:] = [transport.prepare(seen(), files if is_ours else None)]
            return num_bytes

        return fetch(channel, policy_version, stage), ready[0]

    def _first_tag(self) -> str:
        """Return a tag of the initial weights; below adapters, it never names changed weights."""
        return ("base/" if self._lora else "") + self._new_tag(self._version)

    def _new_tag(self, policy_version: int) -> str:
        """Return a new tag; they match :data:`_TAG`."""
        return f"{policy_version}/{os.getpid()}.{next(self._tags)}"

    async def pause(self) -> None:
        """Stop generating at the next token; requests in flight wait."""
        self._paused = True
        self._open.clear()
        await self._or_death(self._ask_pause(self._ready(), keep_kv=True))

    async def resume(self) -> None:
        """Continue after ``pause``."""
        self._paused = False
        await self._or_death(self._ask_continue(self._ready()))
        self._open.set()

    # Statistics

    async def stats(self) -> EngineStats:
        """Return the counters of this process, and the gauges of the server.

        Raises:
            EngineDied: If the server has ended.
        """
        load = await self._or_death(self._load(self._ready()))
        assert load is not None
        running, waiting, kv_used = load
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
        """Stop the server if it was launched here; requests in flight fail. Can be called twice."""
        client, self._client = self._client, None
        if self._channel is not None:
            self._channel.close()
        if client is None and self._process is None:
            return
        if not self._death.done():
            self._death.set_result("the engine was closed")
        await cancel_and_wait(*self._tasks, self._watching)
        if self._transport is not None and self._process is None:
            await self._transport.leave()  # a running server continues without this engine
        if client is not None:
            await client.close()
        if self._process is not None:
            await self._process.close()
        if self._transport is not None:
            await asyncio.to_thread(self._transport.close)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        keep_until_done(asyncio.ensure_future(work), self._tasks)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
