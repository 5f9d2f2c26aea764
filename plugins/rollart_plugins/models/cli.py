"""``rollart model``: create models, and check them.

Takes: a shape, an environment whose text the tokenizer is trained on, a new folder; or a model.
Gives: a model with random weights in the format of transformers; or what can train and serve the
model. Never: writes into a folder that is not empty.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from rollart_core.cli.options import as_options, check_split
from rollart_core.cli.output import print_json, print_table
from rollart_core.config.model import NewModel
from rollart_core.config.problems import of_validation
from rollart_core.errors import ConfigError, first_line
from rollart_core.plugins import registry
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.scheduling.tasks import held_out_tasks

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


_SIGNS = {"ok": "ok", "warn": "limited", "no": "no", "unknown": "?"}


@app.callback(epilog="Example: rollart model check Qwen/Qwen3-0.6B")
def model() -> None:
    """Create a small model with random weights, or check what can train and serve a model."""


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


@app.command(epilog="Example: rollart model check ./my-model --context 4096")
def check(
    path: Annotated[str, typer.Argument(metavar="PATH_OR_ID", help="Model folder or hub id.")],
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of a row, for the estimate of the memory.")
    ] = 8192,
    sglang: Annotated[
        Path | None,
        typer.Option(metavar="PYTHON", help="Interpreter with SGLang. Default: this one."),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(metavar="PYTHON", help="Interpreter with vLLM. Default: this one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check which parts of RollArt can train and serve a model, without loading its weights.

    The exit code is 1 if the model cannot be trained.
    """
    from rollart_plugins.models.check import check_model

    servers = {}
    for name, given in (("SGLang", sglang), ("vLLM", vllm)):
        if given or find_spec(name.lower()):
            servers[name] = str(given or sys.executable)
    found = check_model(path, servers, context)
    needed = {each.part: each.state for each in found if each.state == "no"}
    works = not {"architecture", "tokenizer"} & needed.keys()
    if as_json:
        print_json({"model": path, "works": works, "findings": [asdict(each) for each in found]})
    else:
        rows = [(each.part, _SIGNS[each.state], each.says) for each in found]
        print_table(path, ("part", "", "finding"), rows)
    if not works:
        raise typer.Exit(1)


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
