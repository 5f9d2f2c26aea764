"""An HTTP function for functions-framework (Cloud Run functions): its target is ``score``.

    functions-framework --source .../google_function.py --target score

Takes: a Flask request; the reward by :mod:`rollart_plugins.serverless.blocking`'s variables, and
``ROLLART_REWARD_TOKEN``. Gives: what `rollart serve-reward` would. Never: scores without the token,
where there is one.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

from rollart_plugins.serverless.blocking import answered
from rollart_plugins.serverless.wire import STATUS, Refused

_JSON = {"Content-Type": "application/json"}
_TOKEN = "ROLLART_REWARD_TOKEN"


def score(request: Any) -> tuple[bytes, int, dict[str, str]]:
    """Answer one request; returns body, status and headers, as Flask takes them."""
    if request.path.endswith("/healthz"):
        return b'{"status":"ok"}', 200, _JSON
    token = os.environ.get(_TOKEN, "")
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if token and not hmac.compare_digest(given.encode(), token.encode()):
        refused = Refused("token", "the token is missing or wrong")
        return refused.body(), STATUS["token"], _JSON
    kind, body = answered(request.get_data())
    return body, STATUS[kind] if kind else 200, _JSON
