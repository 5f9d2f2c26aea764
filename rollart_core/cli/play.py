"""``rollart play``: a person plays an environment in the terminal.

Takes: an environment, a task, what is typed. Gives: its pages and rewards, the expert's advice for
``?``. Never: asks a model; of an agent environment the person is the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from rollart_core.cli.options import as_options
from rollart_core.cli.play_agent import play_agent, refusals_told
from rollart_core.config.resolve_envs import no_split
from rollart_core.contracts.adapter import split_id
from rollart_core.errors import UserError
from rollart_core.plugins import registry
from rollart_core.types import Observation

_HINT = "?"
_CALL = 'A call: {"tool_calls": [{"name": ..., "arguments": {...}}]}'


def play(
    env: Annotated[str, typer.Argument(help="Id, alias, module:Class or ADAPTER::FOREIGN_ID.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Its options.")
    ] = None,
    task: Annotated[int, typer.Option(min=0, help="Index of the task.")] = 0,
    split: Annotated[str, typer.Option(help="Split of the task.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of the episode.")] = 0,
) -> None:
    """Play an environment in the terminal; of an agent environment, be the model."""
    given = as_options(options or [])
    check_split(env, given, split)
    made: Any = registry.make(env, **given)
    chosen = {"task": task, "split": split}
    try:
        if callable(getattr(made, "prepare", None)):
            total = play_agent(made, chosen, seed)
        else:
            total = _episode(made, chosen, seed)
    except EOFError:
        typer.echo("\nLeft before the end.")
        return
    finally:
        made.close()
    typer.echo(f"The end. Return: {total:g}")


def check_split(env: str, options: Mapping[str, object], split: str) -> None:
    """Raise UserError for a split that an environment does not have."""
    if ":" in env and split_id(env) is None:
        return  # module:Class has a default spec, which knows nothing of its splits
    spec = registry.env_spec(env, options)
    if split not in spec.splits:
        raise UserError(f"--split: {no_split(spec, split)}")


def _episode(env: Any, options: dict[str, Any], seed: int) -> float:
    """Play to the end and return the sum of the rewards."""
    with refusals_told():
        observation, info = env.reset(seed=seed, options=options)
    typer.echo(f"Type an action; {_HINT} asks the environment's expert; Ctrl-D ends.\n")
    total, over = 0.0, False
    if info.get("tools"):
        names = [tool["function"]["name"] for tool in info["tools"]]
        typer.echo(f"Tools: {', '.join(names)}. {_CALL}\n")
    while not over:
        typer.echo(_text(observation))
        if info.get("available_actions"):
            typer.echo(f"Actions: {', '.join(map(str, info['available_actions']))}")
        action = input("> ")
        if action == _HINT:
            typer.echo(f"The expert would say: {_advice(env)}\n")
            continue
        observation, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        over = bool(terminated or truncated)
        typer.echo(f"Reward: {float(reward):g}\n")
    typer.echo(_text(observation))
    if "success" in info:
        typer.echo("Success." if info["success"] else "No success.")
    return total


def _advice(env: Any) -> str:
    return str(env.oracle()) if hasattr(env, "oracle") else "nothing: this environment has none"


def _text(observation: Observation) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(f"[{m['role']}] {m['content']}" for m in observation)
