"""Tokenizers with a chat template, without heavy imports in the controller's process.

Takes: a local folder or a hub id. Gives: :class:`ChatTokenizer`. Never: imports torch or
transformers if the folder has ``tokenizer.json`` and a chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rollart_core.config.validation.consistency import model_path_fault
from rollart_core.contracts.tool_format import ToolFormat
from rollart_core.errors import ConfigError, first_line
from rollart_core.models.chat_template import ChatTemplate, TemplateRefusal
from rollart_core.models.thinking import Thinking, find_thinking
from rollart_core.models.tool_calls import detect_tool_format
from rollart_core.types import Message, ToolSpec

_NO_THOUGHT = "zq0nothing"
_CACHED_CHARS = 8192
"""Longer texts are not cached: they are rare, and thousands of them would be too large."""


@dataclass(frozen=True, slots=True)
class TokenizerComponents:
    """The components of a :class:`ChatTokenizer`."""

    encode: Callable[[str], list[int]]
    """Encodes text without adding special tokens. Special tokens in the text are recognized."""
    decode: Callable[[Sequence[int], bool], str]
    """``(ids, skip_special_tokens)``."""
    template: ChatTemplate
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    fingerprint: str


class ChatTokenizer:
    """A tokenizer and its chat template.

    Args:
        parts: See :class:`TokenizerComponents`.
    """

    def __init__(self, parts: TokenizerComponents) -> None:
        self._encode = parts.encode
        self._decode = parts.decode
        self._encode_short = lru_cache(maxsize=8192)(self._encode_tuple)
        self.template = parts.template
        self._own_stops = parts.stop_token_ids
        self.vocab_size = parts.vocab_size
        """Number of tokens. The embedding of the model may be larger."""
        self.fingerprint = parts.fingerprint
        """Hash of vocabulary, rules and template. Equal hashes mean the same tokens for every
        text."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of the text. Adds nothing. Recognizes special tokens in the text."""
        if len(text) > _CACHED_CHARS:
            return self._encode(text)
        return list(self._encode_short(text))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text. Bytes that are not valid UTF-8 become U+FFFD."""
        return self._decode(list(token_ids), skip_special_tokens)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format of the model's calls. None without tools, or if no plugin reads them."""
        if not self.template.shows_tools:
            return None
        stops = [self.decode([token]) for token in self._own_stops]
        return detect_tool_format(self.template, stops, lambda text: len(self.encode(text)) == 1)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn of the policy.

        The template writes the first one, or after calls one of the tool format.
        """
        stops = self.tool_format.stops if self.tool_format else ()
        more = [found[0] for stop in stops if len(found := self.encode(stop)) == 1]
        return tuple(dict.fromkeys([*self._own_stops, *more]))

    @cached_property
    def stop_texts(self) -> tuple[str, ...]:
        """The tokens that end a turn of the policy, as text."""
        return tuple(self.decode([stop]) for stop in self.stop_token_ids)

    @property
    def thinking(self) -> Thinking | None:
        """How the policy writes thoughts; None if its template knows none."""
        return find_thinking(self.template)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[ToolSpec] | None = None,
    ) -> str:
        """Render the messages as text with the chat template.

        Raises:
            TemplateRefusal: If the template rejects this sequence of messages.
        """
        return self.template.render(messages, add_generation_prompt, tools)

    def write(self, message: Message) -> str:
        """Return a message of the policy as the policy writes it, without the end token.

        If the prompt opens a thought and the message has none, the text begins with the end of an
        empty thought.

        Raises:
            TemplateRefusal: If the chat template rejects the message.
        """
        thinking, thought = self.thinking, message.get("reasoning_content")
        opened = thinking is not None and thinking.state == "opened" and not thought
        if not message.get("tool_calls") and not thought:
            return (thinking.closing.lstrip() if thinking and opened else "") + message["content"]
        if opened:
            filled = Message(**{**message, "reasoning_content": _NO_THOUGHT})
            return self.write(filled).partition(_NO_THOUGHT)[2].lstrip("\n")
        asked = Message(role="user", content="?")
        prompt = self.render([asked], add_generation_prompt=True)
        whole = self.render([asked, message])
        if not whole.startswith(prompt):
            raise TemplateRefusal("the template does not put the policy's message after the prompt")
        end = max(whole.rfind(stop) for stop in self.stop_texts)
        return whole[len(prompt) : end if end > len(prompt) else len(whole)]

    def _encode_tuple(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(text))


class PieceEncoder:
    """Encodes ASCII text piece by piece from a table, about ten times faster.

    Only for tokenizers with ``rollart_ascii_pieces`` in their config. The tokens of a text are then
    the tokens of its pieces. A single space between two words belongs to the second piece. All
    other text uses the default encoder.

    Args:
        encode: The default encoder.
        pieces: The regex of the pieces.
        special_tokens: Text -> id.
    """

    _MOST_PIECES = 100_000

    def __init__(
        self, encode: Callable[[str], list[int]], pieces: str, special_tokens: Mapping[str, int]
    ) -> None:
        self._encode = encode
        self._find = re.compile(pieces, re.ASCII).findall
        self._split = re.compile("(" + "|".join(map(re.escape, special_tokens)) + ")").split
        self._specials = {text: [i] for text, i in special_tokens.items()}
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of the text."""
        if not text.isascii() or "\x1f" in text:
            return self._encode(text)
        token_ids: list[int] = []
        known = self._known
        for index, part in enumerate(self._split(text)):
            if index % 2:
                token_ids += self._specials[part]
                continue
            for piece in self._find(part):
                token_ids += known[piece] if piece in known else self._learn(piece)
        return token_ids

    def _learn(self, piece: str) -> list[int]:
        if len(self._known) >= self._MOST_PIECES:
            self._known.clear()
        is_spaced_word = piece[0] == " " and (piece[-1].isalnum() or piece[-1] == "_")
        token_ids = self._known[piece] = self._encode(piece[1:] if is_spaced_word else piece)
        return token_ids


