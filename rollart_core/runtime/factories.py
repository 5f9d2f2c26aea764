"""Factories that a run's processes call to build their objects from plain arguments.

Takes: ids, options, paths. Gives: an engine, a trainer, an env worker, a demonstrator. Never:
receives an object from another process. Each process resolves plugins from its own entry points.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from rollart_core.config.resolve import ResolvedPlugin
from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.contracts.inference import (
    EngineStats,
    GenerateRequest,
    GenerateResult,
    InferenceEngine,
    InferenceEngineSpec,
    WeightSwap,
)
from rollart_core.contracts.weights import WeightChannelSpec
from rollart_core.plugins import registry
from rollart_core.rollout.env_worker import EnvRef, EnvWorker
from rollart_core.types import Sample, Task

if TYPE_CHECKING:
    from rollart_core.config.model import NewModel
    from rollart_core.config.run import RunConfig
    from rollart_core.config.run import Trainer as TrainerConfig
    from rollart_core.contracts.algorithm import Algorithm
    from rollart_core.contracts.inference import InferenceEngine
    from rollart_core.contracts.weights import WeightChannel
    from rollart_core.models.thinking import History
    from rollart_core.models.tokenizer import ChatTokenizer
    from rollart_core.training.trainer import Trainer


class RestartInFlight(InferenceEngine):
    """An engine that restarts turns when its weights change.

    Args:
        engine: The engine that generates.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._in_flight: set[str] = set()
        self._overtaken: set[str] = set()
        self._num_restarted = self._num_dropped_tokens = 0

    async def start(self) -> None:
        """Start the engine."""
        await self._engine.start()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn; restart it from the beginning if the weights change meanwhile."""
        while True:
            self._in_flight.add(request.request_id)
            try:
                result = await self._engine.generate(request)
            finally:
                self._in_flight.discard(request.request_id)
                overtaken = request.request_id in self._overtaken
                self._overtaken.discard(request.request_id)
            is_mixed = len({span.policy_version for span in result.spans}) > 1
            if not (is_mixed or (overtaken and result.finish_reason == "abort")):
                return result
            self._num_restarted += 1
            self._num_dropped_tokens += len(result.token_ids)

    async def load_weights(self, policy_version: int) -> WeightSwap:
        """Swap the weights, then abort requests in flight; ``generate`` restarts them."""
        swap = await self._engine.load_weights(policy_version)
        overtaken = set(self._in_flight)
        self._overtaken |= overtaken
        await self._engine.abort(sorted(overtaken))
        return replace(swap, num_restarted=len(overtaken))

    async def sleep(self) -> None:
        """Release the device's memory."""
        await self._engine.sleep()

    async def wake(self, policy_version: int) -> WeightSwap:
        """Continue after ``sleep`` with the weights of a version."""
        return await self._engine.wake(policy_version)

    async def pause(self) -> None:
        """Stop generating at the next token."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._engine.resume()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests without restarting them."""
        self._overtaken.difference_update(request_ids)
        await self._engine.abort(request_ids)

    async def release(self, session_id: str) -> None:
        """Forget a session."""
        await self._engine.release(session_id)

    async def stats(self) -> EngineStats:
        """Return the engine's statistics, with the number of restarted turns and dropped tokens."""
        stats = await self._engine.stats()
        more = {
            "restarted": float(self._num_restarted),
            "dropped_tokens": float(self._num_dropped_tokens),
        }
        return replace(stats, extra={**stats.extra, **more})

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()


MAX_CORPUS_CHARS = 300_000
"""More text takes longer and does not improve a tokenizer of about a thousand tokens."""


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The model, as arguments that are sent to a process."""

    path: str
    dtype: str = "float32"
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class ChannelArgs:
    """The weight channel, as arguments that are sent to a process."""

    plugin: ResolvedPlugin[WeightChannelSpec]
    location: str

    def open(self) -> WeightChannel:
        """Open this process's end of the channel."""
        channel: WeightChannel = self.plugin.build(location=self.location)
        return channel


@dataclass(frozen=True, slots=True)
class RankArgs:
    """Identifies one of several trainer ranks."""

    rank: int
    world_size: int
    store: str
    """``host:port`` of the store that the ranks use to find each other."""
    own_devices: bool = False
    """Whether the rank's process sees only the devices assigned to it."""


@dataclass(frozen=True, slots=True)
class EnvTasks:
    """Tasks of one environment, used as a text corpus or for demonstrations by its expert."""

    env: EnvRef
    tasks: Sequence[Task]
    max_turns: int


def build_engine(
    plugin: ResolvedPlugin[InferenceEngineSpec],
    model: ModelArgs,
    channel: ChannelArgs | None,
    settings: Mapping[str, Any],
    in_flight: str = "continue",
) -> InferenceEngine:
    """Build an inference engine.

    Args:
        plugin: The engine plugin.
        model: The model.
        channel: The source of new weights; None for an engine that keeps its initial weights.
        settings: ``deterministic``, ``kv_on_swap``, ``max_context_tokens``.
        in_flight: How to treat a turn that is running when new weights arrive; ``continue`` or
            ``restart``.
    """
    engine: InferenceEngine = plugin.build(
        model_path=model.path,
        dtype=model.dtype,
        device=model.device,
        channel=channel.open() if channel else None,
        **settings,
    )
    return RestartInFlight(engine) if in_flight == "restart" else engine


