"""The conversation of one episode in tokens, which are the rows for training.

    observe(observation) -> prompt -> engine -> record(result) -> action -> env.step -> observe ...

Takes: observations and the tokens that the engine sampled. Gives: the prompt of the next turn, the
action as text, and the samples for training. Never: encodes sampled tokens again, or calls an
engine or an environment.

A later turn extends the row with the text that the chat template adds: the end of the policy's
message if it was not sampled, the new messages, and the generation prompt. If the template does
not only append (for example, it drops earlier thinking), the row becomes a sample, and a new row
starts with the rendered whole conversation.

With tools, the policy's text is also parsed into calls (``parsed``). The template gets the message
with its calls; if it refuses that or cannot extend the row, the message as text is tried.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollart_core.contracts.inference import GenerateResult
from rollart_core.contracts.tool_format import ParsedMessage
from rollart_core.errors import EnvironmentFailure, InferenceFailure, first_line
from rollart_core.models.chat_template import TemplateRefusal, fold, with_thought
from rollart_core.models.thinking import FOLLOWED, History
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.models.tool_calls import as_called, parse_message
from rollart_core.types import Message, Observation, Sample, ToolSpec


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The tokens that the policy sampled in one turn, and their position in the row."""

    start: int
    turn: int
    result: GenerateResult


@dataclass(frozen=True, slots=True)
class Mark:
    """The state of a conversation right after a turn; see :meth:`Conversation.upto`."""

    row: int
    """Index of the row, from 0."""
    num_tokens: int
    num_messages: int
    num_sampled: int
    num_prompt_chars: int
    called: Message | None
    """The action with its calls; None if it has no calls."""


