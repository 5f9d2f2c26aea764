"""LoRA: a frozen model, and beside each of its chosen matrices two thin ones that are trained.

    x --+--> W (frozen) ----------------------------------------+--> out   (arXiv:2106.09685, eq. 3)
        +--> A [rank, in] --> B [out, rank] --> * alpha / rank -+

On several ranks adapters are put in before the model is sharded, and are shards as the base is.

Takes: a model in float32. Gives: the same model with adapters inside, their tensors, and weights
with them merged. Never: changes the base, or the model's first logprobs (B begins at zero).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollart_core.config.training import LoRA
from rollart_core.errors import ConfigError
from rollart_core.models import lora
from rollart_core.training import checkpoint, distributed
from rollart_core.training.distributed import decoder_layers
from rollart_core.training.trained import TrainedWeights

ADAPTER = "default"
"""What peft calls an adapter that nobody has named."""


class LoRAWeights(TrainedWeights):
    """The adapters of a model, of which this rank may hold shards.

    Args:
        model: A transformers causal LM on its device, with adapters by :func:`put_adapters`.
        config: The ``lora`` section.
        model_path: What a folder in peft's format names as its base.
    """

    def __init__(self, model: nn.Module, config: LoRA, model_path: str) -> None:
        super().__init__(model)
        self.base_path = model_path
        self._config = config
        self._draw()
        self._base = _fingerprint(model)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the adapters alone: what is frozen has no gradient and no moments."""
        return {_plain(n): p for n, p in self.model.named_parameters() if p.requires_grad}

    def kept(self) -> checkpoint.State:
        """Return the adapters, and by what the base is known again."""
        return {"lora": self._adapters(), "lora_base": self._base.clone()}

    def check_loaded(self, kept: checkpoint.State, path: str) -> None:
        """Refuse adapters of another base."""
        found = kept["lora_base"]
        assert isinstance(found, Tensor)
        if not torch.equal(found, self._base):
            raise ConfigError(
                f"the checkpoint {path} holds adapters for other weights than model.path has now: "
                "put back the model the run began with"
            )

    def whole(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with adapters merged, made one by one."""
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
        """Yield merged weights, or with ``sync: adapter`` the adapters alone, in float32."""
        return self.whole(dtype) if self._config.sync == "merged" else self._scaled()

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
        """Return adapters that change nothing."""
        return {name: torch.zeros_like(tensor) for name, tensor in self._adapters().items()}

    @contextmanager
    def holding(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        """Hold other adapters for a while, in which no gradient is wanted."""
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
        """Let A be random, the same on however many ranks, and B zero."""
        chance = torch.Generator().manual_seed(torch.initial_seed())
        for name, parameter in self.parameters().items():
            drawn = torch.zeros(parameter.shape)
            if name.endswith(lora.A):  # as peft draws it
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=chance)
            parameter.copy_(_laid_out(drawn, parameter))

    def _adapters(self) -> dict[str, Tensor]:
        distributed.reshard(self.model)
        return {name: p.detach() for name, p in self.parameters().items()}

    def _scaled(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters as engines get them, whole."""
        scale = self._config.alpha / self._config.rank
        for name, shard in self._adapters().items():
            tensor = distributed.whole(shard)
            yield name, tensor * scale if name.endswith(lora.B) else tensor


def put_adapters(model: nn.Module, config: LoRA, model_path: str) -> None:
    """Put adapters into a model, before it is sharded.

    Raises:
        ConfigError: When peft is missing, or the model has not what is to be adapted.
    """
    modules = _modules(model, config)
    try:
        from peft import inject_adapter_in_model
    except ImportError as e:
        raise ConfigError(f"lora: peft is missing ({e}): pip install 'rollart[lora]'") from e
    inject_adapter_in_model(_record(config, modules, model_path), model, ADAPTER)
    model.eval()


def _record(config: LoRA, modules: Iterable[str], model_path: str) -> Any:
    """Return what peft notes of adapters."""
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
        ConfigError: Naming those that there are.
    """
    inner = {id(m) for layer in decoder_layers(model) for m in layer.modules()}
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in inner]
    last = {name.rpartition(".")[2] for name in linear}
    if not linear:
        raise ConfigError(
            f"lora: {type(model).__name__} has no linear layers in its decoder that could be "
            "adapted; train it whole (remove lora)"
        )
    wanted = last if config.target_modules is None else set(config.target_modules)
    if unknown := sorted(wanted - last):
        raise ConfigError(
            f"lora.target_modules: {type(model).__name__} has no {', '.join(unknown)}; "
            f"it has {', '.join(sorted(last))}"
        )
    return [name for name in linear if name.rpartition(".")[2] in wanted]


def _plain(name: str) -> str:
    """Return a parameter's name without what peft has put in."""
    return name.replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that all ranks have, as another is sharded."""
    tensor, mesh = tensor.to(like.device), getattr(like, "device_mesh", None)
    if mesh is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def _fingerprint(model: nn.Module) -> Tensor:
    """Return a number for each frozen tensor, by its bits; int64 on the CPU.

    The same on however many ranks; a collective call.
    """
    frozen = [p.detach() for p in model.parameters() if not p.requires_grad]
    mine = [getattr(p, "to_local", lambda p=p: p)() for p in frozen]
    sums = [p.contiguous().view(torch.int32).sum(dtype=torch.int64) for p in mine]
    return distributed.all_sum(torch.stack([s.to("cpu") for s in sums]))


def trained_weights(model: nn.Module, config: LoRA | None, model_path: str) -> TrainedWeights:
    """Return what of a model, adapted where ``config`` is given, a run trains."""
    return LoRAWeights(model, config, model_path) if config else TrainedWeights(model)
