"""A good environment, and one that breaks exactly one rule for each check of ``check_env``."""

from __future__ import annotations

import itertools
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium

from rollart_core.contracts.env import EnvSpec, Timeouts
from rollart_core.contracts.reward import Reward, RewardResult
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.rollout import loop
from rollart_core.rollout.tools import Call, ToolAction, ToolEnv, ToolResult, tool
from rollart_core.spaces import Text
from rollart_sandboxes.pool.source import SandboxSource
from rollart_testing.fakes import FakeSandbox

SPLITS = ("train", "test")
LEFT_OPEN: list[object] = []
"""What leaky environments leave behind; :func:`sweep` takes it away."""


def sweep() -> None:
    """End what leaky environments left behind."""
    for thing in LEFT_OPEN:
        if isinstance(thing, threading.Event):
            thing.set()
        elif isinstance(thing, subprocess.Popen):
            thing.kill()
            thing.wait()
        else:
            thing.close()
    LEFT_OPEN.clear()


class Good(gymnasium.Env):
    """Two sums; each right answer earns half."""

    def __init__(self):
        self.observation_space = Text()
        self.action_space = Text()
        self.task, self.turn, self.right = ("train", 0), 2, 0

    def num_tasks(self, split):
        return 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        options = options or {}
        index = options.get("task", int(self.np_random.integers(5)))
        self.task, self.turn, self.right = (options.get("split", "train"), index), 0, 0
        return self.page(), self.info()

    def step(self, action):
        is_right = self.accepts(action)
        self.right += is_right
        self.turn += 1
        return self.page(), self.reward(action, is_right), self.turn == 2, False, self.info()

    def oracle(self):
        return str(sum(self.numbers()))

    def secrets(self):
        return [f"the sum is {sum(self.numbers())}"]

    def corpus(self):
        yield "What is 3 plus 4?"

    async def areset(self, *, seed=None, options=None):
        return self.reset(seed=seed, options=options)

    async def astep(self, action):
        return self.step(action)

    def numbers(self):
        rng = random.Random(f"{self.task}/{self.turn}")
        return rng.randint(10, 99), rng.randint(10, 99)

    def accepts(self, action):
        return action.strip() == self.oracle()

    def reward(self, action, is_right):
        return 0.5 * is_right

    def page(self):
        return "The end." if self.turn == 2 else "What is {} plus {}?".format(*self.numbers())

    def info(self):
        return {"success": self.right == 2, "reward_components": {"right": self.right / 2}}


class CannotBeMade(Good):
    def __init__(self):
        raise RuntimeError("no")


class BareReset(Good):
    def reset(self, **kwargs):
        return super().reset(**kwargs)[0]


class NumberObservation(Good):
    def reset(self, **kwargs):
        return 5, super().reset(**kwargs)[1]


class FourTuple(Good):
    def step(self, action):
        return super().step(action)[:4]


class TextReward(Good):
    def reward(self, action, is_right):
        return "1"


class IntFlags(Good):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, int(terminated), int(truncated), info


class NoTasks(Good):
    def num_tasks(self, split):
        return 0


class LacksASplit(Good):
    def reset(self, *, seed=None, options=None):
        if (options or {}).get("split") == "test":
            raise KeyError("test")
        return super().reset(seed=seed, options=options)


class Numbered(Good):
    made = itertools.count()

    def __init__(self):
        super().__init__()
        self.number = next(Numbered.made)

    def page(self):
        return f"{super().page()} (instance {self.number})"


class ForgetsToReset(Good):
    def reset(self, **kwargs):
        in_the_middle = self.turn == 1 and self.right == 1
        observation, info = super().reset(**kwargs)
        if in_the_middle:
            self.turn = 1
            return self.page(), info
        return observation, info


class NeverSeeds(Good):
    def reset(self, *, seed=None, options=None):
        rng = random.Random(seed)
        options = {"split": "train", "task": rng.randrange(5), **(options or {})}
        self.task = (options["split"], options["task"])
        self.turn, self.right = 0, 0
        return self.page(), self.info()


class SeedsTheWorld(Good):
    def reset(self, *, seed=None, options=None):
        random.seed(seed)
        return super().reset(seed=seed, options=options)


class OneForAll(Good):
    task = turn = right = None

    def __init__(self):
        self.observation_space = Text()
        self.action_space = Text()
        OneForAll.turn = 2

    def __setattr__(self, name, value):
        if name in {"task", "turn", "right"}:
            setattr(OneForAll, name, value)
        else:
            super().__setattr__(name, value)