class Conversation:
    """Builds the token rows of one episode.

    Args:
        tokenizer: The policy's tokenizer.
        max_context_tokens: Maximum length of a row; :meth:`turn_limit` enforces it.
        tools: The tools that the policy may call; see also :meth:`offer`. A template that cannot
            render tools leaves them out.
        history: How earlier turns appear in later prompts.
    """

    __slots__ = (
        "_action_index",
        "_as_calls",
        "_called",
        "_history",
        "_max_context_tokens",
        "_messages",
        "_num_foreign",
        "_num_rows",
        "_prompt",
        "_row",
        "_sampled",
        "_samples",
        "_thinking",
        "_tokenizer",
        "_tools",
        "_turn",
        "parsed",
    )

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        max_context_tokens: int,
        tools: Sequence[ToolSpec] | None = None,
        history: History = FOLLOWED,
    ) -> None:
        self._tokenizer, self._history = tokenizer, history
        self._thinking = tokenizer.thinking
        """How the policy writes thoughts; None if it does not, and for raw completions."""
        self._tools = tuple(tools or ())
        self._max_context_tokens = max_context_tokens
        self._messages: list[Message] = []
        self._prompt = ""
        self._action_index: int | None = None
        self._row = array("i")  # a copy and a pickle of it cost a fiftieth of those of a list
        self._sampled: list[_Sampled] = []
        self._num_foreign = 0
        self._samples: list[Sample] = []
        self._num_rows = 0
        self._turn = 0
        self._called: Message | None = None
        """The newest action with its calls; None if it has no calls."""
        self._as_calls: dict[int, tuple[Message, Message]] = {}
        """Object id -> an action with calls as a message with text, and as one with calls."""
        self.parsed: ParsedMessage | None = None
        """The newest action, parsed; None without tools."""

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        """Set the tools that the policy may call, from the next observation on.

        Raises:
            EnvironmentFailure: If the policy's chat template cannot render tools, or writes calls
                in an unknown format.
        """
        if tools and self._tokenizer.tool_format is None:
            what = "calls in a known format" if self._tokenizer.template.shows_tools else "tools"
            message = f"there are tools, but the policy's chat template does not write {what}"
            raise EnvironmentFailure(message, boundary="tools")
        self._tools = tuple(tools)

    @property
    def prompt(self) -> Sequence[int]:
        """The whole row so far, which is sent to the engine."""
        return self._row[:]

    @property
    def num_tokens(self) -> int:
        """Length of the current row."""
        return len(self._row)

    def turn_limit(self, max_new_tokens: int = sys.maxsize) -> int:
        """Return the token limit of the next turn; 0 if the row is full.

        Args:
            max_new_tokens: The limit of any turn; the rest of the row may be less.
        """
        return max(0, min(max_new_tokens, self._max_context_tokens - len(self._row)))

    def observe(self, observation: Observation) -> None:
        """Add an observation.

        Args:
            observation: Text (one message, after the first action with the role of the history),
                or chat messages.

        Raises:
            EnvironmentFailure: If the chat template refuses the messages, also folded.
        """
        if isinstance(observation, str):
            role = self._history.observation_role if self._turn else "user"
            observation = [Message(role=role, content=observation)]
        messages = [*self._messages, *observation]
        try:
            self._show(messages)
        except TemplateRefusal:
            try:
                self._show(self._folded(observation))
            except TemplateRefusal as e:
                message = f"the chat template refuses the messages: {first_line(str(e))}"
                raise EnvironmentFailure(message, boundary="observation") from e

    def show_tokens(self, token_ids: Sequence[int]) -> None:
        """Add tokens unchanged, without the chat template (raw completions)."""
        self._thinking, self._num_rows = None, max(1, self._num_rows)
        self._row.extend(token_ids)
        self._action_index = None

    def record(self, result: GenerateResult, *, turn: int | None = None) -> str:
        """Add the tokens that the policy sampled in this turn.

        Args:
            result: The sampled tokens.
            turn: The number of the turn, if several conversations form one episode.

        Returns:
            The action: the text without its thought, the stop token and other special tokens.

        Raises:
            InferenceFailure: If logprobs or spans do not cover the tokens.
        """
        _check(result)
        self._turn = self._turn if turn is None else turn
        self._sampled.append(_Sampled(len(self._row), self._turn, result))
        self._row.extend(result.token_ids)
        ids = result.token_ids
        ids = ids[:-1] if ids and ids[-1] in self._tokenizer.stop_token_ids else ids
        thought, action = self._taken_apart(ids)
        self._turn += 1
        self._action_index = len(self._messages)
        self._messages.append(with_thought(Message(role="assistant", content=action), thought))
        if self._called is not None:
            self._as_calls[id(self._messages[-1])] = (self._messages[-1], self._called)
        return action

    def _taken_apart(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Parse thought and calls; return the thought and the action.

        The action has special tokens only if they mark calls.
        """
        tokenizer, tool_format = self._tokenizer, self._tokenizer.tool_format
        text = tokenizer.decode(token_ids)
        plain = tokenizer.decode(token_ids, skip_special_tokens=True)
        thinking = self._thinking
        thought, action = thinking.split(text) if thinking else ("", text)
        if self._tools and tool_format is not None:
            if all(text.count(mark) <= plain.count(mark) for mark in tool_format.marks):
                text = plain
            self.parsed = parse_message(
                text, tool_format, turn=self._turn, tools=self._tools, prompt=self._prompt
            )
            self._called = as_called(self.parsed, self._turn)
            thought = self.parsed.reasoning
            return thought, thinking.split(text)[1] if thinking else text
        if action == text:
            return thought, plain
        return thought, tokenizer.decode(tokenizer.encode(action), skip_special_tokens=True)

    def samples(self) -> tuple[Sample, ...]:
        """Return a sample of each row with sampled tokens, cut after its last sampled token."""
        last = self._sample()
        return tuple(self._samples) if last is None else (*self._samples, last)

    @property
    def newest(self) -> Message:
        """The newest message; after :meth:`record`, the policy's message with parsed calls.

        A message with an unreadable call stays text.
        """
        if self._called is None or (self.parsed and self.parsed.errors):
            return self._messages[-1]
        return self._called

    @property
    def num_rows(self) -> int:
        """The number of rows that were started."""
        return self._num_rows

    def copy(self) -> Conversation:
        """Return an independent copy; both have the samples so far."""
        other = self._twin()
        other._messages, other._row = list(self._messages), self._row[:]
        other._sampled, other._samples = list(self._sampled), list(self._samples)
        other._as_calls = dict(self._as_calls)
        return other

    def mark(self) -> Mark:
        """Return the current state; call it right after :meth:`record`."""
        return Mark(
            self._num_rows - 1,
            len(self._row),
            len(self._messages),
            len(self._sampled),
            len(self._prompt),
            self._called,
        )

    def begins(self, token_ids: Sequence[int], mark: Mark) -> bool:
        """Return whether the tokens begin with those of the current row up to ``mark``."""
        n = mark.num_tokens
        if len(token_ids) < n or token_ids[n - 1] != self._row[n - 1]:
            return False  # a fast check that is usually sufficient
        return array("i", token_ids[:n]) == self._row[:n]

    def upto(self, mark: Mark) -> Conversation:
        """Return a branch that begins with the tokens of the current row up to ``mark``.

        The tokens sampled before are its prompt, unchanged. Samples of the branch do not mark them
        as sampled.
        """
        assert mark.row == self._num_rows - 1, "a new row was started since the mark"
        other = self._twin()
        other._messages, other._row = (
            self._messages[: mark.num_messages],
            self._row[: mark.num_tokens],
        )
        other._sampled, other._num_foreign = self._sampled[: mark.num_sampled], mark.num_sampled
        other._samples, other._prompt = [], self._prompt[: mark.num_prompt_chars]
        other._action_index = mark.num_messages - 1
        other._called = mark.called
        other._as_calls = dict(self._as_calls)
        return other

    def _twin(self) -> Conversation:
        """Return a shallow copy; copy.copy takes twenty times as long."""
        other = object.__new__(Conversation)
        for name in Conversation.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def _folded(self, observation: list[Message]) -> list[Message]:
        """Return the conversation with the new messages folded; accepted ones are unchanged."""
        if self._messages and self._action_index is None:
            return fold([*self._messages, *observation])
        return [*self._messages, *fold(observation)]

    def _show(self, messages: list[Message]) -> None:
        """Extend the row by the messages after the action, or start a new row."""
        refusal: TemplateRefusal | None = None
        forms = self._forms(messages)
        for add in (self._extend, self._begin):
            for form in forms:
                try:
                    if add(form):
                        self._messages = form
                        self._action_index = self._called = None
                        return
                except TemplateRefusal as e:
                    refusal = e
            if refusal is not None and len(forms) == 1:
                break
        assert refusal is not None, "starting a row fails only with a refusal"
        raise refusal

    def _forms(self, messages: list[Message]) -> list[list[Message]]:
        """Return the forms of the messages to try, in order.

        The newest action with its calls, if it has any; as text; then all actions with calls. An
        action as text may break a rule of the template, such as the order of roles.
        """
        forms = [messages]
        if self._called is not None and self._action_index is not None:
            called = list(messages)
            called[self._action_index] = self._called
            forms.insert(0, called)
        if self._as_calls:
            forms.append([self._as_calls.get(id(m), (m, m))[1] for m in messages])
        return forms

    def _extend(self, messages: list[Message]) -> bool:
        """Extend the row; return False if the template does not only append."""
        if self._action_index is None:
            return False
        extension = self._tokenizer.template.continuation(
            self._prompt,
            messages,
            self._action_index,
            tools=self._tools,
            stop_texts=self._tokenizer.stop_texts,
            keeps=self._history.keeps_thinking,
        )
        if extension is None:
            return False
        text, self._prompt = extension
        tokens = self._tokenizer.encode(text)
        ended = self._row[-1] if self._sampled[-1].result.token_ids else None
        is_stop = ended in self._tokenizer.stop_token_ids
        self._row.extend(tokens[1:] if is_stop and tokens[:1] == [ended] else tokens)
        return True

    def _begin(self, messages: list[Message]) -> bool:
        prompt = self._tokenizer.render(messages, add_generation_prompt=True, tools=self._tools)
        finished = self._sample()
        if finished is not None:
            self._samples.append(finished)
        self._prompt = "" if self._tokenizer.template.is_plain else prompt
        self._row = array("i", self._tokenizer.encode(prompt))
        self._sampled, self._num_foreign = [], 0
        self._num_rows += 1
        return True

    def _sample(self) -> Sample | None:
        """Return the current row as a sample; None if it has no sampled tokens."""
        own = self._sampled[self._num_foreign :]
        ends = [s.start + len(s.result.token_ids) for s in own if s.result.token_ids]
        if not ends:
            return None
        num_tokens = ends[-1]
        sample = Sample(
            token_ids=np.array(self._row[:num_tokens], dtype=np.int32),
            loss_mask=np.zeros(num_tokens, dtype=np.bool_),
            inference_logprobs=np.zeros(num_tokens, dtype=np.float32),
            policy_versions=np.full(num_tokens, -1, dtype=np.int32),
            turn_ids=np.full(num_tokens, -1, dtype=np.int32),
        )
        for sampled in own:
            _mark(sample, sampled)
        return sample


def _mark(sample: Sample, sampled: _Sampled) -> None:
    """Write one turn into the arrays of the sample."""
    start, result = sampled.start, sampled.result
    stop = start + len(result.token_ids)
    sample.loss_mask[start:stop] = True
    sample.inference_logprobs[start:stop] = result.inference_logprobs
    sample.turn_ids[start:stop] = sampled.turn
    for span in result.spans:
        sample.policy_versions[start + span.start : start + span.stop] = span.policy_version
    inserted = slice(*(start + at for at in result.inserted))
    sample.loss_mask[inserted] = False
    sample.turn_ids[inserted] = sample.policy_versions[inserted] = -1


def _check(result: GenerateResult) -> None:
    num_tokens = len(result.token_ids)
    edges: Sequence[int] = [0, *(span.stop for span in result.spans)]
    starts = [span.start for span in result.spans]
    if len(result.inference_logprobs) != num_tokens:
        what = f"{len(result.inference_logprobs)} logprobs for {num_tokens} tokens"
    elif starts != edges[:-1] or edges[-1] != num_tokens:
        what = f"spans {list(result.spans)} do not cover {num_tokens} tokens"
    else:
        return
    raise InferenceFailure(f"generate: the engine returned {what}", boundary="generate")
