"""The base class of runtimes, which starts, connects, scales and stops the workers of a run.

    num_engines x engine, trainer rank(s), env workers, demonstrator: each a Worker with a role
                                                  |
                                    ``new_worker(role, index)`` of the runtime

Takes: a resolved run and a run directory. Gives: env workers, engines behind a router, a trainer.
Never: decides where a worker executes (subclasses do), sends an engine requests before it has the
newest weights, removes one without draining it, or depends on the training loop.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from rollart_core.config.base import PluginRef
from rollart_core.config.model import NewModel, RemoteModel
from rollart_core.config.resolve import Resolution, ResolvedPlugin, ResolvedRun
from rollart_core.config.validation.consistency import colocates, num_engines, trainer_section
from rollart_core.contracts.hardware import Placement, Pool
from rollart_core.contracts.inference import InferenceEngineSpec
from rollart_core.errors import PluginError, RollartError, UserError
from rollart_core.inference.router import Router
from rollart_core.inference.shared_devices import Devices, SharedDevices
from rollart_core.inference.teacher import TeacherEngines
from rollart_core.plugins import registry
from rollart_core.rollout.env_pool import EnvPool, EnvWorkerHandle
from rollart_core.runtime.elastic import ENGINES, ENV_WORKERS
from rollart_core.runtime.factories import ChannelArgs, EnvTasks, ModelArgs
from rollart_core.runtime.heartbeat import Heartbeat, Notify, nobody_listens
from rollart_core.runtime.records import StoreRecords, file_store
from rollart_core.runtime.remote import (
    START_LIMIT_S,
    RemoteEngine,
    RemoteWorker,
    RestartPolicy,
    Restarts,
    TrainerGroup,
)
from rollart_core.runtime.run_envs import by_env, env_ref
from rollart_core.runtime.scaling import ClusterLoad
from rollart_core.runtime.worker import Worker
from rollart_core.types import Sample, Task

T = TypeVar("T")
TakeSamples = Callable[[int], Awaitable[list[Sample]]]


class Reservations(Protocol):
    """Reserves the resources that workers need on a cluster."""

    async def reserve(self, role: str, index: int, pool: str | None) -> None:
        """Reserve a slot for one more worker; ``pool`` None: in the pool where it fits best.

        Raises:
            UserError: If no slot is free.
        """

    async def release_reservation(self, role: str, index: int) -> None:
        """Release the slot of a worker that has left for good."""


class EngineSet:
    """The inference engines of a run, which start together and can be scaled later.

    Args:
        new_engine: Returns the unstarted engine with an index.
        reservations: Reserves the slots of engines.
        load_limit_s: See :class:`rollart_core.inference.router.Router`.
        devices: See :class:`rollart_core.inference.router.Router`.
    """

    def __init__(
        self,
        new_engine: Callable[[int], RemoteEngine],
        reservations: Reservations,
        *,
        load_limit_s: float,
        devices: Devices = nullcontext,
    ) -> None:
        self._new_engine = new_engine
        self._reservations = reservations
        self._load_limit_s, self._devices = load_limit_s, devices
        self._next = 0
        self._engines: dict[int, RemoteEngine] = {}
        self._joining: set[RemoteEngine] = set()
        self._router: Router | None = None

    @property
    def started(self) -> bool:
        """True once the engines are up and have a router."""
        return self._router is not None

    @property
    def router(self) -> Router:
        """The router of the engines; only after ``start``."""
        assert self._router is not None
        return self._router

    @property
    def counts(self) -> Counter[str]:
        """The number of engines in each pool, without those that are lost for good."""
        return Counter(e.pool for e in self._engines.values() if e.health != "lost")

    def gauges(self) -> dict[str, float]:
        """Return the health and the load of the engines as metrics."""
        engine_states, counts = self.router.engine_states, self.router.counts
        num_open = sum(state.open for state in engine_states)
        return {
            "engines/num": len(engine_states),
            "engines/up": num_open,
            "engines/restarts": sum(e.num_restarts for e in self._engines.values()),
            "engines/sessions": sum(state.num_sessions for state in engine_states),
            "engines/waiting": sum(state.num_waiting for state in engine_states),
            "engines/kv_used": sum(state.kv_used for state in engine_states) / max(1, num_open),
            "router/moved": counts.num_moved,
            "router/stolen": counts.num_stolen,
            "router/recomputed_tokens": counts.recomputed_tokens,
        }

    async def start(self, count: int) -> None:
        """Start the initial engines concurrently."""
        self._engines = {index: self._new_engine(index) for index in range(count)}
        self._next = count
        await asyncio.gather(*(engine.start() for engine in self._engines.values()))
        self._router = Router(
            list(self._engines.values()), load_limit_s=self._load_limit_s, devices=self._devices
        )
        self._router.watch()

    async def resize(self, count: int, pool: str | None = None) -> None:
        """Scale to this number of engines, in one pool or in total.

        Raises:
            UserError: If no engine would be left, or no slot is free.
            Exception: The error of an engine that did not start; the engines that started stay.
        """
        elsewhere = self.counts.total() - self._count(pool)
        if elsewhere + count < 1:
            raise UserError(f"{pool or 'engines'}={count}: a run needs at least one engine")
        missing = count - self._count(pool)
        if missing > 0:
            joined = await asyncio.gather(
                *(self._add(pool) for _ in range(missing)), return_exceptions=True
            )
            for error in joined:
                if isinstance(error, BaseException):
                    raise error
        while self._count(pool) > count:
            await self._remove(self._last(pool))
        for index in [i for i, e in self._engines.items() if e.health == "lost"]:
            await self._remove(index)

    async def close(self) -> None:
        """Stop all engines."""
        if self._router is not None:
            await self._router.close()
        ending: Sequence[RemoteEngine] = [*self._engines.values(), *self._joining]
        await asyncio.gather(*(engine.close() for engine in ending), return_exceptions=True)

    def _count(self, pool: str | None) -> int:
        return self.counts.total() if pool is None else self.counts[pool]

    def _last(self, pool: str | None) -> int:
        """Return the index of the engine to remove: one that is down, else the newest.

        A pool, and so a class of engines, keeps its last engine while another pool has several.
        """
        there = [i for i, e in self._engines.items() if pool in (None, e.pool)]
        there = [i for i in there if self._engines[i].health != "lost"]
        counts = self.counts
        there = [i for i in there if counts[self._engines[i].pool] > 1] or there
        return max(there, key=lambda i: (self._engines[i].health != "up", i))

    async def _add(self, pool: str | None) -> None:
        index, self._next = self._next, self._next + 1
        await self._reservations.reserve("engine", index, pool)
        engine = self._new_engine(index)
        self._joining.add(engine)
        try:
            await engine.start()
            await self.router.add(engine)
        except BaseException:
            await engine.close()
            await self._reservations.release_reservation("engine", index)
            raise
        finally:
            self._joining.discard(engine)
        self._engines[index] = engine

    async def _remove(self, index: int) -> None:
        engine = self._engines[index]
        try:
            await self.router.remove(engine)
        finally:  # also if the end of the run cancels it
            try:
                await engine.close()
                del self._engines[index]  # not earlier: EngineSet.close needs the entry
            finally:
                await self._reservations.release_reservation("engine", index)


PARTS = "rollart_core.runtime.factories"


class WorkersRuntime(ABC):
    """Starts and stops the workers of a run.

    Args:
        run: The resolved run.
        run_dir: The directory of the run's files.
        shared: A folder that trainer and engines can both access; removed at the end.
    """

    def __init__(self, run: ResolvedRun, run_dir: Path, shared: Path) -> None:
        self.run = run
        self.config = run.config
        self.run_dir = run_dir
        self._shared = shared
        self._envs: EnvPool | None = None
        self._engines: EngineSet | None = None
        self._trainer: TrainerGroup | None = None
        self._demonstrator: Worker | None = None
        self._teachers: list[RemoteEngine] = []
        self._shared_devices: SharedDevices | None = None
        self._of_class: dict[int, dict[int, int]] = {}  # class of engines -> index -> number
        failures = run.config.failures
        self.notify: Notify = nobody_listens
        """Event callback for worker deaths and restarts; a run writes them to the journal."""
        self.heartbeat = Heartbeat(
            every_s=failures.heartbeat_s,
            hang_s=failures.hang_s,
            notify=lambda kind, payload: self.notify(kind, payload),
        )

    on_lost: Callable[[RollartError], None] | None = None
    """Called once, if the cluster that the run is on is lost."""
    trainer_host: str | None = None
    """Address where trainer ranks meet; None: the address of the machine of rank 0."""

    has_own_devices = False
    """Whether a worker's process sees only the devices assigned to it."""

    @classmethod
    @abstractmethod
    def check_pools(cls, run: Resolution) -> None:
        """Check, before anything starts, that the run fits the pools declared in its config.

        Raises:
            ConfigError: With one line per problem.
        """

    @abstractmethod
    async def connect(self) -> Sequence[Pool]:
        """Connect to the machines that workers run on; return the available pools."""

    @abstractmethod
    async def place(self, placement: Placement) -> None:
        """Reserve the slots of the workers, and check the nodes that they are on."""

    @abstractmethod
    async def ask(self, question: Callable[[], T]) -> dict[str, T]:
        """Run a function on each machine of the placed workers.

        Args:
            question: A function that imports what it needs, because it is sent without its module.

        Returns:
            Name of the machine -> its answer.
        """

    @abstractmethod
    def pool_of(self, role: str, index: int) -> str:
        """Return the name of the pool of a worker."""

    @abstractmethod
    def new_worker(self, role: str, index: int = 0) -> Worker:
        """Return an unstarted worker.

        Args:
            role: ``engine``, ``trainer``, ``env``, ``model``, ``demonstrator`` or ``teacher``.
            index: The index among workers with that role.
        """

    @property
    @abstractmethod
    def num_env_workers(self) -> int:
        """The number of env workers to start."""

    async def start_envs(self) -> EnvPool:
        """Start the env workers."""
        self._envs = EnvPool(self.start_worker, num_workers=self.num_env_workers)
        self._envs.on_replaced = lambda why: self.notify("part_died", {"part": "env", "why": why})
        self._envs.on_back = lambda: self.notify("part_back", {"part": "env"})
        await self._envs.start()
        return self._envs

    async def build_model(self, spec: NewModel, corpus_tasks: Sequence[Task]) -> str:
        """Create a new model in the run directory, in a separate process."""
        path = str(self.run_dir / "model")
        worker = self.new_worker("model")
        try:
            await worker.start()
            corpora = self._by_env(corpus_tasks)
            await worker.call(f"{PARTS}:build_model", path, spec, corpora, self.config.seed)
        finally:
            await worker.close()
        return path

    async def start_model(self, model_path: str) -> tuple[Router, TrainerGroup]:
        """Start the inference engines and the trainer concurrently."""
        config, model = self.config, self._model(model_path)
        channel = ChannelArgs(self.run.weights, self.weights_location())
        shared = self._shared_devices = SharedDevices() if colocates(config) else None
        engines = self._engine_set(model, channel)
        self._trainer = TrainerGroup(
            partial(self.new_worker, "trainer"),
            config.runtime.num_trainer_ranks,
            {
                "config": trainer_section(config),
                "algorithm": self.run.algorithm,
                "algorithms": {e.name: e.algorithm for e in self.run.envs if e.algorithm},
                "model": model,
                "channel": channel,
                "settings": {
                    "temperature": self.run.trained_temperature,
                    "deterministic": config.deterministic,
                    "seed": config.seed,
                    "beside": self.run.beside,
                },
            },
            host=self.trainer_host,
            own_devices=self.has_own_devices,
            watch=self.heartbeat.watch,
            store=self.store_records(),
            devices=shared.for_trainer if shared else nullcontext,
        )
        if shared is None:
            await asyncio.gather(engines.start(num_engines(config)), self._trainer.start())
        else:  # one after the other, because both load the model on the same devices
            await self._trainer.start()
            await self._trainer.offload()
            await engines.start(num_engines(config))
            shared.connect(engines.router, self._trainer)
        return engines.router, self._trainer

    async def start_engines(self, model_path: str) -> Router:
        """Start only the inference engines, with the weights of the model."""
        engines = self._engine_set(self._model(model_path), None)
        await engines.start(num_engines(self.config))
        return engines.router

    async def start_teacher(self) -> TeacherEngines:
        """Start the engines of the run's teacher."""
        config = self.config
        assert config.teacher is not None
        assert self.run.teacher is not None
        model = ModelArgs(config.teacher.path, config.teacher.dtype, self._device)
        arguments = {
            "plugin": self.run.teacher,
            "model": model,
            "channel": None,
            "settings": {
                "deterministic": config.deterministic,
                "max_context_tokens": config.rollout.max_context_tokens,
            },
        }
        for index in range(config.teacher.num_engines):
            new_worker = partial(self.new_worker, "teacher", index)
            care = self._care_of(self.run.teacher)
            self._teachers.append(RemoteEngine(new_worker, arguments, care=care))
        await asyncio.gather(*(engine.start() for engine in self._teachers))
        return TeacherEngines(
            self._teachers,
            temperature=config.rollout.temperature,
            limit_s=self.run.deadlines.generate_s,
        )

    def store_records(self) -> StoreRecords:
        """Return the store of batches, which all trainer ranks can read."""
        return file_store(self._shared)

    def weights_location(self) -> str:
        """Return the location where trainer and engines open the weight channel."""
        return str(self._shared / "weights")

    async def start_demonstrator(self, model_path: str, tasks: Sequence[Task]) -> TakeSamples:
        """Start a process that produces demonstrations."""
        worker = self._demonstrator = self.new_worker("demonstrator")
        kwargs = {
            "envs": self._by_env(tasks),
            "tokenizer_path": model_path,
            "config": self.config,
        }
        await worker.start(f"{PARTS}:Demonstrator", kwargs)
        self.heartbeat.watch(worker)

        async def take(n: int) -> list[Sample]:
            samples: list[Sample] = await worker.call("take", n)
            return samples

        return take

    async def stop_demonstrator(self) -> None:
        """Stop the process that produces demonstrations."""
        if self._demonstrator is not None:
            await self._demonstrator.close(grace_s=1.0)
            self._demonstrator = None

    async def close(self) -> None:
        """Stop all workers concurrently, then remove the shared folder."""
        workers = (self._engines, self._trainer, self._envs)
        closing = [worker.close() for worker in (*workers, *self._teachers) if worker is not None]
        await asyncio.gather(*closing, self.stop_demonstrator(), return_exceptions=True)
        await self.heartbeat.close()
        for sandbox in self._sandboxes():  # a killed env worker leaves its sandboxes open
            with suppress(PluginError):  # no service is installed, so this run started no sandbox
                await registry.sandbox_service().collect_garbage(sandbox)
        shutil.rmtree(self._shared, ignore_errors=True)

    # Scaling during the run

    def counts(self) -> dict[str, int]:
        """Return the scalable targets and their counts; empty during set-up."""
        if self._engines is None or self._envs is None or not self._engines.started:
            return {}
        found = {ENGINES: self._engines.counts.total()}
        if self.env_workers_scale:
            found[ENV_WORKERS] = self._envs.num_workers
        pools = self._engines.counts
        return {**found, **pools} if len(pools) > 1 else found

    async def scale(self, target: str, count: int) -> None:
        """Scale the engines, the env workers, or the engines of one pool.

        Raises:
            UserError: If the count is not possible.
        """
        assert self._engines is not None
        if target == ENV_WORKERS:
            await self.set_env_workers(count)
        elif self._shared_devices is not None:
            raise UserError(f"{target}={count}: there is no other device (runtime.colocate)")
        else:
            await self._engines.resize(count, None if target == ENGINES else target)

    async def set_env_workers(self, count: int) -> None:
        """Scale to this number of env workers; those that leave finish their episodes first.

        Raises:
            UserError: If the number is less than one.
        """
        assert self._envs is not None
        if count < 1:
            raise UserError(f"{ENV_WORKERS}={count}: a run needs at least one")
        await self._envs.resize(count)

    def loads(self) -> tuple[list[ClusterLoad], int]:
        """Return the load of each engine that is up, and the number of running episodes."""
        assert self._engines is not None
        assert self._envs is not None
        engine_states = [state for state in self._engines.router.engine_states if state.open]
        return [
            ClusterLoad(s.kv_used, s.num_waiting) for s in engine_states
        ], self._envs.num_episodes

    @property
    def env_workers_scale(self) -> bool:
        """Whether the number of env workers can change."""
        return True

    async def reserve(self, role: str, index: int, pool: str | None) -> None:
        """Reserve a slot for one more worker; ``pool`` None: in the pool where it fits best.

        Raises:
            UserError: If no slot is free.
        """
        raise UserError(f"cannot add another {role} with runtime: {self.config.runtime.kind}")

    async def release_reservation(self, role: str, index: int) -> None:
        """Release the slot and the number of a worker that has left for good."""
        for numbers in self._of_class.values() if role == "engine" else ():
            numbers.pop(index, None)

    def gauges(self) -> dict[str, float]:
        """Return the number and the load of workers as metrics."""
        if self._engines is None or self._envs is None or not self._engines.started:
            return {}
        return {
            **self._engines.gauges(),
            "env_workers/num": self._envs.num_workers,
            "env_workers/episodes": self._envs.num_episodes,
            "env_workers/replaced": self._envs.num_replaced,
        }

    # Workers

    async def start_worker(self) -> EnvWorkerHandle:
        """Start one env worker."""
        worker = self.new_worker("env")
        limits = self.worker_limits(self.config.runtime.env_threads)
        return await self._started_worker(worker, limits)

    async def _started_worker(self, worker: Worker, limits: Mapping[str, int]) -> EnvWorkerHandle:
        try:
            await worker.start(f"{PARTS}:build_env_worker", limits)
        except BaseException:
            await worker.close(grace_s=0.0)
            raise
        self.heartbeat.watch(worker)
        return RemoteWorker(worker)

    def _by_env(self, tasks: Sequence[Task]) -> list[EnvTasks]:
        """Return the tasks of each environment."""
        tasks_of = by_env(tasks)
        return [
            EnvTasks(env_ref(env), tasks_of[env.name], env.max_turns)
            for env in self.run.envs
            if env.name in tasks_of
        ]

    def _sandboxes(self) -> list[str]:
        """Return the ids of the sandboxes that the run's environments use."""
        given = [env.plugin.options.get("sandbox") for env in self.run.envs]
        return list(dict.fromkeys(PluginRef.model_validate(s).id for s in given if s is not None))

    def worker_limits(self, num_threads: int) -> dict[str, int]:
        """Return the arguments of an env worker."""
        return {
            "num_threads": num_threads,
            "max_observation_chars": self.config.rollout.max_observation_chars,
        }

    @property
    def _device(self) -> str:
        """The device of models, from the config."""
        return str(getattr(self.config.model, "device", "auto"))

    def _model(self, path: str) -> ModelArgs:
        model = self.config.model
        if isinstance(model, RemoteModel):
            return ModelArgs("")
        return ModelArgs(path, model.dtype, model.device)

    def _engine_set(self, model: ModelArgs, channel: ChannelArgs | None) -> EngineSet:
        self._engines = EngineSet(
            lambda index: self._engine(index, model, channel),
            self,
            load_limit_s=self.config.failures.load_weights_s,
            devices=self._shared_devices.for_engines if self._shared_devices else nullcontext,
        )
        return self._engines

    def _engine(self, index: int, model: ModelArgs, channel: ChannelArgs | None) -> RemoteEngine:
        config = self.config
        settings: dict[str, object] = {
            "deterministic": config.deterministic,
            "kv_on_swap": config.rollout.kv_on_swap,
            "max_context_tokens": config.rollout.max_context_tokens,
        }
        pool = self.pool_of("engine", index)
        plugin = self.run.engine_on(pool)
        if plugin.spec.takes_index:
            settings["engine_index"] = self._number(index, plugin)
        if self._shared_devices is not None:
            settings["sleeps"] = True
        if plugin.spec.first_device_option:
            settings["has_own_devices"] = self.has_own_devices
        if config.lora and config.lora.sync == "adapter" and plugin.spec.serves_adapters:
            settings["lora"] = config.lora
        arguments = {
            "plugin": plugin,
            "model": model,
            "channel": channel,
            "settings": settings,
            "in_flight": config.rollout.in_flight,
        }
        new_worker = partial(self.new_worker, "engine", index)
        return RemoteEngine(new_worker, arguments, pool=pool, care=self._care_of(plugin))

    def _care_of(self, plugin: ResolvedPlugin[InferenceEngineSpec]) -> RestartPolicy:
        """Return how an engine is restarted: it has time to start and to load the weights."""
        failures, option = self.config.failures, plugin.spec.start_option
        own_s = float(plugin.options[option]) if option else 0.0
        return RestartPolicy(
            self.heartbeat,
            Restarts(failures.max_restarts, failures.restart_window_s),
            lambda *event: self.notify(*event),
            START_LIMIT_S + failures.load_weights_s + own_s,
            self._shared_devices.for_restart if self._shared_devices else nullcontext,
        )

    def _number(self, index: int, plugin: ResolvedPlugin[InferenceEngineSpec]) -> int:
        """Return the number of an engine within its class: the smallest that is free."""
        mine = self._of_class.setdefault(id(plugin), {})
        taken = set(mine.values())
        return mine.setdefault(index, next(n for n in itertools.count() if n not in taken))
