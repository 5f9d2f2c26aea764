"""Function repair for a model that cannot write yet: something is judged whatever it answers."""

from __future__ import annotations

from rollart_envs.swe.function_env import FunctionRepairEnv
from rollart_sandboxes.pool.lease import Step


class GuessingRepairEnv(FunctionRepairEnv):
    """An answer of an odd number of characters stands for the mended function, else the buggy."""

    async def act(self, action: str) -> Step:
        """Judge what the answer stands for."""
        mended = self.oracle() or ""
        buggy = f"```python\n{self.task.buggy_code}\n```"
        return await super().act(mended if len(action) % 2 else buggy)
