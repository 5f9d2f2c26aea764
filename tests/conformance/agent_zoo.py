"""A good agent task, and one that breaks exactly one rule for each check of ``check_agent``."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import zoo

from rollart_core.contracts.agent import AgentResult, AgentStart
from rollart_core.contracts.env import EnvSpec, Timeouts
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.rollout import loop
from rollart_sandboxes.pool.source import SandboxSource

SPLITS = ("train", "test")


DOOR = {
    "type": "function",
    "function": {
        "name": "ask",
        "parameters": {
            "type": "object",
            "properties": {"door": {"type": "integer"}},
            "required": ["door"],
        },
    },
}


def share(door):
    return 16 // door


async def ask(endpoint, messages):
    """Ask an endpoint and return its text."""
    return (await answered(endpoint, messages))["content"] or ""


async def answered(endpoint, messages, **more):
    """Ask an endpoint and return its message; nothing is closed behind the caller's back."""
    host, _, port = endpoint.base_url.split("/")[2].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        body = json.dumps({"model": endpoint.model, "messages": messages, **more}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.0\r\nauthorization: Bearer {endpoint.api_key}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    status, content = answer.split(b" ", 2)[1], answer.partition(b"\r\n\r\n")[2]
    if status != b"200":
        raise RuntimeError(f"the endpoint said {status.decode()}")
    return json.loads(content)["choices"][0]["message"]


class Good:
    """Two sums, asked one after the other; each right answer earns half."""

    def __init__(self):
        self.task, self.right, self.endpoint = ("train", 0), 0, None

    def num_tasks(self, split):
        return 5

    async def prepare(self, *, seed, options):
        index = options.get("task", random.Random(seed).randrange(5))
        self.task, self.right = (options.get("split", "train"), index), 0
        return AgentStart(self.prompt(), {"sums": 2})

    async def run(self, endpoint):
        messages = [{"role": "system", "content": "Add."}]
        for turn in range(2):
            messages.append({"role": "user", "content": self.question(turn)})
            said = await self.ask(endpoint, messages)
            messages.append({"role": "assistant", "content": said})
            self.right += self.accepts(said, turn)

    async def finish(self, recorded):
        return AgentResult(self.reward(), self.right == 2, {"right": self.right / 2})

    def close(self):
        pass

    async def solve(self):
        self.right = 2

    def secrets(self):
        return [f"the sum is {sum(self.numbers(turn))}" for turn in range(2)]

    def corpus(self):
        yield "What is 3 plus 4?"

    async def ask(self, endpoint, messages):
        return await ask(endpoint, messages)

    def numbers(self, turn):
        rng = random.Random(f"{self.task}/{turn}")
        return rng.randint(10, 99), rng.randint(10, 99)

    def prompt(self):
        return "Add twice."

    def question(self, turn):
        return "What is {} plus {}?".format(*self.numbers(turn))

    def accepts(self, said, turn):
        return said.strip() == str(sum(self.numbers(turn)))

    def reward(self):
        return self.right / 2


class Divides(Good):
    """Asks with a tool, and divides by its argument."""

    async def ask(self, endpoint, messages):
        message = await answered(endpoint, messages, tools=[DOOR])
        for call in message.get("tool_calls") or ():
            try:
                share(json.loads(call["function"]["arguments"])["door"])
            except (KeyError, TypeError, ValueError):
                return ""
        return message["content"] or ""


class CannotBeMade(Good):
    def __init__(self):
        raise RuntimeError("no")


class PromptAlone(Good):
    async def prepare(self, **kwargs):
        return (await super().prepare(**kwargs)).prompt


class SaysNothing(Good):
    def prompt(self):
        return " "


class NumberAlone(Good):
    async def finish(self, recorded):
        return self.reward()


class NotANumber(Good):
    def reward(self):
        return float("nan")


class NeverAsks(Good):
    async def run(self, endpoint):
        return


class AsksAStranger(Good):
    async def run(self, endpoint):
        from dataclasses import replace

        try:
            await ask(replace(endpoint, api_key="sk-mine"), [{"role": "user", "content": "hi"}])
        except RuntimeError:
            await super().run(endpoint)


class Stumbles(Good):
    async def run(self, endpoint):
        await super().run(endpoint)
        raise ValueError("one line too many")


class NoTasks(Good):
    def num_tasks(self, split):
        return 0


class LacksASplit(Good):
    async def prepare(self, *, seed, options):
        if options.get("split") == "test":
            raise KeyError("test")
        return await super().prepare(seed=seed, options=options)


class Numbered(Good):
    made = itertools.count()

    def __init__(self):
        super().__init__()
        self.number = next(Numbered.made)

    def question(self, turn):
        return f"{super().question(turn)} (task {self.number})"


class SeedsTheWorld(Good):
    async def prepare(self, *, seed, options):
        random.seed(seed)
        return await super().prepare(seed=seed, options=options)


class SharesItsKey(Good):
    """Tells the program by the process's own environment, which all episodes share."""

    async def run(self, endpoint):
        os.environ["ZOO_KEY"] = endpoint.api_key
        os.environ["ZOO_URL"] = endpoint.base_url
        try:
            await super().run(endpoint)
        finally:
            os.environ.pop("ZOO_KEY", None)
            os.environ.pop("ZOO_URL", None)

    async def ask(self, endpoint, messages):
        await asyncio.sleep(0)
        now = type(endpoint)(os.environ["ZOO_URL"], os.environ["ZOO_KEY"], endpoint.model)
        return await ask(now, messages)


class BlocksTheLoop(Good):
    async def ask(self, endpoint, messages):
        body = json.dumps({"messages": messages}).encode()
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        url = f"{endpoint.base_url}/chat/completions"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
                return json.load(answer)["choices"][0]["message"]["content"] or ""
        except urllib.error.HTTPError as e:
            e.close()
            raise RuntimeError(f"the endpoint said {e.code}") from e


class NeverGivesUp(Good):
    """Asks on, a minute after each refusal by the clock of its loop."""

    async def ask(self, endpoint, messages):
        from support.clock import pass_s

        while True:
            try:
                return await ask(endpoint, messages)
            except RuntimeError:
                pass_s(60)
                await asyncio.sleep(0)


class WillNotEnd(Good):
    """Takes a cancellation for one more reason to ask, a minute later by the clock of the check."""

    late_s = 0.0

    @classmethod
    def monotonic(cls):
        return time.monotonic() + cls.late_s

    async def ask(self, endpoint, messages):
        try:
            return await ask(endpoint, messages)
        except asyncio.CancelledError:
            WillNotEnd.late_s += 60
            return await ask(endpoint, messages)


class NoCorpus(Good):
    def corpus(self):
        return iter(())


class LeavesThePrograms(Good):
    """Starts a program beside it, and ends it only when all went well."""

    async def run(self, endpoint):
        program = subprocess.Popen(["sleep", "60"])
        zoo.LEFT_OPEN.append(program)
        await super().run(endpoint)
        program.kill()
        program.wait()


class LeavesASandbox(Good):
    async def prepare(self, **kwargs):
        earlier = [thing for thing in zoo.LEFT_OPEN if isinstance(thing, zoo.LeftSandbox)]
        for left in earlier:  # all of them before the first await: another instance prepares too
            zoo.LEFT_OPEN.remove(left)
        for left in earlier:
            await asyncio.to_thread(left.close)
        sandboxes = SandboxSource("zoo:PlainSandbox")
        sandbox = await asyncio.to_thread(lambda: loop.run(sandboxes.take()))
        zoo.LEFT_OPEN.append(zoo.LeftSandbox(sandboxes, sandbox))
        return await super().prepare(**kwargs)


class SecretsInTheSandbox(Good):
    """Its box, one for all, has a folder with the hidden tests of the task."""

    @property
    def sandbox(self):
        return next((t.sandbox for t in zoo.LEFT_OPEN if isinstance(t, zoo.LeftSandbox)), None)

    def secrets(self):
        answer = sum(self.numbers(0))
        return [f"def test_sum():\n    assert add(*numbers()) == {answer}\n    again({answer})\n"]

    async def prepare(self, **kwargs):
        start = await super().prepare(**kwargs)
        await asyncio.to_thread(self.fill)
        return start

    def fill(self):
        if self.sandbox is None:
            sandboxes = SandboxSource("process", {"trusted": True})
            zoo.LEFT_OPEN.append(zoo.LeftSandbox(sandboxes, loop.run(sandboxes.take())))
        content = f"# Tests\n{self.secrets()[0]}".encode()
        loop.run(self.sandbox.write_file("deep/below/tests.py", content))


class OneListForAll(Good):
    """Chooses the task by its index, whatever the split."""

    def numbers(self, turn):
        rng = random.Random(f"{self.task[1]}/{turn}")
        return rng.randint(10, 99), rng.randint(10, 99)


class PoorSolution(Good):
    async def solve(self):
        self.right = 1


class PaysIdlers(Good):
    def accepts(self, said, turn):
        return said == "" or super().accepts(said, turn)


class PaysAnyone(Good):
    def accepts(self, said, turn):
        return said.strip() != ""


class PaysOnce(Good):
    def __init__(self):
        super().__init__()
        self.paid = set()

    def reward(self):
        if self.right < 2:
            return 0.0
        is_first = self.task not in self.paid
        self.paid.add(self.task)
        return float(is_first)


class AnswersOnlyErrors(Good):
    def question(self, turn):
        told = f" No: {self.secrets()[0]}." if turn == 1 and self.right == 0 else ""
        return super().question(turn) + told


class SecretsInInfo(Good):
    async def prepare(self, **kwargs):
        start = await super().prepare(**kwargs)
        return AgentStart(start.prompt, {"debug": {"notes": ["task", *self.secrets()]}})


class Fragile(Good):
    def accepts(self, said, turn):
        if "\x00" in said:
            raise ValueError("a null byte")
        return super().accepts(said, turn)


class Fines(Good):
    def reward(self):
        return self.right / 2 if self.right else -0.25


class SlowToJudge(Good):
    async def finish(self, recorded):
        said = [m["content"] for m in recorded.messages if m["role"] == "assistant"]
        await asyncio.sleep(0.06 if said == ["", ""] else 0)
        return await super().finish(recorded)


class ClosesOnce(Good):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True


class HashOrder(Good):
    def question(self, turn):
        return f"{super().question(turn)} Or {' '.join({'red', 'green', 'blue', 'gold', 'grey'})}?"


class CallsHome(Good):
    """Needs a route to the world; no packet is sent to it."""

    async def run(self, endpoint):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
            outside.connect(("192.0.2.1", 9))
        await super().run(endpoint)


class Hangs(Good):
    async def finish(self, recorded):
        threading.Event().wait()


class Crashes(Good):
    async def run(self, endpoint):
        print("out of order", file=sys.stderr, flush=True)
        os._exit(3)


def env_spec(name: str, **said: object) -> EnvSpec:
    """Return the spec of a class of this module."""
    entry_point = f"agent_zoo:{name}"
    return EnvSpec(
        id=f"agentzoo/{name}-v1", entry_point=entry_point, kind="agent", splits=SPLITS, **said
    )


@hookimpl
def rollart_environments() -> list[EnvSpec]:
    """Return those that are checked in processes of their own."""
    names = ("Good", "HashOrder", "CallsHome", "Crashes")
    quick = Timeouts(reset_s=60, step_s=0.1, close_s=60)
    return [*(env_spec(name) for name in names), env_spec("Hangs", timeouts=quick)]
