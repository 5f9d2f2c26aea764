"""Who may import whom. One walk over the source; nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {
    "rollart_core": ROOT / "rollart_core",
    "rollart_envs": ROOT / "envs/rollart_envs",
    "rollart_rewards": ROOT / "rewards/rollart_rewards",
    "rollart_algorithms": ROOT / "algorithms/rollart_algorithms",
    "rollart_plugins": ROOT / "plugins/rollart_plugins",
    "rollart_bench": ROOT / "plugins/rollart_bench",
    "rollart_evals": ROOT / "plugins/rollart_evals",
    "rollart_cpu": ROOT / "plugins/rollart_cpu",
    "rollart_planner": ROOT / "plugins/rollart_planner",
    "rollart_ray": ROOT / "plugins/rollart_ray",
    "rollart_registry": ROOT / "plugins/rollart_registry",
    "rollart_sandboxes": ROOT / "plugins/rollart_sandboxes",
    "rollart_testing": ROOT / "plugins/rollart_testing",
    "rollart_view": ROOT / "plugins/rollart_view",
}
BUILT_INS = tuple(p for p in PACKAGES if p != "rollart_core")

HEAVY = {
    *("torch", "transformers", "tokenizers", "safetensors", "jinja2", "tensorboardX", "trl"),
    *("ray", "docker", "matplotlib", "datasets", "spacy", "scipy", "aiohttp", "fastapi", "nicegui"),
    *("tuf", "securesystemslib", "cryptography", "urllib3", "mcp", "peft", "wandb"),
    *("mlflow", "trackio", "huggingface_hub", "tenacity"),
}
MAY_BE_HEAVY = (
    "rollart_core.training.",
    "rollart_core.models.",
    "rollart_bench.",
    "rollart_cpu.",
    "rollart_core.gateway.http",
    "rollart_ray.",
    "rollart_view.",
    "rollart_registry.",
    "rollart_algorithms.",
    "rollart_plugins.engines.",
    "rollart_sandboxes.",
    "rollart_plugins.serverless.",
    "rollart_plugins.weights.",
    "rollart_plugins.trackers.",
)
"""Files that exist for a heavy library; their config and plugin modules are not among them."""

LAYERS = (
    ("types",),
    ("errors", "strict_json", "suggestions"),
    ("contracts", "spaces"),
    ("config", "plugins"),
    ("gateway", "inference", "models", "rewards", "rollout", "scheduling", "store", "training"),
    ("runtime",),
    ("cli",),
)
"""A package imports from its own layer and the layers above it."""


@dataclass(frozen=True)
class Import:
    """One import statement."""

    where: str
    line: int
    module: str
    names: tuple[str, ...]
    lazy: bool
    """Inside a function."""
    typing_only: bool
    """Under ``if TYPE_CHECKING``."""

    def __str__(self) -> str:
        return f"{self.where}:{self.line} imports {self.module}"


@cache
def modules() -> dict[str, Path]:
    """Return every module of ours by name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    """Return every import of ours."""
    return tuple(i for name, path in modules().items() for i in _imports_of(name, path))


def _imports_of(name: str, path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    stack: list[tuple[ast.AST, bool, bool]] = [(tree, False, False)]
    while stack:
        node, lazy, typing_only = stack.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, node.lineno, alias.name, (), lazy, typing_only)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} is a relative import"
            assert node.module is not None
            names = tuple(alias.name for alias in node.names)
            yield Import(name, node.lineno, node.module, names, lazy, typing_only)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only = True
        children = (
            child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)
        )
        stack += [(child, lazy, typing_only) for child in children]


def cycles() -> list[set[str]]:
    """Return the modules of ours that import each other, at whatever depth; not for typing only.

    A module is in a cycle with another one if each reaches the other by imports.
    """
    needs = {name: _imported_by(name) for name in modules()}
    reached = {name: _reached(name, needs) for name in needs}
    found = []
    for name in sorted(needs):
        cycle = {other for other in reached[name] if name in reached[other]}
        if cycle and cycle not in found:
            found.append(cycle)
    return found


