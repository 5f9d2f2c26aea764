"""An MCP server of the standard library alone, for tests: it starts at once, and misbehaves."""

import json
import os
import sys
import time

TOOLS = [
    {"name": name, "inputSchema": {"type": "object", "properties": {}}}
    for name in ("process_id", "die", "sleep", "picture")
]
PAGES = {None: (TOOLS[:2], "more"), "more": (TOOLS[2:], None)}


def answer(method, params):
    if method == "initialize":
        server = {"name": "plain", "version": "1"}
        version = params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        tools, cursor = PAGES[params.get("cursor")]
        return {"tools": tools} | ({"nextCursor": cursor} if cursor else {})
    name = params["name"]
    if name == "die":
        os._exit(3)
    if name == "sleep":
        time.sleep(60)
    content = [{"type": "text", "text": str(os.getpid())}]
    if name == "picture":
        content = [{"type": "image", "data": "AA==", "mimeType": "image/png"}]
    return {"content": content}


if sys.argv[1:] == ["broken"]:
    sys.exit("out of stock")
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answer(message["method"], message.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
