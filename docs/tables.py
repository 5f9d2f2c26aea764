"""The tables of these pages, made from the code: ``python docs/tables.py`` writes them anew.

    <!-- table: config.Rollout -->  ...made here...  <!-- end -->

Takes: the config models, the registered plugins, the modules' docstrings, the list of commands.
Gives: Markdown between the marks of a page. Never: touches the text around them. A test
fails when a page is out of date or leaves a table out
(``tests/integration/project/test_docs_tables.py``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from functools import cache
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel

from rollart_core.cli import COMMANDS
from rollart_core.cli.info import FieldHelp, fields_of
from rollart_core.config import envs as config_envs
from rollart_core.config import evaluation as config_evaluation
from rollart_core.config import model as config_model
from rollart_core.config import run as config
from rollart_core.config import runtime as config_runtime
from rollart_core.config import scoring as config_rewards
from rollart_core.config import training as config_training
from rollart_core.config.base import Section
from rollart_core.config.sandbox_options import PoolOptions
from rollart_core.contracts.spec import PluginSpec
from rollart_core.evals.plan import Suite, SuiteEnv
from rollart_core.plugins import registry
from rollart_core.plugins.manager import KINDS, plugins
from rollart_plugins.adapters.base import AdapterOptions
from rollart_sandboxes.isolation.config import Isolation

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "docs/config.md",
    "docs/architecture.md",
    "docs/rewards.md",
    "docs/webshop.md",
    "docs/adapters.md",
    "docs/algorithms.md",
    "docs/sandboxes.md",
    "docs/serverless.md",
    "docs/isolation.md",
    "docs/swe.md",
    "docs/evaluation.md",
)
FOLDERS = (
    "rollart_core",
    "envs/rollart_envs",
    "rewards/rollart_rewards",
    "algorithms/rollart_algorithms",
    "plugins/rollart_plugins",
    "plugins/rollart_bench",
    "plugins/rollart_cpu",
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
"""The modules that the sections of a run config are in."""
MARKED = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end -->", flags=re.DOTALL)


def rendered(text: str) -> str:
    """Return a page with all its tables made anew."""
    tables = all_tables()
    return MARKED.sub(lambda found: _marked(found[1], tables[found[1]]()), text)


def all_tables() -> dict[str, Callable[[], str]]:
    """Return what makes each table, by the name that stands in its mark."""
    tables: dict[str, Callable[[], str]] = {"commands": _commands, "modules": _modules}
    for name, section in sections().items():
        tables[f"config.{name}"] = lambda section=section: _fields(fields_of(section))
    for name, model in plugin_models().items():
        tables[f"plugin.{name}"] = lambda model=model: _fields(fields_of(model))
    for model in (Suite, SuiteEnv):
        tables[f"evals.{model.__name__}"] = lambda model=model: _fields(fields_of(model))
    tables["isolation"] = lambda: _fields(fields_of(Isolation))
    tables["boxes.pool"] = lambda: _fields(fields_of(PoolOptions))
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
    """Return the config model of every plugin of ours that takes options, by alias."""
    return _models(kind for kind in KINDS if kind != "env_adapters")


def adapter_models() -> dict[str, type[BaseModel]]:
    """Return the config model of every adapter of ours, by alias."""
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
    """Return every module of ours but the packages' own."""
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


def _own_fields(model: type[BaseModel]) -> list[FieldHelp]:
    """Return the fields that an adapter has besides those of every adapter."""
    shared = AdapterOptions.model_fields if issubclass(model, AdapterOptions) else {}
    return [f for f in fields_of(model) if f.name not in shared]


def _default(default: str) -> str:
    """Return a default as YAML writes it; that of a section is the section's own defaults."""
    if default == "required":
        return "**required**"
    plain = {"None": "none", "True": "`true`", "False": "`false`"}
    if default in plain:
        return plain[default]
    ids = re.findall(r"PluginRef\(id='(.+?)'\)", default)
    if ids:
        return f"`[{', '.join(ids)}]`" if default.startswith("(") else f"`{ids[0]}`"
    return "see below" if "(" in default else f"`{default.strip(chr(39))}`"


def _cell(text: str) -> str:
    one_line = " ".join(text.split()).replace("``", "`").replace("|", "\\|")
    return one_line.replace("None:", "none:")


def _commands() -> str:
    rows = ((f"`{c.example}`", _cell(c.summary)) for c in COMMANDS.values())
    return _table(("command", "what it does"), rows)


def _modules() -> str:
    """Return a heading and a table for each folder."""
    parts = []
    for folder, files in groupby(python_files(), key=lambda path: path.parent):
        rows = ((f"`{path.name}`", sentence(path)) for path in files)
        parts += [f"### {folder.relative_to(ROOT)}", _table(("module", "what it is"), rows)]
    return "\n\n".join(parts)


@cache
def sentence(path: Path) -> str:
    """Return the first line of a module's docstring, its markup turned into Markdown's."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = doc.split("\n\n")[0]
    return re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", _cell(first))


def main() -> None:
    """Write the tables of every page."""
    for name in PAGES:
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        page.write_text(rendered(text), encoding="utf-8")


if __name__ == "__main__":
    main()
