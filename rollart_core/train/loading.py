"""The model a trainer trains, as transformers has it.

Takes: a folder or a hub id. Gives: a causal LM in float32, or a ConfigError. Never: moves it.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from rollart_core.errors import ConfigError, first_line


def load_model(model_path: str) -> torch.nn.Module:
    """Load a causal LM in float32, without dropout.

    Raises:
        ConfigError: When there is none at ``model_path``.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # they would draw over the run's own
    try:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"model.path: {model_path!r} is no causal language model: {first_line(str(e))}"
        ) from e
    return model.eval()  # type: ignore[no-any-return]


def check_vocabulary(policy: torch.nn.Module, other: torch.nn.Module, path: str) -> None:
    """Refuse a reference with logits for other tokens than the policy's.

    Of models in folders that has been found when the config was loaded.

    Raises:
        ConfigError: Naming both sizes.
    """
    sizes = [int(cast("Any", model.config).vocab_size) for model in (policy, other)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"reference.path: {path} has a vocabulary of {sizes[1]} tokens, and the policy one of "
            f"{sizes[0]}; take a model with the same tokenizer"
        )
