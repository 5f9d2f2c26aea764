"""Tools that an environment offers: what they are, how they are called, where they come from.

Takes: the modules beside it. Gives: their public names, in one place. Never: imports ``mcp``.
"""

from rollart_core.rollout.tools.action import Call, ToolAction
from rollart_core.rollout.tools.env import ToolEnv, tool
from rollart_core.rollout.tools.mcp import McpServer, McpTools
from rollart_core.rollout.tools.source import ToolError, ToolResult, ToolSource

__all__ = [
    "Call",
    "McpServer",
    "McpTools",
    "ToolAction",
    "ToolEnv",
    "ToolError",
    "ToolResult",
    "ToolSource",
    "tool",
]
