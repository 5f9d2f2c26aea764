"""Generate the tables of the documentation from the code: run ``python docs/tables.py``.

    <!-- table: config.Rollout -->  ...generated...  <!-- end -->

Takes: the config models, the registered plugins, the modules' docstrings, the list of commands.
Gives: Markdown between the marks of a page. Never: changes the text around them. A test fails if a
page is out of date or does not use a table (``tests/integration/project/test_docs_tables.py``).
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import BaseModel

from rollart_core import errors
from rollart_core.cli import COMMANDS, build_app
from rollart_core.config import envs as config_envs
from rollart_core.config import evaluation as config_evaluation
from rollart_core.config import model as config_model
from rollart_core.config import run as config
from rollart_core.config import runtime as config_runtime
from rollart_core.config import scoring as config_rewards
from rollart_core.config import training as config_training
from rollart_core.config.base import Section
from rollart_core.config.sandbox_options import PoolOptions
from rollart_core.contracts.algorithm import LossBatch
from rollart_core.contracts.env import EnvSpec, Workload
from rollart_core.contracts.hardware import Demand, Placement, Pool
from rollart_core.contracts.spec import PluginSpec
from rollart_core.plugins import registry
from rollart_core.plugins.manager import KINDS, plugins
from rollart_core.rollout.tools.action import ToolAction
from rollart_core.types import Group, Sample, Trajectory
from rollart_evals.plan import Suite, SuiteEnv
from rollart_plugins.adapters.base import AdapterOptions
from rollart_plugins.info import FieldHelp, fields_of
from rollart_plugins.sft.config import SftCheckpoint, SftConfig
from rollart_sandboxes.isolation.config import Isolation

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "rollart_core",
    "envs/rollart_envs",
    "rewards/rollart_rewards",
    "algorithms/rollart_algorithms",
    "plugins/rollart_plugins",
    "plugins/rollart_bench",
    "plugins/rollart_cpu",
    "plugins/rollart_evals",
    "plugins/rollart_planner",
    "plugins/rollart_ray",
    "plugins/rollart_registry",
    "plugins/rollart_sandboxes",
    "plugins/rollart_testing",
    "plugins/rollart_view",
)
CONFIG = (
    config,
    config_envs,
    config_evaluation,
    config_model,
    config_rewards,
    config_runtime,
    config_training,
)
"""The modules that define the sections of a run config."""
RECORDS = (
    LossBatch,
    Group,
    Trajectory,
    Sample,
    EnvSpec,
    Workload,
    Pool,
    Demand,
    Placement,
    ToolAction,
)
"""Records that plugins receive and return."""
MODULES = "docs/reference/modules.md"
"""Tables that only the site uses."""
GPU_TESTS = ROOT / "tests/gpu"
"""The cases of ``make test-gpu``, what verifies each part, and committed results files."""
MARKED = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end -->", flags=re.DOTALL)


def pages() -> list[Path]:
    """Return the pages that can have tables."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def rendered(text: str) -> str:
    """Return a page with all its tables generated again."""
    tables = all_tables()
    return MARKED.sub(lambda found: _marked(found[1], tables[found[1]]()), text)


def all_tables() -> dict[str, Callable[[], str]]:
    """Return the generator of each table, by the name in its mark."""
    tables: dict[str, Callable[[], str]] = {
        "commands": _commands,
        "command-options": _command_options,
        "errors": _errors,
        "verified": _verified,
    }
    for name, section in sections().items():
        tables[f"config.{name}"] = lambda section=section: _fields(fields_of(section))
    for name, model in plugin_models().items():
        tables[f"plugin.{name}"] = lambda model=model: _fields(fields_of(model))
    for model in (Suite, SuiteEnv):
        tables[f"evals.{model.__name__}"] = lambda model=model: _fields(fields_of(model))
    for model in (SftConfig, SftCheckpoint):
        tables[f"sft.{model.__name__}"] = lambda model=model: _fields(fields_of(model))
    for record in RECORDS:
        tables[f"record.{record.__name__}"] = lambda record=record: _record(record)
    tables["isolation"] = lambda: _fields(fields_of(Isolation))
    tables["sandboxes.pool"] = lambda: _fields(fields_of(PoolOptions))
    tables["adapter.common"] = lambda: _fields(fields_of(AdapterOptions))
    for name, model in adapter_models().items():
        tables[f"adapter.{name}"] = lambda model=model: _fields(_own_fields(model))
    return tables


