"""What the cases of `make test-gpu` share: figures with marks, sizes, models, and processes.

A case is a generator function. It yields figures. It raises `Skipped` with the reason if something
is missing, and any other exception if something is wrong. A figure that misses its mark fails the
case. This module imports torch only in functions, so that a missing torch is a reason to skip.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rollart_core.training.optimizer import GuardedAdamW
    from rollart_core.types import Sample

T = TypeVar("T")
GB = 10**9
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""The shape of a layer: `config.json` of Qwen/Qwen3-8B on the Hugging Face hub."""
QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""The same of Qwen/Qwen3-0.6B."""
VOCABULARY = 151_936
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


class Skipped(Exception):
    """Something that the case needs is missing. The message is the reason."""


@dataclass(frozen=True)
class Figure:
    """One measurement.

    Attributes:
        name: What was measured.
        value: A number, or a text such as the name of a kernel.
        unit: Of the number; empty for a text or a ratio.
        at_most: The mark that the number must not exceed, if any.
        at_least: The mark that the number must reach, if any.
    """

    name: str
    value: float | str
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def meets_mark(self) -> bool:
        if isinstance(self.value, str):
            return True
        low = -float("inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return low <= self.value <= high  # False for NaN, if there is a mark or not

    def record(self) -> dict[str, object]:
        fields = {name: value for name, value in asdict(self).items() if value not in (None, "")}
        if isinstance(self.value, float) and not math.isfinite(self.value):
            fields["value"] = str(self.value)  # JSON has no such numbers
        return fields

    def __str__(self) -> str:
        marks = [
            f"{word} {mark:g}"
            for word, mark in (("at most", self.at_most), ("at least", self.at_least))
            if mark is not None
        ]
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        shown = f"{self.name}: {value} {self.unit}".rstrip()
        return shown + (f" ({', '.join(marks)})" if marks else "")


Case = Callable[["Machine"], Iterator[Figure]]


@dataclass(frozen=True)
class Machine:
    """Where a case runs.

    Attributes:
        device: `cuda` or `cpu`.
        folder: An empty folder of the case.
        num_devices: Number of CUDA devices; a case that forks must not ask torch for it.
    """

    device: str
    folder: Path
    num_devices: int = 0

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def size(self, *, cuda: T, cpu: T) -> T:
        """Return the size of this device: cases are small on the CPU."""
        return cuda if self.is_cuda else cpu

    def synchronize(self) -> None:
        import torch

        if self.is_cuda:
            torch.cuda.synchronize()

    def peak_bytes(self, function: Callable[[], object]) -> int:
        """Return the peak of allocated memory during a call, above what was allocated before."""
        import torch

        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def seconds(self, function: Callable[[], object], repeats: int = 3, warmups: int = 1) -> float:
        """Return the median duration of a call."""
        for _ in range(warmups):
            function()
        times = []
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            function()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def need(*packages: str) -> None:
    """Skip the case if this Python lacks one of these packages."""
    for name in packages:
        if find_spec(name) is None:
            raise Skipped(f"this Python has no {name}")


def list_cases(cases: Mapping[Case, float], machine: Machine) -> Iterator[dict[str, object]]:
    """Yield the facts of the machine that results belong to, and the cases and their limits."""
    import torch

    found: dict[str, object] = {"device": "CPU", "num_devices": 0}
    if machine.is_cuda:
        if not torch.cuda.is_available():
            raise Skipped(f"torch {torch.__version__} finds no CUDA device")
        facts = torch.cuda.get_device_properties(0)
        found = {
            "device": facts.name,
            "num_devices": torch.cuda.device_count(),
            "memory_bytes": facts.total_memory,
            "driver": driver_version(),
            "cuda": torch.version.cuda or torch.version.hip,
        }
    for name in ("torch", "transformers", "sglang", "vllm"):
        found[name] = version_of(name)
    known = {name: value for name, value in found.items() if value is not None}
    yield {"machine": known, "cases": {case.__name__: limit for case, limit in cases.items()}}


def version_of(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Return the version of the GPU driver, as `nvidia-smi` shows it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.split("\n")[0].strip() or None


def new_model(machine: Machine, *, dtype: torch.dtype | None = None, **shape: object) -> nn.Module:
    """Return a random Qwen3 on the device, with logits of some spread.

    Args:
        machine: Where.
        dtype: Of the weights; float32 by default.
        shape: Fields of the model's config.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        initializer_range=0.05, tie_word_embeddings=False, max_position_embeddings=65536, **shape
    )
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype or torch.float32, attn_implementation="sdpa"
        )
    return model.to(machine.device)


def new_samples(lengths: Sequence[int], vocab_size: int, sampled: float = 0.5) -> list[Sample]:
    """Return rows of random tokens; the last `sampled` share of each is the policy's."""
    import numpy as np

    from rollart_core.types import Sample

    rng = np.random.default_rng(0)
    samples = []
    for length in lengths:
        ids = rng.integers(0, vocab_size, length).astype(np.int32)
        mask = np.zeros(length, dtype=bool)
        mask[-max(1, int(length * sampled)) :] = True
        mask[0] = False  # a logprob needs a token before it
        versions = np.where(mask, 0, -1).astype(np.int32)
        old = np.where(mask, -4.0, 0.0).astype(np.float32)
        samples.append(Sample(ids, mask, old, versions, versions))
    return samples


def new_optimizer(model: nn.Module) -> GuardedAdamW:
    """Return the trainer's optimizer for all parameters of a model."""
    from rollart_core.training.optimizer import GuardedAdamW

    # The fields of the section `trainer` that it reads, without pydantic.
    settings: Any = SimpleNamespace(
        lr=1e-4,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        grad_clip=1.0,
        warmup_train_steps=0,
        max_kl=None,
        clip=SimpleNamespace(kind="norm"),
        schedule=SimpleNamespace(kind="constant"),
    )
    return GuardedAdamW(dict(model.named_parameters()), settings)


def clear_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def relative_error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference of all tensors, of the norm of the wanted ones."""
    pairs = list(zip(found, wanted, strict=True))
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return (off / sum(float(b.double().square().sum()) for b in wanted)) ** 0.5


def in_ranks(function: Callable[..., object], num: int, *args: object) -> list[Any]:
    """Call `function(rank, *args)` in forked processes, and return the results by rank.

    The calling process must not have used CUDA yet.

    Raises:
        RuntimeError: With the error of the first rank that failed.
    """
    import multiprocessing

    context = multiprocessing.get_context("fork")
    ends = [context.Pipe(duplex=False) for _ in range(num)]
    ranks = [
        context.Process(target=_rank, args=(function, rank, args, ends[rank][1]))
        for rank in range(num)
    ]
    for process, (_, theirs) in zip(ranks, ends, strict=True):
        process.start()
        theirs.close()
    results = []
    for rank, (ours, _) in enumerate(ends):
        try:
            kind, value = ours.recv()
        except EOFError:
            ranks[rank].join()
            kind, value = "failed", f"it ended with exit code {ranks[rank].exitcode}"
        if kind == "failed":
            raise RuntimeError(f"rank {rank}: {value}")
        results.append(value)
    for process in ranks:
        process.join()
    return results


def _rank(
    function: Callable[..., object], rank: int, args: tuple[object, ...], end: object
) -> None:
    import traceback

    try:
        end.send(("done", function(rank, *args)))
    except BaseException as e:
        traceback.print_exc()
        end.send(("failed", f"{type(e).__name__}: {e}"))
