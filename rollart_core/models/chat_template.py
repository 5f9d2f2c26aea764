"""Chat templates: render messages as text, and find the text between two turns.

Takes: a Jinja template of a Hugging Face model. Gives: :class:`ChatTemplate`. Never: tokenizes,
imports transformers, or runs a template outside Jinja's sandbox.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn

from rollart_core.contracts.tool_format import ParsedMessage
from rollart_core.errors import ConfigError, did_you_mean
from rollart_core.types import FunctionCall, Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_PLAIN_NODES = frozenset(
    (
        *("Template", "Output", "TemplateData", "For", "If", "Name", "Const", "Getattr", "Getitem"),
        *("Compare", "Operand", "And", "Or", "Not", "Add", "Concat"),
    )
)
_PLAIN_NAMES = frozenset(["add_generation_prompt", "bos_token", "eos_token", "messages"])
_PLAIN_FACTS = frozenset(["role", "content", "first", "last", "index", "index0", "length"])
_GIVEN = frozenset(["add_generation_prompt", "documents", "messages", "tools"])
_MARK = "zq7mark"
"""Stands for a part of an action, to find where the template puts the end of the action."""

PROBE: Final = "probe_tool"
_TEXT: Final = {"type": "string"}
_VALUES: Final = {
    "text": _TEXT,
    "code": _TEXT,
    "count": {"type": "integer"},
    "deep": {"type": "object"},
}
_SCHEMA: Final = {"type": "object", "properties": _VALUES}
PROBE_TOOL = ToolSpec(
    type="function", function={"name": PROBE, "description": PROBE, "parameters": _SCHEMA}
)
"""A tool that shows whether and how a template renders tools and calls."""


class TemplateRefusal(ValueError):
    """The template rejects this sequence of messages (many require strict alternation)."""


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: Jinja source, with the variables and filters of Hugging Face templates.
        special_tokens: Texts of ``bos_token``, ``eos_token`` and other special tokens.
        kwargs: Values of the template's own variables, for every rendering.

    Raises:
        ValueError: If the source is not a valid Jinja template.
        ConfigError: If the template has no variable of a name in ``kwargs``.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        kwargs: Mapping[str, object] | None = None,
    ) -> None:
        from jinja2 import TemplateError

        environment = _environment()
        self.source = source
        self._special_tokens, self._kwargs = dict(special_tokens), dict(kwargs or {})
        plain = _GENERATION_TAG.sub(_without_generation, source)
        try:
            self._template = environment.from_string(plain)
        except TemplateError as e:
            raise ValueError(f"the chat template is not a valid Jinja template: {e}") from e
        tree = environment.parse(plain)
        self.variables = _own_variables(tree)
        """Names of the variables that ``model.chat_template_kwargs`` may set."""
        _check_names(self._kwargs, self.variables)
        self.is_plain = _is_plain(tree)
        """Whether the template only copies the contents, so that the text around them depends only
        on the roles (derived from the syntax tree)."""
        self.write_calls: Callable[[ParsedMessage], str] | None = None
        """Writes messages with calls as text, if the template omits calls."""
        self._pieces_after = lru_cache(maxsize=4096)(self._find_pieces_after)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[ToolSpec] | None = None,
    ) -> str:
        """Return the messages as text.

        Args:
            messages: The conversation. Arguments of tool calls are text, as in the API. The
                template receives them as objects, and reasoning under each name that templates use.
            add_generation_prompt: Whether to append the start of the policy's next message.
            tools: The tools that the policy may call. A template without tool support omits them.

        Raises:
            TemplateRefusal: If the template rejects the messages.
        """
        from jinja2 import TemplateError

        refusal: Exception | None = None
        for form in self._forms(messages):
            try:
                return self._template.render(
                    messages=form,
                    add_generation_prompt=add_generation_prompt,
                    tools=list(tools) if tools else None,
                    documents=None,
                    **self._kwargs,
                    **self._special_tokens,
                )
            except (TemplateError, TypeError, ValueError) as e:
                refusal = refusal or e
        raise TemplateRefusal(str(refusal)) from refusal

    def _forms(self, messages: Sequence[Message]) -> list[list[Any]]:
        """Return the messages for the template: with arguments as objects, then as text."""
        shown = [_for_template(m) if len(m) > 2 else m for m in messages]
        called = [m for m in messages if m.get("tool_calls")]
        if called and self.write_calls is not None:
            return [[_as_text(m, self.write_calls) if m.get("tool_calls") else m for m in messages]]
        return [shown, [{**m, **_names(m)} for m in messages]] if called else [shown]

    def with_kwargs(self, kwargs: Mapping[str, object]) -> ChatTemplate:
        """Return the template with further values of its variables."""
        return ChatTemplate(self.source, self._special_tokens, {**self._kwargs, **kwargs})

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template renders tools."""
        try:
            return PROBE in self.render([Message(role="user", content="?")], True, [PROBE_TOOL])
        except TemplateRefusal:
            return False

    def continuation(
        self,
        prompt: str,
        messages: Sequence[Message],
        action_index: int,
        *,
        tools: Sequence[ToolSpec] | None = None,
        stop_texts: Sequence[str] = (),
        keeps: bool = False,
    ) -> tuple[str, str] | None:
        """Return the text after the action when later messages and a generation prompt are added.

        Args:
            prompt: The rendering of ``messages[:action_index]`` with a generation prompt; ignored
                (and returned empty) if the template :attr:`is_plain`, ignored if ``keeps``.
            messages: The whole conversation.
            action_index: Index of the policy's newest action. It is the generated text, or has
                ``reasoning_content`` or ``tool_calls``, which a template may render in a different
                way.
            tools: The tools that the policy may call.
            stop_texts: The tokens that end a message of the policy. They mark the end of an action
                with tool calls.
            keeps: Whether earlier thoughts stay in the prompt. Then all messages are compared
                without them, and a template that drops thoughts only appends.

        Returns:
            The text after the action, and the new prompt. None if the template does not only append
            (it rewrites the history, or strips a part of the action).

        Raises:
            TemplateRefusal: If the template rejects the messages.
        """
        if self.is_plain:
            return self._plain_continuation(messages, action_index)
        if keeps:
            messages = [without_thought(m) for m in messages]
            prompt = self.render(messages[:action_index], tools=tools)
        after = self.render(messages, add_generation_prompt=True, tools=tools)
        if not after.startswith(prompt):
            return None
        action = messages[action_index]
        if len(action) == 2 and not keeps:
            for content in (action["content"], action["content"].strip()):
                if after.startswith(content, len(prompt)):
                    return after[len(prompt) + len(content) :], after
        tail = self._tail(messages, action_index, tools, stop_texts)
        if tail is None or not after.endswith(tail):
            return None
        shown = after[len(prompt) : len(after) - len(tail)]
        parts = (action["content"], action.get("reasoning_content", ""))
        return (tail, after) if all(part.strip() in shown for part in parts) else None

    def _tail(
        self,
        messages: Sequence[Message],
        action_index: int,
        tools: Sequence[ToolSpec] | None,
        stop_texts: Sequence[str],
    ) -> str | None:
        """Return the text after the action: a mark replaces its content, or the names it calls."""
        action = messages[action_index]
        marked, calls = Message(**action), action.get("tool_calls", ())
        names = {f"{_MARK}{i}q": call["function"]["name"] for i, call in enumerate(calls)}
        if calls:
            blank = [FunctionCall(name=name, arguments="{}") for name in names]
            pairs = zip(calls, blank, strict=True)
            marked["tool_calls"] = [ToolCall(**{**call, "function": b}) for call, b in pairs]
        else:
            marked["content"] = _MARK
        around = (*messages[:action_index], marked, *messages[action_index + 1 :])
        text = self.render(around, add_generation_prompt=True, tools=tools)
        at = text.find(_MARK)
        if at < 0 or not calls:
            return None if text.count(_MARK) != 1 else text[at + len(_MARK) :]
        ends = [end for stop in stop_texts if (end := text.find(stop, at)) >= 0]
        tail = text[min(ends) :] if ends else None
        for mark, name in names.items():  # tool messages may repeat the names of calls
            tail = tail and tail.replace(mark, name)
        return tail

    def _plain_continuation(
        self, messages: Sequence[Message], action_index: int
    ) -> tuple[str, str] | None:
        pieces = self._pieces_after(tuple(m["role"] for m in messages), action_index)
        if pieces is None:
            return None
        later = zip(messages[action_index + 1 :], pieces[1:], strict=True)
        return pieces[0] + "".join(m["content"] + piece for m, piece in later), ""

    def _find_pieces_after(self, roles: tuple[str, ...], action_index: int) -> list[str] | None:
        """Return the texts between the contents after the action. None if not appended."""
        before = self._pieces(roles[:action_index])
        after = self._pieces(roles)
        if before is None or after is None or after[: action_index + 1] != before:
            return None
        return after[action_index + 1 :]

    def _pieces(self, roles: tuple[str, ...]) -> list[str] | None:
        """Return the texts before, between and after the contents. None if contents are omitted."""
        marks = [f"\x00{i}\x00" for i in range(len(roles))]
        messages = [Message(role=r, content=m) for r, m in zip(roles, marks, strict=True)]
        text = self.render(messages, add_generation_prompt=True)
        pieces = re.split(r"\x00(\d+)\x00", text)
        if [int(i) for i in pieces[1::2]] != list(range(len(roles))):
            return None
        return pieces[::2]


