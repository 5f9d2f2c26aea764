"""A small environment with tools, for tests."""

from rollart_core.rollout.tools.action import Call, ToolAction
from rollart_core.rollout.tools.env import ToolEnv, tool
from rollart_core.rollout.tools.source import ToolResult

SUM = {"a": 1, "b": 2}


class Adding(ToolEnv):
    """Asks for a sum; tools add.

    ``rude``: answers calls with messages that answer none. ``terse``: answers in text, and its
    expert makes one call at a time.
    """

    def __init__(self, rude: bool = False, terse: bool = False) -> None:
        super().__init__()
        self.rude, self.terse = rude, terse

    def begin(self, task, split, seed):
        self.num_asked = 0
        return "1 + 2?"

    def oracle(self):
        self.num_asked += 1
        calls = (Call("add", SUM),) * (1 if self.terse else 2)
        return "3" if self.num_asked > 1 else ToolAction("", calls).text()

    def said(self, content):
        return ToolResult("", reward=float("3" in content), done=True, success="3" in content)

    def step(self, action):
        shown, *rest = super().step(action)
        if self.terse:
            return shown[0]["content"], *rest
        return [m | {"tool_call_id": "x"} if self.rude else m for m in shown], *rest

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two whole numbers."""
        return str(a + b)