def sections() -> dict[str, type[BaseModel]]:
    """Return every section of the run config."""
    return {
        name: model
        for module in CONFIG
        for name, model in vars(module).items()
        if isinstance(model, type)
        and issubclass(model, (Section, config_envs.EnvEntry))
        and model is not Section
        and not name.startswith("_")
        and name != "SyncRun"  # AsyncRun's keys without those of staleness
    }


def plugin_models() -> dict[str, type[BaseModel]]:
    """Return the config model of each of our plugins that has options, by alias."""
    return _models(kind for kind in KINDS if kind != "env_adapters")


def adapter_models() -> dict[str, type[BaseModel]]:
    """Return the config model of each of our adapters, by alias."""
    return _models(["env_adapters"])


def _models(kinds: Iterable[str]) -> dict[str, type[BaseModel]]:
    found = {}
    for kind in kinds:
        for registered in plugins().registered(kind).values():
            spec = registered.spec
            if isinstance(spec, PluginSpec) and spec.config and spec.alias:
                model = registry.config_model(kind, spec.id)
                if model is not None and registered.plugin.distribution == "rollart":
                    found[spec.alias] = model
    return found


@cache
def python_files() -> list[Path]:
    """Return all of our modules except the packages' ``__init__``."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(
        (path for path in files if path.name != "__init__.py"), key=lambda p: (p.parent, p.name)
    )


def _marked(name: str, table: str) -> str:
    return f"<!-- table: {name} -->\n\n{table}\n\n<!-- end -->"


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(columns)
    lines = [head, ["---"] * len(head), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _fields(fields: Iterable[FieldHelp]) -> str:
    rows = ((f"`{f.name}`", _cell(f.type), _default(f.default), _cell(f.help)) for f in fields)
    return _table(("key", "type", "default", "meaning"), rows)


def _record(record: type) -> str:
    """Return the fields of a record, with their docstrings if any, its own fields first."""
    rows: list[tuple[str, ...]] = []
    for base in reversed(record.__mro__[:-1]):
        rows += _own_record(ast.parse(inspect.cleandoc(inspect.getsource(base))))
    return _table(("field", "type", "default", "meaning"), rows)


def _own_record(source: ast.Module) -> Iterator[tuple[str, ...]]:
    (body,) = (node.body for node in source.body if isinstance(node, ast.ClassDef))
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            said = str(after.value.value) if is_text else ""
            given = ast.unparse(node.value) if node.value else "required"
            kind = _cell(ast.unparse(node.annotation))
            yield f"`{ast.unparse(node.target)}`", f"`{kind}`", _plain(given), _cell(said)


def _plain(default: str) -> str:
    found = re.fullmatch(r"field\(default_factory=(\w+)\)", default)
    made = {"dict": "{}", "tuple": "()", "list": "[]", "_no_rows": "empty"}
    if found:
        default = made.get(found[1], f"{found[1]}()")
    return default if default == "required" else f"`{default}`"


def _own_fields(model: type[BaseModel]) -> list[FieldHelp]:
    """Return the fields that an adapter has in addition to the common ones."""
    shared = AdapterOptions.model_fields if issubclass(model, AdapterOptions) else {}
    return [f for f in fields_of(model) if f.name not in shared]


def _default(default: str) -> str:
    """Return a default in YAML. The default of a section is the section's own defaults."""
    if default == "required":
        return "**required**"
    plain = {"None": "none", "True": "`true`", "False": "`false`"}
    if default in plain:
        return plain[default]
    if with_options := re.fullmatch(r"PluginRef\((id='[^']+', .+)\)", default):
        return f"`{{{with_options[1].replace('=', ': ').replace(chr(39), '')}}}`"
    ids = re.findall(r"PluginRef\(id='(.+?)'\)", default)
    if ids:
        return f"`[{', '.join(ids)}]`" if default.startswith("(") else f"`{ids[0]}`"
    return "see below" if "(" in default else f"`{default.strip(chr(39))}`"


def _cell(text: str) -> str:
    one_line = " ".join(text.split()).replace("``", "`").replace("|", "\\|")
    one_line = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", one_line)
    return one_line.replace("None:", "none:")


def _commands() -> str:
    rows = ((f"`{c.example}`", _cell(c.summary)) for c in COMMANDS.values())
    return _table(("command", "what it does"), rows)


