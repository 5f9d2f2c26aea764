"""The token rows of one episode: token in, token out.

    observe(observation) -> prompt -> engine -> record(result) -> action -> env.step -> observe ...

Takes: observations and what the engine sampled. Gives: the prompt of the next turn, the action as
text, and the samples for training. Never: encodes again what the policy sampled, or calls an engine
or an environment.

A later turn extends the row with what the chat template puts between (the end of the policy's
message where it was not sampled, the new messages, the generation prompt). Where the template
does not merely append (it drops earlier thinking, say), the row is kept as a sample as it is, and a
new one begins with the whole conversation rendered afresh.

With tools, what the policy wrote is also taken apart into calls (``parsed``). Its message is shown
to the template as the text that it wrote; where the template does not take that, as calls.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollart_core.contracts.inference import GenerateResult
from rollart_core.errors import EnvironmentFailure, InferenceFailure, first_line
from rollart_core.models.chat_template import TemplateRefusal, fold
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.models.tool_calls import TOOL_MARKS, ParsedCalls, as_called, parse_tool_calls
from rollart_core.types import Message, Observation, Sample, ToolSpec


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What the policy sampled in one turn, and where it stands in the row."""

    start: int
    turn: int
    result: GenerateResult


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a conversation had come right after a turn; see :meth:`Conversation.upto`."""

    row: int
    """Which of its rows it was at, from 0."""
    num_tokens: int
    num_messages: int
    num_sampled: int
    num_prompt_chars: int
    called: Message | None
    """The action with its calls; None when it has none."""


class Conversation:
    """Build the token rows of one episode.

    Args:
        tokenizer: The policy's tokenizer.
        max_context_tokens: Longest row; :meth:`room` counts down to it.
        tools: What the policy may call; see also :meth:`offer`. A template that cannot show them
            leaves them out.
    """

    __slots__ = (
        "_action_index",
        "_as_calls",
        "_called",
        "_max_context_tokens",
        "_messages",
        "_num_foreign",
        "_num_rows",
        "_prompt",
        "_row",
        "_sampled",
        "_samples",
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
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tuple(tools or ())
        self._max_context_tokens = max_context_tokens
        self._messages: list[Message] = []
        self._prompt = ""
        self._action_index: int | None = None
        self._row: list[int] = []
        self._sampled: list[_Sampled] = []
        self._num_foreign = 0
        self._samples: list[Sample] = []
        self._num_rows = 0
        self._turn = 0
        self._called: Message | None = None
        """The newest action with its calls; None when it has none."""
        self._as_calls: dict[int, tuple[Message, Message]] = {}
        """By the id of the object: each action with calls that is shown as text, and as calls."""
        self.parsed: ParsedCalls | None = None
        """The newest action, taken apart; None without tools."""

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        """Tell the policy, from the next observation on, what it may call.

        Raises:
            EnvironmentFailure: When the policy's chat template cannot show tools, or writes calls
                in a way that is not known.
        """
        template = self._tokenizer.template
        if tools and not (template.shows_tools and self._tokenizer.tool_format):
            what = "calls in a known way" if template.shows_tools else "tools"
            message = f"there are tools, but the policy's chat template does not write {what}"
            raise EnvironmentFailure(message, boundary="tools")
        self._tools = tuple(tools)

    @property
    def prompt(self) -> list[int]:
        """The whole row so far: what the engine is given."""
        return list(self._row)

    @property
    def num_tokens(self) -> int:
        """Length of the present row."""
        return len(self._row)

    def turn_limit(self, max_new_tokens: int = sys.maxsize) -> int:
        """Return how many tokens the next turn may have.

        Args:
            max_new_tokens: Of any turn. The row may leave fewer, or none: then it is 0.
        """
        return max(0, min(max_new_tokens, self._max_context_tokens - len(self._row)))

    def observe(self, observation: Observation) -> None:
        """Show the policy something.

        Args:
            observation: Text (one user message), or chat messages.

        Raises:
            EnvironmentFailure: When the chat template does not take the messages, even folded.
        """
        if isinstance(observation, str):
            observation = [Message(role="user", content=observation)]
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
        """Show the policy tokens as they are, without the chat template (raw completions)."""
        self._num_rows = max(1, self._num_rows)
        self._row.extend(token_ids)
        self._action_index = None

    def record(self, result: GenerateResult, *, turn: int | None = None) -> str:
        """Take what the policy sampled in this turn.

        Args:
            result: What it sampled.
            turn: Its number, where several conversations make up one episode.

        Returns:
            The action: the text without the stop token and other special tokens.

        Raises:
            InferenceFailure: When logprobs or spans do not cover the tokens.
        """
        _check(result)
        self._turn = self._turn if turn is None else turn
        self._sampled.append(_Sampled(len(self._row), self._turn, result))
        self._row.extend(result.token_ids)
        ids = result.token_ids
        ids = ids[:-1] if ids and ids[-1] in self._tokenizer.stop_token_ids else ids
        action = self._taken_apart(ids)
        self._turn += 1
        self._action_index = len(self._messages)
        self._messages.append(Message(role="assistant", content=action))
        if self._called is not None:
            self._as_calls[id(self._messages[-1])] = (self._messages[-1], self._called)
        return action

    def _taken_apart(self, token_ids: Sequence[int]) -> str:
        """Find the calls; return the text, with special tokens only where these make calls."""
        action = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        tool_format = self._tokenizer.tool_format if self._tools else None
        if tool_format is not None:
            mark, whole = TOOL_MARKS[tool_format], self._tokenizer.decode(token_ids)
            action = whole if whole.count(mark) > action.count(mark) else action
            self.parsed = parse_tool_calls(action, tool_format, self._turn)
            self._called = as_called(self.parsed, self._turn)
        return action

    def samples(self) -> tuple[Sample, ...]:
        """Return one sample per row that holds sampled tokens, each cut after the last of them."""
        last = self._sample()
        return tuple(self._samples) if last is None else (*self._samples, last)

    @property
    def newest(self) -> Message:
        """The newest message: right after :meth:`record` that of the policy, calls taken out.

        One with a call that cannot be read stays text as a whole.
        """
        if self._called is None or (self.parsed and self.parsed.errors):
            return self._messages[-1]
        return self._called

    @property
    def num_rows(self) -> int:
        """How many rows it has begun."""
        return self._num_rows

    def copy(self) -> Conversation:
        """Return one that goes its own way from here; the samples are in both."""
        other = self._twin()
        other._messages, other._row = list(self._messages), list(self._row)
        other._sampled, other._samples = list(self._sampled), list(self._samples)
        other._as_calls = dict(self._as_calls)
        return other

    def mark(self) -> Mark:
        """Return where it stands, right after :meth:`record`."""
        return Mark(
            self._num_rows - 1,
            len(self._row),
            len(self._messages),
            len(self._sampled),
            len(self._prompt),
            self._called,
        )

    def begins(self, token_ids: Sequence[int], mark: Mark) -> bool:
        """Whether the tokens begin with those of the present row up to ``mark``."""
        n = mark.num_tokens
        if len(token_ids) < n or token_ids[n - 1] != self._row[n - 1]:
            return False  # found without comparing them all, nearly always
        return list(token_ids[:n]) == self._row[:n]

    def upto(self, mark: Mark) -> Conversation:
        """Return a branch that begins with the tokens up to ``mark``, of the present row.

        What was sampled before is its prompt, token for token, and is in no sample of the branch
        as sampled.
        """
        assert mark.row == self._num_rows - 1, "the row has been begun anew since"
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
        """Return one that shares everything; copy.copy takes twenty times as long."""
        other = object.__new__(Conversation)
        for name in Conversation.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def _folded(self, observation: list[Message]) -> list[Message]:
        """Return the conversation with the new messages folded; what was accepted stays."""
        if self._messages and self._action_index is None:
            return fold([*self._messages, *observation])
        return [*self._messages, *fold(observation)]

    def _show(self, messages: list[Message]) -> None:
        """Extend the row by the messages after the action, or begin a new one."""
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
        assert refusal is not None, "a row that cannot be begun is refused"
        raise refusal

    def _forms(self, messages: list[Message]) -> list[list[Message]]:
        """Return the messages in the forms to try, one after another.

        The newest action as calls, if it has any; as text; then all earlier ones as calls too:
        those that are text may break a rule of the template, such as who follows whom.
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
        """Extend the row; False when the template does not merely append."""
        if self._action_index is None:
            return False
        extension = self._tokenizer.template.continuation(
            self._prompt,
            messages,
            self._action_index,
            tools=self._tools,
            stop_text=self._tokenizer.stop_text if self._tools else "",
        )
        if extension is None:
            return False
        text, self._prompt = extension
        tokens = self._tokenizer.encode(text)
        ended = self._row[-1:] if self._sampled[-1].result.token_ids else []
        is_stop = bool(ended) and ended[0] in self._tokenizer.stop_token_ids
        self._row.extend(tokens[1:] if is_stop and tokens[:1] == ended else tokens)
        return True

    def _begin(self, messages: list[Message]) -> bool:
        prompt = self._tokenizer.render(messages, add_generation_prompt=True, tools=self._tools)
        finished = self._sample()
        if finished is not None:
            self._samples.append(finished)
        self._prompt = "" if self._tokenizer.template.is_plain else prompt
        self._row = self._tokenizer.encode(prompt)
        self._sampled, self._num_foreign = [], 0
        self._num_rows += 1
        return True

    def _sample(self) -> Sample | None:
        """Return the present row as a sample; None when nothing in it was sampled."""
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
    """Write one turn's facts into the arrays of the sample."""
    start, result = sampled.start, sampled.result
    stop = start + len(result.token_ids)
    sample.loss_mask[start:stop] = True
    sample.inference_logprobs[start:stop] = result.inference_logprobs
    sample.turn_ids[start:stop] = sampled.turn
    for span in result.spans:
        sample.policy_versions[start + span.start : start + span.stop] = span.policy_version


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
    raise InferenceFailure(f"generate: the engine answered {what}", boundary="generate")
