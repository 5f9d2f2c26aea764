"""``rollart export``: write trajectories of runs to files for other tools.

    jsonl      one JSON object a trajectory: task, status, rewards, turns; token rows on request
    parquet    the columns of the run's own shards, token ids and logprobs included
    messages   one JSON object a conversation, in the format of OpenAI's chat API: ``messages``,
               ``tools``; for `rollart sft` and other trainers
    sharegpt   one JSON object a conversation, in ShareGPT's format: ``conversations``, ``system``,
               ``tools``
    hf         a folder for ``datasets.load_dataset``: the conversations as Parquet, and a card

Takes: run directories, filters. Gives: one file or folder, and counts of exported and skipped
trajectories. Never: writes a partial file, or overwrites an existing one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer

from rollart_core.cli.output import print_json
from rollart_core.errors import UserError, did_you_mean, first_line
from rollart_core.plugins import registry
from rollart_core.store.journal_reader import JournalReader, read_trajectories
from rollart_core.store.trajectory_files import to_rows
from rollart_core.types import Message, Trajectory
from rollart_view.conversations import Conversation, Outcome, conversations, outcome_of

Format = Literal["jsonl", "parquet", "messages", "sharegpt", "hf"]
FORMATS: tuple[Format, ...] = get_args(Format)
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
ENDINGS = {
    "jsonl": ".jsonl",
    "parquet": ".parquet",
    "messages": ".messages.jsonl",
    "sharegpt": ".sharegpt.jsonl",
    "hf": "-dataset",
}
_CHUNK = 64
_Item = TypeVar("_Item")
_SPEAKERS = {"user": "human", "assistant": "gpt", "tool": "observation"}
_TOKEN = "HF_TOKEN"
_CARD = """---
pretty_name: Trajectories of {runs}
task_categories:
  - text-generation
tags:
  - rollart
  - reinforcement-learning
configs:
  - config_name: default
    data_files:
{files}
---

# Trajectories of {runs}

Conversations of a policy with its environments, exported by RollArt {release} on {date}.
Each row has `messages` in the format of OpenAI's chat API, `tools` (a JSON list, or null), and the
task, reward and success of its episode.

{facts}

## License

This dataset has no license yet. Add `license:` to the header before you publish it.
"""
_NO_HUB = "--push needs huggingface_hub: pip install 'rollart[hub]'"


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters for trajectories."""

    statuses: tuple[Outcome, ...] = ("finished", "truncated")
    envs: tuple[str, ...] = ()
    """Names in the run, ids or aliases; empty means all."""
    min_reward: float | None = None

    def refusal(self, trajectory: Trajectory) -> str:
        """Return why a trajectory is left out; empty if it is exported."""
        outcome = outcome_of(trajectory)
        if outcome not in self.statuses:
            return f"status {outcome}"
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
    """Trajectories; one of an agent program may have several conversations."""
    left_out: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    successes: list[bool] = field(default_factory=list)
    runs: Counter[str] = field(default_factory=Counter)
    envs: Counter[str] = field(default_factory=Counter)
    versions: set[int] = field(default_factory=set)

    def as_dict(self) -> dict[str, object]:
        """Return it as plain JSON."""
        return {"path": self.path, "written": self.written, "left_out": dict(self.left_out)}

    def add(self, run: str, trajectory: Trajectory) -> None:
        """Count an exported trajectory."""
        self.written += 1
        self.runs[run] += 1
        self.envs[trajectory.ticket.task.env_id] += 1
        self.versions.add(trajectory.oldest_version)
        if trajectory.reward is not None:
            self.rewards.append(trajectory.reward)
        if trajectory.success is not None:
            self.successes.append(trajectory.success)


