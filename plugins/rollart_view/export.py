"""``rollart export``: write trajectories of runs to files for other tools.

    jsonl      one JSON object a trajectory: task, status, rewards, turns; token rows on request
    parquet    the columns of the run's own shards, token ids and logprobs included
    sharegpt   one JSON object a trajectory: ``conversations`` of ``human`` and ``gpt`` turns

Takes: run directories, filters. Gives: one file, and counts of exported and skipped trajectories.
Never: writes a partial file, or overwrites an existing one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from rollart_core.cli.output import print_json
from rollart_core.errors import UserError, did_you_mean
from rollart_core.plugins import registry
from rollart_core.store.journal_reader import JournalReader, read_trajectories
from rollart_core.store.trajectory_files import to_rows
from rollart_core.types import Status, Trajectory

Format = Literal["jsonl", "parquet", "sharegpt"]
FORMATS: tuple[Format, ...] = get_args(Format)
STATUSES: tuple[Status, ...] = get_args(Status)
ENDINGS = {"jsonl": ".jsonl", "parquet": ".parquet", "sharegpt": ".sharegpt.jsonl"}
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters for trajectories."""

    statuses: tuple[Status, ...] = ("finished", "truncated")
    envs: tuple[str, ...] = ()
    """Names in the run, ids or aliases; empty means all."""
    min_reward: float | None = None

    def refusal(self, trajectory: Trajectory) -> str:
        """Return why a trajectory is left out; empty if it is exported."""
        if trajectory.status not in self.statuses:
            return f"status {trajectory.status}"
        if self.envs and trajectory.ticket.task.env_id not in self.envs:
            return "other environments"
        if self.min_reward is None:
            return ""
        if trajectory.reward is None or trajectory.reward < self.min_reward:
            return f"reward below {self.min_reward:g}"
        return ""


@dataclass(slots=True)
class Account:
    """The counts of an export: written and left out."""

    path: str
    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, object]:
        """Return it as plain JSON."""
        return {"path": self.path, "written": self.written, "left_out": dict(self.left_out)}


def export(
    run_dirs: Sequence[Path], form: Format, out: Path, filters: Filters, *, tokens: bool = False
) -> Account:
    """Write the trajectories of runs that pass the filters.

    Args:
        run_dirs: Runs, finished or in progress.
        form: Format of the file.
        out: The file; it must not exist.
        filters: The filters for trajectories.
        tokens: Whether ``jsonl`` includes the token rows.

    Raises:
        UserError: If the file exists, cannot be written, or would be empty; or if no run has a
            requested environment.
        JournalError: If one is not a run directory.
    """
    if out.exists():
        raise UserError(f"--out {out}: the file exists; give another path or remove it")
    account = Account(str(out))
    wanted = _wanted(_by_name(run_dirs, filters), account)
    beside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(beside, form, wanted, tokens=tokens)
        if not account.written:
            raise UserError(f"nothing to export: {_spelled(account.left_out) or 'no trajectory'}")
        os.link(beside, out)  # unlike a rename, a link never replaces a file
    except FileExistsError:
        raise UserError(f"--out {out}: the file exists; give another path or remove it") from None
    except OSError as e:
        raise UserError(f"--out {out}: cannot be written: {e.strerror or e}") from e
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    return account


