"""Standard JSON, without NaN and infinities.

Takes: plain values. Gives: JSON, with null for numbers that JSON cannot represent. Never: changes
its input.
"""

from __future__ import annotations

import json
import math


def dumps(value: object) -> str:
    """Return indented JSON. NaN and infinities become null, other unknown values text."""
    return json.dumps(_finite(value), indent=2, default=str, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
