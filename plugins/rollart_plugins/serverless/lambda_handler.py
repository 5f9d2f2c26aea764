"""The handler of an AWS Lambda function: ``rollart_plugins.serverless.lambda_handler.handler``.

Takes: a call of the wire as the event; the environment variables of
:mod:`rollart_plugins.serverless.blocking`. Gives: an answer of the wire, or a refusal. Never:
raises if a reward fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollart_plugins.serverless.blocking import answered


def handler(event: Mapping[str, Any], context: object) -> Any:
    """Answer one call; ``context`` is Lambda's and is ignored."""
    _, body = answered(event if isinstance(event, Mapping) else {"version": None})
    return json.loads(body)
