"""Who may import whom. One walk over the source; nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "rollart_core": ROOT / "rollart_core",
    "rollart_envs": ROOT / "envs/rollart_envs",
    "rollart_rewards": ROOT / "rewards/rollart_rewards",
    "rollart_algorithms": ROOT / "algorithms/rollart_algorithms",
    "rollart_plugins": ROOT / "plugins/rollart_plugins",
    "rollart_bench": ROOT / "plugins/rollart_bench",
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
}
MAY_BE_HEAVY = (
    "rollart_core.training.",
    "rollart_core.models.",
    "rollart_bench.",
    "rollart_cpu.",
    "rollart_core.gateway.http_heads",
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
    ("evals",),
    ("cli",),
)
"""A package imports from its own layer and the layers above it."""

NOT_YET_BEHIND_A_HOOK = {
    ("rollart_core.cli.info", "rollart_testing.check.probe"),
    ("rollart_core.cli.play_agent", "rollart_testing.endpoint"),
    ("rollart_core.config.resolve_envs", "rollart_sandboxes.isolation.config"),
    ("rollart_core.config.resolve_plugin", "rollart_sandboxes.isolation.describe"),
    ("rollart_core.config.validation.sandboxes", "rollart_sandboxes.pool.options"),
    ("rollart_core.evals.availability", "rollart_sandboxes.pool"),
    ("rollart_core.evals.availability", "rollart_sandboxes.pool.doctor"),
    ("rollart_core.models.adapter", "rollart_cpu.inference.runner"),
    ("rollart_core.models.loading", "rollart_cpu.inference.architecture"),
    ("rollart_core.models.loading", "rollart_cpu.inference.decoder"),
    ("rollart_core.models.loading", "rollart_cpu.inference.decoder_weights"),
    ("rollart_core.models.loading", "rollart_cpu.inference.runner"),
    ("rollart_core.plugins.registry", "rollart_sandboxes.isolation.describe"),
    ("rollart_core.plugins.registry", "rollart_sandboxes.isolation.env"),
    ("rollart_core.rollout.env_worker", "rollart_sandboxes.isolation.env"),
    ("rollart_core.rollout.tools.mcp", "rollart_sandboxes.pool"),
    ("rollart_core.runtime.env_reports", "rollart_planner.explain"),
    ("rollart_core.runtime.inline", "rollart_sandboxes.pool.live"),
    ("rollart_core.runtime.launch", "rollart_ray.runtime"),
    ("rollart_core.runtime.planning", "rollart_planner.replan"),
    ("rollart_core.runtime.planning", "rollart_planner.run_plan"),
    ("rollart_core.runtime.prepare", "rollart_planner.run_plan"),
    ("rollart_core.runtime.prepare", "rollart_ray"),
    ("rollart_core.runtime.workers", "rollart_sandboxes.pool.gc"),
    ("rollart_core.training.policy", "rollart_cpu.training"),
    ("rollart_core.training.trainer", "rollart_cpu.training.kernels"),
    ("rollart_core.training.trainer", "rollart_cpu.training.native"),
}
"""Imports of built-in packages in the core. None may be added."""


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
    found = {
        (i.where, i.module)
        for i in imports()
        if i.where.startswith("rollart_core") and i.module.split(".")[0] in BUILT_INS
    }
    assert found == NOT_YET_BEHIND_A_HOOK


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
