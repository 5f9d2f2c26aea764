"""What an OpenAI-compatible server says when it does not do what it was asked.

Takes: a status and a body, in any of the shapes that servers use. Gives: an :class:`EndpointError`
of a kind. Never: shows an API key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rollart_core.errors import EndpointError, FaultKind, first_line

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""Statuses that may pass when the same is asked again."""
_OVERFLOW = re.compile(
    r"context[ _-]?(length|window|size)|max_model_len|maximum (model|input|sequence) length"
    r"|(prompt|input) is too long|too many tokens",
    re.IGNORECASE,
)
_OVERFLOW_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_SPENT = frozenset({"insufficient_quota", "billing_hard_limit_reached"})


def fault(status: int, body: bytes, *, where: str, secret: str = "") -> EndpointError:
    """Return what an answer that is no success means.

    Args:
        status: HTTP status, 300 or more.
        body: What came with it.
        where: The URL that was asked.
        secret: An API key, which some servers repeat; it is left out.
    """
    said, codes = _said(body)
    if secret:
        said = said.replace(secret, "***")
    kind = _kind(status, said, codes)
    message = f"{where} answers {status}" + (f": {said}" if said else "")
    again = status in AGAIN and kind != "quota"
    return EndpointError(message, kind=kind, status=status, retryable=again)


def _kind(status: int, said: str, codes: set[str]) -> FaultKind:
    if codes & _SPENT or status == 402:
        return "quota"
    if status in (401, 403):
        return "key"
    if status in (400, 413, 422) and (codes & _OVERFLOW_CODES or _OVERFLOW.search(said)):
        return "overflow"
    if status == 404:
        return "missing"
    if status == 429:
        return "rate"
    return "refused" if status < 500 else "server"


def _said(body: bytes) -> tuple[str, set[str]]:
    """Return the message of an error body and its codes.

    Bodies are ``{"error": {"message", "type", "code"}}`` (OpenAI), the same without ``error``
    (older vLLM), ``{"detail": ...}`` (FastAPI), or text.
    """
    text = body.decode("utf-8", "replace")
    try:
        found: Any = json.loads(text)
    except ValueError:
        return first_line(re.sub(r"<[^>]*>", " ", text)), set()
    if not isinstance(found, Mapping):
        return first_line(text), set()
    inner = found.get("error")
    if isinstance(inner, str):
        return first_line(inner), set()
    fields = inner if isinstance(inner, Mapping) else found
    message = fields.get("message", fields.get("detail", ""))
    codes = {str(fields[k]) for k in ("code", "type") if fields.get(k) is not None}
    return first_line(message if isinstance(message, str) else json.dumps(message)), codes
