"""An HTTP function for functions-framework (Cloud Run functions): its target is ``score``.

    functions-framework --source .../google_function.py --target score

Takes: a Flask request; the environment variables of :mod:`rollart_plugins.serverless.blocking`, and
``ROLLART_REWARD_TOKEN``. Gives: the response of `rollart serve-reward`. Never: scores without the
token, if it is set.
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
    """Answer one request; return body, status and headers, in Flask's form."""
    if request.path.endswith("/healthz"):
        return b'{"status":"ok"}', 200, _JSON
    token = os.environ.get(_TOKEN, "")
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if token and not hmac.compare_digest(given.encode(), token.encode()):
        refused = Refused("token", "the token is missing or wrong")
        return refused.body(), STATUS["token"], _JSON
    kind, body = answered(request.get_data())
    return body, STATUS[kind] if kind else 200, _JSON
