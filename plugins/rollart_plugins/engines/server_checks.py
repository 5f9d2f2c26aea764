"""Checks of a server: the same model, the same tokens, and sufficient limit.

Takes: the local model folder, and the information of the server. Gives: facts, or a one-line
difference. Never: imports torch, or changes the server.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollart_core.errors import ConfigError, InferenceFailure
from rollart_core.models.hub_names import model_config
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer
from rollart_plugins.engines.config import EngineServerConfig
from rollart_plugins.engines.server_client import ServerClient

_ROUTER_WORKERS = "/workers"
"""sglang-router (0.3) and its variants list their servers here; servers have no such endpoint."""
PROBES = (
    "The quick brown fox jumps over 13 lazy dogs; it cost $4.56 (or 7e-8)!",
    "naïve café, Straße, 日本語, עברית, 🙂🏽\u200d🚀\ttab\r\nnew line",
    "def f(x):\n    return {'a': [x ** 2, None]}  # <b>bold</b> \\n",
    "search[red shoes] click[Buy Now] <|im_start|>user\n",
)
"""Texts whose tokens differ between different tokenizers."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The properties of the local model, from its folder."""

    vocab_size: int = 0
    architectures: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of its parameters; empty if the model is not a local folder of safetensors."""
    tokenizer: ChatTokenizer | None = None

    def check_fit(self, given: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError if these are not the shapes of this model's parameters."""
        if not self.shapes:
            return
        for name, shape in given.items():
            known = self.shapes.get(name)
            if known is not None and known != shape:
                raise ValueError(
                    f"{name!r} has shape {list(shape)}, but the model's is {list(known)}"
                )
        if missing := sorted(set(self.shapes) - set(given)):
            raise ValueError(f"the weights lack {missing[0]!r} and {len(missing) - 1} others")
        unknown = sorted(set(given) - set(self.shapes) - {"lm_head.weight"})  # can be tied
        if unknown:
            raise ValueError(f"the model has no {unknown[0]!r}")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The properties of a server."""

    weight_version: str
    """The name of its weights, which are the initial weights of the run."""
    tp_size: int = 1
    device: str = ""


def model_facts(path: str) -> ModelFacts:
    """Read the properties of the local model.

    Raises:
        ConfigError: If its tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(path)
    folder = Path(path)
    config = model_config(path)
    vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return ModelFacts(
        vocab_size=int(vocab_size or tokenizer.vocab_size),
        architectures=tuple(config.get("architectures") or ()),
        shapes=_shapes(folder) if folder.is_dir() else {},
        tokenizer=tokenizer,
    )


async def tokenizer_trouble(
    client: ServerClient, model: ModelFacts, folder: str, path: str | None
) -> str | None:
    """Return how the server's tokenizer differs from the model's, or None.

    Fingerprints are compared if the server's files are readable, else the tokens of some texts.

    Args:
        client: Client of the server.
        model: The expected model.
        folder: Folder of the server's tokenizer, if the server tells it.
        path: The endpoint that returns the tokens of a text. None: the server has no tokenizer.
    """
    assert model.tokenizer is not None
    if (Path(folder) / "tokenizer.json").is_file():
        theirs = load_tokenizer(folder)
        if theirs.fingerprint == model.tokenizer.fingerprint:
            return None
        if theirs.vocab_size != model.tokenizer.vocab_size:
            return f"has the tokenizer of {folder}, not the tokenizer of the run"
    if path is None:
        return (
            "has no tokenizer (--skip-tokenizer-init), so it cannot be checked; start it without "
            "this flag"
        )
    for text in PROBES:
        body = {"prompt": text, "add_special_tokens": False}
        try:
            answer = await client.post(path, body)
        except InferenceFailure as e:
            return f"does not return its tokens: {e}"
        if answer["tokens"] != model.tokenizer.encode(text):
            return f"has another tokenizer than the run's model: {text[:20]!r}... differs"
    return None


async def check_router(client: ServerClient) -> None:
    """Raise if the URL is of a router, which does not forward pauses, aborts and new weights.

    Raises:
        ConfigError: If it is.
    """
    try:
        said = await client.get(_ROUTER_WORKERS)
    except InferenceFailure:
        return
    workers = said.get("workers") if isinstance(said, dict) else None
    if not isinstance(workers, list):
        return
    urls = sorted(str(one.get("url")) for one in workers if isinstance(one, dict))
    raise ConfigError(
        f"engine.url: {client.url} is a router of {len(urls)} servers, which forwards neither new "
        "weights nor pauses. RollArt balances requests itself: set engine.url: "
        f"[{', '.join(urls)}] and runtime.num_engines: {len(urls)}"
    )


def check_url(config: EngineServerConfig, engine_index: int) -> None:
    """Raise if the config has URLs, but none for this engine.

    Raises:
        ConfigError: If there are too few URLs.
    """
    if config.url and engine_index >= len(config.url):
        raise ConfigError(
            f"engine.url has {len(config.url)} servers, but this is engine {engine_index + 1}: "
            "set one URL for each engine, or use fewer engines"
        )


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters, from the headers of the safetensors files."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            head = json.loads(opened.read(length))
        for name, said in head.items():
            if name != "__metadata__":
                found[name] = tuple(said["shape"])
    return found
