"""Rows to imitate: conversations, prompts with completions, and questions with answers.

    row -> messages -> split: named by the row, else by a hash
        -> the model's chat template -> samples, with the tokens of the assistant as loss tokens

Takes: sources of rows, a tokenizer. Gives: :class:`Demonstration` by split, and their samples.
Never: skips a row that it cannot read, or puts rows with the same question into two drawn splits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollart_core.errors import EpisodeError, UserError, did_you_mean, first_line
from rollart_core.models.chat_template import TemplateRefusal
from rollart_core.models.tool_calls import call_id
from rollart_core.rollout.tools.tool_set import checked_tools
from rollart_core.types import FunctionCall, Message, Sample, ToolCall, ToolSpec
from rollart_envs.questions.config import SPLIT_NAMES, SPLITS
from rollart_envs.questions.dataset import ANSWER_FIELDS, content_text, split_of, value_of
from rollart_envs.questions.presets import PRESETS
from rollart_envs.rows import Row, RowError, rows_of, split_sources

if TYPE_CHECKING:
    from rollart_core.models.tokenizer import ChatTokenizer
    from rollart_plugins.sft.config import SftConfig

_QUESTIONS: Final = ("messages", "prompt", "question")
_ANSWERS: Final = ("completion", *ANSWER_FIELDS)
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_KEPT: Final = ("reasoning_content", "tool_call_id", "name")
"""Fields of a message that are copied unchanged."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation to imitate."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    unweighted: frozenset[int] = frozenset()
    """Turns of the assistant that are not trained on (``weight`` 0 in OpenAI's format)."""
    split: str = ""
    """The split that the row names; empty: none."""
    where: str = ""
    """File and row, for messages."""

    @property
    def key(self) -> str:
        """The text before the first answer, equal for texts that differ only in case and spaces."""
        roles = [message["role"] for message in self.messages]
        asked = self.messages[: roles.index("assistant")]
        return " ".join("\n".join(m["content"] for m in asked).casefold().split())


def read_demonstrations(config: SftConfig) -> dict[str, list[Demonstration]]:
    """Return the rows of all sources by split.

    Raises:
        UserError: If a source cannot be read, a row cannot be used, or no row is in ``train``.
    """
    ignored: list[str] = []
    pool = [one for source in config.data for one in _of_source(source, config, ignored)]
    named = {one.split for one in pool}
    splits: dict[str, list[Demonstration]] = {split: [] for split in SPLITS}
    for one in pool:
        split = one.split
        if split in ("", "train"):
            drawn = split_of(one.key, config.shares, config.split_seed)
            split = "train" if drawn in named else drawn
        splits[split].append(one)
    if not splits["train"]:
        counts = [f"{len(rows)} of {split}" for split, rows in splits.items() if rows]
        counts += [f"other splits: {', '.join(ignored)}"] if ignored else []
        found = ", ".join(counts) or "no rows"
        raise UserError(f"{', '.join(config.data)}: has no row to train on ({found})")
    return splits


def _of_source(source: str, config: SftConfig, ignored: list[str]) -> Iterator[Demonstration]:
    for name, part in split_sources(source, config.subset).items():
        split = SPLIT_NAMES.get(name.lower(), "" if not name else None)
        if split is None:
            ignored.append(name)
            continue
        file = part if isinstance(part, Path) else f"{source}, split {name or 'train'}"
        for number, row in rows_of(part):
            try:
                if isinstance(row, RowError):
                    raise row
                one = _demonstration(row, config)
            except RowError as e:
                raise UserError(f"{file}, row {number}: {e}") from None
            yield replace(one, split=one.split or split, where=f"{file}, row {number}")


def _demonstration(row: Row, config: SftConfig) -> Demonstration:
    given, name = _given(row, config)
    messages = [_message(one, f"{name}.{i}", i) for i, one in enumerate(given)]
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    if first == 0:
        raise RowError(name, "begins with a message of the assistant, which answers nothing")
    if prompt := _prompt(config):
        asked = messages[first - 1]["content"]
        messages[first - 1] = {**messages[first - 1], "content": f"{prompt}\n{asked}"}
    said = [one for one in given if _role(one) == "assistant"]
    unweighted = frozenset(turn for turn, one in enumerate(said) if one.get("weight") == 0)
    split = str(row.get("split") or "").lower()
    own = SPLIT_NAMES.get(split, "train") if split else ""
    return Demonstration(tuple(messages), _tools(row.get("tools")), unweighted, own)


