"""The requests and answers of one episode of a program, as exact token rows.

    ask(messages) -> prompt -> engine -> record(result) -> answer -> ... -> ask(messages) ...

Takes: whole conversations, which programs send again with each request, and the sampled tokens.
Gives: the prompt of each request, the answer as a message, and the samples for training. Never:
encodes sampled text again, calls an engine, or uses HTTP.

Messages form a tree. If a request begins with a recorded conversation (every message equal,
including answers), it continues from the tokens of that conversation. If several match, the longest
is used:

- If nothing has followed there yet, the request extends that row.
- Otherwise it is a branch (the history after that point is rewritten, or two requests are
  concurrent). A branch is a new sample that begins with the same tokens. None of them counts as
  sampled again.

A request that does not continue a recorded conversation (a sub-agent, a summary) begins a new
sample with all its messages rendered. In each case the row has exactly the tokens that the engine
received. A request is recorded only together with its answer. A failed request is not recorded.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from rollart_core.contracts.inference import GenerateResult
from rollart_core.models.chat_template import without_thought
from rollart_core.models.thinking import FOLLOWED, History
from rollart_core.models.tokenizer import ChatTokenizer
from rollart_core.rollout.conversation import Conversation, Mark
from rollart_core.types import Message, Sample, TokenSpan, ToolSpec


@dataclass(slots=True, eq=False)
class _Branch:
    """One line of conversation, with its own rows."""

    index: int
    conversation: Conversation
    """The recorded conversation."""
    earlier: dict[int, Conversation] = field(default_factory=dict)
    """Number of the row -> its conversation when the chat template began a new row."""
    newest: _End | None = None
    busy: bool = False
    """Whether a request currently extends it."""


@dataclass(frozen=True, slots=True, eq=False)
class _End:
    """The position after an answer."""

    branch: _Branch
    mark: Mark
    turn: int
    """Index of the answer's turn in the episode."""
    text: str = ""
    """For a raw completion: prompt and answer."""

    def source(self) -> Conversation:
        """Return the conversation whose current row contains this position."""
        return self.branch.earlier.get(self.mark.row, self.branch.conversation)

    def leads_to(self, prompt: str | Sequence[int]) -> bool:
        """Return whether a raw prompt begins with the text or tokens up to here."""
        if isinstance(prompt, str):
            return prompt.startswith(self.text)
        return self.source().begins(prompt, self.mark)


@dataclass(slots=True, eq=False)
class _Node:
    """A conversation up to one of its messages."""

    children: dict[Hashable, _Node] = field(default_factory=dict)
    ends: list[_End] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ModelCall:
    """One request, from its prompt to its answer."""

    token_ids: Sequence[int]
    """The tokens for the engine."""
    token_limit: int
    """Number of tokens left in the row. Below 1, there is no space for an answer."""
    messages: list[Message]
    """The messages of the request. Empty for a raw completion."""
    num_known: int
    """Number of these messages that were already recorded."""
    branch: _Branch
    conversation: Conversation
    """The conversation of the branch, including this request."""
    root: _Node | None = None
    """The node of the last recorded message. None for a raw completion."""
    text: str | None = None
    """The prompt of a raw completion."""
    continues: int = -1
    """The turn whose conversation it continues; -1 if it begins one."""
    tools: Sequence[ToolSpec] = ()
    open: bool = True
    """False after it is recorded or dropped."""

    @property
    def session(self) -> int:
        """Number of the branch. Each request of a branch extends the previous one."""
        return self.branch.index


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy's answer to one request."""

    message: Message
    result: GenerateResult
    """As recorded, cut at the stop text."""
    text: str
    """The whole text without special tokens."""
    turn: int
    """Index of the turn in the episode."""