class AsyncDiffers(Good):
    async def astep(self, action):
        return ("other", *self.step(action)[1:])


class NoCorpus(Good):
    def corpus(self):
        return iter(())


class LeavesThreads(Good):
    def reset(self, **kwargs):
        going = threading.Event()
        threading.Thread(target=going.wait, daemon=True).start()
        LEFT_OPEN.append(going)
        return super().reset(**kwargs)


class BeginsAPool(Good):
    """Its seventh reset begins what stays, and none after."""

    resets = 0

    def reset(self, **kwargs):
        BeginsAPool.resets += 1
        if BeginsAPool.resets == 7:
            LEFT_OPEN.extend(open(os.devnull) for _ in range(20))  # noqa: SIM115
        return super().reset(**kwargs)


class LeavesFiles(Good):
    def __init__(self):
        super().__init__()
        LEFT_OPEN.append(open(os.devnull))  # noqa: SIM115


class LeavesProcesses(Good):
    def __init__(self):
        super().__init__()
        from support.pace import wait_until

        process = subprocess.Popen(["sleep", "60"])
        LEFT_OPEN.append(process)
        comm = Path(f"/proc/{process.pid}/comm")  # the parent's name, at first
        wait_until(lambda: comm.read_text() == "sleep\n", "its name")


class SlowOnce(Good):
    def step(self, action):
        if action.startswith("xxx"):
            time.sleep(0.06)
        return super().step(action)


class ClosesOnce(Good):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True


class OneListForAll(Good):
    """Chooses the task by its index, whatever the split."""

    def numbers(self):
        rng = random.Random(f"{self.task[1]}/{self.turn}")
        return rng.randint(10, 99), rng.randint(10, 99)


class ForgetsAProduct(Good):
    def task_clusters(self, split):
        return [f"{split} product {index // 2}" for index in range(4)]


class SharesAProduct(Good):
    def task_clusters(self, split):
        return [f"product {index}" for index in range(5)]


class FewSeeds(Good):
    """Chooses the task by the seed, among three."""

    def reset(self, *, seed=None, options=None):
        found = super().reset(seed=seed, options=options)
        if not options:
            return found
        self.task = ("drawn", int(self.np_random.integers(3)))
        return self.page(), self.info()


