"""Check whether the answer equals the right one, word for word.

Takes: one episode's request. Gives: 1 or 0. Never: guesses the meaning of an answer.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.contracts.reward_check import RewardExample
from rollart_rewards.answer import answer_part, references
from rollart_rewards.config_answers import ExactMatchConfig
from rollart_rewards.examples import example

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.IGNORECASE)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ExactMatch(Reward):
    """Compare texts; see the module.

    Args:
        options: The fields of :class:`ExactMatchConfig`.
    """

    def __init__(self, **options: object) -> None:
        self.config = ExactMatchConfig.model_validate(options)

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode.

        Raises:
            ValueError: If the environment provides no right answer.
        """
        wanted = {self._plain(one) for one in references(request, self.config.reference)}
        said = answer_part(request.answer, self.config.answer)
        right = said is not None and self._plain(said) in wanted
        return RewardResult(float(right), {"found": float(said is not None)})

    def _plain(self, text: str) -> str:
        """Return a text without the differences that are ignored.

        All four options together are the normalisation of SQuAD's evaluation (arXiv:1606.05250).
        """
        ignore = self.config.ignore
        if "case" in ignore:
            text = text.casefold()
        if "punctuation" in ignore:
            text = text.translate(_NO_PUNCTUATION)
        if "articles" in ignore:
            text = _ARTICLES.sub(" ", text)
        return " ".join(text.split()) if "space" in ignore else text

    def examples(self) -> Sequence[RewardExample]:
        """Return examples with known values if the whole message is the answer."""
        if self.config != ExactMatchConfig():
            return (example("red", "red", 1.0),) if self.config.answer == "message" else ()
        return (
            example("red", "red", 1.0),
            example(" blue\n moon", ["red", "blue moon"], 1.0),
            example("reddish", "red", 0.0),
            example("", "red", 0.0),
        )
