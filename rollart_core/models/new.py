"""New models: a small Qwen3-architecture model and a tokenizer trained on given text.

Takes: texts and :class:`rollart_core.config.model.NewModel`. Gives: a model folder that
transformers loads. Never: imports torch or transformers (numpy draws the weights and safetensors
writes them), or iterates a set, so that the same input gives the same bytes.

The tokenizer is designed for tiny models that copy words token by token:

* A word is the same token in every position. The normalizer replaces a single space between two
  words with a mark at the start of the second word, and adds the same mark at the start of every
  other word. So ``red`` is one token in ``click[red]``, in ``a red shirt`` and at the start of a
  line. The decoder writes the mark as a space after a word character, and omits it otherwise. It
  restores the text exactly, except the mark itself, U+001F, which is dropped. Plain byte-level BPE
  has two unrelated tokens for ``red`` and `` red``. A token for each space would need about 50%
  more tokens.
* Each digit and square bracket is a separate token, so that ``]`` ends a copied value in only one
  way. Tags in capitals, such as `` [SEP] ``, may become one token.
* A turn has few template tokens: ``observation <|assistant|> action <|end|> observation ...``. Only
  the first message, or one after another message of the same side, needs ``<|user|>``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollart_core.config.model import NewModel
from rollart_core.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARK = "\x1f"
"""The mark at the start of every word inside the tokenizer."""
PAD, END, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|assistant|>' + message['content'] + '<|end|>' -}}
{%- elif message['role'] == 'system' -%}
{{- '<|system|>' + message['content'] -}}
{%- elif loop.first or loop.previtem['role'] != 'assistant' -%}
{{- '<|user|>' + message['content'] -}}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>")
TOOL_CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|system|>' -}}
{%- for tool in tools -%}{{- (tool.function | tojson) + '\\n' -}}{%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|assistant|>' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- elif message.role == 'tool' -%}
{{- '<tool_response>' + message.content -}}
{%- elif message.role == 'system' -%}
{{- ('' if tools and loop.first else '<|system|>') + message.content -}}
{%- elif loop.first or loop.previtem.role != 'assistant' -%}
{{- '<|user|>' + message.content -}}
{%- else -%}
{{- message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""
"""``CHAT_TEMPLATE`` with tools, which are called in the format of Hermes and Qwen."""
_LETTERS = r"\p{L}\p{M}_"
_WORD = rf"[{_LETTERS}\p{{N}}]"
r"""Written out because Oniguruma itself is inconsistent about ``\w`` (``²`` is one case)."""
_PRE_TOKEN = "|".join(
    (
        rf" ?\[{MARK}[A-Z]{{2,}}\] ?",  # a tag in capitals
        rf"{MARK}?\p{{N}}",  # one digit
        rf"{MARK}?[{_LETTERS}]+",  # a word, or the rest of a word after digits
        r"[\[\]]",
        rf"[^{_LETTERS}\p{{N}}\[\]{MARK}]+",  # punctuation and white space
    )
)
ASCII_PIECES = r" ?\[[A-Z]{2,}\] ?|(?:(?<=\w) )?\w+|[\[\]]|[^\w\[\]]+"
"""Python regex for the pieces of an ASCII text that are tokenized independently. It splits like the
pre-tokenizer, with the space between two words at the start of the second."""
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""The number of bytes and special tokens."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, tools: bool = False) -> Tokenizer:
    """Train a byte-level BPE tokenizer. The same texts give the same tokenizer.

    Args:
        texts: Texts such as the policy reads and writes.
        vocab_size: Maximum number of tokens, including special tokens. Short texts may give fewer.
        tools: Whether to add tokens for tool calls.

    Raises:
        ConfigError: If ``vocab_size`` is too small for the bytes and special tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"model.vocab_size: {vocab_size} given, at least {MIN_VOCAB_SIZE} needed")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(MARK, ""),
            # tokenizers panics if Replace inserts text at the very start; Prepend may
            normalizers.Prepend(MARK),
            normalizers.Replace(Regex(rf"^{MARK}(?!{_WORD})"), ""),
            normalizers.Replace(Regex(rf"(?<={_WORD}) (?={_WORD})"), MARK),
            normalizers.Replace(Regex(rf"(?<!{_WORD}|{MARK})(?={_WORD})"), MARK),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteLevel(),
            decoders.Replace(Regex(rf"(?<={_WORD}){MARK}"), " "),
            decoders.Replace(MARK, ""),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *(TOOL_TOKENS if tools else ())],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def new_model(
    path: str | Path, spec: NewModel, texts: Iterable[str], seed: int, *, tools: bool = False
) -> Path:
    """Write a model folder: config, random weights, tokenizer and chat template.

    Args:
        path: The folder. Created if missing. Files of the same names are overwritten.
        spec: Shape of the model. The embedding is padded to a multiple of 64 rows.
        texts: Texts to train the tokenizer on.
        seed: Seed of the weights.
        tools: Whether the chat template renders tools.

    Returns:
        The folder.

    Raises:
        ConfigError: If ``vocab_size`` is too small for the bytes and special tokens.
    """
    from safetensors.numpy import save_file

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, spec.vocab_size, tools=tools)
    num_rows = -(-tokenizer.get_vocab_size(with_added_tokens=True) // 64) * 64
    pad_id, end_id = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    ids = {"bos_token_id": None, "eos_token_id": end_id, "pad_token_id": pad_id}
    _write_tokenizer(folder, tokenizer, spec.max_positions, tools=tools)
    _write_json(folder / "config.json", {**_config(spec, num_rows), **ids})
    _write_json(folder / "generation_config.json", {**ids, "do_sample": True})
    weights = random_weights(spec, num_rows, seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_weights(spec: NewModel, num_rows: int, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Draw the weights of a Qwen3 model with tied embeddings.

    Matrices are normal with standard deviation ``1 / sqrt(fan_in)``. For matrices that write to the
    residual stream, it is divided by ``sqrt(2 * num_layers)`` (GPT-2's rule). The embedding has
    0.02, which keeps the first logits near uniform. Norms are 1. The usual 0.02 for all matrices
    makes the outputs of narrow layers almost 0.
    """
    rng = np.random.default_rng(seed)
    width, q_width = spec.width, spec.num_heads * spec.head_dim
    kv_width, ffn = spec.num_kv_heads * spec.head_dim, spec.ffn_width
    depth = float(np.sqrt(2 * spec.num_layers))
    weights = {"model.embed_tokens.weight": _normal(rng, (num_rows, width), 0.02)}
    for layer in range(spec.num_layers):
        shapes = {
            "self_attn.q_proj": ((q_width, width), 1.0),
            "self_attn.k_proj": ((kv_width, width), 1.0),
            "self_attn.v_proj": ((kv_width, width), 1.0),
            "self_attn.o_proj": ((width, q_width), depth),
            "mlp.gate_proj": ((ffn, width), 1.0),
            "mlp.up_proj": ((ffn, width), 1.0),
            "mlp.down_proj": ((width, ffn), depth),
        }
        for name, (shape, shrink) in shapes.items():
            std = 1 / (shrink * float(np.sqrt(shape[1])))
            weights[f"model.layers.{layer}.{name}.weight"] = _normal(rng, shape, std)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(spec.head_dim, np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(width, np.float32)
    return weights | {"model.norm.weight": np.ones(width, np.float32)}


def _normal(
    rng: np.random.Generator, shape: tuple[int, int], std: float
) -> npt.NDArray[np.float32]:
    return (rng.standard_normal(shape) * std).astype(np.float32)


def _config(spec: NewModel, num_rows: int) -> dict[str, object]:
    """Return the content of config.json for transformers."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": spec.dtype,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.width,
        "initializer_range": 0.02,
        "intermediate_size": spec.ffn_width,
        "max_position_embeddings": spec.max_positions,
        "model_type": "qwen3",
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": num_rows,
    }


def _write_tokenizer(
    folder: Path, tokenizer: Tokenizer, max_positions: int, *, tools: bool
) -> None:
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    template = TOOL_CHAT_TEMPLATE if tools else CHAT_TEMPLATE
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT, *(TOOL_TOKENS if tools else ())],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "rollart_ascii_pieces": ASCII_PIECES,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