def build_trainer(
    config: TrainerConfig,
    algorithm: ResolvedPlugin[AlgorithmSpec],
    model: ModelArgs,
    channel: ChannelArgs | None,
    settings: Mapping[str, Any],
    ranks: RankArgs | None = None,
    algorithms: Mapping[str, ResolvedPlugin[AlgorithmSpec]] | None = None,
) -> Trainer:
    """Build the trainer, or one rank of it.

    Args:
        config: The ``trainer`` section.
        algorithm: The algorithm plugin.
        model: The model.
        channel: The channel that weights are published to; None if no engine needs them.
        settings: ``temperature``, ``deterministic``, ``seed`` and ``beside``.
        ranks: This rank; None if there is only one.
        algorithms: The algorithm of each environment, by its name. Empty unless an environment has
            its own settings.
    """
    from rollart_core.training import process_group
    from rollart_core.training.trainer import Trainer

    if ranks is not None:
        process_group.join(
            ranks.store,
            ranks.rank,
            ranks.world_size,
            device=model.device,
            timeout_s=config.collective_timeout_s or process_group.TIMEOUT_S,
            own_devices=ranks.own_devices,
        )
    return Trainer(
        config,
        _algorithm(algorithm, algorithms or {}),
        model_path=model.path,
        dtype=model.dtype,
        device=model.device,
        channel=channel.open() if channel else None,
        **settings,
    )


def _algorithm(
    algorithm: ResolvedPlugin[AlgorithmSpec],
    algorithms: Mapping[str, ResolvedPlugin[AlgorithmSpec]],
) -> Algorithm:
    """Build the algorithm, or one that combines the algorithms of all environments."""
    if not algorithms:
        built: Algorithm = algorithm.build()
        return built
    from rollart_core.training.mixture import AlgorithmMix

    return AlgorithmMix({name: own.build() for name, own in algorithms.items()})


def build_env_worker(num_threads: int, max_observation_chars: int) -> EnvWorker:
    """Build an env worker."""
    return EnvWorker(num_threads=num_threads, max_observation_chars=max_observation_chars)


def build_model(path: str, model: NewModel, corpora: Sequence[EnvTasks], seed: int) -> None:
    """Create a small model and a tokenizer trained on the text of the environments."""
    from rollart_core.models.new import new_model

    num_tasks = sum(len(corpus.tasks) for corpus in corpora)
    texts = (
        text
        for corpus in corpora
        for text in _up_to(MAX_CORPUS_CHARS * len(corpus.tasks) // num_tasks, _texts(corpus))
    )
    tools = any(_calls_tools(corpus.env) for corpus in corpora)
    with closing(texts):
        new_model(path, model, texts, seed, tools=tools)


def _calls_tools(env: EnvRef) -> bool:
    """Return whether the policy may call tools; always True for agents, whose tools are unknown."""
    spec = registry.env_spec(env.id, env.options)
    return spec.tools or spec.kind == "agent"


def _texts(corpus: EnvTasks) -> Iterator[str]:
    from rollart_core.training.warm_start import env_corpus

    with closing(registry.make(corpus.env.id, **corpus.env.options)) as env:
        yield from env_corpus(env, corpus.tasks, max_turns=corpus.max_turns)


def _up_to(num_chars: int, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text
        num_chars -= len(text)
        if num_chars <= 0:
            return


class Demonstrator:
    """Produces demonstrations with the environments' oracles, new ones on each call."""

    def __init__(self, envs: Sequence[EnvTasks], tokenizer_path: str, config: RunConfig) -> None:
        """Start at the first task; after the last task, start over.

        Args:
            envs: The tasks to demonstrate; environments alternate in proportion to their number
                of tasks.
            tokenizer_path: The path of the tokenizer.
            config: The config of the run.
        """
        from rollart_core.models.run_template import run_tokenizer
        from rollart_core.scheduling.task_mix import turns

        tokenizer, history = run_tokenizer(tokenizer_path, config)
        most = config.rollout.max_context_tokens
        self._turns = turns([len(one.tasks) for one in envs], config.seed)
        self._samples = [_demonstrated(one, tokenizer, history, most) for one in envs]

    def take(self, n: int) -> list[Sample]:
        """Return the next ``n`` demonstrations."""
        return [next(self._samples[which]) for which in islice(self._turns, n)]


def _demonstrated(
    one: EnvTasks,
    tokenizer: ChatTokenizer,
    history: History,
    max_context_tokens: int,
) -> Iterator[Sample]:
    from rollart_core.training.warm_start import demonstrations

    return demonstrations(
        lambda: registry.make(one.env.id, **one.env.options),
        tokenizer,
        cycle(one.tasks),
        max_turns=one.max_turns,
        max_context_tokens=max_context_tokens,
        history=history,
    )