@cache
def _by_module() -> dict[str, list[Import]]:
    found: dict[str, list[Import]] = {}
    for one in imports():
        found.setdefault(one.where, []).append(one)
    return found


def _imported_by(name: str) -> set[str]:
    found = set()
    for one in _by_module().get(name, ()):
        whole = {f"{one.module}.{n}" for n in one.names} & modules().keys()
        rest = len(one.names) > len(whole) or not one.names
        own = {one.module} & modules().keys() if rest else set()
        found |= set() if one.typing_only else whole | own
    return found - {name}


def _reached(name: str, needs: dict[str, set[str]]) -> set[str]:
    """Return what a module imports, and what that imports, and so on."""
    seen: set[str] = set()
    pending = [*needs[name]]
    while pending:
        other = pending.pop()
        if other not in seen:
            seen.add(other)
            pending += needs[other]
    return seen


def layer(module: str) -> int:
    """Return the layer of a module of rollart_core; -1 for the package itself."""
    package = module.split(".")[1] if "." in module else ""
    layers = [n for n, names in enumerate(LAYERS) if package in names]
    assert layers or not package, f"{module} is in no layer: add it to LAYERS, in its place"
    return layers[0] if layers else -1


def test_the_walk_sees_every_package() -> None:
    assert {i.where.split(".")[0] for i in imports()} == set(PACKAGES)


def test_imports_of_the_core_run_one_way() -> None:
    wrong = [
        str(i)
        for i in imports()
        if i.where.startswith("rollart_core.")
        and i.module.startswith("rollart_core.")
        and not i.typing_only
        and layer(i.module) > layer(i.where)
    ]
    assert not wrong


def test_the_core_imports_no_built_in_package() -> None:
    wrong = [
        str(i)
        for i in imports()
        if i.where.split(".")[0] == "rollart_core" and i.module.split(".")[0] in BUILT_INS
    ]
    assert not wrong


def test_no_text_of_the_core_names_a_module_of_a_built_in_package() -> None:
    begins = tuple(f"{package}." for package in BUILT_INS)
    wrong = [
        f"{name}: {node.value!r}"
        for name, path in modules().items()
        if name.split(".")[0] == "rollart_core"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(begins)
    ]
    assert not wrong


def test_no_imports_make_a_cycle() -> None:
    assert cycles() == []


def test_built_ins_import_public_names_of_the_core_only() -> None:
    wrong = [
        str(i)
        for i in imports()
        if i.where.startswith(BUILT_INS)
        and i.module.startswith("rollart_core")
        and any(part.startswith("_") for part in (*i.module.split("."), *i.names))
    ]
    assert not wrong


def test_heavy_libraries_are_imported_where_they_belong_or_lazily() -> None:
    wrong = [
        str(i)
        for i in imports()
        if i.module.split(".")[0] in HEAVY
        and not (i.lazy or i.typing_only)
        and (not i.where.startswith(MAY_BE_HEAVY) or i.where.endswith((".config", ".plugin")))
    ]
    assert not wrong


def test_only_the_files_for_it_import_ray() -> None:
    allowed = ("rollart_ray.", "rollart_plugins.serverless.ray_serve")
    wrong = [str(i) for i in imports() if i.module.split(".")[0] == "ray"]
    assert [w for w in wrong if not w.startswith(allowed)] == []


def test_the_scheduler_does_no_io_and_reads_no_clock() -> None:
    impure = {
        *("time", "datetime", "asyncio", "threading", "multiprocessing", "concurrent", "random"),
        *("os", "io", "pathlib", "socket", "subprocess", "sqlite3", "logging", "secrets"),
    }
    wrong = [
        str(i)
        for i in imports()
        if i.where in {"rollart_core.scheduling.scheduler", "rollart_core.scheduling.events"}
        and i.module.split(".")[0] in impure
    ]
    assert not wrong


def test_no_top_level_folder_is_a_package() -> None:
    for folder in ("envs", "rewards", "algorithms", "plugins", "cookiecutter"):
        assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_typed(package: str) -> None:
    assert (PACKAGES[package] / "py.typed").exists()
