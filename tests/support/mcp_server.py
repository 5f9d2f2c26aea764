"""A small MCP server, for tests: run by the Python that has ``mcp``."""

import os

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("stock")
STOCK = {"red": 3, "blue": 7}


@server.tool()
def stock(color: str) -> str:
    """How many there are of a color."""
    if color not in STOCK:
        raise ToolError(f"no {color} here")
    return str(STOCK[color])


@server.tool()
def secrets() -> str:
    """What the server can read of our environment."""
    return os.environ.get("ROLLART_TEST_SECRET", "nothing") + os.environ.get("GIVEN", "")


if __name__ == "__main__":
    server.run()
