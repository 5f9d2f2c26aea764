"""Call a plain function or coroutine function as a reward.

    reward: my_rewards:accuracy          # def accuracy(completion, answer): ...

The function gets what it declares, by keyword:

    completion   the policy's last message
    prompt       the question as the policy saw it: a text, or messages
    messages     the whole conversation, with the policy's messages
    answer       the row's column ``answer``, or the right answer if there is no such column
    reference    the right answer
    COLUMN       every other column of the row, and every option of the reward

verl's names are ``solution_str``, ``ground_truth``, ``data_source`` and ``extra_info``. A function
with the parameter ``completions`` is called as TRL does: every argument is a list with one item,
and the result is a list with one number.

Takes: one episode's request. Gives: the number that the function returns; of a dict, the entry
``score`` or else the sum, with all entries as components. Never: accepts a string, None or NaN as a
reward.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar, Final, cast

from pydantic import BaseModel, ConfigDict, Field

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_core.errors import UserError, first_line
from rollart_core.plugins import registry
from rollart_core.rollout import loop
from rollart_rewards.examples import asked

_NAMED: Final = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_CONVERSATIONS: Final = "completions"
"""The parameter of functions in TRL's form."""


class FunctionConfig(BaseModel):
    """Options of ``rollart/Function-v1``; further options are arguments of the function."""

    model_config = ConfigDict(frozen=True, extra="allow")

    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    """The function, as ``module:function``. Modules in the current folder are found."""


class FunctionReward(Reward):
    """Call a function; see the module.

    Args:
        function: ``module:function``.
        arguments: Further arguments of the function.

    Raises:
        UserError: If it cannot be imported, is no function, or does not take an argument.
    """

    reward_range: ClassVar[tuple[float, float]] = (-100.0, 100.0)

    def __init__(self, *, function: str, **arguments: object) -> None:
        self.function, self._arguments = function, arguments
        registry.find("rewards", function)  # makes the current folder importable
        call = registry.load_object(function, function)
        if not callable(call) or isinstance(call, type):
            raise UserError(f"{function} is a {type(call).__name__}, not a function")
        self._call: Callable[..., object] = call
        unknown = [] if self._takes_all else sorted(set(arguments) - set(self._parameters))
        if unknown:
            raise UserError(f"{function} has no parameter {unknown[0]!r}")

    @classmethod
    def of(cls, function: str) -> type[FunctionReward]:
        """Return the class of rewards that call one function."""

        class Bound(cls):  # type: ignore[misc, valid-type]
            def __init__(self, **arguments: object) -> None:
                super().__init__(function=function, **arguments)

        call = registry.load_object(function, function)
        Bound.__signature__ = _options_of(cast("Callable[..., object]", call))
        return Bound

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode.

        Raises:
            ValueError: If the result is not a finite number, or the row lacks a column.
        """
        given = self._given(request)
        as_trl = _CONVERSATIONS in self._parameters
        if as_trl:
            given = {name: [value] for name, value in given.items() if name not in self._arguments}
            given |= self._arguments
        result = self._call(**self._declared(given))
        if inspect.isawaitable(result):
            result = loop.run(_awaited(result))
        if as_trl:
            result = self._only(result)
        return self._result(result)

    def examples(self) -> Sequence[RewardExample]:
        """Return a request that has every column that the function needs, as a text."""
        plain = asked("The answer is 42.", reference="42")
        columns = dict.fromkeys(self._needed(self._given(plain)), "42")
        return (RewardExample((replace(plain, context={**plain.context, **columns}),)),)

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        every = inspect.signature(self._call).parameters
        return {name: one for name, one in every.items() if one.kind in _NAMED}

    @cached_property
    def _takes_all(self) -> bool:
        kinds = {one.kind for one in inspect.signature(self._call).parameters.values()}
        return inspect.Parameter.VAR_KEYWORD in kinds

    def _given(self, request: RewardRequest) -> dict[str, Any]:
        """Return every argument that the function may declare."""
        columns = dict(request.context)
        reference, said = columns.get("reference"), request.answer
        pages = list(request.messages[:-1] if said else request.messages)
        is_text = not isinstance(columns.get("prompt"), list) and len(pages) == 1
        prompt = pages[0]["content"] if is_text else pages
        turn = said if is_text else [{"role": "assistant", "content": said}]
        names = {
            "completion": said,
            "completions": turn,
            "prompt": prompt,
            "prompts": prompt,
            "messages": list(request.messages),
            "solution_str": said,
        }
        known = {"answer": reference, "ground_truth": reference} if "reference" in columns else {}
        verl = {"data_source": request.env_id, "extra_info": columns}
        return {**verl, **known, **columns, **names, **self._arguments}

    def _declared(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the function declares, or all if it takes all.

        Raises:
            ValueError: If a parameter without a default is not given.
        """
        needed = self._needed(given)
        if needed:
            raise ValueError(
                f"{self.function} needs {needed[0]!r}, which the dataset does not have: its rows "
                f"give {', '.join(sorted(given))}"
            )
        return {n: v for n, v in given.items() if self._takes_all or n in self._parameters}

    def _needed(self, given: Mapping[str, Any]) -> list[str]:
        """Return the parameters without a default that are not given."""
        return [n for n, p in self._parameters.items() if p.default is p.empty and n not in given]

    def _only(self, result: object) -> object:
        if isinstance(result, list | tuple) and len(result) == 1:
            return result[0]
        raise ValueError(f"{self.function} must return a list of one number, got {_shown(result)}")

    def _result(self, result: object) -> RewardResult:
        if not isinstance(result, Mapping):
            return RewardResult(self._number(result))
        parts = {str(name): self._number(value, str(name)) for name, value in result.items()}
        value = parts.pop("score") if "score" in parts else math.fsum(parts.values())
        return RewardResult(value, parts)

    def _number(self, value: object, name: str = "") -> float:
        number = value.item() if hasattr(value, "item") else value  # of numpy or torch
        if isinstance(number, Real) and math.isfinite(number):
            return float(number)
        what = f"{_shown(value)} as {name!r}" if name else _shown(value)
        raise ValueError(
            f"{self.function} returned {what}; return a finite number, a bool, or a dict of them"
        )


def _options_of(call: Callable[..., object]) -> inspect.Signature:
    """Return the signature of a reward's options: all parameters of its function, all optional."""
    given = inspect.signature(call).parameters.values()
    named = [p.replace(kind=p.KEYWORD_ONLY, default=None) for p in given if p.kind in _NAMED]
    return inspect.Signature([*named, *(p for p in given if p.kind is p.VAR_KEYWORD)])


def _shown(value: object) -> str:
    kind = "" if value is None else f" ({type(value).__name__})"
    return f"{first_line(repr(value), 60)}{kind}"


async def _awaited(result: object) -> object:
    return await cast("Any", result)
