"""Loading of the model to train, as transformers builds it.

    one rank       files ──transformers──> whole model ──> device
    several ranks  config ──> parameters without content ──FSDP2──> memory for this rank's shards
                   files  ──tensor by tensor, the rows of this rank──────────^

A recipe lists the tensors of the files that make a parameter:

    files                                        model, as transformers builds it
    model.norm.weight                    ──────> model.norm.weight                      unchanged
    ...experts.0.gate_proj.weight ──┐
    ...experts.1.gate_proj.weight ──┤ stacked
    ...experts.0.up_proj.weight   ──┤ and con-
    ...experts.1.up_proj.weight   ──┴─catenated> ...experts.gate_up_proj [2, ...]

Takes: a folder or a hub id. Gives: a causal LM in float32, or a ConfigError. Never: holds, on one
of several ranks, more than its shards and one tensor of the files. Exception: if no recipe fits the
files (:class:`Unfit`), it logs a warning, and each rank loads the whole model.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollart_core.errors import ConfigError, first_line
from rollart_core.models.weights import TensorFiles, model_folder, weight_files
from rollart_core.training import distributed
from rollart_core.training.distributed import decoder_layers

_log = logging.getLogger(__name__)

BLOCK_BYTES = 32 * 2**20
"""Bytes of a tensor's rows that are read at a time."""
COMPARED_ROWS = 4096
"""Rows of two tensors that are compared at a time."""


