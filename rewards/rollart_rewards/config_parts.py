"""Options of the rewards that combine other rewards. Never imports torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from rollart_core.config.base import Number, PluginRef
from rollart_core.contracts.reward import RewardSpec
from rollart_core.plugins import registry
from rollart_rewards.config_answers import Options

Weight = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class Part(Options):
    """One part of a weighted reward."""

    reward: PluginRef
    """The reward, by id or alias, with its options in the same mapping."""
    weight: Weight = 1.0
    """Factor of its value. A negative weight makes it a cost."""

    @field_validator("reward")
    @classmethod
    def _is_sound(cls, ref: PluginRef) -> PluginRef:
        return checked_ref(ref)


class WeightedConfig(Options):
    """Options of ``rollart/Weighted-v1``."""

    parts: Annotated[dict[str, Part], Field(min_length=1)]
    """Name -> ``{reward: ..., weight: ...}``. The value is the sum of weight times value. Every
    part must score one episode at a time."""

    @field_validator("parts")
    @classmethod
    def _none_sees_a_group(cls, parts: dict[str, Part]) -> dict[str, Part]:
        for name, part in parts.items():
            if spec_of(part.reward).group:
                raise ValueError(
                    f"{name}: {part.reward.id} scores whole groups; use rollart/WeightedGroup-v1 "
                    "instead of rollart/Weighted-v1"
                )
        return parts


class WeightedGroupConfig(Options):
    """Options of ``rollart/WeightedGroup-v1``."""

    parts: Annotated[dict[str, Part], Field(min_length=1)]
    """Name -> ``{reward: ..., weight: ...}``. The value is the sum of weight times value. Parts can
    score the whole group, or one episode at a time."""


class GroupRankConfig(Options):
    """Options of ``rollart/GroupRank-v1``."""

    of: PluginRef | None = None
    """The reward that ranks siblings. If not set, the environment's return is used."""

    @field_validator("of")
    @classmethod
    def _is_sound(cls, ref: PluginRef | None) -> PluginRef | None:
        return single(ref)


class GroupLengthConfig(Options):
    """Options of ``rollart/GroupLength-v1``."""

    right: PluginRef | None = None
    """The reward that decides which answers are right. Default: ``info["success"]``."""
    right_from: Number = 1.0
    """An answer is right if the value of that reward is at least this."""

    @field_validator("right")
    @classmethod
    def _is_sound(cls, ref: PluginRef | None) -> PluginRef | None:
        return single(ref)


def single(ref: PluginRef | None) -> PluginRef | None:
    """Check and return a reward that scores one episode at a time.

    Raises:
        ValueError: If the reward does not exist, an option is wrong, or it scores whole groups.
    """
    if ref is not None and spec_of(checked_ref(ref)).group:
        raise ValueError(f"{ref.id} scores whole groups; use a reward that scores one episode")
    return ref


def checked_ref(ref: PluginRef) -> PluginRef:
    """Check the id and options of a reward and return it.

    Raises:
        ValueError: If the reward does not exist, an option is wrong, or it is not stateless.
    """
    if not spec_of(ref).stateless:
        raise ValueError(f"{ref.id} is not stateless, so it cannot be part of another reward")
    problems = registry.option_problems("rewards", ref.id, ref.options)
    if problems:
        raise ValueError("; ".join(f"{ref.id}: {problem.within()}" for problem in problems))
    return ref


def spec_of(ref: PluginRef) -> RewardSpec:
    """Return the spec of a reward.

    Raises:
        ValueError: If there is no reward with that name.
    """
    try:
        found: Any = registry.spec("rewards", ref.id)
    except Exception as e:  # pydantic expects a ValueError
        raise ValueError(str(e)) from e
    assert isinstance(found, RewardSpec)
    return found