def fold(messages: Sequence[Message]) -> list[Message]:
    """Return the messages for a template that requires ``user, assistant, user, ...`` only.

    Messages of the policy are unchanged. Adjacent other messages are joined into one user message,
    separated by blank lines.
    """
    folded: list[Message] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if folded and role == "user" == folded[-1]["role"]:
            content = f"{folded[-1]['content']}\n\n{message['content']}"
            folded[-1] = Message(role=role, content=content)
        else:
            folded.append(Message(role=role, content=message["content"]))
            if role == "assistant":
                folded[-1].update(message)
    return folded


def with_thought(message: Message, thought: str) -> Message:
    """Return the policy's message with its reasoning, if there is any."""
    return Message(**message, reasoning_content=thought) if thought else message


def without_thought(message: Message) -> Message:
    """Return a message without its reasoning."""
    message = Message(**message)
    message.pop("reasoning_content", None)
    return message


def _for_template(message: Message) -> dict[str, object]:
    """Return the message as templates expect it: the arguments of its calls are objects."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments: object = call["function"]["arguments"]
        with contextlib.suppress(ValueError, TypeError):
            arguments = json.loads(str(arguments))
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, **_names(message), **({"tool_calls": calls} if calls else {})}


def _names(message: Message) -> dict[str, object]:
    """Return the reasoning of a message under the other names that templates use."""
    thought = message.get("reasoning_content")
    return {} if thought is None else {"reasoning": thought, "thinking": thought}


def _own_variables(tree: nodes.Template) -> tuple[str, ...]:
    """Return the variables that the template reads, except those that it sets before."""
    from jinja2 import meta, nodes

    stored: dict[str, int] = {}
    for node in tree.find_all(nodes.Name):
        if node.ctx == "store":
            stored[node.name] = min(node.lineno, stored.get(node.name, node.lineno))
    tests: list[nodes.Node] = [n.node for n in tree.find_all(nodes.Test) if n.name == "defined"]
    tests += [n.node for n in tree.find_all(nodes.Filter) if n.name == "default" and n.node]
    optional = {
        node.name
        for node in tests
        if isinstance(node, nodes.Name) and node.lineno <= stored.get(node.name, node.lineno)
    }
    free = meta.find_undeclared_variables(tree) - set(_environment().globals) - _GIVEN
    found = (n for n in free if n not in stored or n in optional)
    return tuple(sorted(n for n in found if not n.endswith("_token")))


def _check_names(kwargs: Mapping[str, object], variables: tuple[str, ...]) -> None:
    for name in kwargs:
        if name not in variables:
            has = f"its variables are {', '.join(variables)}" if variables else "it has none"
            raise ConfigError(
                f"model.chat_template_kwargs: the chat template of this model has no variable "
                f"{name!r}; {has}.{did_you_mean(name, variables)}"
            )


def _as_text(message: Message, write: Callable[[ParsedMessage], str]) -> Message:
    """Return a message with calls as a message that has them in its content."""
    reasoning, calls = message.get("reasoning_content", ""), tuple(message["tool_calls"])
    content = write(ParsedMessage(message["content"], reasoning, calls))
    return Message(role=message["role"], content=content)


def _is_plain(tree: nodes.Template) -> bool:
    """Return whether the text around the contents depends only on the roles."""
    from jinja2 import nodes

    loops = tree.find_all(nodes.For)
    targets = {node.target.name for node in loops if isinstance(node.target, nodes.Name)}
    return all(
        type(node).__name__ in _PLAIN_NODES and _is_plain_use(node, parents, targets)
        for node, parents in _walk(tree, ())
    )


def _is_plain_use(node: nodes.Node, parents: tuple[str, ...], targets: set[str]) -> bool:
    kind = type(node).__name__
    if kind in ("Getattr", "Getitem"):
        fact = getattr(node, "attr", None) or getattr(getattr(node, "arg", None), "value", None)
        if parents[-1] in ("Getattr", "Getitem"):
            return fact != "content"
        inside_output = all(
            p in ("Output", "Add", "Concat") for p in parents[_last_output(parents) :]
        )
        return fact in _PLAIN_FACTS and (fact != "content" or inside_output)
    if kind == "Name" and parents[-1] not in ("Getattr", "Getitem"):
        name: str = node.name  # type: ignore[attr-defined]
        if parents[-1] == "For":
            return name == "messages" or name in targets
        return name in _PLAIN_NAMES - {"messages"}
    return True


def _last_output(parents: tuple[str, ...]) -> int:
    return max((i for i, p in enumerate(parents) if p == "Output"), default=0)


def _walk(
    node: nodes.Node, parents: tuple[str, ...]
) -> Iterator[tuple[nodes.Node, tuple[str, ...]]]:
    yield node, parents
    for child in node.iter_child_nodes():
        yield from _walk(child, (*parents, type(node).__name__))


def _without_generation(tag: re.Match[str]) -> str:
    """Replace the tag that marks assistant tokens for transformers with one without effect."""
    return f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}"


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment that is compatible with Hugging Face templates."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