def load_tokenizer(
    path: str | Path, template_kwargs: Mapping[str, object] | None = None
) -> ChatTokenizer:
    """Load a tokenizer with its chat template.

    Args:
        path: A model folder, or a hub id such as ``Qwen/Qwen3-0.6B``.
        template_kwargs: Values of the template's own variables (``model.chat_template_kwargs``).

    Raises:
        ConfigError: If there is no tokenizer, it has no chat template, or the template has no
            variable of such a name.
    """
    folder, kwargs = Path(path), dict(template_kwargs or {})
    if (folder / "tokenizer.json").is_file():
        return _from_folder(folder, kwargs)
    if folder.exists() and not (folder / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"model.path: {str(path)!r} is not a model folder: it has neither tokenizer.json "
            "nor tokenizer_config.json"
        )
    if not folder.exists() and (fault := model_path_fault(str(path))):
        raise ConfigError(f"model.path: {fault}")
    return _from_transformers(str(path), kwargs)


def read_template(
    folder: Path, template_kwargs: Mapping[str, object] | None = None
) -> ChatTemplate | None:
    """Return the chat template in a model folder, without its tokenizer; None if it has none.

    Raises:
        ConfigError: As :func:`load_tokenizer`.
    """
    config = _read_json(folder / "tokenizer_config.json")
    source, specials = _template_source(folder, config), _special_texts(config)
    return _template(source, specials, str(folder), template_kwargs or {}) if source else None


def byte_tokenizer() -> ChatTokenizer:
    """Return a tokenizer of single bytes with a plain chat template, for runs without a model."""
    from rollart_core.models import new

    backend = new.train_tokenizer((), new.MIN_VOCAB_SIZE + len(new.TOOL_TOKENS), tools=True)
    settings = _Settings(new.TOOL_CHAT_TEMPLATE, {"eos_token": new.END}, None)
    return _from_backend(backend, settings, "bytes")


def _from_folder(folder: Path, kwargs: Mapping[str, object]) -> ChatTokenizer:
    from tokenizers import Tokenizer

    config = _read_json(folder / "tokenizer_config.json")
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as e:  # tokenizers raises plain Exception
        raise ConfigError(f"model.path: {folder / 'tokenizer.json'}: {first_line(str(e))}") from e
    source, specials = _template_source(folder, config), _special_texts(config)
    generation = _read_json(folder / "generation_config.json")
    pieces = config.get("rollart_ascii_pieces")
    settings = _Settings(source, specials, generation.get("eos_token_id"), pieces, kwargs)
    return _from_backend(backend, settings, str(folder))


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    jinja = folder / "chat_template.jinja"
    return jinja.read_text() if jinja.is_file() else _default_template(config.get("chat_template"))


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer's config by name."""
    return {
        key: token["content"] if isinstance(token, dict) else token
        for key, token in config.items()
        if key.endswith("_token") and isinstance(token, str | dict)
    }


