"""A taskset of verifiers, as a stranger writes it: sums, and on demand a tool that adds."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class Adding(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def num_chars(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 10
    tools: bool = False


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for n in range(self.config.num_tasks):
            data = SumData(prompt=f"What is {n} plus {n}?", system_prompt="Add.", answer=str(2 * n))
            yield SumTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Adding(vf.ToolsetConfig())] if config.tools else []


if __name__ == "__main__":
    Adding.run()  # verifiers starts tool servers as `python -m vf_sums`