def load_model(model_path: str) -> nn.Module:
    """Load a causal LM in float32, without dropout.

    Raises:
        ConfigError: If there is no model at ``model_path``.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would overwrite the run's progress display
    try:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    except (OSError, ValueError) as e:
        raise _no_model(model_path, e) from e
    return model.eval()  # type: ignore[no-any-return]


def load_on_device(
    model_path: str,
    device: torch.device,
    *,
    bfloat16: bool = False,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:
    """Load a causal LM in float32 onto this rank's device: whole on one rank, else its shards.

    Args:
        model_path: A local folder or a hub id.
        device: The device.
        bfloat16: See :func:`rollart_core.training.distributed.shard`.
        prepare: Called with the model before it is sharded. It may wrap modules, but must keep the
            module objects. On several ranks, the parameters have no content yet.

    Raises:
        ConfigError: If there is no model at ``model_path``, or its files cannot be read.
    """
    if distributed.world_size() > 1:
        try:
            with distributed.together():
                plan = _plan(model_path)
        except Unfit as e:
            _log.warning("%s: each rank loads the whole model, because %s", model_path, e)
        else:
            return _load_shards(plan, device, bfloat16=bfloat16, prepare=prepare)
    model = load_model(model_path)
    prepare(model)
    return distributed.shard(model, device, bfloat16=bfloat16)


class _Slot(NamedTuple):
    """The module and attribute of a tensor, which stay valid if the module is wrapped."""

    module: nn.Module
    attribute: str
    recipe: Recipe


class _Plan(NamedTuple):
    """A model without content, and the files and recipes that fill it."""

    model: nn.Module
    files: list[Path]
    slots: list[_Slot]


def _plan(model_path: str) -> _Plan:
    """Build the model without content, and choose the tensors of its files that fill it.

    Raises:
        ConfigError: If there is no model at ``model_path``, or its files cannot be read.
        Unfit: If only transformers can load it.
    """
    model = empty_model(model_path)
    folder = model_folder(model_path)
    files = weight_files(folder)
    if not files:
        raise Unfit("its folder has no safetensors files")
    if (folder / "adapter_config.json").is_file():
        raise Unfit("its folder has an adapter")
    with contextlib.closing(TensorFiles(files)) as tensors:
        found = recipes(model, tensors)
    slots = []
    for name, recipe in found.items():
        parent, _, attribute = name.rpartition(".")
        slots.append(_Slot(model.get_submodule(parent), attribute, recipe))
    return _Plan(model, files, slots)


def empty_model(model_path: str) -> nn.Module:
    """Build a causal LM whose parameters have no content; its buffers have content.

    Raises:
        ConfigError: If there is no model at ``model_path``.
        Unfit: If it cannot be built without content.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(model_path)
        for name in ("quantization_config", "transformers_weights"):
            if getattr(config, name, None):
                raise Unfit(f"its config has {name}")
        with _without_content(), torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError) as e:
        raise _no_model(model_path, e) from e
    except (RuntimeError, NotImplementedError) as e:
        raise Unfit(f"it cannot be built without content: {first_line(str(e))}") from e
    with contextlib.suppress(OSError):  # if there is one, exported folders contain it
        model.generation_config = GenerationConfig.from_pretrained(model_path)
    return model.eval()  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_content() -> Iterator[None]:
    """Build modules within the block without content of their parameters.

    With the meta device, buffers would have no content either, and no file contains them.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # a tied one stays the same object
            return None
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook: Any = emptied  # torch's type lacks the return value
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _load_shards(
    plan: _Plan, device: torch.device, *, bfloat16: bool, prepare: Callable[[nn.Module], None]
) -> nn.Module:
    """Shard a model without content, and fill this rank's shards.

    Raises:
        ConfigError: If the files cannot be read.
    """
    prepare(plan.model)
    model = distributed.shard(plan.model, device, bfloat16=bfloat16)
    distributed.allocate(model, device)
    with distributed.together(), contextlib.closing(TensorFiles(plan.files)) as files:
        for slot in plan.slots:
            rows, first = distributed.own_rows(getattr(slot.module, slot.attribute))
            slot.recipe.fill(files, rows, first)
    return model


def _no_model(model_path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.path: {model_path!r} is not a causal language model: {first_line(str(error))}"
    )


def check_vocabulary(policy: torch.nn.Module, other: torch.nn.Module, path: str) -> None:
    """Check that a reference has the vocabulary size of the policy.

    For models in local folders, the validation of the config has checked it already.

    Raises:
        ConfigError: If the sizes differ; the error names both.
    """
    sizes = [int(cast("Any", model.config).vocab_size) for model in (policy, other)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"reference.path: {path} has a vocabulary of {sizes[1]} tokens, but the policy has one "
            f"of {sizes[0]}: set a model with the same tokenizer"
        )


class Unfit(Exception):
    """No recipe makes the model from its files; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The tensors of the files that make a tensor of the model."""

    parts: tuple[tuple[str, ...], ...]
    """Unchanged: one name. Stacked: for each part of a row, the names of that part of all rows."""
    dim: int | None = None
    """Dimension of the result along which the parts of a row are concatenated; None: unchanged."""

    def fill(self, files: TensorFiles, into: Tensor, first: int = 0) -> None:
        """Write rows of the tensor, from ``first`` on, into ``into``, in its dtype."""
        if self.dim is None:
            _copy(files, self.parts[0][0], into, first)
            return
        sizes = [files.shape(names[0])[self.dim - 1] for names in self.parts]
        for n in range(len(into)):
            cuts = torch.split(into[n], sizes, self.dim - 1)
            for part, names in zip(cuts, self.parts, strict=True):
                part.copy_(files.whole(names[first + n]))

    def shape(self, files: TensorFiles) -> tuple[int, ...]:
        """Return the shape of the result.

        Raises:
            Unfit: If the shapes of the parts do not match.
        """
        if self.dim is None:
            return files.shape(self.parts[0][0])
        at, sizes, rests = self.dim - 1, [], set()
        for names in self.parts:
            shapes = {files.shape(name) for name in names}
            if len(shapes) > 1 or len(names) != len(self.parts[0]):
                raise Unfit(f"{names[0]} and its siblings have different shapes in the files")
            shape = shapes.pop()
            sizes.append(shape[at])
            rests.add(shape[:at] + shape[at + 1 :])
        if len(rests) > 1:
            raise Unfit(f"the shapes of {self.parts[0][0]} and {self.parts[1][0]} do not match")
        rest = rests.pop()
        return (len(self.parts[0]), *rest[:at], sum(sizes), *rest[at:])


def _copy(files: TensorFiles, name: str, into: Tensor, first: int) -> None:
    """Copy rows of a tensor in blocks, because each block is in memory twice."""
    if not into.dim():
        into.copy_(files.whole(name))
        return
    row_bytes = into.element_size() * math.prod(into.shape[1:])
    for block in torch.split(into, max(1, BLOCK_BYTES // max(1, row_bytes))):
        block.copy_(files.rows(name, first, first + len(block)))
        first += len(block)


def recipes(model: nn.Module, files: TensorFiles) -> dict[str, Recipe]:
    """Return name -> recipe of parameters and persistent buffers; a tied one only once.

    Raises:
        Unfit: If copying and stacking the files does not make the model.
    """
    found = _found(model, files.names)
    chosen: dict[str, Recipe] = {}
    for names in _tied(model):
        known = [name for name in names if name in found]
        if not known:
            raise Unfit(f"the files have no {names[0]}")
        for other in known[1:]:
            _check_alike(files, found[known[0]], found[other], other)
        chosen[names[0]] = found[known[0]]
    shapes = {name: tuple(tensor.shape) for name, tensor in _state(model).items()}
    for name, recipe in chosen.items():
        if recipe.shape(files) != shapes[name]:
            raise Unfit(f"{name} is {recipe.shape(files)} in the files instead of {shapes[name]}")
    return chosen


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict, including those without content."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return state


def _tied(model: nn.Module) -> Iterable[list[str]]:
    """Return the names of each tensor of the state dict; several if modules share it."""
    names = defaultdict(list)
    for name, tensor in _state(model).items():
        names[id(tensor)].append(name)
    return names.values()


def _check_alike(files: TensorFiles, one: Recipe, other: Recipe, name: str) -> None:
    """Check that tensors which the model ties have equal values in the files.

    Raises:
        Unfit: If they differ; the message names them.
    """
    shape = one.shape(files)
    alike = other.shape(files) == shape
    for first in range(0, shape[0] if alike else 0, COMPARED_ROWS):
        blocks = torch.empty(2, min(COMPARED_ROWS, shape[0] - first), *shape[1:])
        for recipe, into in zip((one, other), blocks, strict=True):
            recipe.fill(files, into, first)
        alike = alike and torch.equal(blocks[0], blocks[1])
    if not alike:
        raise Unfit(f"the files have separate values for {name}, which the model ties")


@dataclass(slots=True)
class _Stack:
    """A parameter that transformers stacks from several tensors."""

    converter: Any
    names: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Pattern -> tensors of the files that match it, in order."""

    def recipe(self) -> Recipe:
        from transformers.core_model_loading import Concatenate, MergeModulelist

        match self.converter.operations:
            case [MergeModulelist(dim=0)]:
                dims = [1]
            case [MergeModulelist(dim=0), Concatenate(dim=dim)] if dim > 0:
                dims = [dim]
            case _:
                raise Unfit(f"{self.converter} does more than stack tensors")
        patterns = self.converter.source_patterns
        if set(patterns) != set(self.names) or len(self.converter.target_patterns) > 1:
            raise Unfit(f"{self.converter} does not find all tensors that it stacks")
        return Recipe(tuple(tuple(self.names[p]) for p in patterns), dims[0])


