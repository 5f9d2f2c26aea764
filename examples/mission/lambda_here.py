"""AWS Lambda on this machine, with the reward of mission.yaml: lambda_here.py PORT."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress

from rollart_plugins.serverless.local_lambda import FunctionSettings, LocalLambda

SETTINGS = FunctionSettings(
    "env-return", {"return_weight": 0.5, "success_weight": 0.5}, timeout_s=120, idle_s=60
)


async def serve(port: int) -> None:
    """Serve until SIGTERM."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with LocalLambda(SETTINGS, port=port):
        await ended.wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(int(sys.argv[1])))
