"""``rollart model``: create models.

Takes: a shape, an environment whose text the tokenizer is trained on, a new folder. Gives: a model
with random weights in the format of transformers. Never: writes into a folder that is not empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from rollart_core.cli.options import as_options, check_split
from rollart_core.config.model import NewModel
from rollart_core.config.problems import of_validation
from rollart_core.errors import ConfigError, first_line
from rollart_core.plugins import registry
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.scheduling.tasks import held_out_tasks

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback(epilog="Example: rollart model new ./my-model --env webshop width=128")
def model() -> None:
    """Create a small model with random weights."""


@app.command(
    epilog="Example: rollart model new ./my-model --env webshop env.page_handles=true width=128"
)
def new(
    path: Annotated[Path, typer.Argument(help="The folder to create.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Model options (num_layers, width, ...) and environment options (env.*).",
        ),
    ] = None,
    env: Annotated[
        str, typer.Option(help="The environment whose text the tokenizer is trained on.")
    ] = "webshop",
    split: Annotated[str, typer.Option(help="The split from which tasks are read.")] = "train",
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks to read.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed for the weights and the task order.")] = 0,
) -> None:
    """Create a small model with random weights and a tokenizer for an environment's text."""
    from rollart_core.runtime.factories import EnvTasks, build_model

    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not empty: give a new folder")
    shape = as_options(options or [])
    env_options = shape.pop("env", {})
    spec = _shape(shape)
    chosen = registry.env_spec(env, env_options)
    check_split(env, env_options, split)
    with_tasks = registry.make(env, **env_options)
    try:
        count = getattr(with_tasks, "num_tasks", lambda _: None)(split)
        listed = held_out_tasks(chosen.id, split, tasks, seed, num_tasks=count)
    except ValueError as e:
        raise ConfigError(f"--split {split}: {first_line(str(e))}") from e
    finally:
        with_tasks.close()
    corpus = EnvTasks(EnvRef(chosen.id, env_options), listed, max_turns=chosen.max_turns)
    _make(path)
    build_model(str(path), spec, [corpus], seed)
    typer.echo(f"Made {path}: {spec.num_layers} layers of width {spec.width}.")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{folder}: cannot be created: {e.strerror}; give another folder") from e


def _shape(given: dict[str, Any]) -> NewModel:
    try:
        return NewModel(**given)
    except ValidationError as e:
        lines = [problem.within() for problem in of_validation(e, NewModel)]
        raise ConfigError("\n".join(lines)) from e
