"""Check whether the policy's messages have the required form.

Takes: one episode's request. Gives: 1 or 0 for the last message, or the share of all. Never: checks
whether an answer is right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_rewards.answer import last_block
from rollart_rewards.config_answers import FormatConfig, MadeOfTags, MatchesPattern
from rollart_rewards.examples import asked


class Format(Reward):
    """Check the form of messages; see the module.

    Args:
        options: The fields of :class:`FormatConfig`.
    """

    def __init__(self, **options: object) -> None:
        self.config = FormatConfig.model_validate(options)
        self._fits = _test_of(self.config)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode.

        Raises:
            ValueError: If the policy wrote no message.
        """
        said = [m["content"] for m in request.messages if m["role"] == "assistant"]
        if not said:
            raise ValueError("the policy wrote no message: there is no form to check")
        if self.config.messages == "last":
            said = said[-1:]
        return RewardResult(sum(map(self._fits, said)) / len(said))

    def examples(self) -> Sequence[RewardExample]:
        """Return requests that this reward can score."""
        form = self.config.form
        tags = form.tags if isinstance(form, MadeOfTags) else ()
        well = "".join(f"<{tag}>x</{tag}>" for tag in tags)
        told = (RewardExample((asked(well),), (1.0,)),) if well else ()
        return (RewardExample((asked(""),)), *told)


def _test_of(config: FormatConfig) -> Callable[[str], bool]:
    form = config.form
    if isinstance(form, MadeOfTags):
        tags = form.tags
        return lambda text: _is_made_of(text, tags)
    if isinstance(form, MatchesPattern):
        pattern = re.compile(form.pattern, re.DOTALL)
        return lambda text: pattern.fullmatch(text) is not None
    return _json_test(form.json_schema)


def _is_made_of(text: str, tags: tuple[str, ...]) -> bool:
    """Return whether a text is these tags, each once, in this order, with nothing between them."""
    rest = text.strip()
    for tag in tags:
        opened, closed = f"<{tag}>", f"</{tag}>"
        if text.count(opened) != 1 or text.count(closed) != 1 or not rest.startswith(opened):
            return False
        _, found, rest = rest.partition(closed)
        if not found:
            return False
        rest = rest.lstrip()
    return not rest


def _json_test(schema: Mapping[str, Any]) -> Callable[[str], bool]:
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(schema)

    def fits(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(last_block(text))))
        except (ValueError, RecursionError):
            return False

    return fits
