"""``rollart model``: create models, and check which parts of RollArt can use one.

Takes: a shape, an environment whose text the tokenizer is trained on, a new folder; or a model.
Gives: a model with random weights in the format of transformers; or one finding for each part, with
an estimate of the memory. Never: writes into a folder that is not empty; loads the weights of the
checked model, or starts a server. Exception: the equality of tied weights is checked in the files.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from pydantic import ValidationError

from rollart_core.cli.options import as_options, check_split
from rollart_core.cli.output import print_json, print_table
from rollart_core.config.model import NewModel
from rollart_core.config.problems import of_validation
from rollart_core.config.validation.consistency import model_path_fault
from rollart_core.errors import ConfigError, RollartError, first_line
from rollart_core.models.weights import TensorFiles, model_folder, weight_files
from rollart_core.plugins import registry
from rollart_core.rollout.env_worker import EnvRef
from rollart_core.scheduling.tasks import held_out_tasks

if TYPE_CHECKING:
    from torch import nn

    from rollart_core.models.tokenizer import ChatTokenizer

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)

State = Literal["ok", "warn", "no", "unknown"]
_SIGNS: Final = {"ok": "ok", "warn": "limited", "no": "no", "unknown": "?"}
_GB: Final = 1e9
_SERVERS: Final = {
    "SGLang": ("sglang", "srt/models/*.py", r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)"),
    "vLLM": ("vllm", "model_executor/models/registry.py", r'^\s*("\w+"):'),
}
"""Server -> its package, its files that list architectures, and a pattern of the list."""
_FIND: Final = "import importlib.util as u, sys; print(u.find_spec(sys.argv[1]).origin)"
_FIND_S: Final = 60.0
"""Seconds within which an interpreter must find a package."""


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


@dataclass(frozen=True, slots=True)
class ModelFinding:
    """Whether one part of RollArt can use a model."""

    part: str
    state: State
    """``warn``: it works, with a limitation. ``unknown``: it cannot be checked here."""
    says: str


def check_model(path: str, servers: Mapping[str, str], context: int) -> list[ModelFinding]:
    """Check a model.

    Args:
        path: A model folder, or a hub id that is in the local cache or can be downloaded.
        servers: Server -> the Python interpreter that has its package.
        context: Tokens of a row, for the estimate of the memory.

    Returns:
        The findings. If the architecture cannot be trained, it is the only finding.
    """
    try:
        config, model = _architecture(path)
    except RollartError as e:
        return [ModelFinding("architecture", "no", str(e))]
    return list(_findings(path, config, model, servers, context))


def _architecture(path: str) -> tuple[dict[str, Any], nn.Module | str]:
    """Return ``config.json``, and the model without content, or why it cannot be built so."""
    from rollart_core.training.loading import Unfit, empty_model

    if fault := model_path_fault(path):
        raise ConfigError(fault)
    folder = model_folder(path)
    if fault := model_path_fault(str(folder)):  # a hub id has been downloaded
        raise ConfigError(fault)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        return config, empty_model(str(folder))
    except Unfit as e:
        return config, str(e)


def _findings(
    path: str,
    config: dict[str, Any],
    model: nn.Module | str,
    servers: Mapping[str, str],
    context: int,
) -> Iterator[ModelFinding]:
    if isinstance(model, str):
        name = ", ".join(config.get("architectures") or [config.get("model_type", "")])
        whole = f"{name}: {model}; each rank loads the whole model"
        yield ModelFinding("architecture", "warn", whole)
    else:
        count = sum(p.numel() for p in model.parameters())
        says = f"{type(model).__name__}, {count:,} parameters"
        yield ModelFinding("architecture", "ok", says)
    yield from _of_tokenizer(path, config)
    if not isinstance(model, str):
        yield _guarded("trainer", lambda: _trainer(model))
        yield _guarded("FSDP2", lambda: _sharding(path, model))
    yield _guarded("embedded engine", lambda: _embedded(config))
    for server in _SERVERS:
        yield _server(server, servers.get(server), config.get("architectures") or [])
    yield _guarded("memory", lambda: _memory(config, context))
    if not isinstance(model, str):  # the last one, because it changes the model
        yield _guarded("LoRA", lambda: _lora(path, model))


def _guarded(part: str, check: Callable[[], tuple[State, str]]) -> ModelFinding:
    """Return the finding of a check; its error is a finding too."""
    try:
        return ModelFinding(part, *check())
    except RollartError as e:
        return ModelFinding(part, "no", str(e))
    except Exception as e:  # foreign code of an architecture
        return ModelFinding(part, "unknown", f"{type(e).__name__}: {first_line(str(e))}")


def _of_tokenizer(path: str, config: Mapping[str, Any]) -> Iterator[ModelFinding]:
    from rollart_core.models.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
    except RollartError as e:
        yield ModelFinding("tokenizer", "no", str(e))
        return
    size = config.get("text_config", config).get("vocab_size", tokenizer.vocab_size)
    stops = ", ".join(tokenizer.decode([token]) for token in tokenizer.stop_token_ids)
    says = f"{tokenizer.vocab_size:,} tokens; {stops} ends a turn"
    if tokenizer.vocab_size > size:
        yield ModelFinding("tokenizer", "no", f"{says}; the model has only {size:,} embeddings")
    else:
        yield ModelFinding("tokenizer", "ok", says)
    yield _guarded("tools", lambda: _tools(tokenizer))
    yield _guarded("reasoning", lambda: _reasoning(tokenizer))


def _tools(tokenizer: ChatTokenizer) -> tuple[State, str]:
    found = tokenizer.tool_format
    if not tokenizer.template.shows_tools:
        return "no", "the chat template shows no tools; environments without tools work"
    if found is None:
        return "no", "no installed tool format reads the calls that the chat template writes"
    return "ok", f"{type(found).__name__} reads the calls that the chat template writes"


def _reasoning(tokenizer: ChatTokenizer) -> tuple[State, str]:
    found = tokenizer.tool_format
    if found is None or not found.thought:
        return "ok", "no marks of reasoning are known; the whole message is the answer"
    return "ok", f"text after {found.thought} is reasoning"


def _trainer(model: nn.Module) -> tuple[State, str]:
    from rollart_core.plugins import registry
    from rollart_core.training.policy import ForwardSettings, Policy, supports_packing

    settings = ForwardSettings()
    for found in registry.others_first("forward_passes"):
        own: type[Policy] = registry.resolve("forward_passes", found.key)
        if own.fits(model, settings):
            return "ok", f"rows are packed; the forward pass is {found.key}"
    if supports_packing(model):
        return "ok", "rows are packed"
    if getattr(model, "_is_stateful", False):
        return "warn", "rows are padded, because the model has recurrent state"
    return "warn", "rows are padded, because its attention does not support packing"


def _sharding(path: str, model: nn.Module) -> tuple[State, str]:
    from rollart_core.training.distributed import decoder_layers
    from rollart_core.training.loading import Unfit, recipes

    layers = len(decoder_layers(model))
    if not layers:
        return "warn", "no list of layers was found: the model is sharded as one unit"
    files = weight_files(model_folder(path))
    if not files:
        return "warn", "each rank loads the whole model, because the folder has no safetensors"
    try:
        with contextlib.closing(TensorFiles(files)) as tensors:
            recipes(model, tensors)
    except Unfit as e:
        return "warn", f"{layers} layers; each rank loads the whole model, because {e}"
    return "ok", f"{layers} layers; each rank reads its shards of the files"


def _lora(path: str, model: nn.Module) -> tuple[State, str]:
    from rollart_core.config.training import LoRA
    from rollart_core.training.lora import put_adapters

    config = LoRA()
    put_adapters(model, config, path)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return "ok", f"{count:,} parameters of adapters with rank {config.rank}"


def _embedded(config: dict[str, Any]) -> tuple[State, str]:
    from rollart_cpu.inference.architecture import own_architecture

    if own_architecture(config) is not None:
        return "ok", "RollArt's decoder runs it"
    return "warn", "it runs through transformers, one row at a time"


def _server(server: str, python: str | None, architectures: list[str]) -> ModelFinding:
    """Read the architectures of a server from the files of its package, without importing it."""
    package, files, pattern = _SERVERS[server]
    if python is None:
        says = f"not checked: give its interpreter, --{package} PATH/bin/python"
        return ModelFinding(server, "unknown", says)
    try:
        asked = subprocess.run(
            [python, "-c", _FIND, package],
            capture_output=True,
            text=True,
            timeout=_FIND_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ModelFinding(server, "unknown", f"{python} does not find the package {package}")
    known: set[str] = set()
    for file in Path(asked.stdout.strip()).parent.glob(files):
        text = file.read_text(encoding="utf-8")
        for found in re.findall(pattern, text, flags=re.MULTILINE):
            known.update(re.findall(r"\w+", found))
    wanted = ", ".join(architectures)
    if known.intersection(architectures):
        return ModelFinding(server, "ok", f"this version serves {wanted}")
    return ModelFinding(server, "no", f"this version does not serve {wanted}: update it")


def _memory(config: Mapping[str, Any], context: int) -> tuple[State, str]:
    """Estimate the memory with bfloat16 products and activation checkpointing."""
    from rollart_core.runtime.workload import of_config
    from rollart_planner.memory import TrainingNumbers, rank_bytes
    from rollart_planner.roofline import engine_model

    try:
        shape = of_config(config, 2.0)
    except (KeyError, TypeError):
        return "unknown", "the shape cannot be read from config.json; set model.shape for a plan"
    ranks = []
    for count in (1, 8):
        numbers = TrainingNumbers(num_ranks=count, num_tokens=context, recomputes=True)
        needed = _size(sum(rank_bytes(shape, numbers).values()))
        ranks.append(f"{needed} on one device" if count == 1 else f"{needed} on each of {count}")
    row = engine_model(shape, 1).kv_bytes_per_token * context
    return "ok", (
        f"training rows of {context:,} tokens: {' or '.join(ranks)}; an engine: "
        f"{_size(shape.weight_bytes)} of weights and {_size(row)} for each row"
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / _GB:,.1f} GB" if num_bytes >= _GB else f"{num_bytes / 1e6:,.1f} MB"
