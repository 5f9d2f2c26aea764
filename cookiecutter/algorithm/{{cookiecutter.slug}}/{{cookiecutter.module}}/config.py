"""The options of the section `algorithm`. This module must not import torch."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class {{ cookiecutter.class_name }}Config(BaseModel):
    """Options of the algorithm."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_ratio: Annotated[float, Field(gt=1)] = 2.0
    """Cap on the ratio of the trained policy to the one that sampled."""
