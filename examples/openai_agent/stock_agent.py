"""An agent on the `openai` package as a rollout: it looks things up in a store and adds them.

    pip install openai
    PYTHONPATH=examples/openai_agent rollart run examples/openai_agent/run.yaml

`add_up` is the program: nothing in it knows of RollArt. `StockAgent` says what it is asked and what
its answer is worth.
"""

import json
import random
import re

from openai import AsyncOpenAI

from rollart_core.contracts.agent import AgentResult, AgentStart

ITEMS = ("apples", "bolts", "candles", "drums", "eggs", "flutes")
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Say how many of an item there are.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}


async def add_up(client, model, question, store):
    """Answer a question about a store."""
    messages = [{"role": "user", "content": question}]
    while True:
        answer = await client.chat.completions.create(
            model=model, messages=messages, tools=[LOOK_UP]
        )
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return said.content or ""
        for call in said.tool_calls:
            try:
                found = store[json.loads(call.function.arguments)["item"]]
            except (ValueError, KeyError, TypeError):
                found = f"there is no such item; there are {', '.join(store)}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(found)})


class StockAgent:
    """How many of two items are there together?"""

    async def prepare(self, *, seed, options):
        """Fill the store, and ask for two items of it."""
        task = random.Random(f"{options.get('split')}/{options.get('task', seed)}")
        self.store = {item: task.randrange(1, 10) for item in ITEMS}
        self.two = task.sample(ITEMS, 2)
        self.answer = ""
        self.question = f"How many {self.two[0]} and {self.two[1]} are there together?"
        return AgentStart(self.question)

    async def run(self, endpoint):
        """Run the program."""
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            self.answer = await add_up(client, endpoint.model, self.question, self.store)

    async def finish(self, recorded):
        """Look for the number that was asked for."""
        right = re.findall(r"\d+", self.answer)[-1:] == [str(self.total())]
        return AgentResult(float(right), success=right)

    async def solve(self):
        """Say the number."""
        self.answer = str(self.total())

    def total(self):
        """Return what is right."""
        return sum(self.store[item] for item in self.two)

    def num_tasks(self, split):
        """Return how many tasks there are."""
        return 200

    def corpus(self):
        """Yield text for a tokenizer trained from nothing."""
        for item in ITEMS:
            yield f"How many {item} and {item} are there together? 0 1 2 3 4 5 6 7 8 9"
            yield json.dumps({"name": "look_up", "arguments": {"item": item}})

    def close(self):
        """Nothing is left open."""
