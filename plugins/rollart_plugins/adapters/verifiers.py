"""The adapter of verifiers' tasksets (its v1 API): agent tasks, played by a harness of verifiers.

verifiers runs an episode, and the gateway records it:

    prepare: which task -> run: verifiers' env, harness and scoring -> finish: the trace's reward

verifiers scores at the end of its own episode, before ``finish``; judges use their own model
clients. verifiers only accepts an API key as the name of an environment variable. Each episode has
such a variable, with ``API_KEY`` in its name, which verifiers does not pass to programs.

Takes: the id of an installed taskset, and options. Gives: agent tasks and their spec.
Never: imports verifiers before a taskset is used, or ignores errors of an episode: they are raised.
"""

from __future__ import annotations

import json
import os
import random
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from rollart_core.config.base import Number, PositiveInt, Seconds
from rollart_core.contracts.adapter import EnvAdapter
from rollart_core.contracts.agent import AgentResult, AgentStart, Endpoint, Recorded
from rollart_core.contracts.env import EnvSpec, Timeouts
from rollart_core.errors import EnvironmentFailure, PluginError, UnknownIdError, first_line
from rollart_plugins.adapters.fields import Folder, Splits

DEFAULT_TURNS = 10

HARNESS: Final = "rollart_chat"
"""Name of the harness in ``verifiers_chat.py``."""
_ENDLESS: Final = {"train": (0, 1000), "test": (1000, 1200)}
_TEST_SHARE: Final = 5
"""One of this many tasks is a test task."""


class VerifiersOptions(BaseModel):
    """Options of ``verifiers::TASKSET``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    taskset: dict[str, Any] = Field(default_factory=dict)
    """Configuration of the taskset, as in verifiers' `--env.taskset`."""
    harness: dict[str, Any] = Field(default_factory=lambda: {"id": HARNESS})
    """The agent program, as in verifiers' `--env.agent.harness`. `rollart_chat` is a chat loop with
    the tools of the taskset, in the process of the env worker. The harnesses of verifiers (`null`,
    `bash`, ...) are programs that it starts with `uv`."""
    runtime: dict[str, Any] = Field(default_factory=lambda: {"type": "subprocess"})
    """Where the agent program runs, as in verifiers' `--env.agent.runtime`. `subprocess`: on this
    machine, without isolation. `docker`: in a container."""
    max_turns: PositiveInt = DEFAULT_TURNS
    """Number of requests after which verifiers ends an episode. The episode is then scored as
    truncated."""
    splits: Splits | None = None
    """First position and end of each split in the loaded taskset. If not set, the last fifth is the
    test split and the rest the train split. For an infinite taskset, train is 0 to 1000 and test
    1000 to 1200."""
    reward_range: tuple[Number, Number] | None = None
    """Smallest and largest reward, which verifiers does not provide."""
    deterministic: bool = False
    """Whether the same answers of the policy always lead to the same requests and reward."""
    network: bool = False
    """Whether the tasks or their judges require network access."""
    path: Folder | None = None
    """A folder from which the taskset is imported."""
    prepare_s: Seconds = 120.0
    """Maximum time to load the taskset, when a worker first uses it."""


