"""Keys by their previous names are accepted, with a warning."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rollart_core.config.sandbox_options import PoolOptions
from rollart_sandboxes.isolation.config import Isolation


@pytest.mark.parametrize(
    ("model", "given", "old", "new"),
    [
        (PoolOptions, {"max_boxes": 3}, "max_boxes", "max_sandboxes"),
        (Isolation, {"kind": "docker", "num_seats": 3}, "num_seats", "num_slots"),
        (
            Isolation,
            {"kind": "docker", "episodes_per_box": 3},
            "episodes_per_box",
            "episodes_per_sandbox",
        ),
    ],
)
def test_a_previous_name_has_the_same_effect(
    model: type[BaseModel], given: dict[str, Any], old: str, new: str
) -> None:
    with pytest.warns(FutureWarning, match=f"{old} is now {new}; RollArt 0.3 removes"):
        found = model.model_validate(given)
    assert found == model.model_validate({new if k == old else k: v for k, v in given.items()})
    with pytest.warns(FutureWarning), pytest.raises(ValidationError, match=f"remove {old}"):
        model.model_validate({**given, new: given[old]})
