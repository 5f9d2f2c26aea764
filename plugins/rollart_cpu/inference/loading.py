"""From a model path to a runner: our own decoder, or any causal LM that transformers can load.

The latter (:class:`HuggingFaceRunner`) is slower, but of every kind: it keeps one transformers
cache a slot, and batches no segments.

Takes: a path and how to run it. Gives: a :class:`Runner` with weights loaded. Never: schedules.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollart_core.errors import ConfigError
from rollart_core.models.weights import iter_weights, model_folder
from rollart_cpu.inference.architecture import Architecture, own_architecture, read_config
from rollart_cpu.inference.decoder import Decoder
from rollart_cpu.inference.decoder_weights import DecoderWeights
from rollart_cpu.inference.runner import Runner, TokenBatch

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


class HuggingFaceRunner(Runner):
    """One forward per segment through ``AutoModelForCausalLM``."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int,
        max_tokens: int,
        max_batch_tokens: int,
    ) -> None:
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except Exception as e:
            raise ConfigError(f"transformers cannot load {str(folder)!r}: {e}") from e
        self._model = model.to(device).eval()
        self._device = device
        self._cache_name = cache_name(model)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self.max_batch_tokens = max_batch_tokens
        self._caches: list[Any] = [None] * num_slots
        self._tokens: list[list[int]] = [[] for _ in range(num_slots)]
        self._staged: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """See :meth:`Runner.forward`."""
        wanted, rows, first = set(batch.wanted.tolist()), [], 0
        for i, length in enumerate(batch.lengths.tolist()):
            ids = batch.token_ids[first : first + length].tolist()
            keep = length if batch.every_row else 1
            logits = self._segment(int(batch.slots[i]), int(batch.starts[i]), ids, keep)
            if batch.every_row or i in wanted:
                rows.append(logits)
            first += length
        return torch.cat(rows) if rows else torch.empty(0, self.vocab_size, device=self._device)

    def _segment(self, slot: int, start: int, ids: list[int], keep: int = 1) -> torch.Tensor:
        """Run one segment on a slot's cache and return its last rows' logits ``[keep, vocab]``."""
        kept = self._tokens[slot]
        if len(kept) != start and not self._crop(slot, start):
            ids = kept[:start] + ids  # a cache that cannot be cut is computed again
            self._caches[slot], start = None, 0
        result = self._model(
            torch.tensor([ids], device=self._device),
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_name: self._caches[slot]},
        )
        self._caches[slot] = getattr(result, self._cache_name)
        self._tokens[slot] = kept[:start] + ids
        logits: torch.Tensor = result.logits[0, -keep:].float()
        return logits

    def _crop(self, slot: int, length: int) -> bool:
        """Cut a slot's cache to ``length`` tokens; False when its kind cannot be cut."""
        if length == 0:
            self._caches[slot], self._tokens[slot] = None, []
            return True
        cache = self._caches[slot]
        if not hasattr(cache, "crop") or any(getattr(cache, "is_sliding", [True])):
            return False
        cache.crop(length - len(self._tokens[slot]))  # negative: how many to take off
        return True

    def clear(self, slot: int) -> None:
        """See :meth:`Runner.clear`."""
        self._caches[slot], self._tokens[slot] = None, []

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """See :meth:`Runner.copy_prefix`."""
        self._caches[target] = copy.deepcopy(self._caches[source])
        self._tokens[target] = list(self._tokens[source])
        if len(self._tokens[target]) != num_tokens and not self._crop(target, num_tokens):
            ids = self._tokens[target][:num_tokens]
            self._caches[target], self._tokens[target] = None, []
            self._segment(target, 0, ids)
        self._tokens[target] = self._tokens[target][:num_tokens]

    @torch.inference_mode()
    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """See :meth:`Runner.load`."""
        num_bytes = self.stage(tensors)
        self.swap()
        return num_bytes

    @torch.inference_mode()
    def swap(self) -> None:
        """See :meth:`Runner.swap`; a copy within the device."""
        state = self._model.state_dict()
        for name, tensor in self._staged.items():
            state[name].copy_(tensor)

    @torch.inference_mode()
    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """See :meth:`Runner.stage`."""
        state, self._staged = self._model.state_dict(), {}
        missing, num_bytes = {_place(t): name for name, t in state.items()}, 0
        for name, tensor in tensors:
            if name not in state:
                raise ValueError(f"weights hold {name!r}, which this model has not")
            if state[name].shape != tensor.shape:
                want = tuple(state[name].shape)
                raise ValueError(f"{name!r} is {tuple(tensor.shape)}, the model wants {want}")
            self._staged[name] = torch.empty_like(state[name]).copy_(tensor)
            missing.pop(_place(state[name]), None)
            num_bytes += tensor.nbytes
        buffers = {_place(b) for b in self._model.buffers()}
        lacking = [name for place, name in missing.items() if place not in buffers]
        if lacking:
            raise ValueError(f"weights lack {len(lacking)} tensors, such as {min(lacking)!r}")
        return num_bytes


def cache_name(model: torch.nn.Module) -> str:
    """Return what a model calls its cache: ``cache`` since transformers 5.24.

    Earlier versions, and models that bring their own code, say ``past_key_values``.
    """
    named = "cache" in inspect.signature(model.forward).parameters
    return "cache" if named else "past_key_values"


def _place(tensor: torch.Tensor) -> int:
    """Tied tensors lie at one place and count once."""
    return tensor.data_ptr()
