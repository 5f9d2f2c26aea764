"""RollArt's own commands, in the order of ``--help``; other plugins add theirs behind them.

Takes: nothing. Gives: each command's summary, and where its code is. Never: imports a command.

The code of some comes from RollArt's plugins, by the hook ``rollart_commands``. Their summaries are
here as well, so that ``--help`` loads no plugin.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A command that is imported when it is called."""

    entry_point: str | None
    """``module:function`` or ``module:app`` (a typer app with commands of its own); None: a plugin
    of RollArt says it."""
    summary: str
    example: str


_HERE = "rollart_core.cli"

COMMANDS: dict[str, Command] = {
    "run": Command(
        f"{_HERE}.run:run",
        "Train a policy as a config file says.",
        "rollart run examples/hello.yaml trainer.lr=1e-4",
    ),
    "eval": Command(
        f"{_HERE}.eval:evaluate",
        "Score models, OpenAI-compatible endpoints and baselines on held-out tasks.",
        "rollart eval --env webshop --model http://127.0.0.1:8000/v1 evaluation.tasks=50",
    ),
    "list": Command(
        f"{_HERE}.list:list_plugins",
        "List what is installed, of which kind, from which package, broken or not.",
        "rollart list environments --json",
    ),
    "info": Command(
        f"{_HERE}.info:info",
        "Show what one plugin says of itself, and the options it takes.",
        "rollart info webshop/WebShop-v1",
    ),
    "new-env": Command(
        f"{_HERE}.new:new_env",
        "Make a package with an environment that passes its own tests.",
        "rollart new-env acme-maze --id acme/Maze-v1 --non-interactive",
    ),
    "new-reward": Command(
        f"{_HERE}.new:new_reward",
        "Make a package with a reward function.",
        "rollart new-reward acme-brevity --non-interactive",
    ),
    "new-algorithm": Command(
        f"{_HERE}.new:new_algorithm",
        "Make a package with a training algorithm.",
        "rollart new-algorithm acme-loo --non-interactive",
    ),
    "new-mapper": Command(
        f"{_HERE}.new:new_mapper",
        "Make a package with a hardware mapper.",
        "rollart new-mapper acme-split --non-interactive",
    ),
    "play": Command(
        None,
        "Play an environment in the terminal.",
        "rollart play webshop --task 3 --split test",
    ),
    "check": Command(
        None,
        "Check a plugin, a project folder or a wheel: static, runtime and semantic.",
        "rollart check webshop/WebShop-v1",
    ),
    "audit": Command(
        f"{_HERE}.audit:audit",
        "Account for every ticket of a run, from its journal.",
        "rollart audit runs/hello-20260101-120000",
    ),
    "diagnose": Command(
        None,
        "Say what happened in a run: collapse, plateau, staleness and more; what to change.",
        "rollart diagnose runs/hello-20260101-120000",
    ),
    "plot": Command(
        None,
        "Draw the course of runs: reward, success, staleness, tokens a second, loss.",
        "rollart plot runs/hello-20260101-120000 --out hello.svg",
    ),
    "export": Command(
        None,
        "Write trajectories of runs as JSON lines, Parquet or ShareGPT's conversations.",
        "rollart export runs/hello-20260101-120000 --to sharegpt --min-reward 1",
    ),
    "scale": Command(
        f"{_HERE}.scale:scale",
        "Add or remove engines and env workers of a live run.",
        "rollart scale runs/hello-20260101-120000 engines=2",
    ),
    "plan": Command(
        None,
        "Show where a run's parts would go on a cluster, why, and the rates to expect.",
        "rollart plan examples/mix.yaml --cluster examples/clusters/two_kinds.yaml --mapper cost",
    ),
    "registry": Command(
        None,
        "Publish to a community registry, install from one, or run one.",
        "rollart registry install acme/Maze-v1 --registry https://rollart.example.org",
    ),
    "bench": Command(
        None,
        "Run a benchmark, ours beside a peer's; without a name, list them.",
        "rollart bench engine --json",
    ),
    "sandbox": Command(
        None,
        "See which boxes live, remove what killed runs left, find out which walls work here.",
        "rollart sandbox doctor",
    ),
    "build": Command(
        None,
        "Build the image in which an environment runs with isolation: docker.",
        "rollart build ./acme-maze",
    ),
    "model": Command(
        f"{_HERE}.model:app",
        "Make models.",
        "rollart model new ./my-model --env webshop width=128",
    ),
}
