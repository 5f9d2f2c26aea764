"""The shipped agents: on the `openai` package, and the config of mini-swe-agent."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.gateways import LIMITS, agent_parts
from support.talks import result
from support.tool_templates import call_text, tool_tokenizer

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.rollout.agent_episode import run_agent_episode
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.types import Task, Ticket

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ID = "stock_agent:StockAgent"


class Clerk:
    """Looks both items up, the second at first in a way that cannot be read, and adds them."""

    def __init__(self, tokenizer):
        self.tokenizer, self.requests = tokenizer, []

    async def generate(self, request):
        self.requests.append(request)
        text = self.tokenizer.decode(request.token_ids)
        first, second = re.search(r"How many (\w+) and (\w+) are there", text).groups()
        found = [int(n) for n in re.findall(r"<tool_response>\s*(\d+)", text)]
        asked = text.count("<|im_start|>assistant") - 1
        said = [
            call_text("hermes", ("look_up", json.dumps({"item": first}))),
            call_text("hermes", ("look_up", json.dumps({"article": second}))),
            call_text("hermes", ("look_up", json.dumps({"item": second}))),
            f"There are {sum(found)}.",
        ][asked]
        ids = [*self.tokenizer.encode(said), self.tokenizer.stop_token_ids[0]]
        return result(ids, asked, "stop")

    async def release(self, session_id):
        pass


def test_the_openai_agent_calls_its_tool_and_each_episode_is_one_row(monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.syspath_prepend(str(EXAMPLES / "openai_agent"))
    tokenizer = tool_tokenizer("hermes")
    engine = Clerk(tokenizer)
    env, limits = EnvRef(ID), replace(LIMITS, max_new_tokens=200)

    async def main():
        async with agent_parts(env, engine, limits, max_context_tokens=3000) as parts:
            tickets = [Ticket(f"g{i}.0", Task(ID, "train", i, i), f"g{i}", 0) for i in range(4)]
            return await asyncio.gather(*(run_agent_episode(t, 0, parts) for t in tickets))

    for trajectory in asyncio.run(main()):
        assert trajectory.failure is None
        assert (trajectory.reward, trajectory.success) == (1.0, True)
        assert len(trajectory.turns) == 4
        assert "there is no such item" in trajectory.turns[2].observation
        (sample,) = trajectory.samples
        assert sample.num_loss_tokens == sum(turn.num_new_tokens for turn in trajectory.turns)


@pytest.mark.parametrize("name", ["run.yaml", "repair.yaml"])
def test_the_config_of_mini_swe_agent_can_be_run(name):
    run = resolve_run(load_config(EXAMPLES / "mini_swe_agent" / name))
    assert run.envs[0].spec.kind == "agent"
    assert "{task}" in run.env.options["program"][-1]
