"""What every runtime does alike: its parts are started, wired together and ended.

    num_engines x engine, trainer rank(s), env workers, demonstrator: each a Part of some role
                                                  |
                                    ``new_part(role, index)`` of the runtime

Takes: a resolved run and a run directory. Gives: the parts that a
:class:`rollart_core.runtime.base.Runtime` offers. Never: knows where a part executes; subclasses
say so.
"""

from __future__ import annotations

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rollart_core.boxes.reap import reap_at_leisure
from rollart_core.config import NewModel, PluginRef
from rollart_core.resolve import ResolvedRun
from rollart_core.rollout.env_pool import EnvPool, Worker
from rollart_core.rollout.router import Router
from rollart_core.runtime.base import TakeSamples
from rollart_core.runtime.heartbeat import Heartbeat, Tell, nobody_listens
from rollart_core.runtime.part import Part
from rollart_core.runtime.parts import ChannelArgs, EnvTasks, ModelArgs
from rollart_core.runtime.remote import Care, RemoteEngine, RemoteWorker
from rollart_core.runtime.restarts import Restarts
from rollart_core.runtime.run_envs import by_env, env_ref
from rollart_core.runtime.trainer_group import TrainerGroup
from rollart_core.types import Sample, Task

PARTS = "rollart_core.runtime.parts"


