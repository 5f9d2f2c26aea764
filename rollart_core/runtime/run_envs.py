"""The environments of a run, with their tasks, mixed by weight, and their episodes.

Takes: a resolved run, and its env workers once they are up. Gives: a task source, fixed lists of
tasks, and the execution of a ticket in the environment of its task; for agents also the gateway
that their programs call. Never: starts a gateway for a run without agents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from rollart_core.config.model import RemoteModel
from rollart_core.config.problems import Problem
from rollart_core.config.resolve import ResolvedEnv, ResolvedRun
from rollart_core.config.run import RunConfig
from rollart_core.contracts.adapter import split_id
from rollart_core.errors import ConfigError
from rollart_core.models.run_template import run_tokenizer
from rollart_core.models.thinking import History, why_rows
from rollart_core.models.tokenizer import ChatTokenizer, byte_tokenizer
from rollart_core.rewards.service import RewardService, RewardServicePlan, Scorer
from rollart_core.rollout.agent_episode import AgentDependencies, run_agent_episode
from rollart_core.rollout.baseline import (
    Baseline,
    BaselineName,
    DrawsWords,
    Expert,
    NobodyGenerates,
)
from rollart_core.rollout.conversation import Conversation
from rollart_core.rollout.env_pool import EnvPool, PhaseTimeouts
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.rollout.episode import (
    Dialogue,
    EpisodeDependencies,
    EpisodeLimits,
    Generator,
    ThoughtLimit,
    run_episode,
)
from rollart_core.rollout.text_conversation import TextConversation
from rollart_core.scheduling.curriculum import CurriculumTasks
from rollart_core.scheduling.task_mix import TaskMix, Tasks, WeightedSource, interleaved, shares
from rollart_core.scheduling.tasks import Holdout, TaskSource, held_out_tasks, hold_out
from rollart_core.types import Task, Ticket, Trajectory

if TYPE_CHECKING:
    from rollart_core.gateway.gateway import Gateway


WhichSplit = Literal["split", "evaluation_split", "check_split"]
"""The split of training, of evaluation, or of the checks of the warm start."""
SplitTasks = tuple[int | None, Callable[[int], int] | None]
"""Number of tasks in a list (None: no end), and their indices in the split (None: all tasks)."""

_BYTES_A_TOKEN: Final = 8
"""Factor from the context in tokens to bytes. It is larger than the bytes per token of usual
tokenizers, so no page is too long for the byte tokenizer of the random player."""


class RunEnvs:
    """The environments of one run; see the module docstring."""

    def __init__(self, run: ResolvedRun) -> None:
        """Describe the environments without calling a worker."""
        self._run = run
        self._envs = run.envs
        self._num_tasks: dict[tuple[str, str], int | None] = {}
        self._holdouts: dict[str, Holdout] = {}
        self._clusters: dict[tuple[str, str], list[str]] = {}
        self._deps: dict[str, EpisodeDependencies] = {}
        self._agent_names: set[str] = set()
        self._agents: RunAgents | None = None
        plan = RewardServicePlan(run.config.scoring, run.scoring.backends, run.deadlines.reward_s)
        self.scoring = RewardService(plan)
        self._tokenizer: ChatTokenizer | None = None
        self.row_note: str | None = None
        """Why the chat template begins a new row in each turn; None if turns extend one row."""

    async def count_tasks(self, workers: EnvPool) -> None:
        """Get the number of tasks and the task clusters of each split of each environment."""
        for env in self._envs:
            if await _is_agent(env, workers):
                self._agent_names.add(env.name)
            splits = (env.split, env.evaluation_split, env.check_split, env.validation_split)
            for split in dict.fromkeys(splits):
                if split:
                    count = await workers.call("num_tasks", env_ref(env), split)
                    self._num_tasks[env.name, split] = count
                    await self._ask_clusters(env, split, workers)
        self._hold_out()

    def check_evaluation(self) -> None:
        """Check the number of held-out tasks; call ``count_tasks`` first.

        Raises:
            ConfigError: If a split has fewer tasks than the config asks for.
        """
        counts = {env.name: self._num_tasks[env.name, env.evaluation_split] for env in self._envs}
        for problem in few_tasks(self._run, counts):
            raise ConfigError(problem.within())

    def _hold_out(self) -> None:
        """Hold out validation tasks from the training tasks, if there is no validation split."""
        evaluation = self._run.config.evaluation
        if evaluation.every_batches is None:
            return
        for env, share in zip(self._envs, self._shares(evaluation.validation_tasks), strict=True):
            if env.validation_split:
                continue
            num_tasks = self._num_tasks[env.name, env.split]
            clusters = self._clusters.get((env.name, env.split))
            self._holdouts[env.name] = hold_out(env.spec.id, env.split, num_tasks, share, clusters)

    async def _ask_clusters(self, env: ResolvedEnv, split: str, workers: EnvPool) -> None:
        num_tasks = self._num_tasks[env.name, split]
        if num_tasks is None:
            return
        names = await workers.call("task_clusters", env_ref(env), split)
        if names is None:
            return
        if len(names) != num_tasks:
            raise ConfigError(
                f"env {env.name}: task_clusters({split!r}) returns {len(names)} names, but "
                f"num_tasks({split!r}) is {num_tasks}: return one name per task"
            )
        self._clusters[env.name, split] = names

    def cluster_of(self, task: Task) -> str | None:
        """Return the cluster of a task, such as its product; None if it has none."""
        names = self._clusters.get((task.env_id, task.split))
        return None if names is None else names[task.index]

    def source(self) -> Tasks:
        """Return the source of training tasks, in its initial state."""
        seed, task_seeds = self._run.config.seed, self._run.config.task_seeds
        sources = []
        for env in self._envs:
            num_tasks, index_of = self._of_split(env, env.split)
            source = TaskSource(
                env.name, env.split, num_tasks, seed, task_seeds=task_seeds, index_of=index_of
            )
            sources.append(source)
        weighted = [
            WeightedSource(source, env.weight)
            for source, env in zip(sources, self._envs, strict=True)
        ]
        if self._run.config.curriculum is not None:
            names = (env.name for env in self._envs)
            named = dict(zip(names, weighted, strict=True))
            return CurriculumTasks(named, self._run.config.curriculum, seed)
        if len(sources) == 1:
            return sources[0]
        return TaskMix(weighted, seed)

    def tasks(self, which: WhichSplit, n: int) -> list[Task]:
        """Return a fixed list of ``n`` tasks, with the tasks of environments interleaved evenly."""
        seed = self._run.config.seed
        lists = []
        for env, share in zip(self._envs, self._shares(n), strict=True):
            split: str = getattr(env, which)
            num_tasks, index_of = self._of_split(env, split)
            if which == "evaluation_split" and num_tasks is not None:
                share = min(share, num_tasks)  # the default may be more
            lists.append(self._listed(env.name, split, share, num_tasks, index_of))
        return lists[0] if len(lists) == 1 else interleaved(lists, seed)

    def validation_tasks(self) -> list[Task]:
        """Return the tasks of every validation: without duplicates and without training tasks."""
        seed, lists = self._run.config.seed, []
        wanted = self._run.config.evaluation.validation_tasks
        for env, share in zip(self._envs, self._shares(wanted), strict=True):
            split, index_of = env.validation_split or env.split, None
            num_tasks = self._num_tasks[env.name, split]
            if not env.validation_split:
                holdout = self._holdouts[env.name]
                num_tasks, index_of = holdout.num_held, holdout.held
            n = share if num_tasks is None else min(share, num_tasks)
            lists.append(self._listed(env.name, split, n, num_tasks, index_of))
        return lists[0] if len(lists) == 1 else interleaved(lists, seed)

    def held_out(self, name: str, n: int) -> list[Task]:
        """Return up to ``n`` held-out tasks of an environment: a fixed list without duplicates."""
        env = next(env for env in self._envs if env.name == name)
        split = env.evaluation_split
        num_tasks, index_of = self._of_split(env, split)
        n = n if num_tasks is None else min(n, num_tasks)
        return self._listed(name, split, n, num_tasks, index_of)

    def _listed(
        self,
        name: str,
        split: str,
        n: int,
        num_tasks: int | None,
        index_of: Callable[[int], int] | None,
    ) -> list[Task]:
        config = self._run.config
        return held_out_tasks(
            name,
            split,
            n,
            config.seed,
            num_tasks=num_tasks,
            task_seeds=config.task_seeds,
            index_of=index_of,
        )

    async def has_oracle(self, env: ResolvedEnv, workers: EnvPool) -> bool:
        """Return whether an environment has an expert."""
        found: bool = await workers.call("has_oracle", env_ref(env))
        return found

    def is_agent(self, name: str) -> bool:
        """Return whether an environment is an agent task; call ``count_tasks`` first."""
        return name in self._agent_names

    def wire(self, workers: EnvPool, engine: Generator | None, model_path: str) -> None:
        """Create the dependencies of the episodes of each environment.

        Args:
            workers: The env workers.
            engine: The engine or router; None: only baselines can play.
            model_path: The model whose tokenizer is used.
        """
        talk = self._talk(model_path) if engine else (TextConversation, ())
        new_conversation, stop_token_ids = talk
        engine = engine and self._limited(engine)
        if self._agent_names:
            self._agents = RunAgents(self._run.config, workers, engine, model_path)
        for env in self._envs:
            score = self.scoring.scorer(env.reward)
            if env.name in self._agent_names:
                assert self._agents is not None
                self._agents.add(env, env_ref(env), self._limits(env), score)
                continue
            self._deps[env.name] = EpisodeDependencies(
                env=env_ref(env),
                envs=workers,
                engine=engine or NobodyGenerates(),
                new_conversation=new_conversation,
                score=score,
                stop_token_ids=stop_token_ids,
                limits=self._limits(env),
                seed=self._run.config.seed,
                success_from=self._run.config.scoring.success_from if env.decides_success else None,
            )

    async def open(self) -> None:
        """Check the reward backends, and open the gateway if there are agents.

        Raises:
            ConfigError: If a backend cannot be used, or the gateway cannot listen.
        """
        await self.scoring.open()
        if self._agents is not None:
            await self._agents.open()

    async def close(self) -> None:
        """Close the gateway and end all scoring; may be called twice."""
        if self._agents is not None:
            await self._agents.close()
        await self.scoring.close()

    async def run_episode(
        self,
        ticket: Ticket,
        start_version: int,
        *,
        temperature: float | None = None,
        on_cancel: Callable[[Trajectory], None] | None = None,
    ) -> Trajectory:
        """Execute one attempt of a ticket in the environment of its task."""
        if self._agents and self._agents.has(ticket.task.env_id):
            return await self._agents.run_episode(
                ticket, start_version, temperature=temperature, on_cancel=on_cancel
            )
        deps = self._deps[ticket.task.env_id]
        return await run_episode(
            ticket, start_version, deps, temperature=temperature, on_cancel=on_cancel
        )

    async def demonstrate(
        self,
        ticket: Ticket,
        start_version: int,
        *,
        on_cancel: Callable[[Trajectory], None] | None = None,
    ) -> Trajectory:
        """Execute a ticket with the expert of its environment."""
        deps = self._deps[ticket.task.env_id]
        assert self._tokenizer is not None
        calls_tools = any(e.spec.tools for e in self._envs if e.name == ticket.task.env_id)
        expert = Expert(self._tokenizer, start_version, calls_tools=calls_tools)
        return await run_episode(
            ticket, start_version, replace(deps, expert=expert), on_cancel=on_cancel
        )

    async def play_baseline(self, ticket: Ticket, name: BaselineName) -> Trajectory:
        """Execute a ticket with a baseline, in an environment or an agent task."""
        if self._agents and self._agents.has(ticket.task.env_id):
            return await self._agents.play_baseline(ticket, name)
        deps = replace(
            self._deps[ticket.task.env_id],
            engine=NobodyGenerates(),
            new_conversation=TextConversation,
            stop_token_ids=(),
            expert=Baseline(name),
        )
        return await run_episode(ticket, 0, deps)

    def _shares(self, n: int) -> list[int]:
        """Return the number of tasks of each environment among ``n`` tasks."""
        return shares([env.weight for env in self._envs], n)

    def _of_split(self, env: ResolvedEnv, split: str) -> SplitTasks:
        """Return the tasks of a split without the held-out validation tasks."""
        holdout = self._holdouts.get(env.name) if split == env.split else None
        if holdout is None:
            return self._num_tasks[env.name, split], None
        return holdout.num_kept, holdout.kept

    def _talk(self, model_path: str) -> tuple[Callable[[], Dialogue], tuple[int, ...]]:
        """Return the factory of conversations, and the tokens that end a turn of the policy."""
        config = self._run.config
        if isinstance(config.model, RemoteModel):
            return partial(TextConversation, config.rollout, config.model.chat_template_kwargs), ()
        tokenizer, history = run_tokenizer(model_path, self._run.config)
        self._tokenizer = tokenizer
        self.row_note = why_rows(tokenizer.template, history)
        calling = [env.spec.id for env in self._envs if env.spec.tools]
        if calling and tokenizer.tool_format is None:
            raise ConfigError(
                f"model: {calling[0]} has tools, but the chat template in {model_path} does not "
                "show tools or writes calls in an unknown format: use a model that supports tools "
                "(see `rollart list tool_formats`)"
            )
        most = self._run.config.rollout.max_context_tokens
        begin = partial(Conversation, tokenizer, max_context_tokens=most, history=history)
        return begin, tuple(tokenizer.stop_token_ids)

    def _limited(self, engine: Generator) -> Generator:
        """Return the engine with the run's limit on thoughts, if it has one."""
        limit = self._run.config.rollout.max_thinking_tokens
        if limit is None or self._tokenizer is None or self._tokenizer.thinking is None:
            return engine
        return ThoughtLimit(engine, self._tokenizer, self._tokenizer.thinking, limit)

    def _limits(self, env: ResolvedEnv) -> EpisodeLimits:
        config, deadlines = self._run.config, self._run.deadlines
        return EpisodeLimits(
            max_turns=env.max_turns,
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            timeouts=PhaseTimeouts(env.reset_s, env.step_s),
            generate_s=deadlines.generate_s,
            episode_s=deadlines.episode_s,
            reward_range=env.reward_range,
        )


