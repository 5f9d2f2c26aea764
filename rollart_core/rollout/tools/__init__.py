"""Tools of environments: specs, calls and sources.

Takes: the modules of this package. Gives: their public names. ``rollart_plugins.mcp`` has the tools
of MCP servers.
"""

from rollart_core.rollout.tools.action import Call, ToolAction
from rollart_core.rollout.tools.env import ToolEnv, tool
from rollart_core.rollout.tools.source import ToolError, ToolResult, ToolSource

__all__ = [
    "Call",
    "ToolAction",
    "ToolEnv",
    "ToolError",
    "ToolResult",
    "ToolSource",
    "tool",
]
