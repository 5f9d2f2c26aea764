"""Options of the rewards that are made of other rewards. Never imports torch."""

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
    """The reward, by id or alias, with its options beside it."""
    weight: Weight = 1.0
    """What its value is multiplied by; negative: it is a cost."""

    @field_validator("reward")
    @classmethod
    def _is_sound(cls, ref: PluginRef) -> PluginRef:
        return checked_ref(ref)


class WeightedConfig(Options):
    """Options of ``rollart/Weighted-v1``."""

    parts: Annotated[dict[str, Part], Field(min_length=1)]
    """Name -> ``{reward: ..., weight: ...}``; the value is the sum of weight times value. All score
    one episode at a time."""

    @field_validator("parts")
    @classmethod
    def _none_sees_a_group(cls, parts: dict[str, Part]) -> dict[str, Part]:
        for name, part in parts.items():
            if spec_of(part.reward).group:
                raise ValueError(
                    f"{name}: {part.reward.id} sees whole groups, which takes "
                    "rollart/WeightedGroup-v1 around it"
                )
        return parts


class WeightedGroupConfig(Options):
    """Options of ``rollart/WeightedGroup-v1``."""

    parts: Annotated[dict[str, Part], Field(min_length=1)]
    """Name -> ``{reward: ..., weight: ...}``; the value is the sum of weight times value. Parts may
    see the whole group, or one episode at a time."""


class GroupRankConfig(Options):
    """Options of ``rollart/GroupRank-v1``."""

    of: PluginRef | None = None
    """The reward by which siblings are ranked; none: the environment's own return."""

    @field_validator("of")
    @classmethod
    def _is_sound(cls, ref: PluginRef | None) -> PluginRef | None:
        return single(ref)


class GroupLengthConfig(Options):
    """Options of ``rollart/GroupLength-v1``."""

    right: PluginRef | None = None
    """The reward that says who was right; none: the environment's ``info["success"]``."""
    right_from: Number = 1.0
    """Its value from which on an answer counts as right."""

    @field_validator("right")
    @classmethod
    def _is_sound(cls, ref: PluginRef | None) -> PluginRef | None:
        return single(ref)


def single(ref: PluginRef | None) -> PluginRef | None:
    """Return a reward that scores one episode at a time, checked.

    Raises:
        ValueError: When there is no such reward, an option is wrong, or it sees whole groups.
    """
    if ref is not None and spec_of(checked_ref(ref)).group:
        raise ValueError(f"{ref.id} sees whole groups; it cannot stand here")
    return ref


def checked_ref(ref: PluginRef) -> PluginRef:
    """Return a reward whose id and options are sound.

    Raises:
        ValueError: When there is no such reward, an option is wrong, or it is not stateless.
    """
    if not spec_of(ref).stateless:
        raise ValueError(f"{ref.id} is not stateless, so it can be no part of another reward")
    problems = registry.option_problems("rewards", ref.id, ref.options)
    if problems:
        raise ValueError("; ".join(f"{ref.id}: {problem.within()}" for problem in problems))
    return ref


def spec_of(ref: PluginRef) -> RewardSpec:
    """Return what a reward says of itself.

    Raises:
        ValueError: When there is none of that name.
    """
    try:
        found: Any = registry.spec("rewards", ref.id)
    except Exception as e:  # pydantic wants a ValueError
        raise ValueError(str(e)) from e
    assert isinstance(found, RewardSpec)
    return found
