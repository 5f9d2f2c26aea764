"""Handlers of Lambda functions that do what a handler should not."""

from __future__ import annotations

import os
import time


def raises(event, context):
    """Raise."""
    raise LookupError("nobody home")


def ends(event, context):
    """End the process."""
    os._exit(7)


def sleeps(event, context):
    """Take too long."""
    time.sleep(60)


def babbles(event, context):
    """Answer something else."""
    return {"statusCode": 200, "body": "hello"}
