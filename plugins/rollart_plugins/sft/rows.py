"""Rows to imitate: conversations, prompts with completions, and questions with answers.

    row -> messages -> split: named by the row, else by a hash
        -> the model's chat template -> samples, with the tokens of the assistant as loss tokens

Takes: files of rows, a tokenizer. Gives: :class:`Demonstration` by split, and their samples. Never:
skips a row that it cannot read, or puts conversations with the same question into two splits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from rollart_core.errors import EpisodeError, UserError, did_you_mean, first_line
from rollart_core.models.chat_template import TemplateRefusal
from rollart_core.models.tool_calls import call_id
from rollart_core.rollout.tools.tool_set import checked_tools
from rollart_core.types import FunctionCall, Message, Sample, ToolCall, ToolSpec
from rollart_envs.rows import RowError, read_rows

if TYPE_CHECKING:
    from rollart_core.models.tokenizer import ChatTokenizer
    from rollart_plugins.sft.config import SftConfig

SPLITS: Final = ("train", "warm", "validation", "test")
_SPLIT_NAMES: Final = {name: name for name in SPLITS} | {
    **dict.fromkeys(("val", "valid", "dev"), "validation"),
    "eval": "test",
}
_QUESTIONS: Final = ("messages", "prompt", "question")
_ANSWERS: Final = ("completion", "answer", "reference", "ground_truth", "solution")
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
    """Return the rows of all files by split.

    Raises:
        UserError: If a file cannot be read, a row cannot be used, or no row is in ``train``.
    """
    pool = [one for file in config.data for one in _of_file(Path(file).expanduser(), config)]
    named = {one.split for one in pool}
    splits: dict[str, list[Demonstration]] = {split: [] for split in SPLITS}
    for one in pool:
        own = one.split not in ("", "train")
        splits[one.split if own else _drawn(one.key, named, config)].append(one)
    if not splits["train"]:
        counts = ", ".join(f"{len(rows)} of {split}" for split, rows in splits.items() if rows)
        raise UserError(f"{', '.join(config.data)}: has no row to train on ({counts or 'no rows'})")
    return splits


def _drawn(key: str, named: set[str], config: SftConfig) -> str:
    """Return the split of a question, drawn as ``text/Questions-v1`` draws it."""
    digest = blake2b(f"{config.split_seed}\0{key}".encode("utf-8", "replace"), digest_size=8)
    place, end = int.from_bytes(digest.digest(), "big") / 2**64, 0.0
    for split in SPLITS[1:]:
        end += config.shares.get(cast("Any", split), 0.0)
        if place < end:
            return "train" if split in named else split
    return "train"


def _of_file(path: Path, config: SftConfig) -> Iterator[Demonstration]:
    for number, row in read_rows(path):
        where = f"{path}, row {number}"
        try:
            if isinstance(row, RowError):
                raise row
            yield replace(_demonstration(row, config), where=where)
        except RowError as e:
            raise UserError(f"{where}: {e}") from None


def _demonstration(row: Mapping[str, Any], config: SftConfig) -> Demonstration:
    name = config.question or next((n for n in _QUESTIONS if row.get(n) is not None), "")
    if row.get(name) is None:
        near = did_you_mean(name or "question", [str(one) for one in row])
        wanted = name or " or ".join(_QUESTIONS)
        raise RowError(wanted, f"is missing; the fields are {', '.join(map(str, row))}.{near}")
    given = _listed(row[name], name, "user")
    if not any(_role(one) == "assistant" for one in given):
        given += _answer(row, config)
    messages = [_message(one, f"{name}.{i}", i) for i, one in enumerate(given)]
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    if first == 0:
        raise RowError(name, "begins with a message of the assistant, which answers nothing")
    if config.prompt:
        asked = messages[first - 1]["content"]
        messages[first - 1] = {**messages[first - 1], "content": f"{config.prompt}\n{asked}"}
    said = [one for one in given if _role(one) == "assistant"]
    return Demonstration(
        tuple(messages),
        _tools(row.get("tools")),
        frozenset(turn for turn, one in enumerate(said) if one.get("weight") == 0),
        _SPLIT_NAMES.get(str(row.get("split") or "").lower(), "train" if row.get("split") else ""),
    )


def _answer(row: Mapping[str, Any], config: SftConfig) -> list[Any]:
    """Return the answer to a question as messages; of several right answers, the first."""
    name = config.answer or next((n for n in _ANSWERS if row.get(n) is not None), "")
    value = row.get(name)
    if isinstance(value, list) and value and not isinstance(value[0], Mapping):
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if value is None:
        wanted = name or " or ".join(_ANSWERS)
        raise RowError(wanted, "is missing, and the row has no message of the assistant")
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
    content = _text(value.get("content"), name, may_be_empty=bool(calls))
    message = Message(role="system" if role == "developer" else role, content=content)
    message.update({k: value[k] for k in _KEPT if value.get(k) is not None})  # type: ignore[typeddict-item]
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: Any, name: str, *, may_be_empty: bool) -> str:
    if isinstance(content, list):
        kinds = [one.get("type") if isinstance(one, Mapping) else None for one in content]
        other = next((kind for kind in kinds if kind != "text"), None)
        if other is not None or not kinds:
            raise RowError(name, f"has content of type {other!r}; text models read only text")
        content = "\n".join(str(one.get("text") or "") for one in content)
    if content is None and may_be_empty:
        return ""
    if not isinstance(content, str):
        raise RowError(name, f"has the content {content!r:.60}, which is not a text")
    return content


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