def _command_options() -> str:
    """Yield a heading, the usage and a table for each command and each of its subcommands."""
    group: Any = typer.main.get_command(build_app())
    context = group.make_context("rollart", ["list"])
    commands = ((name, group.resolve_command(context, [name])[1]) for name in sorted(COMMANDS))
    return "\n\n".join(block for name, command in commands for block in _command(name, command))


def _command(name: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    if inner:
        for sub in inner.values():
            yield from _command(f"{name} {sub.name}", sub)
        return
    usage = command.collect_usage_pieces(command.context_class(command, info_name=name))
    yield f"### {name}"
    yield _cell(inspect.cleandoc(command.help or "").split("\n\n")[0])
    plain = re.sub(r"\{(.+?)\}", r"\1", " ".join([name, *usage]))
    yield f"```text\nUsage: rollart {plain}\n```"
    rows = [(f"`{_parameter(p)}`", _cell(p.help or "")) for p in command.params if not p.hidden]
    if rows:
        yield _table(("argument or option", "meaning"), rows)


def _parameter(parameter: Any) -> str:
    """Return the name of an argument as the usage shows it, or the names of an option."""
    if parameter.param_type_name == "argument" and parameter.metavar:
        return _cell(parameter.metavar)
    return ", ".join((*parameter.opts, *parameter.secondary_opts))


def _errors() -> str:
    """Return every error with its parent, its failure kind, and its meaning."""
    found = [e for e in vars(errors).values() if isinstance(e, type)]
    raised = [e for e in found if issubclass(e, errors.RollartError)]
    return _table(
        ("error", "is a", "failure kind", "retried", "meaning"),
        (
            (
                f"`{error.__name__}`",
                f"`{error.__mro__[1].__name__}`",
                f"`{error.kind.value}`" if hasattr(error, "kind") else "",
                ("yes" if error.retryable else "no") if hasattr(error, "kind") else "",
                _cell((error.__doc__ or "").split("\n\n")[0]),
            )
            for error in raised
            if error is not errors.RollartError
        ),
    )


def _verified() -> str:
    """Return what was verified where, by committed results of ``make test-gpu``."""
    rows = yaml.safe_load((GPU_TESTS / "verified.yaml").read_text(encoding="utf-8"))
    results = gpu_results()
    columns = ("what", "verified on the CPU", "verified by `make test-gpu`", "never run")
    return _table(columns, (_verified_row(row, results) for row in rows))


def gpu_results() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the newest result of each case that was not skipped, by device and part/case."""
    files = [json.loads(path.read_text()) for path in GPU_TESTS.glob("results/*.json")]
    cases = [{**case, "device": file["device"]} for file in files for case in file["cases"]]
    ran = sorted((c for c in cases if c["result"] != "skipped"), key=lambda c: str(c["date"]))
    return {(c["device"], f"{c['part']}/{c['case']}"): c for c in ran}


def _verified_row(row: dict[str, Any], results: dict[Any, dict[str, Any]]) -> Iterator[str]:
    on_cpu = [f"`{command}`, {date}" for command, date in row.get("cpu", {}).items()]
    on_gpu = []
    for (device, name), case in results.items():
        if name in row.get("cases", {}) and device == "CPU" and case["result"] == "passed":
            command = f"make test-gpu PART={case['part']} DEVICE=cpu"
            on_cpu.append(f"`{command}`, {case['date'][:10]}")
        elif name in row.get("cases", {}) and device != "CPU":
            shown = [f for f in case.get("figures", ()) if f["name"] in row["cases"][name]]
            figures = [f"{f['name']} {f['value']:.3g} {f.get('unit', '')}".strip() for f in shown]
            ran = f"{case['result']}, {device}, {case['date'][:10]}"
            on_gpu.append(": ".join([ran, *filter(None, ["; ".join(figures)])]))
    yield row["what"]
    yield "<br>".join(dict.fromkeys(on_cpu)) or "never run"
    yield "<br>".join(on_gpu) or "never run"
    yield row.get("never", "")


def modules() -> str:
    """Return a heading and a table for each folder."""
    parts = []
    for folder, files in groupby(python_files(), key=lambda path: path.parent):
        rows = ((f"`{path.name}`", sentence(path)) for path in files)
        parts += [f"### {folder.relative_to(ROOT)}", _table(("module", "what it is"), rows)]
    return "\n\n".join(parts)


@cache
def sentence(path: Path) -> str:
    """Return the first line of a module's docstring as Markdown."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return _cell(doc.split("\n\n")[0])


def main() -> None:
    """Write the tables of all pages."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(rendered(text), encoding="utf-8")


if __name__ == "__main__":
    main()
