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
        "Train a policy as a config file describes.",
        "rollart run examples/hello.yaml trainer.lr=1e-4",
    ),
    "sft": Command(
        None,
        "Fine-tune a model on conversations, questions with answers, or exported trajectories.",
        "rollart sft train.jsonl model=./model trainer.lr=1e-4",
    ),
    "eval": Command(
        None,
        "Score models, OpenAI-compatible endpoints and baselines on held-out tasks.",
        "rollart eval --env webshop --model http://127.0.0.1:8000/v1 evaluation.tasks=50",
    ),
    "list": Command(
        f"{_HERE}.list:list_plugins",
        "List installed plugins and their packages by kind, and show which plugins are broken.",
        "rollart list environments --json",
    ),
    "info": Command(
        None,
        "Show the spec and the options of a plugin.",
        "rollart info webshop/WebShop-v1",
    ),
    "new-env": Command(
        None,
        "Create a package with an environment that passes its own tests.",
        "rollart new-env acme-maze --id acme/Maze-v1 --non-interactive",
    ),
    "new-reward": Command(
        None,
        "Create a package with a reward function.",
        "rollart new-reward acme-brevity --non-interactive",
    ),
    "new-algorithm": Command(
        None,
        "Create a package with a training algorithm.",
        "rollart new-algorithm acme-loo --non-interactive",
    ),
    "new-mapper": Command(
        None,
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
        None,
        "Report what happened to every ticket of a run.",
        "rollart audit runs/hello-20260101-120000",
    ),
    "diagnose": Command(
        None,
        "Find problems in a run, such as a collapse, and suggest what to change.",
        "rollart diagnose runs/hello-20260101-120000",
    ),
    "plot": Command(
        None,
        "Plot the reward, success, staleness, tokens per second and loss of runs.",
        "rollart plot runs/hello-20260101-120000 --out hello.svg",
    ),
    "export": Command(
        None,
        "Export the trajectories of runs as records, conversations or datasets.",
        "rollart export runs/hello-20260101-120000 --to messages --min-reward 1",
    ),
    "rescore": Command(
        None,
        "Score the recorded trajectories of a run again, with any reward.",
        "rollart rescore runs/hello-20260101-120000 --reward exact-match",
    ),
    "scale": Command(
        None,
        "Change the number of engines and env workers in a live run.",
        "rollart scale runs/hello-20260101-120000 engines=2",
    ),
    "plan": Command(
        None,
        "Show where each worker would run on a cluster, and the expected rates.",
        "rollart plan examples/mix.yaml --cluster examples/clusters/two_kinds.yaml --mapper cost",
    ),
    "registry": Command(
        None,
        "Host a community registry, publish packages to it, or install packages from it.",
        "rollart registry install acme/Maze-v1 --registry https://rollart.example.org",
    ),
    "bench": Command(
        None,
        "Run a benchmark. If no name is given, list all benchmarks.",
        "rollart bench engine --json",
    ),
    "sandbox": Command(
        None,
        "List live sandboxes, remove those of killed runs, and test which types work here.",
        "rollart sandbox doctor",
    ),
    "build": Command(
        None,
        "Build the Docker image for an environment that runs with `isolation: docker`.",
        "rollart build ./acme-maze",
    ),
    "model": Command(
        None,
        "Create a small model, or check which parts can train and serve a model.",
        "rollart model check Qwen/Qwen3-0.6B",
    ),
}
