"""What an OpenAI-compatible server is, before it is asked for anything: which model, which tokens.

Takes: a client, and what the config wants. Gives: facts of the server, or a ConfigError that says
how to mend it. Never: lets a model with other tokens answer a prompt of token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollart_core.errors import ConfigError, EndpointError, did_you_mean
from rollart_core.inference.endpoint.client import EndpointClient
from rollart_core.models.tokenizer import ChatTokenizer

_START_RETRIES = 1
NUM_SPREAD_TOKENS = 512
"""So many tokens, from all over the vocabulary, make up one of the texts that are compared."""
_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces\tand a tab\n\n\nthree lines, 0123456789 1,234.56 10^9",
    "def f(x: int) -> str:\n    return f'{x!r}' if x else \"\"  # done",
    "Grüße aus Köln, là-bas; Привет мир, 你好世界, こんにちは, שלום, مرحبا, 👩‍💻🎉",
    "'s 're 'll DON'T camelCase snake_case SCREAMING_CASE http://a.b/c?d=e&f=%20",
)


@dataclass(frozen=True, slots=True)
class Served:
    """One model of a server."""

    name: str
    max_context_tokens: int | None
    """None: the server does not say."""


async def served(client: EndpointClient, wanted: str | None) -> Served:
    """Return the model that a server is to be asked for.

    Args:
        client: Of the server.
        wanted: Its name; None: the only one.

    Raises:
        ConfigError: When there is no server, no such model, or no telling which; or a bad key.
    """
    try:
        answer = await client.get("models", num_retries=_START_RETRIES)
    except EndpointError as e:
        if e.kind == "missing" and wanted is not None:
            return Served(wanted, None)  # not every server has the list
        raise ConfigError(start_fault(e)) from e
    rows = answer.get("data") if isinstance(answer, Mapping) else None
    found = {
        r["id"]: r for r in rows or () if isinstance(r, Mapping) and isinstance(r.get("id"), str)
    }
    if wanted is None and len(found) == 1:
        wanted = next(iter(found))
    if wanted is None:
        raise ConfigError(f"engine.model: say which of the server's models: {_names(found)}")
    if wanted not in found and found:
        near = did_you_mean(wanted, list(found))
        raise ConfigError(
            f"engine.model: the server has no {wanted!r}.{near} It has {_names(found)}"
        )
    length = found.get(wanted, {}).get("max_model_len")
    return Served(wanted, length if isinstance(length, int) and length > 0 else None)


def start_fault(error: EndpointError) -> str:
    """Return what a person reads when a server cannot be used, and how to mend it."""
    mend = {
        "unreachable": "start the server, or mend engine.base_url",
        "slow": "see whether it is at work, or mend engine.base_url",
        "key": "put its key into the environment as OPENAI_API_KEY, or name the variable with "
        "engine.api_key_env",
        "missing": "mend engine.base_url (it usually ends with /v1), or name engine.model",
    }.get(error.kind)
    return f"engine: {error}" + (f": {mend}" if mend else "")


async def check_tokens(client: EndpointClient, model: str, tokenizer: ChatTokenizer) -> None:
    """Make sure that the server's tokens are those of our tokenizer.

    It encodes texts that cover writing systems, code, white space, the special tokens and tokens
    from all over our vocabulary; each must come back as ours does, id for id.

    Raises:
        ConfigError: When one does not, or the server cannot be asked.
    """
    for text in probe_texts(tokenizer):
        theirs, ours = await _encoded(client, model, text), tokenizer.encode(text)
        if theirs == ours:
            continue
        at = next(
            (n for n, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b),
            min(len(theirs), len(ours)),
        )
        raise ConfigError(
            f"engine: {model!r} at {client.server.base_url} has other tokens than model.path: of "
            f"{text[:40]!r} it makes {len(theirs)}, the tokenizer here {len(ours)}, and they part "
            f"at number {at}; give the model.path of the model that is served"
        )


def probe_texts(tokenizer: ChatTokenizer) -> Iterator[str]:
    """Yield the texts that two tokenizers must agree on."""
    yield from _TEXTS
    stops = "".join(tokenizer.decode([i]) for i in tokenizer.stop_token_ids)
    yield f"before{stops}after {stops}"
    step = max(1, tokenizer.vocab_size // NUM_SPREAD_TOKENS)
    spread = range(0, tokenizer.vocab_size, step)
    yield " ".join(tokenizer.decode([i], skip_special_tokens=True) for i in spread)


async def _encoded(client: EndpointClient, model: str, text: str) -> list[int]:
    """Return a text in the server's tokens: from ``/tokenize``, or as a prompt comes back."""
    body: dict[str, Any] = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        try:
            found = (await client.post("/tokenize", body)).get("tokens")
        except EndpointError as e:
            if e.kind not in ("missing", "refused"):
                raise
            body |= {"max_tokens": 1, "return_token_ids": True}
            choices = (await client.post("completions", body)).get("choices")
            first = choices[0] if isinstance(choices, list) and choices else None
            found = first.get("prompt_token_ids") if isinstance(first, Mapping) else None
    except EndpointError as e:
        raise ConfigError(start_fault(e)) from e
    if not isinstance(found, list) or not all(type(i) is int for i in found):
        raise ConfigError(
            f"engine: {client.server.base_url} does not say its tokens (vLLM does): a server that "
            "gives text only is model: {kind: remote}"
        )
    return found


def _names(found: Mapping[str, Any]) -> str:
    names = sorted(found)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return (", ".join(names[:10]) + more) or "none"