class BySeed(Good):
    """Chooses the task by the seed alone."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task = ("drawn", int(self.np_random.integers(2**31)))
        self.turn, self.right = 0, 0
        return self.page(), self.info()

    def num_tasks(self, split):
        return None


class PoorOracle(Good):
    def oracle(self):
        return str(sum(self.numbers())) if self.turn == 0 else "I give up"

    def accepts(self, action):
        return action.strip() == str(sum(self.numbers()))


class PaysIdlers(Good):
    def accepts(self, action):
        return action == "" or super().accepts(action)


class PaysAnyone(Good):
    def accepts(self, action):
        return action.strip() != ""


class PaysOnce(Good):
    def __init__(self):
        super().__init__()
        self.paid = set()

    def reward(self, action, is_right):
        if self.right < 2:
            return 0.0
        is_first = self.task not in self.paid
        self.paid.add(self.task)
        return float(is_first)


class AnswersOnlyErrors(Good):
    def page(self):
        told = f" No: {self.secrets()[0]}." if self.turn == 1 and self.right == 0 else ""
        return super().page() + told


class AnswersInInfo(Good):
    secrets = property()  # hasattr() says that it has none

    def info(self):
        return {**super().info(), "answer": self.oracle()}


class SecretsInInfo(Good):
    def info(self):
        return {**super().info(), "debug": {"notes": ["task", *self.secrets()]}}


class AstepAlone(Good):
    areset = property()  # hasattr() says that it has none


class OracleRaises(Good):
    def oracle(self):
        return {"red": "1"}["blue"]

    def accepts(self, action):
        return action.strip() == str(sum(self.numbers()))


class GoodTools(ToolEnv):
    """A word that only a tool knows; `submit` it."""

    def __init__(self):
        super().__init__()
        self.word = ""

    def num_tasks(self, split):
        return 5

    def begin(self, task, split, seed):
        rng = random.Random(f"{split}/{task}/{seed}")
        self.word, self.has_asked = "".join(rng.choices("abcdefgh", k=8)), False
        return f"Room {task} of {split}: what is the word?"

    def secrets(self):
        return [self.word]

    def oracle(self):
        if not self.has_asked:
            return ToolAction("", (Call("ask", {"door": len(self.word)}),)).text()
        return ToolAction("", (Call("submit", {"word": self.word}),)).text()

    def said(self, content):
        return ToolResult("Call a tool.")

    @tool
    def ask(self, door: int) -> str:
        """Ask at a door."""
        self.has_asked = True
        return f"A door has {self.share(door)} hinges."

    def share(self, door):
        return 16 // door if door else 0

    @tool
    def submit(self, word: str) -> ToolResult:
        """Say the word."""
        right = self.accepts(word)
        return ToolResult("The end.", reward=float(right), done=True, success=right)

    def accepts(self, word):
        return word == self.word


class PaysAnyCall(GoodTools):
    def accepts(self, word):
        return True


class PaysAnyCallBeforeAWord(PaysAnyCall):
    """Words end the episode, so that who says as much as it calls earns half."""

    def said(self, content):
        return ToolResult("The end.", done=True, success=False)


class ToolTellsSecrets(GoodTools):
    @tool
    def recall(self, page: int = 0) -> str:
        """Read the notes."""
        return f"page {page}: {self.word}"


class Divides(GoodTools):
    def share(self, door):
        return 16 // door


class PlainSandbox(FakeSandbox):
    def __init__(self, **options):
        super().__init__()


class LeftSandbox:
    def __init__(self, sandboxes, sandbox):
        self.sandboxes, self.sandbox = sandboxes, sandbox

    def close(self):
        loop.run(self.sandboxes.give_back(self.sandbox))


class LeavesASandbox(Good):
    """Always one, so that they do not grow in number."""

    def reset(self, **kwargs):
        for left in [thing for thing in LEFT_OPEN if isinstance(thing, LeftSandbox)]:
            LEFT_OPEN.remove(left)
            left.close()
        sandboxes = SandboxSource("zoo:PlainSandbox")
        LEFT_OPEN.append(LeftSandbox(sandboxes, loop.run(sandboxes.take())))
        return super().reset(**kwargs)


class SecretsInTheSandbox(Good):
    """Its box, one for all, has a folder with the hidden tests of the task."""

    @property
    def sandbox(self):
        return next((thing.sandbox for thing in LEFT_OPEN if isinstance(thing, LeftSandbox)), None)

    def secrets(self):
        answer = self.oracle()
        return [f"def test_sum():\n    assert add(*numbers()) == {answer}\n    again({answer})\n"]

    def reset(self, **kwargs):
        answer = super().reset(**kwargs)
        if self.sandbox is None:
            sandboxes = SandboxSource("process", {"trusted": True})
            LEFT_OPEN.append(LeftSandbox(sandboxes, loop.run(sandboxes.take())))
        content = f"# Tests\n{self.secrets()[0]}".encode()
        loop.run(self.sandbox.write_file("deep/below/tests.py", content))
        return answer


class Leaves(Good):
    def step(self, action):
        sys.exit(0)


class Wavers(Reward):
    """Scores otherwise each time."""

    times = 0

    def score(self, request):
        self.times += 1
        return RewardResult(1 / self.times)


class Fragile(Good):
    def step(self, action):
        if "\x00" in action:
            raise ValueError("a null byte")
        return super().step(action)


class Fines(Good):
    def reward(self, action, is_right):
        return 0.5 if is_right else -0.25


class HashOrder(Good):
    def page(self):
        return f"{super().page()} One of {' '.join({'red', 'green', 'blue', 'gold', 'grey'})}."


class CallsHome(Good):
    """Needs a route to the world; no packet is sent to it."""

    def reset(self, **kwargs):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
            outside.connect(("192.0.2.1", 9))
        return super().reset(**kwargs)


class ServesItself(Good):
    """Talks to a server of its own on the loopback, which is no network."""

    def reset(self, **kwargs):
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()).close()
            server.accept()[0].close()
        return super().reset(**kwargs)


class Hangs(Good):
    def step(self, action):
        threading.Event().wait()


class HangsWhenMade(Good):
    def __init__(self):
        threading.Event().wait()


class Crashes(Good):
    def step(self, action):
        print("out of order", file=sys.stderr, flush=True)
        os._exit(3)


def env_spec(name: str, **said: object) -> EnvSpec:
    """Return the spec of a class of this module."""
    return EnvSpec(id=f"zoo/{name}-v1", entry_point=f"zoo:{name}", splits=SPLITS, **said)


@hookimpl
def rollart_environments() -> list[EnvSpec]:
    """Return those that are checked in processes of their own."""
    names = ("Good", "HashOrder", "CallsHome", "ServesItself", "Crashes", "LeavesThreads")
    quick = Timeouts(reset_s=60, step_s=0.1, close_s=60)
    return [*(env_spec(name) for name in names), env_spec("Hangs", timeouts=quick)]
