"""Our own decoder for the Llama, Mistral, Qwen2 and Qwen3 family, and runners of any model path.

    token ids -> embedding -> layers x [norm, qkv, rotate + store, attend, out, norm, mlp] -> head

Takes: packed token batches, no padding. Gives: logits of the wanted rows; in the last layer only
those rows are computed after their keys and values are stored. Never: allocates per step on a CPU
(buffers are allocated once), or schedules.

:func:`load_runner` takes a model path; causal LMs of other families run through transformers
(:class:`HuggingFaceRunner`). That is slower: it keeps one transformers cache per slot, and does not
batch segments.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollart_core.errors import ConfigError
from rollart_core.models.hub_names import as_in_files
from rollart_core.models.weights import iter_weights, model_folder
from rollart_cpu.inference.architecture import Architecture, own_architecture, read_config
from rollart_cpu.inference.decoder_weights import DecoderWeights, LayerWeights, Linear
from rollart_cpu.inference.kernels import load_kernels
from rollart_cpu.inference.layout import Layout, lay_out
from rollart_cpu.inference.ops import NativeOps, Ops, TorchOps, fits
from rollart_cpu.inference.runner import Runner, TokenBatch

TILE_ROWS = 64
"""Rows of every matrix product in deterministic mode: a product of one shape gives a row the same
bits at any position, products of two shapes may not."""


FLOPS_WORTH_THREADS = 3e7
"""A CPU step with less work runs on one thread: waking others costs more than it saves, and ten
times more on a busy machine, where a thread may not be scheduled."""


class Decoder(Runner):
    """A runner of our own."""

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        num_slots: int,
        max_tokens: int,
        max_batch_tokens: int,
        deterministic: bool = False,
        kernels: str = "auto",
    ) -> None:
        """Allocate cache and buffers.

        Args:
            weights: Allocated weights; loaded by :meth:`load`.
            num_slots: Rows of the cache.
            max_tokens: Positions of a row.
            max_batch_tokens: Most rows of one batch.
            deterministic: Give a row the same bits whatever other rows are in the batch.
            kernels: ``auto``, ``native`` or ``torch``.

        Raises:
            UserError: If ``native`` kernels are requested but not available.
        """
        self._w, self._shape = weights, weights.shape
        self._spare: DecoderWeights | None = None
        self.vocab_size = self._shape.vocab_size
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self._tile = TILE_ROWS if deterministic else 1
        self._adaptive = not deterministic and weights.embedding.device.type == "cpu"
        self.max_batch_tokens = -(-max_batch_tokens // self._tile) * self._tile
        self._ops = self._make_ops(kernels, deterministic)
        self._buffers = self._make_buffers()

    def _make_ops(self, kernels: str, deterministic: bool) -> Ops:
        table = self._w.embedding
        rope = rope_tables(self._shape, self.max_tokens, table.device)
        slots, tokens = self.num_slots, self.max_tokens
        native = table.device.type == "cpu" and table.dtype == torch.float32 and fits(self._shape)
        library = load_kernels(kernels == "native") if native and kernels != "torch" else None
        self.is_native = library is not None
        if library is not None:
            return NativeOps(library, self._shape, rope, slots, tokens)
        return TorchOps(
            self._shape, rope, slots, tokens, dtype=table.dtype, deterministic=deterministic
        )

    def _make_buffers(self) -> dict[str, torch.Tensor]:
        s, like, rows = self._shape, self._w.embedding, self.max_batch_tokens
        widths = {
            "x": s.width,
            "h": s.width,
            "qkv": s.qkv_width,
            "heads": s.num_heads * s.head_dim,
            "y": s.width,
            "gate_up": 2 * s.ffn_width,
            "ffn": s.ffn_width,
            "x_wanted": s.width,
            "qkv_wanted": s.qkv_width,
        }
        return {name: like.new_zeros(rows, width) for name, width in widths.items()}

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """See :meth:`Runner.load`."""
        with torch.inference_mode():
            return self._w.load(tensors)

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """See :meth:`Runner.stage`."""
        with torch.inference_mode(), _nearby(self._w.embedding.device):
            self._spare = self._spare or self._w.alike()
            return self._spare.fill(tensors)

    def swap(self) -> None:
        """See :meth:`Runner.swap`."""
        assert self._spare is not None, "nothing was staged"
        self._w, self._spare = self._spare, self._w

    def clear(self, slot: int) -> None:
        """See :meth:`Runner.clear`."""
        self._ops.clear(slot)

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """See :meth:`Runner.copy_prefix`."""
        self._ops.copy_prefix(source, target, num_tokens)

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """See :meth:`Runner.forward`."""
        threads = torch.get_num_threads()
        flops = 2 * batch.num_tokens * self._w.num_products
        if threads == 1 or not self._adaptive or flops >= FLOPS_WORTH_THREADS:
            return self._forward(batch)
        torch.set_num_threads(1)
        try:
            return self._forward(batch)
        finally:
            torch.set_num_threads(threads)

    @torch.inference_mode()
    def _forward(self, batch: TokenBatch) -> torch.Tensor:
        num, device = batch.num_tokens, self._w.embedding.device
        layout = lay_out(batch, split=device.type == "cpu" and torch.get_num_threads() > 1)
        x = self._rows("x", num)
        ids = torch.from_numpy(batch.token_ids).to(device)
        torch.index_select(self._w.embedding, 0, ids, out=x)
        residual: torch.Tensor | None = None
        for i, layer in enumerate(self._w.layers):
            last = i == len(self._w.layers) - 1
            x, residual = self._layer(i, layer, x, residual, layout, last=last)
        h = self._rows("h", x.shape[0])
        self._ops.norm(x, residual, self._w.norm, h)
        logits = x.new_empty(self._padded(x.shape[0]), self.vocab_size)
        self._multiply("h", self._w.head, logits, x.shape[0])
        return logits[: x.shape[0]].float()

    def _layer(
        self,
        i: int,
        w: LayerWeights,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        layout: Layout,
        *,
        last: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream ``[N or R, D]`` and the last term to add to it."""
        ops, num = self._ops, x.shape[0]
        ops.norm(x, residual, w.norm1, self._rows("h", num))
        qkv = self._linear("h", w.qkv, "qkv", num)
        ops.rotate_and_store(i, qkv, (w.q_norm, w.k_norm), layout)
        items = layout.items
        if last and not layout.all_wanted:
            x, qkv = self._only_wanted(x, qkv, layout)
            num, items = x.shape[0], layout.wanted_items
        ops.attend(i, qkv, self._rows("heads", num), items)
        ops.norm(x, self._linear("heads", w.out, "y", num), w.norm2, self._rows("h", num))
        ops.silu_mul(self._linear("h", w.gate_up, "gate_up", num), self._rows("ffn", num))
        return x, self._linear("ffn", w.down, "y", num)

    def _only_wanted(
        self, x: torch.Tensor, qkv: torch.Tensor, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(layout.wanted_rows).to(x.device)
        x_wanted = self._rows("x_wanted", len(rows))
        qkv_wanted = self._rows("qkv_wanted", len(rows))
        return (
            torch.index_select(x, 0, rows, out=x_wanted),
            torch.index_select(qkv, 0, rows, out=qkv_wanted),
        )

    def _rows(self, name: str, num: int) -> torch.Tensor:
        return self._buffers[name][:num]

    def _padded(self, num: int) -> int:
        return -(-num // self._tile) * self._tile

    def _linear(self, source: str, linear: Linear, target: str, num: int) -> torch.Tensor:
        """Multiply the first ``num`` rows of one buffer into another."""
        self._multiply(source, linear, self._buffers[target], num)
        return self._rows(target, num)

    def _multiply(self, source: str, linear: Linear, target: torch.Tensor, num: int) -> None:
        """Multiply in one piece, or in deterministic mode in tiles of one shape."""
        step = num if self._tile == 1 else self._tile
        for start in range(0, num, max(step, 1)):
            x, out = self._buffers[source][start : start + step], target[start : start + step]
            if linear.bias is None:
                torch.mm(x, linear.weight, out=out)
            else:
                torch.addmm(linear.bias, x, linear.weight, out=out)


@contextmanager
def _nearby(device: torch.device) -> Iterator[None]:
    """Copy on a separate stream, so that no step waits for a copy; it is complete at exit."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def rope_tables(
    shape: Architecture, num_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines ``[positions, head_dim / 2]`` in float32."""
    even = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float()
    frequency = 1.0 / (shape.rope_theta ** (even / shape.head_dim))
    angle = torch.arange(num_positions).float()[:, None] * frequency
    return angle.cos().to(device), angle.sin().to(device)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Options to run a model."""

    dtype: str = "float32"
    """The dtype that weights are rounded to: ``float32`` or ``bfloat16``."""
    compute_dtype: str = "auto"
    """The dtype of products. ``auto``: float32 on a CPU (few have fast bfloat16 products, and
    float32 is the more exact), ``dtype`` elsewhere."""
    device: str = "auto"
    """``auto`` is CUDA if available."""
    num_slots: int = 64
    max_tokens: int = 2048
    max_batch_tokens: int = 1024
    kv_cache_bytes: int | None = None
    """Fewer slots are allocated if they would take more."""
    deterministic: bool = False
    kernels: str = "auto"
    decoder: str = "auto"
    """``auto``, ``own`` or ``transformers``."""


def load_runner(path: str, options: RunnerOptions) -> Runner:
    """Load a model.

    Args:
        path: A local folder or a hub id.
        options: Options to run it.

    Raises:
        ConfigError: If it is not a model, or cannot run with these options.
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
        ConfigError: If CUDA is requested but not available.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device: cuda was requested, but torch sees no CUDA device")
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


_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Relative difference of logits that rounding can explain."""


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
        self._is_recurrent = bool(getattr(model, "_is_stateful", False))
        self._continues = not self._is_recurrent or self._reads_on()
        """Whether several tokens can follow a cache."""

    @torch.inference_mode()
    def _reads_on(self) -> bool:
        """Return whether tokens after a cache have the logits that they have without it.

        With some recurrent models, transformers ignores the state if several tokens follow it.
        """
        ids = [i % self.vocab_size for i in range(1, 7)]
        whole = self._model(torch.tensor([ids], device=self._device)).logits[0, -1].float()
        begun = self._model(torch.tensor([ids[:3]], device=self._device), use_cache=True)
        cache = {self._cache_name: getattr(begun, self._cache_name, None)}
        rest = self._model(torch.tensor([ids[3:]], device=self._device), use_cache=True, **cache)
        difference = (rest.logits[0, -1].float() - whole).abs().max()
        return bool(difference <= _ROUNDING[self._model.dtype] * whole.abs().max())

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
        fits = (len(kept) == start or self._crop(slot, start)) and self._caches[slot] is not None
        if start and not (fits and (self._continues or len(ids) == 1)):
            ids = kept[:start] + ids  # there is no cache to continue: compute all tokens again
            self._caches[slot], start = None, 0
        result = self._model(
            torch.tensor([ids], device=self._device),
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_name: self._caches[slot]},
        )
        self._caches[slot] = getattr(result, self._cache_name, None)
        self._tokens[slot] = kept[:start] + ids
        logits: torch.Tensor = result.logits[0, -keep:].float()
        return logits

    def _crop(self, slot: int, length: int) -> bool:
        """Cut a slot's cache to ``length`` tokens; False when its kind cannot be cut."""
        if length == 0:
            self._caches[slot], self._tokens[slot] = None, []
            return True
        cache = self._caches[slot]
        if self._is_recurrent or not hasattr(cache, "crop"):
            return False
        if any(getattr(cache, "is_sliding", [True])):
            return False
        try:
            cache.crop(length - len(self._tokens[slot]))  # negative: how many to take off
        except (RuntimeError, ValueError):  # a convolution keeps no earlier state
            return False
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
        state = self._state()
        for name, tensor in self._staged.items():
            state[name].copy_(tensor)

    @torch.inference_mode()
    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """See :meth:`Runner.stage`."""
        state, self._staged = self._state(), {}
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

    def _state(self) -> dict[str, torch.Tensor]:
        """Return the weights in use by the names in files: experts are views of one tensor."""
        architectures = self._model.config.architectures or ()
        return dict(as_in_files(self._model.state_dict().items(), architectures))


def cache_name(model: torch.nn.Module) -> str:
    """Return what a model calls its cache: ``cache`` since transformers 5.24.

    Earlier versions, and models that bring their own code, say ``past_key_values``.
    """
    named = "cache" in inspect.signature(model.forward).parameters
    return "cache" if named else "past_key_values"


def _place(tensor: torch.Tensor) -> int:
    """Tied tensors share memory and count once."""
    return tensor.data_ptr()
