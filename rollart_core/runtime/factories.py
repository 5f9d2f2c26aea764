"""What the processes of a run build in themselves, from plain arguments.

Takes: ids, options, paths. Gives: an engine, a trainer, an env worker, a demonstrator. Never: gets
an object of another process; plugins are resolved here, from this process's entry points.
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
    from rollart_core.config.run import Trainer as TrainerConfig
    from rollart_core.contracts.algorithm import Algorithm
    from rollart_core.contracts.inference import InferenceEngine
    from rollart_core.contracts.weights import WeightChannel
    from rollart_core.models.tokenizer import ChatTokenizer
    from rollart_core.training.trainer import Trainer


class RestartInFlight(InferenceEngine):
    """An engine that begins turns again when its weights change.

    Args:
        engine: The one that generates.
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
        """Generate one turn; again from its beginning while weights change under it."""
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
        """Swap, then end what was in flight; ``generate`` begins it again."""
        swap = await self._engine.load_weights(policy_version)
        overtaken = set(self._in_flight)
        self._overtaken |= overtaken
        await self._engine.abort(sorted(overtaken))
        return replace(swap, num_restarted=len(overtaken))

    async def pause(self) -> None:
        """Stop generating at the next token."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Go on after ``pause``."""
        await self._engine.resume()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests for good."""
        self._overtaken.difference_update(request_ids)
        await self._engine.abort(request_ids)

    async def release(self, session_id: str) -> None:
        """Forget a session."""
        await self._engine.release(session_id)

    async def stats(self) -> EngineStats:
        """Return those of the engine, with what was begun again."""
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
"""More text does not make a better tokenizer of about a thousand tokens, only a later one."""


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The model as it travels to a process."""

    path: str
    dtype: str = "float32"
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class ChannelArgs:
    """The weight channel as it travels to a process."""

    plugin: ResolvedPlugin[WeightChannelSpec]
    location: str

    def open(self) -> WeightChannel:
        """Open this process's end."""
        channel: WeightChannel = self.plugin.build(location=self.location)
        return channel


@dataclass(frozen=True, slots=True)
class RankArgs:
    """Which of several trainer ranks this is."""

    rank: int
    world_size: int
    store: str
    """``host:port`` of the store by which the ranks find each other."""
    own_devices: bool = False
    """Whether its process sees the devices that it has, and no others."""


@dataclass(frozen=True, slots=True)
class EnvTasks:
    """Tasks of one environment, to read its text or to have its expert demonstrate them."""

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
        plugin: Which engine.
        model: Which model.
        channel: Where weights come from; None for an engine that keeps its first.
        settings: ``deterministic``, ``kv_on_swap``, ``max_context_tokens``.
        in_flight: What becomes of a turn that new weights come under; ``continue`` or ``restart``.
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
    channel: ChannelArgs,
    settings: Mapping[str, Any],
    ranks: RankArgs | None = None,
    algorithms: Mapping[str, ResolvedPlugin[AlgorithmSpec]] | None = None,
) -> Trainer:
    """Build the trainer, or one rank of it.

    Args:
        config: The ``trainer`` section.
        algorithm: Which algorithm.
        model: Which model.
        channel: Where weights go.
        settings: ``temperature``, ``deterministic``, ``seed`` and ``beside``.
        ranks: Which rank this is; None: the only one.
        algorithms: By the name of the environment, where it has settings of its own; then of all.
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
        channel=channel.open(),
        **settings,
    )


def _algorithm(
    algorithm: ResolvedPlugin[AlgorithmSpec],
    algorithms: Mapping[str, ResolvedPlugin[AlgorithmSpec]],
) -> Algorithm:
    """Build the algorithm, or one over those of all environments."""
    if not algorithms:
        built: Algorithm = algorithm.build()
        return built
    from rollart_core.training.mixture import AlgorithmMix

    return AlgorithmMix({name: own.build() for name, own in algorithms.items()})


def build_env_worker(num_threads: int, max_observation_chars: int) -> EnvWorker:
    """Build an env worker."""
    return EnvWorker(num_threads=num_threads, max_observation_chars=max_observation_chars)


def build_model(path: str, model: NewModel, corpora: Sequence[EnvTasks], seed: int) -> None:
    """Make a small model and a tokenizer trained on the environments' own text."""
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
    """Tell whether the policy is to call tools there; what agents ask for is not known before."""
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
    """Makes demonstrations by the environments' oracles, fresh ones on every call."""

    def __init__(
        self, envs: Sequence[EnvTasks], tokenizer_path: str, max_context_tokens: int, seed: int
    ) -> None:
        """Begin at the first task; the tasks are gone through again when they are used up.

        Args:
            envs: What to demonstrate; environments take turns in proportion to their tasks.
            tokenizer_path: Where the tokenizer lies.
            max_context_tokens: Longest row.
            seed: The seed of the run.
        """
        from rollart_core.models.tokenizer import load_tokenizer
        from rollart_core.scheduling.task_mix import turns

        tokenizer = load_tokenizer(tokenizer_path)
        self._turns = turns([len(one.tasks) for one in envs], seed)
        self._samples = [_demonstrated(one, tokenizer, max_context_tokens) for one in envs]

    def take(self, n: int) -> list[Sample]:
        """Return the next ``n`` demonstrations."""
        return [next(self._samples[which]) for which in islice(self._turns, n)]


def _demonstrated(
    one: EnvTasks, tokenizer: ChatTokenizer, max_context_tokens: int
) -> Iterator[Sample]:
    from rollart_core.training.warm_start import demonstrations

    return demonstrations(
        lambda: registry.make(one.env.id, **one.env.options),
        tokenizer,
        cycle(one.tasks),
        max_turns=one.max_turns,
        max_context_tokens=max_context_tokens,
    )
