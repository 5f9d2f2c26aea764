"""A harness of verifiers: a chat loop with the task's MCP tools, in this process.

Takes: the arguments of a verifiers harness: a prompt, an endpoint, its key, URLs of tool servers.
Gives: the conversation, until the policy calls no tool. Never: lets the policy execute code.

The ``null`` harness of verifiers does the same in a program that ``uv`` installs and starts for
each episode. This module is only imported if verifiers is installed.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]

Json = dict[str, Any]


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """The harness has no settings of its own."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """Request a completion, call the requested tools, and repeat."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run one segment of a conversation."""
        messages = self._begin(data)
        limit_s = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": limit_s} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, opened = await connect_mcp({"mcpServers": servers}, stack)
            headers = {"Authorization": f"Bearer {secret}"}
            client = httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None)
            chat = await stack.enter_async_context(client)
            while True:
                body = {"model": ctx.model, "messages": messages}
                answer = await chat.post(
                    "chat/completions", json={**body, "tools": tools} if tools else body
                )
                if answer.status_code >= 500:
                    return vf.ProgramResult(1, "", answer.text)
                if answer.status_code >= 400:  # a limit: the conversation is scored
                    return vf.ProgramResult(0, "", answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    said = await _called(call, dispatch, opened)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})

    def _begin(self, data: vf.TaskData) -> list[Json]:
        system, prompt = self.resolve_prompt(data)
        messages: list[Json] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or ())]


async def _called(call: Json, dispatch: dict[str, Any], servers: dict[str, Any]) -> Any:
    """Return the result of a tool; errors of a call are returned to the policy as text."""
    name, text = call["function"]["name"], call["function"].get("arguments") or "{}"
    if name not in dispatch:
        return f"error: there is no tool {name!r}; there are {', '.join(dispatch) or 'none'}"
    try:
        arguments = json.loads(text)
    except ValueError as e:
        return f"error: the arguments are not JSON: {e}"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    return await call_mcp(servers, dispatch, name, arguments)
