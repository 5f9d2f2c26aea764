"""AWS Lambda on this machine, with the reward of mission.yaml: lambda_here.py PORT."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path

import yaml

from rollart_bench.local_lambda import FunctionSettings, LocalLambda

CONFIG = Path(__file__).resolve().parents[1] / "mission.yaml"


async def serve(port: int) -> None:
    """Serve until SIGTERM."""
    options = dict(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["reward"])
    settings = FunctionSettings(options.pop("id"), options, timeout_s=120, idle_s=60)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with LocalLambda(settings, port=port):
        await ended.wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(int(sys.argv[1])))