def export_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    to: Annotated[
        str, typer.Option("--to", help="The format: jsonl, parquet or sharegpt.")
    ] = "jsonl",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The file to create. Default: a file in this folder, named after the first run.",
            show_default=False,
        ),
    ] = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            "--status",
            help="finished, truncated or failed. Can be repeated. Default: all except failed.",
            show_default=False,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="ENV",
            help="Only this environment (name in the run, id or alias). Can be repeated.",
        ),
    ] = None,
    min_reward: Annotated[
        float | None,
        typer.Option("--min-reward", help="Leave out trajectories with a lower reward."),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Add token ids, masks and logprobs to a jsonl file.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export the trajectories of runs to a file that other tools can read.

    Example: rollart export runs/hello-20260101-120000 --to sharegpt --min-reward 1
    """
    form: Any = _one_of("--to", to, FORMATS)
    statuses: Any = tuple(_one_of("--status", s, STATUSES) for s in status or ())
    if tokens and form != "jsonl":
        raise typer.BadParameter(f"--tokens: has no effect with --to {form}")
    filters = Filters(statuses or Filters().statuses, tuple(env or ()), min_reward)
    path = out or Path(runs[0].resolve().name + ENDINGS[form])
    account = export(runs, form, path, filters, tokens=tokens)
    if as_json:
        print_json(account.as_dict())
        return
    typer.echo(f"{account.written} trajectories in {account.path}")
    for why, count in account.left_out.items():
        typer.echo(f"left out: {count} ({why})")


def _one_of(option: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise typer.BadParameter(f"{option} {given}: must be one of {', '.join(known)}")
    return given


def sharegpt(trajectory: Trajectory) -> dict[str, object]:
    """Return a trajectory as a conversation in ShareGPT's format."""
    said = []
    for turn in trajectory.turns:
        said.append({"from": "human", "value": turn.observation})
        said.append({"from": "gpt", "value": turn.action})
    task = trajectory.ticket.task
    return {
        "id": f"{trajectory.ticket.ticket_id}#{trajectory.ticket.attempt}",
        "conversations": said,
        "env": task.env_id,
        "split": task.split,
        "task": task.index,
        "reward": trajectory.reward,
        "success": trajectory.success,
    }


def _by_name(run_dirs: Sequence[Path], filters: Filters) -> list[tuple[Path, Filters]]:
    """Return the runs, each with filters that use its own names of environments."""
    if not filters.envs:
        return [(run_dir, filters) for run_dir in run_dirs]
    runs = [(run_dir, _environments(run_dir)) for run_dir in run_dirs]
    if all(envs for _, envs in runs):
        _check_envs(filters.envs, [envs for _, envs in runs])
    return [
        (run_dir, replace(filters, envs=(*filters.envs, *_named(envs, filters.envs))))
        for run_dir, envs in runs
    ]


def _environments(run_dir: Path) -> dict[str, set[str]]:
    """Return the environments of a run by name, each with its accepted names, ids and aliases."""
    with JournalReader(run_dir) as reader:
        said: Any = reader.config().get("env", [])
    if isinstance(said, dict):
        return {said["id"]: _known_as(said["id"])}
    return {entry["name"]: {entry["name"], *_known_as(entry["id"])} for entry in said}


def _known_as(env_id: str) -> set[str]:
    """Return an id, with its alias if it is installed."""
    with suppress(UserError):
        alias = registry.spec("environments", env_id).alias
        return {env_id, alias} if alias else {env_id}
    return {env_id}


def _named(envs: Mapping[str, set[str]], asked: Sequence[str]) -> list[str]:
    return [name for name, known_as in envs.items() if known_as.intersection(asked)]


def _check_envs(asked: Sequence[str], runs: Sequence[Mapping[str, set[str]]]) -> None:
    """Raise UserError for a requested environment that no run has."""
    for env in asked:
        if any(_named(envs, [env]) for envs in runs):
            continue
        names = dict.fromkeys(name for envs in runs for name in envs)
        known = {word for envs in runs for known_as in envs.values() for word in known_as}
        has = "the run has" if len(runs) == 1 else "the runs have"
        near = did_you_mean(env, sorted(known))
        raise UserError(f"--env {env}: {has} {', '.join(names)}.{near}")


def _wanted(
    runs: Iterable[tuple[Path, Filters]], account: Account
) -> Iterator[tuple[str, Trajectory]]:
    for run_dir, filters in runs:
        for trajectory in read_trajectories(run_dir):
            refusal = filters.refusal(trajectory)
            if refusal:
                account.left_out[refusal] += 1
                continue
            account.written += 1
            yield run_dir.resolve().name, trajectory


def _write(
    path: Path, form: Format, wanted: Iterable[tuple[str, Trajectory]], *, tokens: bool
) -> None:
    if form == "parquet":
        _write_parquet(path, (trajectory for _, trajectory in wanted))
        return
    with path.open("w", encoding="utf-8") as file:
        for run, trajectory in wanted:
            row = sharegpt(trajectory) if form == "sharegpt" else _plain(trajectory, tokens=tokens)
            file.write(json.dumps({**row, "run": run}, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_parquet(path: Path, trajectories: Iterable[Trajectory]) -> None:
    import pyarrow.parquet as pq

    writer: Any = None
    try:
        for chunk in _chunks(trajectories):
            rows = to_rows(chunk)
            writer = writer or pq.ParquetWriter(path, rows.schema, compression="zstd")
            writer.write_batch(rows)
    finally:
        if writer is not None:
            writer.close()


def _chunks(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    iterator = iter(trajectories)
    while chunk := [t for _, t in zip(range(_CHUNK), iterator, strict=False)]:
        yield chunk


def _plain(trajectory: Trajectory, *, tokens: bool) -> dict[str, Any]:
    row: dict[str, Any] = to_rows([trajectory]).to_pylist()[0]
    row["reward_components"] = dict(row["reward_components"])
    if not tokens:
        del row["samples"]
    return row


def _spelled(counts: Counter[str]) -> str:
    return ", ".join(f"{n} of {why}" for why, n in counts.items())
