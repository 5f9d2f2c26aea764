"""An environment of boxes for tests: every episode leaves as much behind as it can."""

from __future__ import annotations

from typing import Any

from rollart_sandboxes.pool.lease import Reset, SandboxEnv, Step
from rollart_sandboxes.pool.source import sandbox_source

TURNS = 3
_WORK = "setsid -f sleep 1000; head -c 100000 /dev/zero > left; mkdir -p a/b; ln -s / a/root; pwd"


class BusySandbox(SandboxEnv):
    """Runs a command each turn, snapshots its box at first and resets it at last."""

    def __init__(self, sandbox: dict[str, Any], pool: dict[str, Any]) -> None:
        super().__init__(sandbox_source(sandbox, pool))
        self._turn = 0
        self._snapshot = ""

    async def begin(self, seed: int | None, options: dict[str, Any]) -> Reset:
        sandbox = await self.open_sandbox()
        await sandbox.write_file("task", str(options["task"]).encode())
        self._snapshot = await sandbox.snapshot()
        self._turn = 0
        return "go", {}

    async def act(self, action: str) -> Step:
        assert self._sandbox is not None
        done = await self._sandbox.exec(["/bin/sh", "-c", _WORK], timeout_s=60)
        assert done.exit_code == 0
        self._turn += 1
        if self._turn < TURNS:
            return "on", 0.0, False, False, {}
        await self._sandbox.restore(self._snapshot)
        listed = await self._sandbox.exec(["ls", "-A"], timeout_s=60)
        return "done", float(listed.stdout == b"task\n"), True, False, {}