class VerifiersAdapter(EnvAdapter):
    """Tasksets of verifiers' v1 API, by the name of their package."""

    def make(self, env_id: str, options: Mapping[str, object]) -> VerifiersTask:
        """Make an agent task.

        Raises:
            UserError: If the package is missing, or the id or the options are invalid.
        """
        chosen = self._chosen(options)
        return VerifiersTask(env_id, chosen)

    def spec(self, env_id: str, options: Mapping[str, object]) -> EnvSpec:
        """Return the spec of a taskset, without loading its tasks.

        Raises:
            UserError: If the package is missing, or the id or the options are invalid.
        """
        chosen = self._chosen(options)
        return EnvSpec(
            id=env_id,
            entry_point=f"{type(self).__module__}:{type(self).__name__}",
            kind="agent",
            summary=summary_of(env_id, chosen),
            splits=tuple(chosen.splits or ("train", "test")),
            disjoint_splits=False,  # other seeds, but possibly the same tasks
            reward_range=chosen.reward_range or (float("-inf"), float("inf")),
            deterministic=chosen.deterministic,
            max_turns=chosen.max_turns,
            timeouts=Timeouts(reset_s=chosen.prepare_s),
            network=chosen.network,
        )

    def _chosen(self, options: Mapping[str, object]) -> VerifiersOptions:
        if find_spec("verifiers") is None:
            raise PluginError(
                "verifiers is not installed: pip install 'verifiers>=0.4' (Python 3.11 or newer)"
            )
        chosen = VerifiersOptions(**options)
        if chosen.path is not None and chosen.path not in sys.path:
            sys.path.insert(0, chosen.path)
        return chosen


class VerifiersTask:
    """Tasks of one taskset.

    Args:
        taskset_id: Id of the taskset in verifiers.
        options: Validated options.

    Raises:
        UserError: If the taskset does not exist, or the options do not fit it.
    """

    def __init__(self, taskset_id: str, options: VerifiersOptions) -> None:
        self._id, self._options = taskset_id, options
        self._config = _config(taskset_id, options)
        self._task: Any = None
        self._episode: Any = None

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks in a split."""
        first, end = self._range(split)
        return end - first

    async def prepare(self, *, seed: int, options: Mapping[str, Any]) -> AgentStart:
        """Select the task of ``options`` (``task``, ``split``), or a task drawn with ``seed``."""
        split = str(options.get("split") or "train")
        first, end = self._range(split)
        index = options.get("task")
        if index is None:
            index = random.Random(seed).randrange(end - first)
        if not 0 <= index < end - first:
            raise ValueError(f"task {index} is not in split {split!r}: 0 to {end - first - 1}")
        self._task = self._tasks[first + index].with_data()
        self._episode = None
        data = self._task.data
        prompt = data.prompt_text or data.description or data.name or f"{self._id} {data.idx}"
        return AgentStart(prompt, {"id": data.id, "name": data.name, "system": data.system_prompt})

    async def run(self, endpoint: Endpoint) -> None:
        """Run and score one episode with verifiers.

        Raises:
            EnvironmentFailure: If the episode failed.
        """
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import load_environment

        env = load_environment(self._config)
        with _in_environment(endpoint.api_key) as variable:
            client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
            context = vf.ModelContext(model=endpoint.model, client=client)
            async with env.serving():
                self._episode = await env.run_episode(self._task, context)
        errors = [e for trace in self._episode.traces if not trace.ok for e in trace.errors]
        errors += self._episode.errors
        if not self._episode.ok:
            said = (
                f"{errors[-1].type}: {errors[-1].message}" if errors else "no further information"
            )
            raise EnvironmentFailure(
                f"verifiers: the episode failed: {first_line(said)}",
                boundary="agent.run",
                detail="\n".join(str(error) for error in errors),
            )

    async def finish(self, recorded: Recorded) -> AgentResult:
        """Return the result of verifiers: the mean reward over its traces (usually one).

        Raises:
            EnvironmentFailure: If no trace was scored.
        """
        traces: Sequence[Any] = self._episode.traces if self._episode is not None else ()
        if not traces or not all(trace.ok for trace in traces):
            raise EnvironmentFailure(
                "verifiers returned no score, because its episode did not finish",
                boundary="agent.finish",
            )
        reward = sum(trace.reward for trace in traces) / len(traces)
        truncated = any(trace.is_truncated for trace in traces)
        return AgentResult(float(reward), None, _components(traces), truncated)

    def close(self) -> None:
        """Release the episode; verifiers released its resources when ``run`` ended."""
        self._task = self._episode = None

    @property
    def _tasks(self) -> Sequence[Any]:
        return _loaded(self._id, json.dumps(self._options.taskset, sort_keys=True))

    def _range(self, split: str) -> tuple[int, int]:
        given = self._options.splits
        ranges = given or _split(len(self._tasks), endless=_is_endless(self._id))
        if split not in ranges:
            raise ValueError(f"no split {split!r}; available splits: {', '.join(ranges)}")
        first, end = ranges[split]
        end = min(end, len(self._tasks))
        if first >= end:
            raise ValueError(f"split {split!r} has no task: the taskset has {len(self._tasks)}")
        return first, end


def summary_of(taskset_id: str, options: VerifiersOptions) -> str:
    """Return a one-line description of a taskset.

    Raises:
        UserError: If the taskset does not exist, or the options do not fit it.
    """
    config = _config(taskset_id, options)
    return f"{taskset_id}, a taskset of verifiers, played by {_role(config)[1].harness.id}."


def _config(taskset_id: str, options: VerifiersOptions) -> Any:
    """Return verifiers' configuration of an environment with one agent."""
    from verifiers.v1.utils.loaders import resolve_env_config, taskset_class

    from rollart_plugins.adapters import verifiers_chat

    # verifiers looks up harnesses by the name of a top-level module.
    sys.modules.setdefault(HARNESS, verifiers_chat)
    try:
        taskset_class(taskset_id)
    except (ImportError, TypeError, AttributeError) as e:
        raise UnknownIdError(f"verifiers: {first_line(str(e))}") from e
    said: dict[str, Any] = {"taskset": {**options.taskset, "id": taskset_id}}
    agent = {"harness": options.harness, "runtime": options.runtime}
    try:
        role, _ = _role(resolve_env_config(said))
        whole = {**said, role: {**agent, "max_turns": options.max_turns}}
        return resolve_env_config(whole)
    except (ValueError, ImportError) as e:
        raise PluginError(f"verifiers::{taskset_id}: {_fault(e)}") from e


