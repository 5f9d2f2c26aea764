"""LoRA: a frozen model, with two trained low-rank matrices for each adapted matrix.

    x --+--> W (frozen) ----------------------------------------+--> out   (arXiv:2106.09685, eq. 3)
        +--> A [rank, in] --> B [out, rank] --> * alpha / rank -+

On several ranks, adapters are added before the model is sharded, and are sharded like the base.

Takes: a model in float32. Gives: the same model with adapters, their tensors, and merged weights.
Never: changes the base, or the model's initial logprobs (B begins at zero).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollart_core.config.training import LoRA
from rollart_core.errors import ConfigError, first_line
from rollart_core.models import lora
from rollart_core.training import checkpoint, distributed
from rollart_core.training.distributed import decoder_layers
from rollart_core.training.trained import TrainedWeights

ADAPTER = "default"
"""peft's default name of an adapter."""


class LoRAWeights(TrainedWeights):
    """The adapters of a model, which may be sharded.

    Args:
        model: A transformers causal LM on its device, with adapters of :func:`put_adapters`.
        config: The ``lora`` section.
        model_path: The base model, as named in exported folders in peft's format.
    """

    def __init__(self, model: nn.Module, config: LoRA, model_path: str) -> None:
        super().__init__(model)
        self.base_path = model_path
        self._config = config
        self._draw()
        self._base = _fingerprint(model)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return only the adapters; frozen parameters have no gradient and no moments."""
        return {_plain(n): p for n, p in self.model.named_parameters() if p.requires_grad}

    def kept(self) -> checkpoint.State:
        """Return the adapters, and a fingerprint of the base."""
        return {"lora": self._adapters(), "lora_base": self._base.clone()}

    def check_loaded(self, kept: checkpoint.State, path: str) -> None:
        """Check that loaded adapters belong to this base.

        Raises:
            ConfigError: If they belong to another base.
        """
        found = kept["lora_base"]
        assert isinstance(found, Tensor)
        if not torch.equal(found, self._base):
            raise ConfigError(
                f"the checkpoint {path} has adapters for other weights than model.path has now: "
                "restore the model that the run began with"
            )

    def whole(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with merged adapters, created one by one."""
        adapters = dict(self._scaled())
        for full_name, parameter in checkpoint.named_tensors(self.model).items():
            name = _plain(full_name)
            if name.endswith((lora.A, lora.B)):
                continue
            module = name.removesuffix(".weight")
            if module + lora.A not in adapters:
                yield name, distributed.whole(parameter.to(dtype))
                continue
            down, up = adapters[module + lora.A], adapters[module + lora.B]
            yield name, lora.merge(distributed.whole(parameter), down, up).to(dtype)

    def published(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield merged weights, or only the adapters in float32 with ``sync: adapter``."""
        return super().published(dtype) if self._config.sync == "merged" else self._scaled()

    def export_with_adapters(self, path: str) -> None:
        """Write the adapters in peft's format, at ``<path>-adapter``."""
        from safetensors.torch import save_file

        adapters = ((name, distributed.whole(t)) for name, t in self._adapters().items())
        held = checkpoint.on_first_rank(adapters)
        tensors = {f"base_model.model.{name}": t.contiguous() for name, t in held.items()}
        modules = {name.removesuffix(lora.A) for name in held if name.endswith(lora.A)}

        def write(part: Path) -> None:
            with distributed.together():
                if distributed.rank() == 0:
                    part.mkdir()
                    save_file(
                        tensors, part / "adapter_model.safetensors", metadata={"format": "pt"}
                    )
                    record = _record(self._config, modules, self.base_path)
                    record.save_pretrained(str(part))

        checkpoint.replace_folder(Path(f"{path}-adapter"), write)

    def now(self) -> dict[str, Tensor]:
        """Return a copy of the adapters."""
        return {name: tensor.clone() for name, tensor in self._adapters().items()}

    def none(self) -> dict[str, Tensor]:
        """Return adapters of zeros, which do not change the base."""
        return {name: torch.zeros_like(tensor) for name, tensor in self._adapters().items()}

    @contextmanager
    def holding(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        """Use other adapters within the block, without gradients."""
        mine = self.now()
        self._hold(others)
        try:
            yield
        finally:
            self._hold(mine)

    @torch.no_grad()
    def _hold(self, others: Mapping[str, Tensor]) -> None:
        for name, own in self._adapters().items():
            own.copy_(others[name])

    @torch.no_grad()
    def _draw(self) -> None:
        """Initialise A randomly, the same for any number of ranks, and B with zeros."""
        chance = torch.Generator().manual_seed(torch.initial_seed())
        for name, parameter in self.parameters().items():
            drawn = torch.zeros(parameter.shape)
            if name.endswith(lora.A):  # as peft does
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=chance)
            parameter.copy_(_laid_out(drawn, parameter))

    def _adapters(self) -> dict[str, Tensor]:
        distributed.reshard(self.model)
        return {name: p.detach() for name, p in self.parameters().items()}

    def _scaled(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole adapters as engines receive them."""
        scale = self._config.alpha / self._config.rank
        for name, shard in self._adapters().items():
            tensor = distributed.whole(shard)
            yield name, tensor * scale if name.endswith(lora.B) else tensor


def put_adapters(model: nn.Module, config: LoRA, model_path: str) -> None:
    """Add adapters to a model, before it is sharded.

    Raises:
        ConfigError: If peft is missing or refuses, or the model lacks the modules to adapt.
    """
    modules = _modules(model, config)
    try:
        from peft import inject_adapter_in_model
    except ImportError as e:
        raise ConfigError(f"lora: peft is missing ({e}): pip install 'rollart[lora]'") from e
    try:
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of its defaults
            inject_adapter_in_model(_record(config, modules, model_path), model, ADAPTER)
    except ValueError as e:
        raise ConfigError(f"lora: {first_line(str(e))}") from e
    model.eval()


def _record(config: LoRA, modules: Iterable[str], model_path: str) -> Any:
    """Return peft's config of the adapters."""
    from peft import LoraConfig

    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=sorted(modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model_path,
        inference_mode=False,
    )


def _modules(model: nn.Module, config: LoRA) -> list[str]:
    """Return the full names of the matrices to adapt.

    Raises:
        ConfigError: If a module does not exist; the error lists the existing ones.
    """
    inner = {id(m) for layer in decoder_layers(model) for m in layer.modules()}
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in inner]
    last = {name.rpartition(".")[2] for name in linear}
    if not linear:
        raise ConfigError(
            f"lora: {type(model).__name__} has no linear layers in its decoder that can be "
            "adapted: remove lora to train the whole model"
        )
    wanted = last if config.target_modules is None else set(config.target_modules)
    if unknown := sorted(wanted - last):
        raise ConfigError(
            f"lora.target_modules: {type(model).__name__} has no {', '.join(unknown)}; "
            f"it has {', '.join(sorted(last))}"
        )
    return [name for name in linear if name.rpartition(".")[2] in wanted]


def _plain(name: str) -> str:
    """Return a parameter's name without peft's additions."""
    return name.replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that all ranks have, sharded like another tensor."""
    tensor, mesh = tensor.to(like.device), getattr(like, "device_mesh", None)
    if mesh is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def _fingerprint(model: nn.Module) -> Tensor:
    """Return a checksum of the bits of each frozen tensor; int64 on the CPU.

    It is the same for any number of ranks. This is a collective call.
    """
    frozen = [p.detach() for p in model.parameters() if not p.requires_grad]
    mine = [getattr(p, "to_local", lambda p=p: p)() for p in frozen]
    sums = [p.contiguous().view(torch.int32).sum(dtype=torch.int64) for p in mine]
    return distributed.all_sum(torch.stack([s.to("cpu") for s in sums]))


def trained_weights(model: nn.Module, config: LoRA | None, model_path: str) -> TrainedWeights:
    """Return the trained weights of a model: its adapters if ``config`` is given, else all."""
    return LoRAWeights(model, config, model_path) if config else TrainedWeights(model)
