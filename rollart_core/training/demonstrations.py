"""Demonstrations for the warm start: the environment's own expert, as if the policy had sampled it.

Takes: environments that have ``oracle()``. Gives: training samples, one at a time, and text for a
tokenizer. Never: calls a model. Both generators stop cleanly (``close()`` closes the environment),
so a thread can draw fresh demonstrations while the trainer trains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias, cast

from rollart_core.contracts.agent import AgentTask
from rollart_core.contracts.env import HasCorpus, HasOracle, TextEnv
from rollart_core.contracts.inference import GenerateResult
from rollart_core.errors import ConfigError, EnvironmentFailure, boundary
from rollart_core.models.chat_template import TemplateRefusal
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.rollout.conversation import Conversation
from rollart_core.rollout.tool_turn import answered, expert_turn
from rollart_core.rollout.tools.action import ToolAction
from rollart_core.rollout.tools.tool_set import checked_tools
from rollart_core.types import Observation, Sample, Task, TokenSpan, ToolSpec

MakeEnv: TypeAlias = Callable[[], TextEnv]
_MOST_MISSES = 256
"""In a row; then it is no use to go on, and an endless stream of tasks would never yield."""
_MOST_KEPT = 1024
"""Tasks whose samples are kept for when they come again."""


@dataclass(frozen=True, slots=True)
class _Episode:
    """What the expert saw and did."""

    turns: list[tuple[Observation, str]]
    total: float
    """Sum of the rewards."""
    success: bool | None
    """What the environment says; None when it says nothing."""
    tools: tuple[ToolSpec, ...] = ()
    """What could be called."""

    def is_worth(self, min_return: float | None) -> bool:
        """Tell whether to imitate it."""
        if min_return is not None:
            return self.total >= min_return
        return self.total > 0 if self.success is None else self.success


def demonstrations(
    make_env: MakeEnv,
    tokenizer: ChatTokenizer,
    tasks: Iterable[Task],
    *,
    max_turns: int,
    max_context_tokens: int,
    min_return: float | None = None,
) -> Iterator[Sample]:
    """Yield the samples of the expert's episodes, one environment used for all and closed after.

    A task that comes again, seed and all, is not played again: in boxes an episode takes long. The
    expert's action and the stop token are marked as sampled, with logprobs 0 and version 0.
    Episodes that are not worth imitating (see ``min_return``), do not end in ``max_turns``, or
    outgrow ``max_context_tokens`` are left out.

    Args:
        make_env: Makes the environment; called once, when the first sample is asked for.
        tokenizer: The policy's.
        tasks: May be endless.
        max_turns: Longest episode.
        max_context_tokens: Longest row.
        min_return: Least sum of rewards of an episode that is worth imitating; None: what
            ``info["success"]`` says at its end, or a sum above 0 where it says nothing.

    Raises:
        ConfigError: When the environment has no ``oracle()``, or its oracle gives nothing to
            imitate in all tasks, or in ``256`` in a row; or calls tools in a way that the chat
            template does not take.
        EnvironmentFailure: When the environment raises.
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
                if episode is not None and episode.is_worth(min_return):
                    samples = _samples(episode, tokenizer, max_context_tokens)
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

    That is the environment's ``corpus()`` where it has one, else what its expert reads and writes.

    Raises:
        ConfigError: When the environment has neither ``corpus()`` nor ``oracle()``, or is an agent
            without ``corpus()``.
        EnvironmentFailure: When the environment raises.
    """
    if callable(getattr(env, "corpus", None)):
        with boundary(EnvironmentFailure, "env.corpus"):
            yield from cast(HasCorpus, env).corpus()
        return
    if isinstance(env, AgentTask):
        raise ConfigError(
            f"model: {type(env).__name__} is an agent without corpus(), text to train a new "
            "tokenizer on; give it one, or name a model with model.path"
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
            f"warm_start: {type(env).__name__} has no oracle(), the expert's next action; "
            "give it one, or leave warm_start out"
        )
    return cast(HasOracle, env).oracle


def _episode(
    env: TextEnv, oracle: Callable[[], str | None], task: Task, max_turns: int
) -> _Episode | None:
    """Return what the expert saw and did; None when it did not come to an end."""
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
    episode: _Episode, tokenizer: ChatTokenizer, max_context_tokens: int
) -> tuple[Sample, ...]:
    """Return the samples of the episode; none when a row outgrows the context."""
    conversation = Conversation(tokenizer, max_context_tokens=max_context_tokens)
    if episode.tools:
        conversation.offer(episode.tools)
    for observation, action in episode.turns:
        conversation.observe(observation)
        text = _written(tokenizer, action) if episode.tools else action
        conversation.record(_as_sampled(tokenizer, text))
        if conversation.num_tokens > max_context_tokens:
            return ()
    return conversation.samples()


def _written(tokenizer: ChatTokenizer, action: str) -> str:
    """Return an action with tool calls as the policy is to write it."""
    message, _ = expert_turn(ToolAction.read(action))
    try:
        return tokenizer.write(message)
    except TemplateRefusal as e:
        raise ConfigError(
            f"warm_start: the policy's chat template does not take what the oracle calls: {e}"
        ) from e


def _as_sampled(tokenizer: ChatTokenizer, action: str) -> GenerateResult:
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
        f"warm_start: the oracle of {type(env).__name__} gave nothing to imitate in {num_tasks} "
        f"tasks: it must succeed within {max_turns} turns and {max_context_tokens} tokens"
    )


def _texts(observation: Observation) -> list[str]:
    if isinstance(observation, str):
        return [observation]
    return [message["content"] for message in observation]


def _action_texts(action: str) -> list[str]:
    """Return what a policy writes for an action, apart from what its template puts around."""
    asked = ToolAction.read(action)
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in asked.calls]
    return [text for text in (asked.content, *map(json.dumps, calls)) if text]
