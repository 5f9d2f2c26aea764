"""A small environment with tools, for tests."""

from rollart_core.tools.action import Call, ToolAction
from rollart_core.tools.env import ToolEnv, tool
from rollart_core.tools.source import ToolResult

SUM = {"a": 1, "b": 2}


class Adding(ToolEnv):
    """Asks for a sum; tools add. ``rude``: answers calls with messages that answer none."""

    def __init__(self, rude: bool = False) -> None:
        super().__init__()
        self.rude = rude

    def begin(self, task, split, seed):
        self.num_asked = 0
        return "1 + 2?"

    def oracle(self):
        self.num_asked += 1
        return (
            "3"
            if self.num_asked > 1
            else ToolAction("", (Call("add", SUM), Call("add", SUM))).text()
        )

    def said(self, content):
        return ToolResult("", reward=float("3" in content), done=True, success="3" in content)

    def step(self, action):
        shown, *rest = super().step(action)
        return [m | {"tool_call_id": "x"} if self.rude else m for m in shown], *rest

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two whole numbers."""
        return str(a + b)
