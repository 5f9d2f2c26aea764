"""Tools that an environment offers: what they are, how they are called, where they come from.

Takes: the modules beside it. Gives: their public names, in one place. Never: imports ``mcp``.
"""

from rollart_core.tools.action import Call, ToolAction
from rollart_core.tools.env import ToolEnv, tool
from rollart_core.tools.mcp import McpServer, McpTools
from rollart_core.tools.source import ToolError, ToolResult, ToolSource

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
