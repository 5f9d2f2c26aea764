"""What a trainer has beside the policy: adapters, critic, reference, a teacher's word, shaping.

Takes: sections of the run config. Gives: one record that travels to every trainer rank. Never:
imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollart_core.config.training import Critic, LoRA, Reference, Shaping
from rollart_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AuxiliaryModels:
    """What there is besides the policy and its algorithm."""

    lora: LoRA | None = None
    """None: all of the policy is trained."""
    warms_whole: bool = False
    """Whether adapters begin with RL, on what a warm start has made of the whole policy."""
    critic: Critic | None = None
    """How extra modules are built and taught."""
    reference: Reference | None = None
    """None: the weights RL began with."""
    has_teacher: bool = False
    """Whether samples come with a teacher's logprobs."""
    shapings: Mapping[str, Shaping] = field(default_factory=dict)
    """By the name of the environment: what its rewards become."""


ALONE = AuxiliaryModels()
"""Nothing."""


def check_auxiliary_models(
    beside: AuxiliaryModels, requires: frozenset[str], modules: frozenset[str]
) -> None:
    """Refuse what does not go together with the algorithm, now that its options are known.

    Args:
        beside: What the run has.
        requires: The signals that the algorithm asks for.
        modules: The names of its extra modules.

    Raises:
        ConfigError: Saying what to add or remove.
    """
    if modules and beside.critic is None:
        raise ConfigError(
            f"the algorithm trains {', '.join(sorted(modules))} beside the policy: add critic to "
            "the config, such as critic: {backbone: shared}"
        )
    for section, given, is_used in (
        ("critic", beside.critic is not None, bool(modules)),
        ("reference", beside.reference is not None, "ref_logprobs" in requires),
        ("teacher", beside.has_teacher, "teacher_logprobs" in requires),
    ):
        if given and not is_used:
            raise ConfigError(
                f"{section}: has no effect, for the algorithm asks for nothing of it with these "
                "options; remove it, or set the option that does (such as kl_coef)"
            )
