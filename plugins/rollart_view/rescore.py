"""``rollart rescore``: score the recorded trajectories of a run again, with any reward.

Takes: a run directory and a reward. Gives: old and new rewards, and typed failures. Never: plays an
episode, or changes the run.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
import yaml

from rollart_core.cli.output import print_json, print_table
from rollart_core.config.base import PluginRef
from rollart_core.config.load import as_error
from rollart_core.config.problems import Problem
from rollart_core.config.resolve_plugin import PluginFinder, ResolvedPlugin
from rollart_core.config.run import Deadlines
from rollart_core.config.scoring import Scoring, reward_problems
from rollart_core.contracts.reward import RewardRequest, RewardResult, RewardSpec
from rollart_core.errors import EpisodeError, UserError, first_line
from rollart_core.rewards.service import RewardService, RewardServicePlan, Scorer
from rollart_core.store.journal_reader import read_trajectories
from rollart_core.types import Failure, Trajectory
from rollart_view.conversations import last_messages, outcome_of

_CHUNK = 256
"""Trajectories that are scored at once."""
_SAME = 1e-9
"""Rewards with a smaller difference are equal."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """One trajectory with its recorded reward and its new one."""

    ticket_id: str
    attempt: int
    env: str
    task: int
    old: float
    new: float | None
    """None if it could not be scored."""
    components: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None

    def as_dict(self) -> dict[str, object]:
        """Return it as plain JSON."""
        row = {name: getattr(self, name) for name in self.__slots__}
        if self.failure is not None:
            row["failure"] = {k: getattr(self.failure, k) for k in ("kind", "boundary", "message")}
        return row


@dataclass(frozen=True, slots=True)
class Rescoring:
    """The result: the trajectories, and the number of others by reason."""

    rows: list[Rescored]
    left_out: Counter[str]
    has_context: bool
    """Whether any record has data of the environment for its reward."""

    def as_dict(self) -> dict[str, object]:
        """Return the totals, and those of each environment, as plain JSON."""
        envs = dict.fromkeys(row.env for row in self.rows)
        of_envs = {env: _totals([row for row in self.rows if row.env == env]) for env in envs}
        return {**_totals(self.rows), "left_out": dict(self.left_out), "envs": of_envs}


def rescore(run_dir: Path, ref: PluginRef) -> Rescoring:
    """Score the trajectories of a run that did not fail.

    Args:
        run_dir: A run directory.
        ref: The reward.

    Raises:
        UserError: If the reward cannot be built.
        JournalError: If ``run_dir`` is not a run directory.
    """
    reward, service = _service(ref)
    return asyncio.run(_rescored(run_dir, reward, service))


def rescore_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    reward: Annotated[
        str,
        typer.Option(help="The reward: its id, alias or module:Class, or YAML with its options."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A new file: one JSON object per trajectory."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score the recorded trajectories of a run again, without playing. The run is not changed.

    The exit code is 1 if no trajectory could be scored.

    Example: rollart rescore runs/hello-20260101-120000 --reward exact-match
    """
    if out is not None and out.exists():
        raise UserError(f"--out {out}: the file exists; give another path or remove it")
    ref = _ref(reward)
    found = rescore(run_dir, ref)
    if out is not None:
        _write(out, found.rows)
    if as_json:
        print_json({"run": str(run_dir), "reward": ref.id, **found.as_dict()})
    else:
        _show(f"{run_dir}: {ref.id}", found)
    if not any(row.new is not None for row in found.rows):
        raise typer.Exit(1)


def _ref(given: str) -> PluginRef:
    """Return the reward of the option.

    Raises:
        UserError: If it is neither a name nor a mapping with ``id``.
    """
    try:
        value = yaml.safe_load(given) if given.lstrip().startswith("{") else given
        return PluginRef.model_validate(value)
    except (yaml.YAMLError, ValueError):
        example = "--reward '{id: math, tolerance: 0.01}'"
        raise UserError(f"--reward {given}: must be a name, or options as in {example}") from None


def _service(ref: PluginRef) -> tuple[ResolvedPlugin[RewardSpec], RewardService]:
    """Return the reward and its service, with the default backend of a run."""
    problems: list[Problem] = []
    find = PluginFinder(problems.append, import_classes=True, look_here=True)
    scoring, backend = Scoring(), None
    reward: ResolvedPlugin[RewardSpec] | None = find("rewards", ref, "reward")
    if reward is not None:
        backend = find("reward_backends", scoring.backend_for([reward.spec]), "scoring", "backend")
        problems += reward_problems(scoring, [reward.spec], [backend.spec] if backend else [])
    if problems or reward is None or backend is None:
        raise as_error(problems, "rescore")
    plan = RewardServicePlan(scoring, [backend], Deadlines().reward_s)
    return reward, RewardService(plan)


async def _rescored(
    run_dir: Path, reward: ResolvedPlugin[RewardSpec], service: RewardService
) -> Rescoring:
    left_out, rows = Counter[str](), list[Rescored]()
    has_context = False
    try:
        scorer = service.scorer(reward)
        await service.open()
        trajectories = _scorable(read_trajectories(run_dir), left_out)
        for chunk in _groups(trajectories) if reward.spec.group else _chunks(trajectories):
            has_context = has_context or any(trajectory.context for trajectory in chunk)
            rows += await _scored(chunk, scorer, service if reward.spec.group else None)
    finally:
        await service.close()
    if not rows:
        raise UserError(f"{run_dir} has no trajectory with a reward to score again")
    return Rescoring(rows, left_out, has_context)