def export(
    run_dirs: Sequence[Path], form: Format, out: Path, filters: Filters, *, tokens: bool = False
) -> Account:
    """Write the trajectories of runs that pass the filters.

    Args:
        run_dirs: Runs, finished or in progress.
        form: Format of the file.
        out: The file, or the folder for ``hf``; it must not exist.
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
    facts = {d.resolve().name: _facts(d) for d in run_dirs} if form == "hf" else {}
    wanted = _wanted(_by_name(run_dirs, filters), account)
    beside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(beside, form, wanted, tokens=tokens)
        if not account.written:
            raise UserError(f"nothing to export: {_spelled(account.left_out) or 'no trajectory'}")
        if form == "hf":
            card = _card(account, facts, _splits(beside / "data"))
            (beside / "README.md").write_text(card, encoding="utf-8")
            beside.rename(out)
        else:
            os.link(beside, out)  # unlike a rename, a link never replaces a file
    except FileExistsError:
        raise UserError(f"--out {out}: the file exists; give another path or remove it") from None
    except OSError as e:
        raise UserError(f"--out {out}: cannot be written: {e.strerror or e}") from e
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
    return account


def upload(folder: Path, repo: str) -> str:
    """Upload an exported folder to the Hugging Face Hub as a dataset; return its address.

    Args:
        folder: The folder of an export to ``hf``.
        repo: Such as ``user/name``. A new dataset is private.

    Raises:
        UserError: If there is no token or package, or the hub refuses or cannot be reached.
    """
    hub = _hub()
    try:
        api = hub.HfApi(token=os.environ[_TOKEN])
        made = api.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, repo_type="dataset", folder_path=folder)
    except Exception as e:  # those of its HTTP library are not all documented
        why = first_line(str(e) or type(e).__name__)
        raise UserError(f"--push {repo}: the upload failed: {why}. The export is {folder}") from e
    return str(made)


def _hub() -> Any:
    """Return the package for the hub.

    Raises:
        UserError: If it is not installed, or there is no token.
    """
    if not os.environ.get(_TOKEN):
        raise UserError(f"--push needs a token with write access: set {_TOKEN}")
    try:
        import huggingface_hub
    except ImportError as e:
        raise UserError(_NO_HUB) from e
    return huggingface_hub


_Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The file or folder to create. Default: one here, named after the first run.",
        show_default=False,
    ),
]
_Statuses = Annotated[
    list[str] | None,
    typer.Option(
        help="finished, truncated, failed or aborted. Can be repeated. Default: the first two.",
        show_default=False,
    ),
]
_Envs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ENV",
        help="Only this environment (name in the run, id or alias). Can be repeated.",
    ),
]
_Push = Annotated[
    str | None,
    typer.Option(
        metavar="REPO",
        help=f"With --to hf: upload to this dataset on the hub. Needs {_TOKEN}.",
    ),
]


def export_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    to: Annotated[
        str, typer.Option(help="The format: jsonl, parquet, messages, sharegpt or hf.")
    ] = "jsonl",
    out: _Out = None,
    status: _Statuses = None,
    env: _Envs = None,
    min_reward: Annotated[
        float | None,
        typer.Option("--min-reward", help="Leave out trajectories with a lower reward."),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Add token ids, masks and logprobs to a jsonl file.")
    ] = False,
    push: _Push = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export the trajectories of runs to a file that other tools can read.

    Example: rollart export runs/hello-20260101-120000 --to messages --min-reward 1
    """
    form: Any = _one_of("--to", to, FORMATS)
    statuses: Any = tuple(_one_of("--status", s, OUTCOMES) for s in status or ())
    if tokens and form != "jsonl":
        raise typer.BadParameter(f"--tokens: has no effect with --to {form}")
    if push is not None:
        if form != "hf":
            raise typer.BadParameter(f"--push {push}: needs --to hf, not --to {form}")
        _hub()
    filters = Filters(statuses or Filters().statuses, tuple(env or ()), min_reward)
    path = out or Path(runs[0].resolve().name + ENDINGS[form])
    account = export(runs, form, path, filters, tokens=tokens)
    uploaded = {"uploaded": upload(path, push)} if push else {}
    if as_json:
        print_json(account.as_dict() | uploaded)
        return
    typer.echo(f"{account.written} trajectories in {account.path}")
    for why, count in account.left_out.items():
        typer.echo(f"left out: {count} ({why})")
    for url in uploaded.values():
        typer.echo(f"uploaded to {url}")


