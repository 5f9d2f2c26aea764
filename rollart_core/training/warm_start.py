"""The warm start: supervised steps on the oracle's demonstrations before RL.

    environment's expert --> demonstrations, as if the policy had sampled them --> trainer --> check

Takes: environments with ``oracle()``, the trainer, and a check that returns the success rate of
sampled episodes. Gives: training samples one at a time, text for a tokenizer, and the result of the
warm start. Never: uses tasks of the training or test split for its checks (they have their own
split), or changes the initial state of RL other than the weights. The generators of samples and
text call no model and stop cleanly (``close()`` closes the environment), so a thread can create new
demonstrations while the trainer trains.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

from rollart_core.config.run import WarmStart
from rollart_core.contracts.agent import AgentTask
from rollart_core.contracts.env import HasCorpus, HasOracle, TextEnv
from rollart_core.contracts.inference import GenerateResult
from rollart_core.errors import ConfigError, EnvironmentFailure, boundary
from rollart_core.models.chat_template import TemplateRefusal
from rollart_core.models.thinking import FOLLOWED, History
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.rollout.asyncio_tasks import cancel_and_wait
from rollart_core.rollout.conversation import Conversation
from rollart_core.rollout.tool_turn import answered, expert_turn
from rollart_core.rollout.tools.action import ToolAction
from rollart_core.rollout.tools.tool_set import checked_tools
from rollart_core.types import Message, Observation, Sample, Task, TokenSpan, ToolSpec

CHECK_FROM_SHARE = 0.3
"""Checks begin when the loss suggests this share of the required success."""
CHECK_ANYWAY = 20
"""One of this number of due checks takes place even if the loss is high. The loss stays high if an
expert chooses randomly among equally good actions."""
LOSS_MEMORY = 0.8
"""Decay of the running mean of the loss."""

MakeEnv: TypeAlias = Callable[[], TextEnv]
_MOST_MISSES = 256
"""Number of consecutive tasks without samples after which the generator fails. With an endless
stream of tasks, it would never yield."""
_MOST_KEPT = 1024
"""Maximum number of tasks whose samples are cached for repeated tasks."""


class SupervisedTrainer(Protocol):
    """The interface of the trainer that the warm start uses."""

    async def supervise(self, samples: list[Sample], lr: float) -> Mapping[str, float]:
        """Take one supervised step."""


@dataclass(frozen=True, slots=True)
class WarmStartDependencies:
    """The components that the warm start uses."""

    demonstrations: Callable[[int], Awaitable[list[Sample]]]
    trainer: SupervisedTrainer
    check: Callable[[int], Awaitable[float]]
    """Train step -> sampled success of the current weights on the check split."""
    progress: Callable[[Mapping[str, float]], None]


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """The result of a warm start."""

    train_steps: int
    success: float
    """Success at the last check; NaN if there was none."""
    reached: bool
    wall_s: float


async def warm_start(config: WarmStart, parts: WarmStartDependencies) -> WarmStartResult:
    """Train until sampled success reaches ``until_success``, or a limit of steps or time."""
    began = time.perf_counter()
    success, loss, step = math.nan, math.nan, 0
    upcoming = asyncio.ensure_future(parts.demonstrations(config.batch_size))
    try:
        for step in range(1, config.max_train_steps + 1):
            samples = await upcoming
            upcoming = asyncio.ensure_future(parts.demonstrations(config.batch_size))
            metrics = await parts.trainer.supervise(samples, _lr(config, step))
            loss = _running(loss, metrics["loss"])
            wall_s = time.perf_counter() - began
            due = step % config.check_every == 0
            anyway = step % (CHECK_ANYWAY * config.check_every) == 0
            if anyway or (due and _promising(loss, samples, config.until_success)):
                success = await parts.check(step)
            parts.progress({"train_step": step, "loss": loss, "success": success, "wall_s": wall_s})
            if success >= config.until_success or wall_s > (config.max_wall_s or math.inf):
                break
    finally:
        await cancel_and_wait(upcoming)
    return WarmStartResult(
        train_steps=step,
        success=success,
        reached=success >= config.until_success,
        wall_s=time.perf_counter() - began,
    )


def _promising(loss: float, samples: Sequence[Sample], wanted: float) -> bool:
    """Return whether a check may succeed.

    An episode is sampled correctly with a probability of about ``exp(-loss * tokens)``. This is
    estimated for each sample: an environment with short answers is learned long before the mean
    over tokens shows it, if another environment has long answers.
    """
    chances = [math.exp(-loss * sample.num_loss_tokens) for sample in samples]
    return sum(chances) / len(chances) >= CHECK_FROM_SHARE * wanted


def _running(mean: float, value: float) -> float:
    return value if math.isnan(mean) else LOSS_MEMORY * mean + (1 - LOSS_MEMORY) * value


def _lr(config: WarmStart, step: int) -> float:
    """Return the learning rate of a step: a short linear ramp, then constant."""
    return config.lr * min(1.0, step / config.warmup_train_steps)


@dataclass(frozen=True, slots=True)
class _Episode:
    """The observations and the actions of the expert."""

    turns: list[tuple[Observation, str]]
    total: float
    """Sum of the rewards."""
    success: bool | None
    """Success as reported by the environment; None if it reports none."""
    tools: tuple[ToolSpec, ...] = ()
    """The available tools."""

    @property
    def is_worth(self) -> bool:
        """Whether to imitate the episode."""
        return self.total > 0 if self.success is None else self.success


def demonstrations(
    make_env: MakeEnv,
    tokenizer: ChatTokenizer,
    tasks: Iterable[Task],
    *,
    max_turns: int,
    max_context_tokens: int,
    history: History = FOLLOWED,
) -> Iterator[Sample]:
    """Yield the samples of the expert's episodes; one environment runs all and is then closed.

    A repeated task with the same seed does not run again, because an episode in a sandbox takes
    long. The expert's action and the stop token are marked as sampled, with logprobs 0 and version
    0. Episodes are skipped if they did not succeed (``info["success"]`` at the end; if it is
    missing, the sum of the rewards must be above 0), do not end within ``max_turns``, or exceed
    ``max_context_tokens``.

    Args:
        make_env: Creates the environment; called once, before the first sample.
        tokenizer: The policy's tokenizer.
        tasks: The tasks; may be endless.
        max_turns: Maximum number of turns of an episode.
        max_context_tokens: Maximum number of tokens of a row.
        history: How earlier turns appear in later prompts.

    Raises:
        ConfigError: If the environment has no ``oracle()``, if its oracle has no episode to imitate
            in all tasks or in 256 consecutive tasks, or if it calls tools in a way that the chat
            template rejects.
        EnvironmentFailure: If the environment raises.
    """
    with closing(make_env()) as env:
        oracle = _oracle(env)
        num_misses, found = 0, False
        played: dict[Task, tuple[Sample, ...]] = {}
        for task in tasks:
            samples = played.get(task)
            if samples is None:
                episode = _episode(env, oracle, task, max_turns)
                samples = ()
                if episode is not None and episode.is_worth:
                    samples = _samples(episode, tokenizer, max_context_tokens, history)
                if len(played) < _MOST_KEPT:
                    played[task] = samples
            found, num_misses = found or bool(samples), 0 if samples else num_misses + 1
            if num_misses == _MOST_MISSES:
                break
            yield from samples
        if not found or num_misses == _MOST_MISSES:
            raise ConfigError(_nothing_to_imitate(env, num_misses, max_turns, max_context_tokens))


def env_corpus(env: TextEnv, tasks: Iterable[Task], *, max_turns: int = 100) -> Iterator[str]:
    """Yield texts to train a tokenizer on; the environment is not closed.

    The texts are the environment's ``corpus()`` if it has one, else its expert's observations and
    actions.

    Raises:
        ConfigError: If the environment has neither ``corpus()`` nor ``oracle()``, or is an agent
            without ``corpus()``.
        EnvironmentFailure: If the environment raises.
    """
    if callable(getattr(env, "corpus", None)):
        with boundary(EnvironmentFailure, "env.corpus"):
            yield from cast(HasCorpus, env).corpus()
        return
    if isinstance(env, AgentTask):
        raise ConfigError(
            f"model: {type(env).__name__} is an agent without corpus(), the text to train a new "
            "tokenizer on: implement corpus(), or set model.path"
        )
    oracle, shown = _oracle(env), False
    for task in tasks:
        episode = _episode(env, oracle, task, max_turns)
        if episode and episode.tools and not shown:
            shown = True
            yield from (json.dumps(spec["function"]) for spec in episode.tools)
        for observation, action in episode.turns if episode else ():
            yield from _texts(observation)
            yield from _action_texts(action) if episode and episode.tools else [action]


def _oracle(env: TextEnv) -> Callable[[], str | None]:
    if not callable(getattr(env, "oracle", None)):
        raise ConfigError(
            f"warm_start: {type(env).__name__} has no oracle(), the expert's next action: "
            "implement oracle(), or remove warm_start"
        )
    return cast(HasOracle, env).oracle


def _episode(
    env: TextEnv, oracle: Callable[[], str | None], task: Task, max_turns: int
) -> _Episode | None:
    """Return the expert's episode; None if it did not end."""
    turns: list[tuple[Observation, str]] = []
    options = {"task": task.index, "split": task.split}
    with boundary(EnvironmentFailure, "env.reset"):
        observation, info = env.reset(seed=task.seed, options=options)
        tools = checked_tools(info.get("tools") or ())
    total = 0.0
    while len(turns) < max_turns:
        with boundary(EnvironmentFailure, "env.oracle"):
            action = oracle()
        if action is None:
            return None
        turns.append((observation, action))
        with boundary(EnvironmentFailure, "env.step"):
            observation, reward, terminated, truncated, info = env.step(action)
            if tools:
                _, turn = expert_turn(ToolAction.read(action))
                observation = answered(turn, observation, done=terminated or truncated)
        total += float(reward)
        if terminated or truncated:
            success = info.get("success")
            return _Episode(turns, total, None if success is None else bool(success), tools)
    return None