def _found(model: nn.Module, names: Iterable[str]) -> Mapping[str, Recipe]:
    """Return name in the model -> recipe, for all tensors that the files contain.

    Raises:
        Unfit: If transformers would do more than rename and stack.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key
    except ImportError:  # before transformers 5, the files have the names of the model
        return {own: Recipe(((name,),)) for name, own in _prefixed(model, names) if own}
    mapping = get_model_conversion_mapping(model)
    by_pattern = {
        pattern: conversion
        for conversion in mapping
        if isinstance(conversion, WeightConverter)
        for pattern in conversion.source_patterns
    }
    found: dict[str, Recipe] = {}
    stacks: dict[str, _Stack] = {}
    for name, own, pattern in _renamed(model, mapping, sorted(names, key=dot_natural_key)):
        if pattern is None:
            found[own] = Recipe(((name,),))
        else:
            stacks.setdefault(own, _Stack(by_pattern[pattern])).names[pattern].append(name)
    if both := sorted(set(stacks) & set(found)):
        raise Unfit(f"the files have both {both[0]} and the tensors that it is stacked from")
    # As from_pretrained does: the used conversions are reversed when the model is written.
    model._weight_conversions = [c for c in mapping if getattr(c, "_was_used", True)]  # type: ignore[assignment]
    return found | {own: stack.recipe() for own, stack in stacks.items()}


def _renamed(
    model: nn.Module, mapping: list[Any], names: Iterable[str]
) -> Iterator[tuple[str, str, str | None]]:
    """Yield the name in the files, the name in the model, and the pattern of its stack."""
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    renamings = [c for c in mapping if isinstance(c, WeightRenaming)]
    converters = [c for c in mapping if isinstance(c, WeightConverter)]
    state, prefix = _state(model), model.base_model_prefix
    for name in names:
        own, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if own not in state and name in state:
            own, pattern = rename_source_key(name, [], [], prefix, state)
        if own in state:
            yield name, own, pattern


def _prefixed(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the name in the files and in the model; one of them may have a prefix."""
    state, prefix = _state(model), f"{model.base_model_prefix}."
    for name in names:
        for own in (name, prefix + name, name.removeprefix(prefix)):
            if own in state:
                yield name, own
                break


def recompute_activations(model: nn.Module) -> None:
    """Make every layer of the model recompute its activations in the backward pass.

    Call it before the layers are sharded, so that FSDP2 gathers their parameters only once.
    """
    for layer in decoder_layers(model):
        # There is no dropout, so the random state need not be preserved.
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


class HostCopies:
    """Host memory for the storages of tensors, whose device is free meanwhile.

    Only the storages change: parameters, shards of FSDP2 and moments keep their identity and their
    views. On a CPU the same is done with a copy. The host memory is kept, because pinned memory
    takes long to allocate.
    """

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._free: dict[int, list[Tensor]] = {}  # by bytes

    @property
    def num_bytes(self) -> int:
        """The bytes that are in host memory now."""
        return sum(host.nbytes for _, host in self._held)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Move the storages of tensors to host memory; call it once until ``reload``."""
        storages = {}
        for tensor in tensors:
            storage = _own(tensor).untyped_storage()
            if not storage.resizable():  # on a CPU: memory of the file that it was loaded from
                tensor.data = tensor.detach().clone()
                storage = tensor.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage
        for storage in storages.values():
            host = self._host(storage.nbytes(), pinned=storage.device.type == "cuda")
            host.copy_(_as_bytes(storage), non_blocking=True)
            self._held.append((storage, host))
        _wait()
        for storage, _ in self._held:
            storage.resize_(0)

    def reload(self) -> None:
        """Move all storages back to their devices."""
        for storage, host in self._held:
            storage.resize_(host.nbytes)
            _as_bytes(storage).copy_(host, non_blocking=True)
        _wait()
        for _, host in self._held:
            self._free.setdefault(host.nbytes, []).append(host)
        self._held.clear()

    def _host(self, num_bytes: int, *, pinned: bool) -> Tensor:
        if free := self._free.get(num_bytes):
            return free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def _own(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor."""
    detached: Any = tensor.detach()
    own: Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    return own


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
