"""``rollart eval``: score a model, or any OpenAI-compatible endpoint, on held-out tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rollart_core.cli.output import print_json, stdout_console
from rollart_core.cli.progress import display, evaluation_table
from rollart_core.config_load import apply_override, read_yaml
from rollart_core.errors import ConfigError

_URLS = ("http://", "https://")


def evaluate(
    config: Annotated[
        str | None,
        typer.Argument(help="A config file, or a run directory.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's."),
    ] = None,
    env: Annotated[
        str | None, typer.Option("--env", metavar="ID", help="The environment, without a file.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="M", help="A model folder, a hub id, or the URL of a server (…/v1)."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What the server calls the model.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="The served model's own: the server is then asked in tokens (vLLM), not in text.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one JSON object; progress goes to stderr.")
    ] = False,
) -> None:
    """Score a model, or any OpenAI-compatible endpoint, on held-out tasks."""
    mapping, source, settings = _begun(config, overrides or [], has_all=bool(env and model))
    if env:
        mapping["env"] = env
    if model:
        _set_model(mapping, model, tokenizer)
    elif tokenizer:
        raise ConfigError("--tokenizer goes with --model URL")
    if name is not None:
        apply_override(mapping, f"engine.model={name}")
    keys = [apply_override(mapping, setting) for setting in settings]
    mapping.setdefault("stop", {"batches": 1})  # of training, which there is none of

    from rollart_core.runtime.evaluation import run_evaluation
    from rollart_core.runtime.prepare import prepare_mapping

    run = prepare_mapping(mapping, source, keys, trains=False)

    console = Console(stderr=True) if as_json else stdout_console()
    with display(console) as observer:
        report = run_evaluation(run, observer=observer)
    if as_json:
        print_json(report.as_dict())
    else:
        console.print(evaluation_table(report.as_dict()))
    if not report.ok:
        typer.echo(f"Error: every episode failed; most often: {report.why_failed}", err=True)
        raise typer.Exit(1)


def _begun(
    config: str | None, overrides: list[str], *, has_all: bool
) -> tuple[dict[str, Any], str, list[str]]:
    """Return a mapping to begin with, where it is from, and the settings that come on top."""
    if config and "=" not in config:
        return _from_file(Path(config)), config, overrides
    if not has_all:
        raise typer.BadParameter("name a config file or a run directory, or --env and --model")
    return {"name": "eval"}, "command line", [*([config] if config else []), *overrides]


def _from_file(path: Path) -> dict[str, Any]:
    """Return a config, or that of a run with the model it trained."""
    if not path.is_dir():
        mapping = read_yaml(path)
    else:
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{path}: that is no run directory (it has no config.yaml)")
        mapping = read_yaml(path / "config.yaml")
        trained = path / "model-trained"
        if trained.is_dir():
            _set_model(mapping, str(trained), None)
    mapping["runtime"] = _on_this_machine(mapping.get("runtime"))
    return mapping


def _on_this_machine(runtime: object) -> object:
    """Return the runtime of an evaluation: one trainer's ranks are none of its business."""
    if isinstance(runtime, dict) and runtime.get("kind", "inline") == "inline":
        return runtime
    return {"kind": "inline"}


def _set_model(mapping: dict[str, Any], model: str, tokenizer: str | None) -> None:
    """Have the mapping score this model: files by the engine there is, a URL by ``openai``."""
    if not model.startswith(_URLS):
        if tokenizer is not None:
            raise ConfigError("--tokenizer goes with --model URL: a model in files has its own")
        before: object = mapping.get("model")
        had = before if isinstance(before, dict) else {}
        kept = {key: had[key] for key in ("dtype", "device") if key in had}
        mapping["model"] = {"path": model, **kept}
        return
    mapping["model"] = {"path": tokenizer} if tokenizer else {"kind": "remote"}
    mapping["engine"] = {"id": "openai", "base_url": model}
    if not tokenizer and isinstance(mapping.get("rollout"), dict):
        mapping["rollout"].pop("max_context_tokens", None)
