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
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer
from rollart_plugins.engines import sglang_dialect as dialect
from rollart_plugins.engines.hub_names import model_config
from rollart_plugins.engines.sglang_client import SGLangClient

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
class Needs:
    """The requirements of a run for a server."""

    max_tokens: int
    """Maximum number of tokens in one row."""
    keep_kv: bool
    """Whether requests keep their cache over a weight swap."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The properties of a server."""

    version: str
    weight_version: str
    tp_size: int
    device: str


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


async def check_server(
    client: SGLangClient, model: ModelFacts, needs: Needs, *, launched: bool
) -> ServerFacts:
    """Check a server and return its properties.

    Args:
        client: Client of the server.
        model: The expected model.
        needs: The requirements of the run.
        launched: Whether this engine launched the server, with its model and flags.

    Raises:
        ConfigError: If it has another model, another tokenizer or too little limit, or cannot be
            used for training.
    """
    info = await client.get(dialect.MODEL_INFO)
    about = await client.get(dialect.SERVER_INFO)
    facts = ServerFacts(
        version=str(about.get("version")),
        weight_version=str(info.get("weight_version")),
        tp_size=int(about.get("tp_size") or 1),
        device=str(about.get("device") or ""),
    )
    trouble = _trouble(model, needs, info, about)
    if trouble is None and not launched:
        trouble = await _tokenizer_trouble(client, model, info, about)
    if trouble is not None:
        raise ConfigError(f"engine: the SGLang server at {client.url} {trouble}")
    return facts


def _trouble(
    model: ModelFacts, needs: Needs, info: dialect.Json, about: dialect.Json
) -> str | None:
    max_tokens = needs.max_tokens
    theirs = tuple(info.get("architectures") or ())
    if model.architectures and theirs and theirs != model.architectures:
        return f"has the model {theirs[0]}, but the run's model is {model.architectures[0]}"
    if int(about.get("dp_size") or 1) != 1:
        return (
            "has several replicas (dp_size), which do not support weight updates; use more "
            "engines instead"
        )
    limit = about.get("max_req_input_len")
    if limit is not None and int(limit) + 1 < max_tokens:
        return (
            f"accepts at most {limit} tokens, but rollout.max_context_tokens is {max_tokens}: "
            f"start it with --context-length {max_tokens + dialect.CONTEXT_MARGIN}, or lower "
            "rollout.max_context_tokens"
        )
    if needs.keep_kv and not about.get("disable_overlap_schedule"):
        return (
            "uses the overlap schedule, which would assign a token to the next weights: start it "
            "with --disable-overlap-schedule, or use rollout.kv_on_swap: recompute"
        )
    cache = about.get("max_total_num_tokens")
    if cache is not None and int(cache) < max_tokens:
        return f"has a KV cache of {cache} tokens, too small for a row of {max_tokens}"
    return None


async def _tokenizer_trouble(
    client: SGLangClient, model: ModelFacts, info: dialect.Json, about: dialect.Json
) -> str | None:
    """Compare tokenizer fingerprints if its files are readable, else the tokens of some texts."""
    assert model.tokenizer is not None
    path = str(info.get("tokenizer_path") or info.get("model_path") or "")
    if (Path(path) / "tokenizer.json").is_file():
        theirs = load_tokenizer(path)
        if theirs.fingerprint == model.tokenizer.fingerprint:
            return None
        if theirs.vocab_size != model.tokenizer.vocab_size:
            return f"has the tokenizer of {path}, not the tokenizer of the run"
    if about.get("skip_tokenizer_init"):
        return (
            "has no tokenizer (--skip-tokenizer-init), so it cannot be checked; start it without "
            "this flag"
        )
    for text in PROBES:
        body = {"prompt": text, "add_special_tokens": False}
        try:
            answer = await client.post(dialect.TOKENIZE, body)
        except InferenceFailure as e:
            return f"does not return its tokens: {e}"
        if answer["tokens"] != model.tokenizer.encode(text):
            return f"has another tokenizer than the run's model: {text[:20]!r}... differs"
    return None


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