class Transcript:
    """The token rows of one episode of a program. See the module docstring.

    Args:
        tokenizer: The policy's tokenizer.
        max_context_tokens: Maximum number of tokens of a row.
        history: How earlier turns appear in later prompts.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, *, max_context_tokens: int, history: History = FOLLOWED
    ) -> None:
        self._tokenizer, self._history = tokenizer, history
        self._max_context_tokens = max_context_tokens
        self._roots: dict[str, _Node] = {}
        self._texts: list[_End] = []
        self._branches: list[_Branch] = []
        self.num_turns = 0
        """Number of recorded answers."""
        self.messages: list[Message] = []
        """The conversation of the last recorded request, including its answer."""

    def ask(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> ModelCall:
        """Return the prompt for a conversation.

        Args:
            messages: The whole conversation, as the program sends it.
            tools: The tools that the policy may call. Different tools make a different
                conversation.

        Raises:
            EnvironmentFailure: If the chat template rejects the messages, even after folding.
        """
        messages = list(messages)
        root = self._roots.setdefault(json.dumps(tools, sort_keys=True) if tools else "", _Node())
        node, ends, known = root, list[_End](), 0
        for index, message in enumerate(messages, 1):
            child = node.children.get(_key(message))
            if child is None:
                break
            node = child
            if node.ends:
                ends, known, root = node.ends, index, node
        branch, conversation = self._from(ends, tools)
        conversation.observe(messages[known:])
        ask = self._asked(branch, conversation)
        ask.root, ask.messages, ask.num_known, ask.tools = root, messages, known, tools
        ask.continues = ends[0].turn if ends else -1
        return ask

    def ask_text(self, prompt: str | Sequence[int]) -> ModelCall:
        """Return the call for a raw completion: a text, or its tokens."""
        known = [end for end in self._texts if end.leads_to(prompt)]
        longest = max((end.mark.num_tokens for end in known), default=0)
        ends = [end for end in known if end.mark.num_tokens == longest]
        shown = max((end.text for end in ends), key=len, default="")
        if isinstance(prompt, str):  # the same number of tokens may be a different text
            ends = [end for end in ends if end.text == shown]
        branch, conversation = self._from(ends)
        if isinstance(prompt, str):
            conversation.show_tokens(self._tokenizer.encode(prompt[len(shown) :]))
        else:
            conversation.show_tokens(prompt[longest:])
        ask = self._asked(branch, conversation)
        ask.text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
        return ask

    def record(self, ask: ModelCall, result: GenerateResult, *, stop: Sequence[str] = ()) -> Answer:
        """Record the sampled tokens of a request.

        Args:
            ask: The request. Recorded at most once.
            result: The sampled tokens.
            stop: Texts that end an answer. The tokens after the one that completes the first stop
                text are removed. The text is cut before the stop text.

        Raises:
            InferenceFailure: If logprobs or spans do not cover the tokens. The request is then
                dropped.
        """
        assert ask.open, "recorded or dropped before"
        result, is_cut = self._stopped(result, stop)
        conversation, branch = ask.conversation, ask.branch
        try:
            text = conversation.record(result, turn=self.num_turns)
        except BaseException:
            self.drop(ask)
            raise
        message = conversation.newest
        if is_cut:
            text, message = _before(text, stop), Message(**message)
            message["content"] = _before(message["content"], stop)
        before = branch.conversation
        if conversation.num_rows > before.num_rows > 0 and branch.newest is not None:
            branch.earlier[before.num_rows - 1] = before
        branch.conversation = conversation
        self._end(ask, message, text)
        ask.open, branch.busy = False, False
        answer = Answer(message, result, text, self.num_turns)
        self.num_turns += 1
        asked = ask.messages if ask.text is None else [Message(role="user", content=ask.text)]
        self.messages = [*asked, message]
        return answer

    def drop(self, ask: ModelCall) -> None:
        """Drop a request without an answer. A recorded request is kept."""
        if ask.open:
            ask.open = ask.branch.busy = False

    def samples(self) -> tuple[Sample, ...]:
        """Return the samples of all branches, in the order of their start."""
        return tuple(s for branch in self._branches for s in branch.conversation.samples())

    def _from(
        self, ends: Sequence[_End], tools: Sequence[ToolSpec] = ()
    ) -> tuple[_Branch, Conversation]:
        """Return a branch that continues one of these ends, and its conversation."""
        for end in ends:
            if end.branch.newest is end and not end.branch.busy:
                return end.branch, end.branch.conversation.copy()
        if ends:
            conversation = ends[0].source().upto(ends[0].mark)
        else:
            conversation = Conversation(
                self._tokenizer,
                max_context_tokens=self._max_context_tokens,
                tools=tools,
                history=self._history,
            )
        return _Branch(-1, conversation), conversation.copy()

    def _asked(self, branch: _Branch, conversation: Conversation) -> ModelCall:
        """Return the call after the request was added."""
        if branch.index < 0:
            branch.index = len(self._branches)
            self._branches.append(branch)
        branch.busy = True
        prompt, token_limit = conversation.prompt, conversation.turn_limit()
        return ModelCall(prompt, token_limit, [], 0, branch, conversation)

    def _end(self, ask: ModelCall, message: Message, text: str) -> None:
        """Store the end of the conversation, for requests that continue it."""
        branch = ask.branch
        if ask.root is None:
            assert ask.text is not None
            branch.newest = _End(
                branch, branch.conversation.mark(), self.num_turns, ask.text + text
            )
            self._texts.append(branch.newest)
            return
        node = ask.root
        for each in (*ask.messages[ask.num_known :], message):
            parent, node = node, node.children.setdefault(_key(each), _Node())
            if "reasoning_content" in each:  # programs often send an answer without its reasoning
                parent.children.setdefault(_key(without_thought(each)), node)
        branch.newest = _End(branch, branch.conversation.mark(), self.num_turns)
        node.ends.append(branch.newest)

    def _stopped(self, result: GenerateResult, stop: Sequence[str]) -> tuple[GenerateResult, bool]:
        """Return the result up to the first stop text, and whether it was cut."""
        whole = self._tokenizer.decode(result.token_ids, skip_special_tokens=True) if stop else ""
        found = [text for text in stop if text in whole]
        if not found:
            return result, False
        low, high = 1, len(result.token_ids)
        while low < high:  # the fewest tokens whose text contains a stop text
            middle = (low + high) // 2
            text = self._tokenizer.decode(result.token_ids[:middle], skip_special_tokens=True)
            low, high = (low, middle) if any(s in text for s in found) else (middle + 1, high)
        return _cut(result, low), True


def _before(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop text."""
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]


def _cut(result: GenerateResult, num_tokens: int) -> GenerateResult:
    """Return the first tokens of a result."""
    spans = tuple(
        TokenSpan(span.start, min(span.stop, num_tokens), span.policy_version, span.kv)
        for span in result.spans
        if span.start < num_tokens
    )
    return replace(
        result,
        token_ids=result.token_ids[:num_tokens],
        inference_logprobs=result.inference_logprobs[:num_tokens],
        spans=spans,
        inserted=(min(result.inserted[0], num_tokens), min(result.inserted[1], num_tokens)),
        finish_reason="stop",
    )


def _key(message: Message) -> Hashable:
    """Return the key by which a message is recognized when a program sends it again."""
    if len(message) == 2:
        return message["role"], message["content"]
    calls = message.get("tool_calls")
    more = tuple(
        (call["id"], call["function"]["name"], _arguments_key(call["function"]["arguments"]))
        for call in calls or ()
    )
    return (
        message["role"],
        message["content"],
        more,
        message.get("tool_call_id"),
        message.get("name"),
        message.get("reasoning_content"),
    )


def _arguments_key(arguments: str) -> str:
    """Return the arguments in a canonical form, because programs parse and serialize them again."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