def few_tasks(run: ResolvedRun, counts: Mapping[str, int | None]) -> list[Problem]:
    """Return the problem if there are fewer held-out tasks than the config asks for.

    In a mixture, an environment may repeat the tasks of its share.

    Args:
        run: The run.
        counts: Environment -> number of held-out tasks; None: the split has no end.
    """
    asked, env = run.config.evaluation, run.envs[0]
    count = counts.get(env.name)
    given = "tasks" in asked.model_fields_set and not run.is_mixed
    if not given or count is None or asked.tasks <= count:
        return []
    has = f"split {env.evaluation_split!r} of {env.name} has {count} tasks"
    return [Problem(("evaluation", "tasks"), f"{asked.tasks}: {has}; decrease it")]


def env_ref(env: ResolvedEnv) -> EnvRef:
    """Return the reference from which a worker creates the environment."""
    return EnvRef(env.spec.id, env.plugin.options)


async def _is_agent(env: ResolvedEnv, workers: EnvPool) -> bool:
    """Return whether it is an agent task; for an unregistered class, ask an env worker."""
    if ":" in env.spec.id and not split_id(env.spec.id):
        found: bool = await workers.call("is_agent", env_ref(env))
        return found
    return env.spec.kind == "agent"


def by_env(tasks: Iterable[Task]) -> Mapping[str, list[Task]]:
    """Group tasks by environment, in their order."""
    found: dict[str, list[Task]] = {}
    for task in tasks:
        found.setdefault(task.env_id, []).append(task)
    return found