def _one_of(option: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise typer.BadParameter(f"{option} {given}: must be one of {', '.join(known)}")
    return given


def openai_rows(run: str, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    """Yield the conversations of a trajectory in the format of OpenAI's chat API."""
    for facts, talk in _talks(run, trajectory):
        tools = {"tools": list(talk.tools)} if talk.tools else {}
        yield {"messages": list(talk.messages), **tools, **facts}


def sharegpt_rows(run: str, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    """Yield the conversations of a trajectory in ShareGPT's format, with JSON for calls."""
    for facts, talk in _talks(run, trajectory):
        rest = list(talk.messages)
        first = rest.pop(0) if rest[0]["role"] == "system" else None
        row: dict[str, Any] = {"conversations": [_as_sharegpt(message) for message in rest]}
        if first is not None:
            row["system"] = first["content"]
        if talk.tools:
            row["tools"] = json.dumps([tool["function"] for tool in talk.tools], ensure_ascii=False)
        yield row | facts


def _talks(run: str, trajectory: Trajectory) -> Iterator[tuple[dict[str, Any], Conversation]]:
    """Yield each conversation of a trajectory with the facts for its row."""
    found = conversations(trajectory)
    task = trajectory.ticket.task
    for number, talk in enumerate(found):
        part = f"/{number}" if len(found) > 1 else ""
        facts = {
            "id": f"{trajectory.ticket.ticket_id}#{trajectory.ticket.attempt}{part}",
            "env": task.env_id,
            "split": task.split,
            "task": task.index,
            "status": outcome_of(trajectory),
            "reward": trajectory.reward,
            "success": trajectory.success,
            "policy_version": trajectory.oldest_version,
            "run": run,
        }
        yield facts, talk


def _as_sharegpt(message: Message) -> dict[str, str]:
    entry = {"from": _SPEAKERS.get(message["role"], message["role"]), "value": message["content"]}
    if message.get("reasoning_content"):
        entry["reasoning_content"] = message["reasoning_content"]
    if calls := message.get("tool_calls"):
        made = [
            {
                "name": call["function"]["name"],
                "arguments": _parsed(call["function"]["arguments"]),
            }
            for call in calls
        ]
        value = json.dumps(made[0] if len(made) == 1 else made, ensure_ascii=False)
        entry |= {"from": "function_call", "value": value}
        if message["content"]:
            entry["content"] = message["content"]
    return entry


def _parsed(arguments: str) -> object:
    with suppress(ValueError):
        return json.loads(arguments)
    return arguments


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
            account.add(run_dir.resolve().name, trajectory)
            yield run_dir.resolve().name, trajectory


def _write(
    path: Path, form: Format, wanted: Iterable[tuple[str, Trajectory]], *, tokens: bool
) -> None:
    if form == "parquet":
        _write_parquet(path, (trajectory for _, trajectory in wanted))
        return
    if form == "hf":
        _write_dataset(path / "data", wanted)
        return
    with path.open("w", encoding="utf-8", errors="replace") as file:
        for run, trajectory in wanted:
            for row in _rows(form, run, trajectory, tokens=tokens):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _rows(
    form: Format, run: str, trajectory: Trajectory, *, tokens: bool
) -> Iterable[dict[str, Any]]:
    if form == "messages":
        return openai_rows(run, trajectory)
    if form == "sharegpt":
        return sharegpt_rows(run, trajectory)
    return [{**_plain(trajectory, tokens=tokens), "run": run}]


def _write_dataset(folder: Path, wanted: Iterable[tuple[str, Trajectory]]) -> None:
    """Write the conversations as Parquet, a file for each split of the tasks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    schema = _dataset_schema()
    with ExitStack() as stack:
        writers: dict[str, Any] = {}
        for chunk in _chunks(wanted):
            rows = [row for run, trajectory in chunk for row in openai_rows(run, trajectory)]
            for split in dict.fromkeys(row["split"] for row in rows):
                if split not in writers:
                    path = folder / f"{_split_name(split)}-00000-of-00001.parquet"
                    writers[split] = stack.enter_context(pq.ParquetWriter(path, schema))
                mine = [_dataset_row(row) for row in rows if row["split"] == split]
                writers[split].write_table(pa.Table.from_pylist(mine, schema=schema))


def _splits(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in folder.iterdir())


def _split_name(split: str) -> str:
    """Return a name for a split that ``datasets`` accepts."""
    return re.sub(r"\W", "_", split) or "train"


def _dataset_row(row: dict[str, Any]) -> dict[str, Any]:
    row = row | {"tools": json.dumps(row["tools"]) if "tools" in row else None}
    text = json.dumps(row, ensure_ascii=False)
    clean: dict[str, Any] = json.loads(text.encode("utf-8", "replace"))  # no lone surrogates
    return clean


def _dataset_schema() -> Any:
    """Return the columns of a dataset; ``tools`` is JSON, since each tool has its own schema."""
    import pyarrow as pa

    text = pa.string()
    function = pa.struct([("name", text), ("arguments", text)])
    call = pa.struct([("id", text), ("type", text), ("function", function)])
    names = ("role", "content", "reasoning_content", "tool_call_id", "name")
    message = pa.struct([*((name, text) for name in names), ("tool_calls", pa.list_(call))])
    return pa.schema(
        [
            ("messages", pa.list_(message)),
            *((name, text) for name in ("tools", "id", "env", "split")),
            ("task", pa.int64()),
            ("status", text),
            ("reward", pa.float64()),
            ("success", pa.bool_()),
            ("policy_version", pa.int64()),
            ("run", text),
        ]
    )


def _facts(run_dir: Path) -> dict[str, str]:
    """Return the facts of a run for the card, without paths of this machine."""
    with JournalReader(run_dir) as reader:
        config: Any = reader.config()
    found = {key: config.get(key) or {} for key in ("model", "algorithm", "reward")}
    model = str(found["model"].get("path") or "")
    is_path = model.count("/") > 1 or model.startswith((".", "/"))
    return {
        "model": Path(model).name if is_path else model,
        "algorithm": str(found["algorithm"].get("id") or ""),
        "reward": str(found["reward"].get("id") or "the return of the environment"),
    }


def _card(account: Account, facts: Mapping[str, Mapping[str, str]], splits: Sequence[str]) -> str:
    """Return the dataset card: the header that ``datasets`` reads, and the facts of the export."""
    rewards, successes = account.rewards, account.successes
    lines = [f"{n} trajectories of the environment `{env}`" for env, n in account.envs.items()]
    for run, n in account.runs.items():
        said = ", ".join(f"{key} `{value}`" for key, value in facts[run].items() if value)
        lines.append(f"{n} trajectories of the run `{run}`: {said}")
    lines.append(f"policy versions {min(account.versions)} to {max(account.versions)}")
    if rewards:
        lines.append(f"reward {sum(rewards) / len(rewards):.6g} on average")
    if successes:
        lines.append(f"success {sum(successes) / len(successes):.1%} of {len(successes)}")
    lines += [f"{n} trajectories are left out ({why})" for why, n in account.left_out.items()]
    return _CARD.format(
        files="\n".join(f"      - split: {n}\n        path: data/{n}-*.parquet" for n in splits),
        runs=", ".join(account.runs),
        release=version("rollart"),
        date=time.strftime("%Y-%m-%d"),
        facts="\n".join(f"- {line}" for line in lines),
    )


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


def _chunks(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    iterator = iter(items)
    while chunk := [t for _, t in zip(range(_CHUNK), iterator, strict=False)]:
        yield chunk


def _plain(trajectory: Trajectory, *, tokens: bool) -> dict[str, Any]:
    row: dict[str, Any] = to_rows([trajectory]).to_pylist()[0]
    for name in ("reward_components", "env_components"):
        row[name] = dict(row[name])
    row["context"] = json.loads(row["context"] or "{}")
    for turn in row["turns"]:
        turn["messages"], turn["tools"] = (
            json.loads(turn[k] or "[]") for k in ("messages", "tools")
        )
    if not tokens:
        del row["samples"]
    return row


def _spelled(counts: Counter[str]) -> str:
    return ", ".join(f"{n} of {why}" for why, n in counts.items())