class PartsRuntime(ABC):
    """Starts and ends the parts of a run.

    Args:
        run: What to do.
        run_dir: Where it keeps what it makes.
        shared: A folder that trainer and engines can both reach; removed at the end.
    """

    def __init__(self, run: ResolvedRun, run_dir: Path, shared: Path) -> None:
        self.run = run
        self.config = run.config
        self.run_dir = run_dir
        self._shared = shared
        self._envs: EnvPool | None = None
        self._engines: list[RemoteEngine] = []
        self._trainer: TrainerGroup | None = None
        self._demonstrator: Part | None = None
        self._router: Router | None = None
        failures = run.config.failures
        self.tell: Tell = nobody_listens
        """Keeps what becomes of parts: in a run, the journal."""
        self.heartbeat = Heartbeat(
            every_s=failures.heartbeat_s,
            hang_s=failures.hang_s,
            tell=lambda kind, payload: self.tell(kind, payload),
        )

    @abstractmethod
    def new_part(self, role: str, index: int = 0) -> Part:
        """Return an unstarted part.

        Args:
            role: ``engine``, ``trainer``, ``env``, ``model`` or ``demonstrator``.
            index: Which of its role.
        """

    @property
    @abstractmethod
    def num_env_workers(self) -> int:
        """How many env workers to start."""

    async def start_envs(self) -> EnvPool:
        """Start the env workers."""
        self._envs = EnvPool(self.start_worker, num_workers=self.num_env_workers)
        await self._envs.start()
        return self._envs

    async def build_model(self, spec: NewModel, corpus_tasks: Sequence[Task]) -> str:
        """Make a model from nothing in a process of its own, under the run directory."""
        path = str(self.run_dir / "model")
        part = self.new_part("model")
        try:
            await part.start()
            corpora = self._by_env(corpus_tasks)
            await part.call(f"{PARTS}:build_model", path, spec, corpora, self.config.seed)
        finally:
            await part.close()
        return path

    async def start_model(self, model_path: str) -> tuple[Router, TrainerGroup]:
        """Start the inference engines and the trainer, all at once."""
        config = self.config
        model = ModelArgs(model_path, config.model.dtype, config.model.device)
        channel = ChannelArgs(self.run.weights, str(self._shared / "weights"))
        num_engines = config.runtime.num_engines
        self._engines = [self._engine(i, model, channel) for i in range(num_engines)]
        self._trainer = TrainerGroup(
            partial(self._watched_part, "trainer"),
            1,
            {
                "config": config.trainer,
                "algorithm": self.run.algorithm,
                "model": model,
                "channel": channel,
                "settings": {
                    "temperature": config.rollout.temperature,
                    "deterministic": config.deterministic,
                    "seed": config.seed,
                },
            },
        )
        await asyncio.gather(*(e.start() for e in self._engines), self._trainer.start())
        limit_s = config.failures.load_weights_s
        self._router = Router(self._engines, load_limit_s=limit_s)
        self._router.watch()
        return self._router, self._trainer

    async def start_demonstrator(self, model_path: str, tasks: Sequence[Task]) -> TakeSamples:
        """Start a process that makes demonstrations."""
        part = self._demonstrator = self.new_part("demonstrator")
        kwargs = {
            "envs": self._by_env(tasks),
            "tokenizer_path": model_path,
            "max_context_tokens": self.config.rollout.max_context_tokens,
            "seed": self.config.seed,
        }
        await part.start(f"{PARTS}:Demonstrator", kwargs)

        async def take(n: int) -> list[Sample]:
            samples: list[Sample] = await part.call("take", n)
            return samples

        return take

    async def stop_demonstrator(self) -> None:
        """End the demonstrating process."""
        if self._demonstrator is not None:
            await self._demonstrator.close(grace_s=1.0)
            self._demonstrator = None

    async def close(self) -> None:
        """End every part at once, then remove what they shared."""
        if self._router is not None:
            await self._router.close()
        closing = [e.close() for e in self._engines]
        closing += [p.close() for p in (self._trainer, self._envs) if p is not None]
        await asyncio.gather(*closing, self.stop_demonstrator(), return_exceptions=True)
        await self.heartbeat.close()
        for sandbox in self._sandboxes():  # an env worker that was killed could not close its own
            await reap_at_leisure(sandbox)
        shutil.rmtree(self._shared, ignore_errors=True)

    async def start_worker(self) -> Worker:
        """Start one env worker."""
        part = self.new_part("env")
        await part.start(f"{PARTS}:build_env_worker", self.worker_limits(num_threads=64))
        self.heartbeat.watch(part)
        return RemoteWorker(part)

    def _by_env(self, tasks: Sequence[Task]) -> list[EnvTasks]:
        """Return the tasks of each environment."""
        tasks_of = by_env(tasks)
        return [
            EnvTasks(env_ref(env), tasks_of[env.name], env.max_turns)
            for env in self.run.envs
            if env.name in tasks_of
        ]

    def _sandboxes(self) -> list[str]:
        """Return the ids of the sandboxes that environments of the run act in."""
        given = [env.plugin.options.get("sandbox") for env in self.run.envs]
        return list(dict.fromkeys(PluginRef.model_validate(s).id for s in given if s is not None))

    def worker_limits(self, num_threads: int) -> dict[str, int]:
        """Return what an env worker is built with."""
        return {
            "num_threads": num_threads,
            "max_observation_chars": self.config.rollout.max_observation_chars,
        }

    def _engine(self, index: int, model: ModelArgs, channel: ChannelArgs) -> RemoteEngine:
        config = self.config
        settings = {
            "deterministic": config.deterministic,
            "kv_on_swap": config.rollout.kv_on_swap,
            "max_context_tokens": config.rollout.max_context_tokens,
        }
        arguments = {
            "plugin": self.run.engine,
            "model": model,
            "channel": channel,
            "settings": settings,
        }
        care = Care(self.heartbeat, self.new_restarts(), lambda *event: self.tell(*event))
        return RemoteEngine(partial(self.new_part, "engine", index), arguments, care=care)

    def new_restarts(self) -> Restarts:
        """Return how often one engine may be started again."""
        failures = self.config.failures
        return Restarts(failures.max_restarts, failures.restart_window_s)

    def _watched_part(self, role: str, index: int = 0) -> Part:
        """Return an unstarted part that gets pings from when it is up."""
        part = self.new_part(role, index)
        self.heartbeat.watch(part)
        return part