def _role(config: Any) -> tuple[str, Any]:
    from verifiers.v1.configs.agent import agent_config_fields

    roles = agent_config_fields(config)
    if len(roles) != 1:
        names = ", ".join(roles) or "none"
        raise ValueError(
            f"it has the agents {names}; only tasksets with exactly one agent are supported"
        )
    name, found = next(iter(roles.items()))
    return str(name), found


def _fault(error: Exception) -> str:
    """Return the first lines of an error in one line; pydantic's message has several."""
    return "; ".join(line.strip() for line in str(error).splitlines()[:3])


@lru_cache(maxsize=8)
def _loaded(taskset_id: str, taskset: str) -> Sequence[Any]:
    """Return the tasks of a taskset, or the first ones of an infinite taskset; cached."""
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    config = taskset_config_type(taskset_id).model_validate(
        {**json.loads(taskset), "id": taskset_id}
    )
    found = load_taskset(config)
    most = max(end for _, end in _ENDLESS.values()) if found.INFINITE else None
    return tuple(islice(found, most))


def _is_endless(taskset_id: str) -> bool:
    from verifiers.v1.utils.loaders import taskset_class

    return bool(taskset_class(taskset_id).INFINITE)


def _split(num_tasks: int, *, endless: bool) -> Mapping[str, tuple[int, int]]:
    if endless:
        return _ENDLESS
    first = num_tasks - max(1, num_tasks // _TEST_SHARE)
    return {"train": (0, max(1, first)), "test": (max(1, first), num_tasks)}


def _components(traces: Sequence[Any]) -> dict[str, float]:
    """Return metrics, and unweighted rewards, of the last trace."""
    last = traces[-1]
    rewards = {name: reward.value for name, reward in last.rewards.items() if reward is not None}
    metrics = {name: value for name, value in last.metrics.items() if value is not None}
    return {name: float(value) for name, value in {**metrics, **rewards}.items()}


@contextmanager
def _in_environment(key: str) -> Iterator[str]:
    """Set an environment variable to ``key`` for the duration of the block, and yield its name."""
    name = f"ROLLART_API_KEY_{uuid.uuid4().hex}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]
