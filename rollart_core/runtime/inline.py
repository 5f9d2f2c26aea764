"""One machine: engine and trainer in a process each, environments in processes or threads.

Takes: a run config and a run directory. Gives: the parts that a
:class:`rollart_core.runtime.base.Runtime` offers. Never: needs a daemon or a GPU, or leaves a
process or a shared memory file behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollart_core.boxes.ledger import RUN_VARIABLE
from rollart_core.boxes.reap import reap_at_leisure
from rollart_core.config import InlineRuntime as InlineConfig
from rollart_core.config import NewModel, PluginRef
from rollart_core.contracts.hardware import Pool
from rollart_core.resolve import ResolvedRun
from rollart_core.rollout.env_pool import EnvPool, LocalWorker, Worker
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_core.rollout.router import Router
from rollart_core.runtime.base import TakeSamples
from rollart_core.runtime.parts import ChannelArgs, Corpus, ModelArgs
from rollart_core.runtime.process import PartProcess
from rollart_core.runtime.remote import RemoteEngine, RemoteTrainer, RemoteWorker
from rollart_core.types import Sample, Task

_PARTS = "rollart_core.runtime.parts"


class InlineRuntime:
    """Starts and ends the parts on this machine."""

    def __init__(self, run: ResolvedRun, run_dir: Path) -> None:
        """Describe the run; nothing is started yet."""
        self._run = run
        config = self._config = run.config
        self._inline: InlineConfig = config.runtime
        self._env = EnvRef(run.env.spec.id, run.env.options)
        self._run_dir = run_dir
        self._shared = shared_folder(run_dir.name)
        self._envs: EnvPool | None = None
        self._engines: list[RemoteEngine] = []
        self._trainer: RemoteTrainer | None = None
        self._demonstrator: PartProcess | None = None

    async def start_envs(self) -> EnvPool:
        """Start the env workers."""
        self._envs = EnvPool(self._start_worker, num_workers=max(1, self._inline.env_processes))
        await self._envs.start()
        return self._envs

    async def build_model(self, spec: NewModel, corpus_tasks: Sequence[Task]) -> str:
        """Make a model from nothing in a process of its own, under the run directory."""
        path = str(self._run_dir / "model")
        part = self._process("model", threads=2)
        try:
            await part.start()
            corpus = Corpus(self._env, corpus_tasks, self._run.max_turns)
            await part.call(f"{_PARTS}:build_model", path, spec, corpus, self._config.seed)
        finally:
            await part.close()
        return path

    async def start_model(self, model_path: str) -> tuple[Router, RemoteTrainer]:
        """Start the inference engine and the trainer, both at once."""
        config = self._config
        model = ModelArgs(model_path, config.model.dtype, config.model.device)
        channel = ChannelArgs(self._run.weights, str(self._shared / "weights"))
        engine = RemoteEngine(
            lambda: self._process("engine", threads=self._inline.engine_threads),
            {
                "plugin": self._run.engine,
                "model": model,
                "channel": channel,
                "settings": {
                    "deterministic": config.deterministic,
                    "kv_on_swap": config.rollout.kv_on_swap,
                    "max_context_tokens": config.rollout.max_context_tokens,
                },
            },
        )
        self._engines = [engine]
        self._trainer = RemoteTrainer(
            self._process("trainer", threads=self._inline.trainer_threads),
            {
                "config": config.trainer,
                "algorithm": self._run.algorithm,
                "model": model,
                "channel": channel,
                "settings": {
                    "temperature": config.rollout.temperature,
                    "deterministic": config.deterministic,
                    "seed": config.seed,
                },
            },
        )
        await asyncio.gather(engine.start(), self._trainer.start())
        return Router(self._engines), self._trainer

    async def start_demonstrator(self, model_path: str, tasks: Sequence[Task]) -> TakeSamples:
        """Start a process that makes demonstrations."""
        part = self._demonstrator = self._process("demonstrator")
        limits = {
            "max_turns": self._run.max_turns,
            "max_context_tokens": self._config.rollout.max_context_tokens,
        }
        kwargs = {"env": self._env, "tokenizer_path": model_path, "tasks": tasks, "limits": limits}
        await part.start(f"{_PARTS}:Demonstrator", kwargs)

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
        closing = [e.close() for e in self._engines]
        closing += [p.close() for p in (self._trainer, self._envs) if p is not None]
        await asyncio.gather(*closing, self.stop_demonstrator(), return_exceptions=True)
        if "sandbox" in self._env.options:  # an env worker that was killed could not close its own
            await reap_at_leisure(PluginRef.model_validate(self._env.options["sandbox"]).id)
        shutil.rmtree(self._shared, ignore_errors=True)

    async def _start_worker(self) -> Worker:
        limits = {
            "num_threads": self._inline.env_threads,
            "max_observation_chars": self._config.rollout.max_observation_chars,
        }
        if self._inline.env_processes == 0:
            return LocalWorker(EnvWorker(**limits))
        part = self._process("env")
        await part.start(f"{_PARTS}:build_env_worker", limits)
        return RemoteWorker(part)

    def _process(self, name: str, threads: int = 1) -> PartProcess:
        log = self._run_dir / "logs" / f"{name}.log"
        whose = {RUN_VARIABLE: self._run_dir.name}
        return PartProcess(name, log_path=log, num_threads=threads, environment=whose)


def local_pool() -> Pool:
    """Return this machine as the one pool there is."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Pool("local", "cpu", cores or 1)


def shared_folder(run_name: str) -> Path:
    """Make and return the folder in memory (or the temporary one) that a run's processes share.

    Its name carries the process id of the run, so that a later run can remove what a killed one
    left.
    """
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    for left in root.glob("rollart-run-*"):
        _remove_if_orphan(left)
    folder = root / f"rollart-run-{os.getpid()}-{run_name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _remove_if_orphan(folder: Path) -> None:
    with contextlib.suppress(ValueError, PermissionError):
        pid = int(folder.name.split("-")[2])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
