"""Run on one machine: one process per engine and trainer rank, environments in processes or here.

Takes: a run config and a run directory. Gives: the workers that a
:class:`rollart_core.runtime.workers.WorkersRuntime` provides. Never: needs a daemon or a GPU, or
leaves a process or a shared memory file behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rollart_core.config.resolve import Resolution, ResolvedRun
from rollart_core.config.runtime import InlineRuntime as InlineConfig
from rollart_core.config.validation.consistency import INLINE_POOLS
from rollart_core.contracts.hardware import Placement, Pool
from rollart_core.contracts.sandbox import RUN_VARIABLE
from rollart_core.errors import ConfigError
from rollart_core.rollout.env_pool import EnvWorkerHandle, LocalWorker
from rollart_core.rollout.env_worker import EnvWorker
from rollart_core.runtime.placement import colocation_fault, shm_fault
from rollart_core.runtime.process import WorkerProcess
from rollart_core.runtime.worker import Worker
from rollart_core.runtime.workers import WorkersRuntime

T = TypeVar("T")
NVIDIA_SMI_S = 60.0
LOCAL, BASE = INLINE_POOLS
"""The pool name of this machine, and the pool name of ``engine`` if there are other engines."""


class InlineRuntime(WorkersRuntime):
    """Starts and stops the workers on this machine."""

    trainer_host = "127.0.0.1"

    def __init__(self, run: ResolvedRun, run_dir: Path) -> None:
        """Describe the run without starting anything."""
        super().__init__(run, run_dir, shared_folder(run_dir.name))
        assert isinstance(run.config.runtime, InlineConfig)
        self._inline = run.config.runtime
        further = [one.name for one in run.engines for _ in range(one.count)]
        first = BASE if further else LOCAL
        self._pools_of_engines = dict(enumerate([first] * self._inline.num_engines + further))

    @property
    def num_env_workers(self) -> int:
        """The number of env workers; 1, in this process, if ``env_processes`` is 0."""
        return max(1, self._inline.env_processes)

    @classmethod
    def check_pools(cls, run: Resolution) -> None:
        """Do nothing: the config declares no pools for this runtime."""

    async def connect(self) -> Sequence[Pool]:
        """Return this machine as one pool; with several classes of engines, also a pool of each."""
        here = local_pool()
        if not self.run.engines:
            return [here]
        ranks = self._inline.num_trainer_ranks
        rest = replace(here, count=max(here.count, ranks + 1), roles=("envs", "trainer"))
        classes = [(BASE, self._inline.num_engines)]
        classes += [(one.name, one.count) for one in self.run.engines]
        return [rest, *(Pool(name, "cpu", count, roles=("engines",)) for name, count in classes)]

    async def place(self, placement: Placement) -> None:
        """Check that shared memory and shared GPUs have room; everything runs on this machine.

        Raises:
            ConfigError: If they have not.
        """
        root = shared_root()
        fault = shm_fault(self.run, str(root), shutil.disk_usage(root).free)
        if not fault and self._inline.colocate and self._device != "cpu":
            sizes = await asyncio.to_thread(_gpu_bytes)
            used = sizes[: self._inline.num_trainer_ranks]
            fault = colocation_fault(self.run, min(used)) if used else None
        if fault:
            raise ConfigError(fault)

    async def ask(self, question: Callable[[], T]) -> dict[str, T]:
        """Run a function on this machine."""
        return {LOCAL: await asyncio.to_thread(question)}

    def pool_of(self, role: str, index: int) -> str:
        """Return the pool of this machine, or for an engine the pool of its class."""
        return self._pools_of_engines[index] if role == "engine" else LOCAL

    def new_worker(self, role: str, index: int = 0) -> Worker:
        """Return an unstarted process on this machine."""
        threads = {
            "engine": self._inline.engine_threads,
            "teacher": self._inline.engine_threads,
            "trainer": self._inline.trainer_threads,
            "model": 2,
        }
        name = f"{role}-{index}" if index else role
        log = self.run_dir / "logs" / f"{name}.log"
        whose = {RUN_VARIABLE: self.run_dir.name}
        return WorkerProcess(
            name, log_path=log, num_threads=threads.get(role, 1), environment=whose
        )

    async def start_worker(self) -> EnvWorkerHandle:
        """Start one env worker in a process, or in this process with ``env_processes: 0``."""
        limits = self.worker_limits(self._inline.env_threads)
        if self._inline.env_processes == 0:
            return LocalWorker(EnvWorker(**limits))
        return await self._started_worker(self.new_worker("env"), limits)

    async def reserve(self, role: str, index: int, pool: str | None) -> None:
        """Record the pool of a new engine; a process needs no reservation."""
        if role == "engine":
            self._pools_of_engines[index] = pool or self._pools_of_engines[0]

    @property
    def env_workers_scale(self) -> bool:
        """Whether the number of env workers can change; False if they are in this process."""
        return self._inline.env_processes > 0


def _gpu_bytes() -> list[float]:
    """Return the memory of each GPU that nvidia-smi finds; asking torch would take some of it."""
    query = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_S)
        return [float(line) * 2**20 for line in said.stdout.split()]
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []


def local_pool() -> Pool:
    """Return this machine as a pool."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Pool(LOCAL, "cpu", cores or 1)


def shared_folder(run_name: str) -> Path:
    """Create and return the folder that a run's processes share, in memory if possible.

    Its name contains the process id of the run, so that a later run can remove the folder of a
    killed run.
    """
    root = shared_root()
    for left in root.glob("rollart-run-*"):
        _remove_if_orphan(left)
    folder = root / f"rollart-run-{os.getpid()}-{run_name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def shared_root() -> Path:
    """Return the parent of the shared folders: ``/dev/shm``, or the temporary folder."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def _remove_if_orphan(folder: Path) -> None:
    with contextlib.suppress(ValueError, PermissionError):
        pid = int(folder.name.split("-")[2])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
