"""Options of the hardware mappers, as pydantic models that import nothing heavy."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class StaticConfig(BaseModel):
    """Options of `static`: somebody has decided."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    envs: dict[str, str] = Field(default_factory=dict)
    """Env -> pool of its workers; `*` stands for all others."""
    engines: dict[str, str | dict[str, Share]] = Field(default_factory=dict)
    """Env -> pool that generates for it, or pool -> share; `*` stands for all others."""
    trainer: str = ""
    """Pool of the trainer."""
    rewards: str = "inline"
    """`inline`: beside the environments; or a serverless pool."""

    @model_validator(mode="after")
    def _all_three(self) -> StaticConfig:
        missing = [name for name in ("envs", "engines", "trainer") if not getattr(self, name)]
        if missing:
            raise ValueError(
                f"static needs {', '.join(missing)}; such as "
                "{envs: {'*': cpus}, engines: {'*': h100}, trainer: h100}"
            )
        return self


class RandomConfig(BaseModel):
    """Options of `random`: what a placement is worth comparing with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    """The same seed, workloads and pools give the same placement."""
