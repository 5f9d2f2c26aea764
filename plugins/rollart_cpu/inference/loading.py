"""From a model path to a runner.

Takes: a path and how to run it. Gives: a :class:`Runner` with weights loaded. Never: schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rollart_core.errors import ConfigError
from rollart_core.models.weights import iter_weights, model_folder
from rollart_cpu.inference.architecture import Architecture, own_architecture, read_config
from rollart_cpu.inference.decoder import Decoder
from rollart_cpu.inference.decoder_weights import DecoderWeights
from rollart_cpu.inference.runner import Runner
from rollart_cpu.inference.transformers_runner import HuggingFaceRunner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a model is run."""

    dtype: str = "float32"
    """What weights are rounded to: ``float32`` or ``bfloat16``."""
    compute_dtype: str = "auto"
    """What they are multiplied in. ``auto``: float32 on a CPU (few have fast bfloat16 products, and
    float32 is the more exact), ``dtype`` elsewhere."""
    device: str = "auto"
    """``auto`` is CUDA where there is one."""
    num_slots: int = 64
    max_tokens: int = 2048
    max_batch_tokens: int = 1024
    kv_cache_bytes: int | None = None
    """Fewer slots are made when they would take more."""
    deterministic: bool = False
    kernels: str = "auto"
    decoder: str = "auto"
    """``auto``, ``own`` or ``transformers``."""


def load_runner(path: str, options: RunnerOptions) -> Runner:
    """Load a model.

    Args:
        path: A local folder or a hub id.
        options: How to run it.

    Raises:
        ConfigError: When it is no model, or cannot be run as asked.
    """
    folder = model_folder(path)
    config = read_config(folder)
    device = pick_device(options.device)
    shape = None if options.decoder == "transformers" else own_architecture(config)
    if shape is None:
        if options.decoder == "own":
            raise ConfigError(f"our own decoder cannot run {config['model_type']!r} in {path!r}")
        return _load_adapter(folder, device, options)
    return _load_own(folder, shape, device, options)


def pick_device(name: str) -> torch.device:
    """Return the torch device of a name.

    Raises:
        ConfigError: When CUDA is asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch sees no CUDA device")
    return torch.device(name)


def _load_adapter(folder: Path, device: torch.device, options: RunnerOptions) -> Runner:
    if options.deterministic:
        raise ConfigError(
            "deterministic: true needs a Llama, Mistral, Qwen2 or Qwen3 model; "
            f"{str(folder)!r} runs through transformers"
        )
    return HuggingFaceRunner(
        folder,
        dtype=DTYPES[options.dtype],
        device=device,
        num_slots=options.num_slots,
        max_tokens=options.max_tokens,
        max_batch_tokens=options.max_batch_tokens,
    )


def _load_own(
    folder: Path, shape: Architecture, device: torch.device, options: RunnerOptions
) -> Runner:
    compute = options.compute_dtype
    if compute == "auto":
        compute = "float32" if device.type == "cpu" else options.dtype
    tensors = dict(iter_weights(folder))
    biased = frozenset(name for name in tensors if name.endswith(".bias"))
    weights = DecoderWeights(shape, DTYPES[options.dtype], DTYPES[compute], device, biased)
    decoder = Decoder(
        weights,
        num_slots=_num_slots(shape, DTYPES[compute].itemsize, options),
        max_tokens=options.max_tokens,
        max_batch_tokens=options.max_batch_tokens,
        deterministic=options.deterministic,
        kernels=options.kernels,
    )
    try:
        decoder.load(tensors.items())
    except ValueError as e:
        raise ConfigError(f"model folder {str(folder)!r}: {e}") from e
    return decoder


def _num_slots(shape: Architecture, item_bytes: int, options: RunnerOptions) -> int:
    if options.kv_cache_bytes is None:
        return options.num_slots
    row = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * item_bytes
    fit = options.kv_cache_bytes // (row * options.max_tokens)
    if fit < 1:
        raise ConfigError(
            f"kv_cache_bytes {options.kv_cache_bytes} holds no context of {options.max_tokens} "
            f"tokens ({row * options.max_tokens} bytes); raise it or lower max_context_tokens"
        )
    return min(options.num_slots, fit)