def _samples(
    episode: _Episode, tokenizer: ChatTokenizer, max_context_tokens: int, history: History
) -> tuple[Sample, ...]:
    """Return the samples of the episode; none if a row exceeds the context."""
    conversation = Conversation(tokenizer, max_context_tokens=max_context_tokens, history=history)
    if episode.tools:
        conversation.offer(episode.tools)
    for observation, action in episode.turns:
        conversation.observe(observation)
        text = _written(tokenizer, action, calls=bool(episode.tools))
        conversation.record(as_sampled(tokenizer, text))
        if conversation.num_tokens > max_context_tokens:
            return ()
    return conversation.samples()


def _written(tokenizer: ChatTokenizer, action: str, *, calls: bool) -> str:
    """Return an action in the form that the policy must write, without a thought."""
    message = Message(role="assistant", content=action)
    if calls:
        message, _ = expert_turn(ToolAction.read(action))
    try:
        return tokenizer.write(message)
    except TemplateRefusal as e:
        raise ConfigError(
            f"warm_start: the policy's chat template rejects the oracle's tool calls: {e}"
        ) from e


def as_sampled(tokenizer: ChatTokenizer, action: str) -> GenerateResult:
    """Return the action and the stop token as if the engine had sampled them."""
    token_ids = [*tokenizer.encode(action), tokenizer.stop_token_ids[0]]
    num_tokens = len(token_ids)
    return GenerateResult(
        token_ids=token_ids,
        inference_logprobs=[0.0] * num_tokens,
        spans=(TokenSpan(0, num_tokens, 0),),
        finish_reason="stop",
    )


def _nothing_to_imitate(
    env: TextEnv, num_tasks: int, max_turns: int, max_context_tokens: int
) -> str:
    return (
        f"warm_start: the oracle of {type(env).__name__} had no episode to imitate in {num_tasks} "
        f"tasks: it must succeed within {max_turns} turns and {max_context_tokens} tokens"
    )


def _texts(observation: Observation) -> list[str]:
    if isinstance(observation, str):
        return [observation]
    return [message["content"] for message in observation]


def _action_texts(action: str) -> list[str]:
    """Return the texts that a policy writes for an action, without those of its template."""
    asked = ToolAction.read(action)
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in asked.calls]
    return [text for text in (asked.content, *map(json.dumps, calls)) if text]