class RunAgents:
    """The agents of a run, with their gateway and the dependencies of their episodes.

    The gateway listens from ``open`` to ``close``.

    Args:
        config: The run's config.
        workers: The env workers of the run.
        engine: The engine or router; None: only baselines can play.
        model_path: The path of the tokenizer.
    """

    def __init__(
        self, config: RunConfig, workers: EnvPool, engine: Generator | None, model_path: str
    ) -> None:
        self._config = config
        self._workers = workers
        self._gateway: Gateway | None = None
        if engine:
            tokenizer, history = run_tokenizer(model_path, config)
            self._gateway = _gateway(config, engine, tokenizer, history, port=config.gateway.port)
        self._drawing: Gateway | None = None
        self._opens = asyncio.Lock()
        self._deps: dict[str, AgentDependencies] = {}

    def add(self, env: ResolvedEnv, ref: EnvRef, limits: EpisodeLimits, score: Scorer) -> None:
        """Create the dependencies of one agent's episodes."""
        self._deps[env.name] = AgentDependencies(
            env=ref,
            envs=self._workers,
            gateway=self._gateway,
            score=score,
            limits=limits,
        )

    async def open(self) -> None:
        """Start the gateway.

        Raises:
            ConfigError: If aiohttp is missing, or the address is in use.
        """
        if self._gateway is not None:
            await self._gateway.start()

    async def close(self) -> None:
        """Stop the gateways; may be called twice."""
        for gateway in (self._gateway, self._drawing):
            if gateway is not None:
                await gateway.close()

    def has(self, name: str) -> bool:
        """Return whether an environment of the run is an agent."""
        return name in self._deps

    async def run_episode(
        self,
        ticket: Ticket,
        start_version: int,
        *,
        temperature: float | None,
        on_cancel: Callable[[Trajectory], None] | None,
    ) -> Trajectory:
        """Execute one attempt of a ticket of an agent."""
        deps = self._deps[ticket.task.env_id]
        return await run_agent_episode(
            ticket, start_version, deps, temperature=temperature, on_cancel=on_cancel
        )

    async def play_baseline(self, ticket: Ticket, name: BaselineName) -> Trajectory:
        """Execute a ticket of an agent with a baseline.

        Raises:
            ConfigError: If aiohttp is missing, which the gateway of the random player needs.
        """
        deps = self._deps[ticket.task.env_id]
        if name == "random":
            deps = replace(deps, gateway=await self._answers_at_random())
        else:
            deps = replace(deps, acts="expert" if name == "oracle" else "nobody")
        return await run_agent_episode(ticket, 0, deps)

    async def _answers_at_random(self) -> Gateway:
        async with self._opens:
            if self._drawing is None:
                tokenizer = byte_tokenizer()
                draws = DrawsWords(tokenizer)
                self._drawing = _gateway(
                    self._config, draws, tokenizer, History(), tokens_more=_BYTES_A_TOKEN
                )
                await self._drawing.start()
            return self._drawing


def _gateway(
    config: RunConfig,
    engine: Generator,
    tokenizer: ChatTokenizer,
    history: History,
    *,
    port: int = 0,
    tokens_more: int = 1,
) -> Gateway:
    """Return an unopened gateway that allows ``tokens_more`` times the run's longest row."""
    from rollart_core.gateway.gateway import Gateway, GatewaySettings

    settings = GatewaySettings(
        max_context_tokens=tokens_more * config.rollout.max_context_tokens,
        seed=config.seed,
        history=history,
        host=config.gateway.host,
        port=port,
    )
    return Gateway(engine, tokenizer, settings)
