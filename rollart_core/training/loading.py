"""The model a trainer trains, as transformers has it.

    one rank       files ──transformers──> whole model ──> device
    several ranks  config ──> parameters without content ──FSDP2──> room for this rank's shards
                   files  ──tensor by tensor, the rows of this rank──────────^

Takes: a folder or a hub id. Gives: a causal LM in float32, or a ConfigError. Never: holds, on one
of several ranks, more than its shards and one tensor of the files; but where the files are none
that it can read row by row, it says so and lets each rank load them whole.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from rollart_core.errors import ConfigError, first_line
from rollart_core.models.tensor_files import TensorFiles
from rollart_core.models.weights import model_folder, weight_files
from rollart_core.training import distributed
from rollart_core.training.recipes import Recipe, Unfit, recipes

_log = logging.getLogger(__name__)


def load_model(model_path: str) -> nn.Module:
    """Load a causal LM in float32, without dropout.

    Raises:
        ConfigError: When there is none at ``model_path``.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # they would draw over the run's own
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
        device: Where to.
        bfloat16: See :func:`rollart_core.training.distributed.shard`.
        prepare: Gets the model before it is sharded. Its modules may be wrapped, and stay the
            objects they are; on several ranks its parameters have no content yet.

    Raises:
        ConfigError: When there is none at ``model_path``, or its files cannot be read.
    """
    if distributed.world_size() > 1:
        try:
            with distributed.together():
                plan = _plan(model_path)
        except Unfit as e:
            _log.warning("%s: each rank loads the whole model, for %s", model_path, e)
        else:
            return _load_shards(plan, device, bfloat16=bfloat16, prepare=prepare)
    model = load_model(model_path)
    prepare(model)
    return distributed.shard(model, device, bfloat16=bfloat16)


class _Slot(NamedTuple):
    """Where a tensor of the model is held, whatever its module is wrapped in by then."""

    module: nn.Module
    attribute: str
    recipe: Recipe


class _Plan(NamedTuple):
    """A model without content, and what fills it."""

    model: nn.Module
    files: list[Path]
    slots: list[_Slot]


def _plan(model_path: str) -> _Plan:
    """Build the model without content, and say what of its files fills it.

    Raises:
        ConfigError: When there is none at ``model_path``, or its files cannot be read.
        Unfit: When transformers has to load it.
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
    """Build a causal LM whose parameters have shapes and no content; buffers are as ever.

    Raises:
        ConfigError: When there is none at ``model_path``.
        Unfit: When it cannot be built so.
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
    with contextlib.suppress(OSError):  # it goes into exported folders, where there is one
        model.generation_config = GenerationConfig.from_pretrained(model_path)
    return model.eval()  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_content() -> Iterator[None]:
    """Let parameters of modules that are built meanwhile lose their content at once.

    On the meta device as a whole buffers would have none either, which no file has.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # a tied one stays the same object
            return None
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook: Any = emptied  # torch types it without what it may return
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
        ConfigError: When the files cannot be read.
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
        f"model.path: {model_path!r} is no causal language model: {first_line(str(error))}"
    )


def check_vocabulary(policy: torch.nn.Module, other: torch.nn.Module, path: str) -> None:
    """Refuse a reference with logits for other tokens than the policy's.

    Of models in folders that has been found when the config was loaded.

    Raises:
        ConfigError: Naming both sizes.
    """
    sizes = [int(cast("Any", model.config).vocab_size) for model in (policy, other)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"reference.path: {path} has a vocabulary of {sizes[1]} tokens, and the policy one of "
            f"{sizes[0]}; take a model with the same tokenizer"
        )