def _given(row: Row, config: SftConfig) -> tuple[list[Any], str]:
    """Return the messages of a row as they are, with at least one of the assistant; their field."""
    if config.preset:
        parts = PRESETS[config.preset].read(row)
        answer = parts.demonstration or parts.context.get("reference")
        if answer is None:
            raise RowError("solution", "is missing, so there is nothing to learn")
        said = [*_listed(parts.question, "question", "user"), *_listed(answer, "", "assistant")]
        return said, "question"
    name = config.question or next((n for n in _QUESTIONS if row.get(n) is not None), "")
    if not name:
        near = did_you_mean("question", [str(one) for one in row])
        problem = f"is missing; the fields are {', '.join(map(str, row))}.{near}"
        raise RowError(" or ".join(_QUESTIONS), problem)
    given = _listed(value_of(row, name), name, "user")
    if not any(_role(one) == "assistant" for one in given):
        given += _answer(row, config)
    return given, name


def _prompt(config: SftConfig) -> str:
    if config.prompt is None and config.preset:
        return PRESETS[config.preset].prompt
    return config.prompt or ""


def _answer(row: Row, config: SftConfig) -> list[Any]:
    """Return the answer to a question as messages; of several right answers, the first."""
    name = config.answer or next((n for n in _ANSWERS if row.get(n) is not None), "")
    if not name:
        problem = "is missing, and the row has no message of the assistant"
        raise RowError(" or ".join(_ANSWERS), problem)
    value: Any = value_of(row, name)
    if isinstance(value, list) and value and not isinstance(value[0], Mapping):
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    return _listed(value, name, "assistant")


def _listed(value: Any, name: str, role: str) -> list[Any]:
    """Return a text or a list of messages as a list of messages."""
    if isinstance(value, str) and value.strip():
        return [{"role": role, "content": value}]
    if isinstance(value, list) and value:
        return list(value)
    raise RowError(name, f"is {value!r:.60}; it must be a text or a list of messages, not empty")


def _role(value: Any) -> Any:
    return value.get("role") if isinstance(value, Mapping) else None


def _message(value: Any, name: str, index: int) -> Message:
    role = _role(value)
    if role not in _ROLES:
        raise RowError(name, f"is {value!r:.60}; its role must be one of {', '.join(_ROLES)}")
    calls = [_call(one, name, call_id(index, i)) for i, one in enumerate(_calls(value, name))]
    content = value.get("content")
    content = "" if content is None and calls else content_text(content, name)
    message = Message(role="system" if role == "developer" else role, content=content)
    message.update({k: value[k] for k in _KEPT if value.get(k) is not None})  # type: ignore[typeddict-item]
    if calls:
        message["tool_calls"] = calls
    return message


def _calls(value: Mapping[str, Any], name: str) -> list[Any]:
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and value.get("role") != "assistant"):
        raise RowError(name, "has tool_calls that are not a list in a message of the assistant")
    return calls


def _call(value: Any, name: str, default_id: str) -> ToolCall:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(name, f"has the tool call {value!r:.60}, which names no function")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(
        id=str(value.get("id") or default_id),
        type="function",
        function=FunctionCall(name=function["name"], arguments=text),
    )


def _tools(value: Any) -> tuple[ToolSpec, ...]:
    """Return the tools of a row; datasets store them as a JSON text."""
    try:
        return checked_tools(json.loads(value) if isinstance(value, str) else value or ())
    except ValueError as e:
        raise RowError("tools", first_line(str(e))) from None


def samples_of(one: Demonstration, tokenizer: ChatTokenizer) -> tuple[Sample, ...]:
    """Return the samples of a conversation, as if the policy had sampled each answer.

    There are several if the chat template rewrites earlier messages, as those do that drop earlier
    thoughts.

    Raises:
        UserError: If the chat template rejects the messages or the tools.
    """
    from rollart_core.rollout.conversation import Conversation
    from rollart_core.training.warm_start import as_sampled

    conversation = Conversation(tokenizer, max_context_tokens=1)
    pending: list[Message] = []
    try:
        conversation.offer(one.tools)
        for message in one.messages:
            if message["role"] != "assistant":
                pending.append(message)
                continue
            conversation.observe(pending)
            pending = []
            conversation.record(as_sampled(tokenizer, tokenizer.write(message)))
    except (EpisodeError, TemplateRefusal) as e:
        raise UserError(f"{one.where}: {first_line(str(e))}") from e
    found = conversation.samples()
    if one.unweighted:
        for sample in found:
            sample.loss_mask[[int(t) in one.unweighted for t in sample.turn_ids]] = False
    return found


def cut(sample: Sample, num_tokens: int) -> Sample:
    """Return the first tokens of a sample."""
    arrays: Sequence[Any] = (
        sample.token_ids,
        sample.loss_mask,
        sample.inference_logprobs,
        sample.policy_versions,
        sample.turn_ids,
    )
    return Sample(*(array[:num_tokens] for array in arrays))