def _scorable(trajectories: Iterable[Trajectory], left_out: Counter[str]) -> Iterator[Trajectory]:
    for trajectory in trajectories:
        if trajectory.reward is None:
            left_out[f"status {outcome_of(trajectory)}"] += 1
        else:
            yield trajectory


def _chunks(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    iterator = iter(trajectories)
    while chunk := [t for _, t in zip(range(_CHUNK), iterator, strict=False)]:
        yield chunk


def _groups(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    """Yield the members of each group; of a ticket that was played again, the last attempt."""
    groups: dict[str, dict[str, Trajectory]] = {}
    for trajectory in trajectories:
        ticket = trajectory.ticket
        members = groups.setdefault(ticket.group_id, {})
        known = members.get(ticket.ticket_id)
        if known is None or known.ticket.attempt <= ticket.attempt:
            members[ticket.ticket_id] = trajectory
    for members in groups.values():
        yield sorted(members.values(), key=lambda t: t.ticket.index)


async def _scored(
    chunk: Sequence[Trajectory], scorer: Scorer, groups: RewardService | None
) -> list[Rescored]:
    """Score trajectories concurrently; with ``groups``, they are the members of one group."""
    if groups is not None:
        groups.on_played = lambda ticket_id, attempt: None  # members wait for one another
    tasks = [asyncio.ensure_future(scorer(request_of(t))) for t in chunk]
    if groups is not None:
        await asyncio.sleep(0)  # all of them wait now
        groups.score_group([t.ticket.ticket_id for t in chunk])
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [_row(t, result) for t, result in zip(chunk, results, strict=True)]


def request_of(trajectory: Trajectory) -> RewardRequest:
    """Return the request that the reward of the run received."""
    ticket, turns = trajectory.ticket, trajectory.turns
    return RewardRequest(
        ticket_id=ticket.ticket_id,
        env_id=ticket.task.env_id,
        split=ticket.task.split,
        task_index=ticket.task.index,
        messages=last_messages(trajectory),
        env_return=trajectory.score or 0.0,
        success=trajectory.success,
        components=trajectory.env_components,
        truncated=trajectory.status == "truncated",
        num_turns=len(turns),
        num_loss_tokens=sum(turn.num_new_tokens for turn in turns),
        context=trajectory.context,
        attempt=ticket.attempt,
    )


def _row(trajectory: Trajectory, result: RewardResult | BaseException) -> Rescored:
    ticket, old = trajectory.ticket, trajectory.reward
    assert old is not None, "only trajectories with a reward are scored"
    new, components, failure = None, dict[str, float](), None
    if isinstance(result, RewardResult):
        new, components = result.value, dict(result.components)
    elif isinstance(result, EpisodeError):
        failure = result.failure()
    else:
        raise result
    env, task = ticket.task.env_id, ticket.task.index
    return Rescored(ticket.ticket_id, ticket.attempt, env, task, old, new, components, failure)


def _totals(rows: Sequence[Rescored]) -> dict[str, object]:
    """Return the totals; the means are those of the trajectories that could be scored."""
    pairs = [(row.old, row.new) for row in rows if row.new is not None]
    failures = Counter(row.failure.kind.value for row in rows if row.failure is not None)
    return {
        "scored": len(pairs),
        "old_mean": fmean(old for old, _ in pairs) if pairs else None,
        "new_mean": fmean(new for _, new in pairs) if pairs else None,
        "changed": sum(abs(new - old) > _SAME for old, new in pairs),
        "failures": dict(failures),
    }


def _show(title: str, found: Rescoring) -> None:
    said: Any = found.as_dict()
    totals = {"all": said} if len(said["envs"]) > 1 else {}
    columns = ("", "scored", "old mean", "new mean", "changed", "failed")
    rows = [
        (
            name,
            str(one["scored"]),
            *("-" if one[k] is None else f"{one[k]:.6g}" for k in ("old_mean", "new_mean")),
            str(one["changed"]),
            str(sum(one["failures"].values())),
        )
        for name, one in {**said["envs"], **totals}.items()
    ]
    print_table(title, columns, rows)
    failures = [row.failure for row in found.rows if row.failure is not None]
    for kind, count in Counter((f.kind.value, f.boundary) for f in failures).items():
        example = next(f.message for f in failures if (f.kind.value, f.boundary) == kind)
        typer.echo(f"failed: {count} ({kind[0]} in {kind[1]}), such as: {first_line(example)}")
    for why, count in found.left_out.items():
        typer.echo(f"not scored: {count} ({why})")
    if failures and not found.has_context:
        typer.echo("The records have no data of the environment for rewards, such as `reference`.")


def _write(out: Path, rows: Iterable[Rescored]) -> None:
    try:
        with out.open("x", encoding="utf-8", errors="replace") as file:
            for row in rows:
                file.write(json.dumps(row.as_dict(), ensure_ascii=False) + "\n")
    except OSError as e:
        raise UserError(f"--out {out}: cannot be written: {e.strerror or e}") from e
