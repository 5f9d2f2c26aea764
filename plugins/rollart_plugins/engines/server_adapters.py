"""LoRA adapters on an inference server: one for each policy version, over the unchanged base model.

    weight channel --> a folder in peft's format --> load under a new name --> requests name it
                                                     requests in progress keep their own adapter

Takes: the adapters of a trainer. Gives: adapters on a server, each with a name of its own.
Never: replaces the weights of an adapter (arXiv:2106.09685) that a request uses, or pauses the
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollart_core.config.training import LoRA
from rollart_core.errors import EngineDied, InferenceFailure
from rollart_plugins.engines.server_client import ServerClient
from rollart_plugins.engines.weight_transport import WeightTransport

if TYPE_CHECKING:
    import torch

NUM_ADAPTERS: Final = 4
"""The number of adapters whose requests a launched server computes in one batch."""
_NAME: Final = "rollart-"
_MODELS: Final = "/v1/models"
_FILE, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
"""peft puts it before the names of tensors."""


class AdapterTransport(WeightTransport):
    """A folder for each adapter, which the server reads.

    Args:
        client: Client of the server.
        kind: The kind of engine, one word.
        folder: Parent of the folders. None: the temporary folder.
        endpoints: The endpoints that load and unload an adapter.
    """

    def __init__(
        self, client: ServerClient, kind: str, folder: str | None, endpoints: tuple[str, str]
    ) -> None:
        self._client, self._kind, self._parent = client, kind, folder
        self._load, self._unload = endpoints
        self._home: Path | None = None
        self._loaded: dict[str, Path] = {}
        self._unloaded: list[Path] = []

    def prepare(
        self, tensors: Iterable[tuple[str, torch.Tensor]], files: Sequence[Path] | None = None
    ) -> Path:
        """Write the folder during generation; runs in a thread.

        Raises:
            InferenceFailure: If it cannot be written.
            Exception: Any error that ``tensors`` raises.
        """
        from rollart_plugins.engines.weight_files import new_folder, written

        held = dict(tensors)
        with written(Path(self._parent or tempfile.gettempdir())):
            if self._home is None:
                self._home = new_folder(self._kind, self._parent)
            folder = Path(tempfile.mkdtemp(dir=self._home))
            folder.chmod(0o755)  # the server can run as another user
            _write(folder, held)
        return folder

    async def send(self, ready: Path, tag: str, *, keep_kv: bool) -> None:
        """Load an adapter under the name of ``tag``, which no other adapter has had."""
        body = {"lora_name": adapter_name(tag), "lora_path": str(ready)}
        await self._client.post(self._load, body, limit_s=None)
        self._loaded[tag] = ready

    async def keep_only(self, tags: set[str]) -> None:
        """Unload all other adapters.

        A server can read an adapter again for a cancelled request that it still knows, so the
        folder is kept until the next call.
        """
        for folder in self._unloaded:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._unloaded.clear()
        for tag in self._loaded.keys() - tags:
            self._unloaded.append(self._loaded.pop(tag))
            await self._forget(adapter_name(tag))

    async def test(self, tensors: Mapping[str, torch.Tensor], tag: str) -> None:
        """Load an adapter on the server, and unload it.

        Raises:
            InferenceFailure: If the server does not load it.
        """
        ready = await asyncio.to_thread(self.prepare, tensors.items())
        await self.send(ready, tag, keep_kv=False)
        await self.keep_only(set())

    async def take_over(self) -> None:
        """Unload the adapters that an engine which did not close left on a running server."""
        models = (await self._client.get(_MODELS))["data"]
        for name in (str(model["id"]) for model in models):
            if name.startswith(_NAME):
                await self._forget(name)

    async def leave(self) -> None:
        """Unload all adapters."""
        await self.keep_only(set())

    def close(self) -> None:
        """Remove the folders."""
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)

    async def _forget(self, name: str) -> None:
        with contextlib.suppress(EngineDied, InferenceFailure, TimeoutError):
            await self._client.post(self._unload, {"lora_name": name})


def adapter_name(tag: str) -> str:
    """Return the name of an adapter on a server."""
    return _NAME + tag


def check_adapters(
    given: Mapping[str, tuple[int, ...]], weights: Mapping[str, tuple[int, ...]]
) -> None:
    """Check the shapes of adapters against those of the base weights.

    Args:
        given: Shapes of the adapters' tensors, by name.
        weights: Shapes of the base weights; empty if unknown.

    Raises:
        ValueError: If a tensor is not of an adapter, or does not fit its weight.
    """
    from rollart_core.models.lora import A, B

    for name in given:
        if not name.endswith((A, B)):
            raise ValueError(f"{name!r} is not of a LoRA adapter, but lora.sync is adapter")
        module = name.removesuffix(A).removesuffix(B)
        down, up = given.get(module + A), given.get(module + B)
        if down is None or up is None:
            raise ValueError(f"the adapter of {module!r} lacks a tensor")
        found, wanted = (up[0], down[1]), weights.get(f"{module}.weight", (up[0], down[1]))
        if wanted != found or up[1] != down[0]:
            raise ValueError(
                f"the adapter of {module!r} has shape {list(found)}, but the weight has "
                f"{list(wanted)}"
            )


def empty_adapter(shapes: Mapping[str, tuple[int, ...]], lora: LoRA) -> dict[str, torch.Tensor]:
    """Return an adapter that changes nothing, for the matrices that certainly have one.

    Args:
        shapes: Shapes of the base weights, by name.
        lora: The run's ``lora`` section.
    """
    import torch

    from rollart_core.models.lora import A, B

    found: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        chosen = lora.target_modules
        is_one = last.endswith("_proj") if chosen is None else last in chosen
        if is_one and len(shape) == 2 and ".layers." in name and ".experts." not in name:
            found[module + A] = torch.zeros(lora.rank, shape[1])
            found[module + B] = torch.zeros(shape[0], lora.rank)
    return found


def matrices(names: Iterable[str]) -> list[str]:
    """Return the names of the adapted matrices, such as ``q_proj``, of the tensors of adapters."""
    from rollart_core.models.lora import A

    return sorted({n.removesuffix(A).rpartition(".")[2] for n in names if n.endswith(A)})


def _write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write adapters, whose scale is already in B, in peft's format."""
    from safetensors.torch import save_file

    from rollart_core.models.lora import A

    plain = {_PREFIX + name: tensor.clone() for name, tensor in tensors.items()}
    save_file(plain, folder / _FILE, metadata={"format": "pt"})
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(A))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "target_modules": matrices(tensors),
        "bias": "none",
    }
    (folder / _CONFIG).write_text(json.dumps(config), encoding="utf-8")
    for file in (_FILE, _CONFIG):
        (folder / file).chmod(0o644)  # by default, only this user can read it
