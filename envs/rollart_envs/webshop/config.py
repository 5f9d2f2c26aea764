"""The options of WebShop, as a pydantic model that imports nothing heavy.

Takes: plain mappings. Gives: a frozen :class:`WebShopConfig`, which reports what is missing on this
machine. Never: reads the data files; :mod:`rollart_envs.webshop.shop` does that when the first
environment is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollart_core.config.base import MOST, Seed
from rollart_envs.webshop.files import find_files
from rollart_envs.webshop.generate import MAX_PRODUCTS
from rollart_envs.webshop.nouns import NO_SPACY, has_spacy

ObservationMode = Literal["text", "text_rich", "html", "terse"]
Goals = Literal["synthetic", "human"]
InstructionOn = Literal["every_page", "first_page"]
Difficulty = Literal[1, 2, 3]
NounTagger = Literal["auto", "spacy", "builtin"]


class WebShopConfig(BaseModel):
    """Options of a WebShop environment. With ``data_dir`` and defaults it behaves as upstream.

    Use ``observation_mode: terse``, ``page_handles: true``, ``results_per_page: 3`` and
    ``instruction: first_page`` for small models.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Path | None = Field(
        None, description="Folder with the official files. If not set: the generated catalogue."
    )
    observation_mode: ObservationMode = Field(
        "text",
        description="text, text_rich and html are upstream's; terse prints only what a purchase "
        "needs, with everything clickable in brackets.",
    )
    goals: Goals = Field(
        "synthetic", description="Instructions made from a template, or written by people."
    )
    seed: Seed = Field(
        0, description="Draws ranged prices and price limits (and the generated catalogue)."
    )
    page_handles: bool = Field(
        False, description="Show products as 'item 1', 'item 2', ... instead of their ids."
    )
    results_per_page: Annotated[int, Field(ge=1, le=50)] = Field(
        10, description="Products on a page of search results."
    )
    instruction: InstructionOn = Field(
        "every_page", description="The pages that print the instruction."
    )
    num_products: Annotated[int, Field(ge=8, le=MOST)] | None = Field(
        None,
        description="Products in the catalogue. Official files: the first ones (default: all). "
        f"Generated: the number to make (default: 560), at most {MAX_PRODUCTS:,}.",
    )
    difficulty: Difficulty | None = Field(
        None,
        description="Of the generated catalogue (default: 1). 1: one attribute; the right product "
        "is nearly always the first result. 2: two attributes; results are shuffled. "
        "3: also a third option with similar values of two words.",
    )
    noun_tagger: NounTagger = Field(
        "auto",
        description="Nouns for r_type: spaCy's model, the built-in rules, or auto: spaCy's "
        "if it is installed.",
    )

    @model_validator(mode="after")
    def _has_effect(self) -> WebShopConfig:
        if self.data_dir is not None and self.difficulty is not None:
            raise ValueError("difficulty needs the generated catalogue: remove it, or data_dir")
        if self.data_dir is None and (self.num_products or 0) > MAX_PRODUCTS:
            raise ValueError(
                f"num_products: the generated catalogue has at most {MAX_PRODUCTS}, not "
                f"{self.num_products}; use a smaller number, or set data_dir"
            )
        return self

    def missing(self) -> dict[str, str]:
        """Return a problem for each official file or tagger that is missing on this machine."""
        found = {}
        if self.data_dir is not None:
            try:
                find_files(self.data_dir)
            except ValueError as e:
                found["data_dir"] = str(e)
        if self.noun_tagger == "spacy" and not has_spacy():
            found["noun_tagger"] = NO_SPACY
        return found
