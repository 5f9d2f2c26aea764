"""Options of the algorithms: what has no effect, or contradicts another option, is refused."""

import pytest
from pydantic import ValidationError

from rollart_algorithms import config
from rollart_core.plugins.manifest import read_manifest

SPECS = read_manifest("rollart_algorithms").specs["algorithms"]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.alias)
def test_defaults_are_allowed_and_every_algorithm_says_what_it_computes(spec: object) -> None:
    model = getattr(config, spec.config.partition(":")[2])  # type: ignore[attr-defined]
    assert model.model_validate(model().model_dump()) == model()
    assert spec.formula.strip()  # type: ignore[attr-defined]
    assert spec.paper.startswith("arXiv:")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("GRPOConfig", {"proximal": "inference", "tis_cap": 2.0}, "tis_cap has no effect"),
        (
            "GRPOConfig",
            {"proximal": "inference", "importance_correction": "token_mask"},
            "importance_correction has no effect with proximal: inference",
        ),
        ("GRPOConfig", {"mask_floor": 0.1}, "mask_floor has no effect"),
        ("GRPOConfig", {"importance_correction": "none", "tis_cap": 3.0}, "tis_cap has no"),
        (
            "GRPOConfig",
            {"importance_correction": "token_mask", "mask_floor": 6.0},
            "mask_floor must be below tis_cap",
        ),
        ("GRPOConfig", {"kl_estimator": "k2"}, "kl_estimator has no effect with kl_coef: 0"),
        ("GRPOConfig", {"kl_in": "reward"}, "kl_in has no effect with kl_coef: 0"),
        ("GRPOConfig", {"discount": 0.9}, "discount has no effect with credit: trajectory"),
        ("GRPOConfig", {"loss_aggregation": "sample_sum_norm"}, "needs norm_tokens"),
        ("GRPOConfig", {"norm_tokens": 5}, "norm_tokens has no effect"),
        ("GRPOConfig", {"normalise": "none", "std_correction": 1}, "std_correction has no"),
        ("GRPOConfig", {"kl_coef": -1}, "greater than or equal to 0"),
        ("GRPOConfig", {"kl_coef": float("nan")}, "less than or equal to"),
        ("GRPOConfig", {"dual_clip": 1.0}, "greater than 1"),
        ("GRPOConfig", {"staleness_discount": 0.0}, "greater than 0"),
        ("GSPOConfig", {"ratio_level": "token"}, "sample_mean"),
        ("CISPOConfig", {"dual_clip": 3.0}, "None"),
        ("PPOConfig", {"discount_unit": "turn"}, "discount_unit has no effect with discount: 1"),
        ("PPOConfig", {"zero_advantage": "drop"}, "keep"),
        ("StarPOConfig", {"keep_groups": 0.0}, "greater than 0"),
        ("TOPRConfig", {"baseline": "median"}, "group_mean"),
        ("TOPRConfig", {"clip_low": 0.1}, "Extra inputs"),
        ("SFTConfig", {"kl_coef": 0.1}, "Extra inputs"),
        ("SFTConfig", {"entropy_coef": 0.1}, "Extra inputs"),
        ("GRPOConfig", {"zero_advantage": "drop", "kl_coef": 0.1}, "share of kl_coef"),
        ("TOPRConfig", {"zero_advantage": "drop", "entropy_coef": 0.1}, "share of entropy_coef"),
        ("DAPOConfig", {"entropy_coef": -0.1}, "greater than or equal to 0"),
        ("GRPOConfig", {"normalise": "none", "std_floor": 0.1}, "std_floor has no effect"),
        ("GRPOConfig", {"min_effective_groups": 0}, "greater than 0"),
        ("PPOConfig", {"min_effective_groups": 2}, "Extra inputs"),
        ("GRPOConfig", {"bootstrap_truncated": True}, "Extra inputs"),
        (
            "PPOConfig",
            {"bootstrap_truncated": True, "mask_truncated": True},
            "bootstrap_truncated has no effect with mask_truncated: true",
        ),
        ("RLOOConfig", {"ratio_level": "sample_sum", "credit": "turn"}, "credit: turn gives each"),
        ("GiGPOConfig", {"ratio_level": "sample_sum"}, "step advantage of GiGPO gives each"),
        ("PPOConfig", {"ratio_level": "sample_sum"}, "critic of PPO gives each"),
        ("DistillationConfig", {"ratio_level": "sample_sum"}, "teacher's score"),
        (
            "ReinforcePPConfig",
            {"ratio_level": "sample_sum", "kl_coef": 0.1},
            "kl_in: reward gives each",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    model: str, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        getattr(config, model).model_validate(options)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("GRPOConfig", {"zero_advantage": "drop", "kl_coef": 0.1, "kl_in": "reward"}),
        ("ReinforcePPConfig", {"ratio_level": "sample_sum"}),
        ("CISPOConfig", {"ratio_level": "sample_sum", "credit": "turn"}),  # a weight, no gradient
        ("GSPOConfig", {"credit": "turn"}),
        ("GiGPOConfig", {"ratio_level": "sample_mean"}),
    ],
)
def test_what_can_be_meant_is_not(model: str, options: dict[str, object]) -> None:
    getattr(config, model).model_validate(options)


ALIASES = {spec.alias: spec.config.partition(":")[2] for spec in SPECS}


@pytest.mark.parametrize("alias", sorted(set(ALIASES) - {"sft"}))
def test_the_divisor_counts_all_tokens_unless_asked_otherwise(alias: str) -> None:
    assert getattr(config, ALIASES[alias])().zero_advantage == "keep"


def test_grpo_and_dapo_have_the_defaults_of_their_papers() -> None:
    names = ("clip_low", "clip_high", "loss_aggregation", "normalise", "kl_coef")
    differing = {
        name: (getattr(config.GRPOConfig(), name), getattr(config.DAPOConfig(), name))
        for name in names
    }
    assert differing == {
        "clip_low": (0.2, 0.2),
        "clip_high": (0.2, 0.28),
        "loss_aggregation": ("sample_mean", "token_mean"),
        "normalise": ("group_std", "group_std"),
        "kl_coef": (0.0, 0.0),
    }