def _from_transformers(path: str, kwargs: Mapping[str, object]) -> ChatTokenizer:
    trouble = "" if Path(path).exists() else _hub_trouble(path)
    from transformers import AutoTokenizer, GenerationConfig

    local = bool(trouble)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=local)
    except Exception as e:
        reason = trouble or first_line(str(e))
        raise ConfigError(f"model.path: no tokenizer at {path!r}: {reason}") from e
    try:
        eos = GenerationConfig.from_pretrained(path, local_files_only=local).eos_token_id
    except OSError:  # a model without generation_config.json
        eos = None
    specials = {k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    source = _default_template(tokenizer.chat_template)
    if getattr(tokenizer, "is_fast", False):
        settings = _Settings(source, specials, eos, template_kwargs=kwargs)
        return _from_backend(tokenizer.backend_tokenizer, settings, path)
    own = tokenizer.eos_token_id
    vocab = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return ChatTokenizer(
        TokenizerComponents(
            encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
            decode=lambda ids, skip: str(tokenizer.decode(list(ids), skip_special_tokens=skip)),
            template=_template(source, specials, path, kwargs),
            stop_token_ids=_stop_token_ids(own, eos, path),
            vocab_size=len(tokenizer),
            fingerprint=_fingerprint(vocab, source or ""),
        )
    )


def _hub_trouble(path: str) -> str:
    """Return why the hub does not provide this model. Empty if it does. Sends one request.

    transformers retries for a minute if the hub is unreachable. A model in the local cache loads
    anyway.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(path, timeout=10)
    except Exception as e:
        return f"it is not a folder, and the hub returned: {first_line(str(e))}"
    return ""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of a tokenizer, in addition to its vocabulary."""

    template: str | None
    special_tokens: Mapping[str, str]
    eos_token_id: object
    """From the generation config: an id, a list of ids, or None."""
    ascii_pieces: str | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict)


def _from_backend(backend: Any, settings: _Settings, path: str) -> ChatTokenizer:
    """Build on a ``tokenizers.Tokenizer``."""
    backend.no_padding()
    backend.no_truncation()
    source, specials = settings.template, settings.special_tokens
    own = backend.token_to_id(specials["eos_token"]) if "eos_token" in specials else None

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    added = {t.content: i for i, t in backend.get_added_tokens_decoder().items()}
    fast = PieceEncoder(encode, settings.ascii_pieces, added) if settings.ascii_pieces else encode
    return ChatTokenizer(
        TokenizerComponents(
            encode=fast,
            decode=lambda ids, skip: str(backend.decode(ids, skip_special_tokens=skip)),
            template=_template(source, specials, path, settings.template_kwargs),
            stop_token_ids=_stop_token_ids(own, settings.eos_token_id, path),
            vocab_size=backend.get_vocab_size(with_added_tokens=True),
            fingerprint=_fingerprint(backend.to_str(), source or ""),
        )
    )


def _template(
    source: str | None, specials: Mapping[str, str], path: str, kwargs: Mapping[str, object]
) -> ChatTemplate:
    if not source:
        raise ConfigError(
            f"model.path: the tokenizer at {path!r} has no chat template; "
            "add a chat_template.jinja to its folder"
        )
    try:
        return ChatTemplate(source, specials, kwargs)
    except ConfigError:
        raise
    except ValueError as e:
        raise ConfigError(f"model.path: {path}: {first_line(str(e))}") from e


def _default_template(templates: object) -> str | None:
    """Return the default template. Some tokenizers have several, by name."""
    if isinstance(templates, str):
        return templates
    if isinstance(templates, list):
        templates = {t["name"]: t["template"] for t in templates}
    if isinstance(templates, dict):
        return str(templates["default"]) if "default" in templates else None
    return None


def _stop_token_ids(own: int | None, generation: object, path: str) -> tuple[int, ...]:
    """Return the tokenizer's end token first, then those of the generation config."""
    more = generation if isinstance(generation, list) else [generation]
    found = dict.fromkeys(int(i) for i in [own, *more] if i is not None)
    if not found:
        raise ConfigError(f"model.path: the tokenizer at {path!r} has no eos_token")
    return tuple(found)


def _fingerprint(*texts: str) -> str:
    digest = blake2b(digest_size=16)
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text.encode())
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file, or an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as e:
        raise ConfigError(f"model.path: {path} is not a JSON object: {first_line(str(e))}") from e
