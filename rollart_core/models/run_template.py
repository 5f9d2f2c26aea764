"""The chat template of a run: checks before the run, and its tokenizer.

Takes: a run config. Gives: the problems of its options for the chat template, why each turn would
begin a new row, and the tokenizer of the policy. Never: downloads anything for a check.
"""

from __future__ import annotations

from pathlib import Path

from rollart_core.config.load import as_error
from rollart_core.config.model import ModelPath
from rollart_core.config.problems import Problem
from rollart_core.config.run import RunConfig
from rollart_core.config.validation.consistency import hub_cached
from rollart_core.errors import ConfigError
from rollart_core.models.chat_template import ChatTemplate
from rollart_core.models.thinking import History, history_of, thinking_problems, why_rows
from rollart_core.models.tokenizer import ChatTokenizer, load_tokenizer, read_template


def run_tokenizer(path: str, config: RunConfig) -> tuple[ChatTokenizer, History]:
    """Return the tokenizer of a run's policy, and how its conversations show earlier turns.

    Raises:
        ConfigError: If the chat template does not support an option of the run.
    """
    tokenizer = load_tokenizer(path, getattr(config.model, "chat_template_kwargs", None))
    if problems := list(thinking_problems(tokenizer.template, config.rollout)):
        raise as_error(problems, path)
    return tokenizer, history_of(tokenizer.template, config.rollout)


def template_problems(config: RunConfig) -> list[Problem]:
    """Return the options that the chat template of the model does not support.

    Without the model's files on this machine, there are none; the run checks again.
    """
    try:
        template = _template(config)
    except ConfigError as e:
        key, _, message = str(e).partition(": ")
        return [Problem(tuple(key.split(".")), message)]
    return [] if template is None else list(thinking_problems(template, config.rollout))


def rows_note(config: RunConfig) -> str | None:
    """Return why each turn of the run begins a new row; None if it does not, or is not known."""
    try:
        template = _template(config)
    except ConfigError:  # reported by the checks of the config
        return None
    return None if template is None else why_rows(template, history_of(template, config.rollout))


def _template(config: RunConfig) -> ChatTemplate | None:
    """Return the template of a model whose files are on this machine."""
    model = config.model
    if not isinstance(model, ModelPath):
        return None
    folder = Path(model.path).expanduser()
    cached = None if folder.is_dir() else hub_cached(model.path)
    return read_template(cached.parent if cached else folder, model.chat_template_kwargs)
