import os
import sys
from pathlib import Path

import pytest
from support.processes import wait_gone

from rollart_core.errors import ConfigError
from rollart_core.rollout.tools.action import Call, ToolAction
from rollart_core.rollout.tools.env import ToolEnv
from rollart_core.rollout.tools.source import ToolResult
from rollart_core.rollout.tools.tool_set import ToolSet
from rollart_plugins.mcp import McpServer, McpTools

SUPPORT = Path(__file__).resolve().parents[2] / "support"


class Shop(ToolEnv):
    def begin(self, task, split, seed):
        return "How many blue ones?"

    def said(self, content):
        return ToolResult("", reward=float(content == "7"), done=True)


def _plain(*args, **given):
    script = str(SUPPORT / "plain_mcp_server.py")
    return McpTools(McpServer(sys.executable, ("-S", script, *args), **given))


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_environment_offers_the_tools_of_a_real_server(monkeypatch):
    monkeypatch.setenv("ROLLART_TEST_SECRET", "leaked")
    script, given = str(SUPPORT / "mcp_server.py"), {"GIVEN": "given"}
    stock = McpTools(McpServer(sys.executable, (script,), env=given, prefix="shop_"))
    env = Shop(sources=[stock])
    try:
        _, info = env.reset()
        names = [spec["function"]["name"] for spec in info["tools"]]
        assert names == ["shop_stock", "shop_secrets"]
        assert info["tools"][0]["function"]["description"] == "How many there are of a color."
        told = ToolSet(info["tools"]).problem("shop_stock", {"color": 3})
        assert "3 is not of type 'string'" in told
        calls = [
            Call("shop_stock", {"color": "blue"}),
            Call("shop_stock", {"color": "pink"}),
            Call("shop_stock", {}),
            Call("shop_secrets"),
        ]
        shown, *_ = env.step(ToolAction("", tuple(calls)).text())
        blue, pink, nothing, secret = [message["content"] for message in shown]
        assert blue == "7"
        assert pink.startswith("error: ")
        assert "no pink here" in pink
        assert nothing.startswith("error: ")
        assert secret == "nothinggiven", "our environment variables are not passed on"
    finally:
        env.close()


def test_a_server_is_started_once_and_gone_after_close():
    tools = _plain(only=["process_id", "picture"])
    pid = int(tools.call("process_id", {}))
    assert int(tools.call("process_id", {})) == pid
    assert [spec["function"]["name"] for spec in tools.tools()] == ["process_id", "picture"]
    assert tools.call("picture", {}) == "[image left out]"
    tools.close()
    tools.close()
    assert not _alive(pid)


def test_a_server_that_dies_fails_calls_until_it_is_closed():
    tools = _plain()
    try:
        first = int(tools.call("process_id", {}))
        for name in ("die", "process_id"):
            with pytest.raises(RuntimeError, match=r"[Cc]lose|ended"):
                tools.call(name, {})
        wait_gone(first)
        tools.close()
        assert int(tools.call("process_id", {})) != first
    finally:
        tools.close()


@pytest.mark.slow
def test_a_call_that_takes_too_long_ends_in_time():
    tools = _plain(call_s=0.3)
    tools.tools()
    with pytest.raises(TimeoutError):
        tools.call("sleep", {})
    tools.close()


@pytest.mark.slow
def test_a_server_that_does_not_start_is_said_in_one_line():
    with pytest.raises(RuntimeError, match="did not start: out of stock"):
        _plain("broken").tools()
    with pytest.raises(RuntimeError, match=r"did not start: .*no-such-command"):
        McpTools(McpServer("no-such-command")).tools()
    with pytest.raises(RuntimeError, match="did not start: TimeoutError"):
        McpTools(McpServer("sleep", ("30",), start_s=0.2)).tools()
    with pytest.raises(ConfigError, match="no tool 'stok'; it has: process_id, die"):
        _plain(only=["stok"]).tools()


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollart\[mcp\]'"):
        _plain().tools()
