"""Whether two models speak of the same tokens: where one reads what the other wrote, they must.

Takes: model folders. Gives: a reason why not. Never: imports torch, transformers or tokenizers, or
reaches the network: of a model that is not in a folder nothing is known here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def vocabulary_fault(ours: str, other: str) -> str | None:
    """Say why token ids of one model mean something else to another; None where nothing shows it.

    Args:
        ours: Folder of the policy.
        other: Folder of the other model.
    """
    first, second = _vocabulary(Path(ours).expanduser()), _vocabulary(Path(other).expanduser())
    if first is not None and second is not None and first != second:
        differing = sorted(
            (i, token) for token, i in first.items() if second.get(token) != i
        ) or sorted((i, token) for token, i in second.items() if token not in first)
        at, token = differing[0]
        return (
            f"{other} has another vocabulary than {ours}: {len(second)} tokens against "
            f"{len(first)}, and token {at} ({token!r}) is not the same; take a model with the same "
            "tokenizer"
        )
    sizes = [_size(Path(p).expanduser()) for p in (ours, other)]
    if None not in sizes and sizes[0] != sizes[1] and (first is None or second is None):
        return (
            f"{other} has another vocabulary than {ours}: {sizes[1]} tokens against {sizes[0]}; "
            "take a model with the same tokenizer"
        )
    return None


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Return token -> id of a model folder; None where there is no ``tokenizer.json``."""
    content = _json(folder / "tokenizer.json")
    if content is None:
        return None
    known = content.get("model", {}).get("vocab", {})
    found = (
        {str(token): int(i) for token, i in known.items()}
        if isinstance(known, Mapping)
        else {str(row[0]): i for i, row in enumerate(known)}
    )
    added = content.get("added_tokens") or []
    return found | {str(token["content"]): int(token["id"]) for token in added}


def _size(folder: Path) -> int | None:
    content = _json(folder / "config.json") or {}
    size = content.get("vocab_size")
    return size if isinstance(size, int) else None


def _json(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
