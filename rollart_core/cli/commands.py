"""RollArt's own commands, in the order of ``--help``; commands of other plugins follow.

Takes: nothing. Gives: each command's summary and entry point. Never: imports a command.

Plugins of RollArt provide some commands through the hook ``rollart_commands``. Their summaries are
also here, so that ``--help`` loads no plugin.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A command that is imported when it is called."""

    entry_point: str | None
    """``module:function`` or ``module:app`` (a typer app with subcommands). None: a plugin of
    RollArt provides it."""
    summary: str
    example: str


_HERE = "rollart_core.cli"

COMMANDS: dict[str, Command] = {
    "run": Command(
        f"{_HERE}.run:run",
        "Train a policy with a config file.",
        "rollart run examples/hello.yaml trainer.lr=1e-4",
    ),
    "eval": Command(
        f"{_HERE}.eval:evaluate",
        "Score models, OpenAI-compatible endpoints and baselines on held-out tasks.",
        "rollart eval --env webshop --model http://127.0.0.1:8000/v1 evaluation.tasks=50",
    ),
    "list": Command(
        f"{_HERE}.list:list_plugins",
        "List installed plugins by kind, with their package, and those that are broken.",
        "rollart list environments --json",
    ),
    "info": Command(
        f"{_HERE}.info:info",
        "Show the spec of one plugin, and its options.",
        "rollart info webshop/WebShop-v1",
    ),
    "new-env": Command(
        f"{_HERE}.new:new_env",
        "Create a package with an environment that passes its own tests.",
        "rollart new-env acme-maze --id acme/Maze-v1 --non-interactive",
    ),
    "new-reward": Command(
        f"{_HERE}.new:new_reward",
        "Create a package with a reward function.",
        "rollart new-reward acme-brevity --non-interactive",
    ),
    "new-algorithm": Command(
        f"{_HERE}.new:new_algorithm",
        "Create a package with a training algorithm.",
        "rollart new-algorithm acme-loo --non-interactive",
    ),
    "new-mapper": Command(
        f"{_HERE}.new:new_mapper",
        "Create a package with a hardware mapper.",
        "rollart new-mapper acme-split --non-interactive",
    ),
    "play": Command(
        None,
        "Play an environment in the terminal.",
        "rollart play webshop --task 3 --split test",
    ),
    "check": Command(
        None,
        "Run static, runtime and semantic checks on a plugin, a project folder or a wheel.",
        "rollart check webshop/WebShop-v1",
    ),
    "audit": Command(
        f"{_HERE}.audit:audit",
        "Account for every ticket of a run from its journal.",
        "rollart audit runs/hello-20260101-120000",
    ),
    "diagnose": Command(
        None,
        "Diagnose a run: collapse, plateau, staleness and more; what to change.",
        "rollart diagnose runs/hello-20260101-120000",
    ),
    "plot": Command(
        None,
        "Plot curves of runs: reward, success, staleness, tokens per second, loss.",
        "rollart plot runs/hello-20260101-120000 --out hello.svg",
    ),
    "export": Command(
        None,
        "Export trajectories of runs as JSON lines, Parquet or ShareGPT conversations.",
        "rollart export runs/hello-20260101-120000 --to sharegpt --min-reward 1",
    ),
    "scale": Command(
        f"{_HERE}.scale:scale",
        "Add or remove engines and env workers of a live run.",
        "rollart scale runs/hello-20260101-120000 engines=2",
    ),
    "plan": Command(
        None,
        "Show how a run would be placed on a cluster, why, and the expected rates.",
        "rollart plan examples/mix.yaml --cluster examples/clusters/two_kinds.yaml --mapper cost",
    ),
    "registry": Command(
        None,
        "Publish to a community registry, install from it, or host one.",
        "rollart registry install acme/Maze-v1 --registry https://rollart.example.org",
    ),
    "bench": Command(
        None,
        "Run a benchmark of RollArt and its peers. Without a name, list all benchmarks.",
        "rollart bench engine --json",
    ),
    "sandbox": Command(
        None,
        "List live sandboxes, remove those of killed runs, and test which isolation works here.",
        "rollart sandbox doctor",
    ),
    "build": Command(
        None,
        "Build the image in which an environment runs with `isolation: docker`.",
        "rollart build ./acme-maze",
    ),
    "model": Command(
        f"{_HERE}.model:app",
        "Create models.",
        "rollart model new ./my-model --env webshop width=128",
    ),
}
