"""``rollart sft``: fine-tune a model on rows, with the trainer and the SFT algorithm of runs.

    rows -> demonstrations -> samples -> groups of one -> Trainer.train_batch (rollart/SFT-v1)
                                |                             |
                     held-out loss of ``validation``    checkpoints, the best or last weights

Takes: a config, or a run to resume. Gives: a report, in ``report.json`` and as an object. Never:
trains by itself, or leaves a process running, however it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rollart_core.cli.output import print_json, print_table, stdout_console
from rollart_core.cli.progress import display
from rollart_core.config.base import PluginRef
from rollart_core.config.load import as_error, dump_yaml, read_yaml
from rollart_core.config.model import ModelPath, NewModel
from rollart_core.config.problems import Problem
from rollart_core.config.resolve_plugin import PluginFinder, ResolvedPlugin
from rollart_core.config.training import AuxiliaryModels, Trainer
from rollart_core.contracts.sandbox import RUN_VARIABLE
from rollart_core.errors import ConfigError, UserError, described, is_from_outside
from rollart_core.runtime.interrupts import EXIT_CODES, PREEMPTED, STOP_HINTS, interrupts
from rollart_core.scheduling.tasks import TaskSourceState
from rollart_core.store.run_dir import (
    TRAINED_MODEL,
    RunState,
    checkpoint_folder,
    new_run_dir,
    run_lock,
    runs_dir_fault,
    write_json,
)
from rollart_core.suggestions import no_run
from rollart_core.types import Group, Sample, Task, Ticket, Trajectory
from rollart_envs.questions.config import SPLITS
from rollart_plugins.sft.config import SftConfig, checked, load_sft_config
from rollart_plugins.sft.rows import Demonstration, cut, read_demonstrations, samples_of

if TYPE_CHECKING:
    from rollart_core.models.tokenizer import ChatTokenizer
    from rollart_core.runtime.process import WorkerProcess
    from rollart_core.runtime.remote import TrainerGroup
    from rollart_core.scheduling.observer import RunObserver

_CONFIG = "config.yaml"
_MEASURED_ROWS = 256
"""Rows that are sent to the trainer at a time to measure their loss."""
_METRICS = (
    *("loss", "grad_norm", "lr", "updated", "skipped", "clipped", "entropy", "tokens"),
    *("tokens_per_s", "train_s"),
)
"""The trainer's metrics that have a meaning without rollouts."""

Row = tuple[Sample, ...]
"""The samples of one conversation."""


@dataclass(slots=True)
class SftReport:
    """The result of a fine-tuning."""

    run_dir: str = ""
    ok: bool = True
    stop_reason: str = ""
    train_steps: int = 0
    batches: int = 0
    num_batches: int = 0
    """Number of batches of the whole run."""
    rows: dict[str, int] = field(default_factory=dict)
    """Number of rows by split."""
    samples_per_row: float = 1.0
    """Above 1 if the chat template rewrites earlier messages."""
    tokens: int = 0
    """Number of tokens of the training rows, once."""
    loss_tokens: int = 0
    """Number of tokens of the assistant in the training rows, once."""
    truncated: int = 0
    """Number of rows that were cut to ``max_context_tokens``."""
    dropped: int = 0
    """Number of rows that were left out because they are too long."""
    held_out_loss: list[dict[str, float]] = field(default_factory=list)
    """Each measurement: batch and mean loss per token."""
    chosen_batch: int = 0
    """The batch after which the trained model was saved."""
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Data:
    """The tokenized rows."""

    train: list[Row]
    held_out: list[Row]
    fingerprint: str
    """Changes if the training rows change."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Everything that is checked before training begins."""

    config: SftConfig
    algorithm: ResolvedPlugin[Any]
    trackers: tuple[ResolvedPlugin[Any], ...]
    demonstrations: dict[str, list[Demonstration]]


def sft(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG|FILE|KEY=VALUE]...",
            help="A config file (.yaml), data files, and settings.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check config and data without training.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Continue the run in this directory.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object. Progress goes to stderr.")
    ] = False,
) -> None:
    """Fine-tune a model on conversations, questions with answers, or exported trajectories."""
    console = Console(stderr=True) if as_json else stdout_console()
    prepared = _prepare(_config(arguments or [], resume))
    if dry_run:
        report = _checked(prepared)
    else:
        with display(console) as observer:
            report = asyncio.run(_Sft(prepared, observer).execute(resume))
    if as_json:
        print_json(asdict(report))
    else:
        _show(report)
    if not report.ok:
        typer.echo(f"Error: the run stopped: {report.stop_reason}", err=True)
        raise typer.Exit(EXIT_CODES[report.stop_reason])


def fine_tune(config: SftConfig, *, observer: RunObserver | None = None) -> SftReport:
    """Fine-tune a model and wait for the end.

    Raises:
        UserError: If it cannot start.
        RollartError: If the trainer is lost, or training diverges.
    """
    from rollart_core.scheduling.observer import NobodyWatches

    return asyncio.run(_Sft(_prepare(config), observer or NobodyWatches()).execute(None))


def _config(arguments: Sequence[str], resume: Path | None) -> SftConfig:
    if resume is None:
        return load_sft_config(arguments)
    if arguments:
        raise ConfigError(f"--resume uses the config of the run: remove {arguments[0]}")
    path = resume / _CONFIG
    if not path.is_file():
        raise ConfigError(f"--resume: {no_run(resume, _CONFIG)}")
    return checked(read_yaml(path), path)


def _prepare(config: SftConfig) -> _Prepared:
    """Resolve plugins and read the data.

    Raises:
        UserError: With one line for each problem.
    """
    from rollart_core.config.validation.consistency import model_path_fault
    from rollart_core.runtime.prepare import no_device

    problems: list[Problem] = no_device(config.model)
    find = PluginFinder(problems.append, import_classes=False, look_here=True)
    algorithm = find("algorithms", PluginRef(id="rollart/SFT-v1"), "algorithm")
    trackers = [find("trackers", one, "trackers", i) for i, one in enumerate(config.trackers)]
    if isinstance(config.model, ModelPath) and (fault := model_path_fault(config.model.path)):
        problems.append(Problem(("model", "path"), fault))
    if fault := runs_dir_fault(config.runs_dir):
        problems.append(Problem(("runs_dir",), fault))
    if problems:
        raise as_error(problems, "sft")
    return _Prepared(config, algorithm, tuple(trackers), read_demonstrations(config))


def _checked(prepared: _Prepared) -> SftReport:
    """Return what would be trained; a new model has no tokenizer yet."""
    report = SftReport(stop_reason="dry run", rows=_counts(prepared))
    model = prepared.config.model
    if isinstance(model, ModelPath):
        from rollart_core.models.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(model.path, model.chat_template_kwargs)
        data = _tokenized(prepared, tokenizer, report)
        report.num_batches = len(list(_batches(prepared.config, data.train)))
    return report


def _counts(prepared: _Prepared) -> dict[str, int]:
    return {split: len(prepared.demonstrations[split]) for split in SPLITS}


def _tokenized(prepared: _Prepared, tokenizer: ChatTokenizer, report: SftReport) -> _Data:
    """Return the samples of the rows, and count them in the report.

    Raises:
        UserError: If the chat template rejects a row, a row is too long, or none is left.
    """
    config, long = prepared.config, _Lengths(prepared.config)
    parts = [
        [
            row
            for one in prepared.demonstrations[split]
            if (row := long.fitting(one, samples_of(one, tokenizer)))
        ]
        for split in ("train", "validation")
    ]
    if long.refused:
        raise UserError(long.refusal())
    train, held_out = parts
    if not train:
        raise UserError(f"{', '.join(config.data)}: no row fits into max_context_tokens")
    samples = [sample for row in train for sample in row]
    report.truncated, report.dropped = long.truncated, long.dropped
    report.tokens = sum(s.num_tokens for s in samples)
    report.loss_tokens = sum(s.num_loss_tokens for s in samples)
    report.samples_per_row = len(samples) / len(train)
    digest = blake2b(digest_size=16)
    for sample in samples:
        digest.update(sample.token_ids.tobytes() + sample.loss_mask.tobytes())
    return _Data(train, held_out, digest.hexdigest())


@dataclass(slots=True)
class _Lengths:
    """Compares rows with the maximum length, and counts those that are longer."""

    config: SftConfig
    refused: list[tuple[str, int]] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0

    def fitting(self, one: Demonstration, row: Row) -> Row:
        """Return the samples of a row that are trained on; empty if there is nothing to learn."""
        limit, longest = self.config.max_context_tokens, max(s.num_tokens for s in row)
        if longest > limit:
            if self.config.too_long == "refuse":
                self.refused.append((one.where, longest))
            if self.config.too_long != "truncate":
                self.dropped += 1
                return ()
            row = tuple(cut(sample, limit) for sample in row)
        kept = tuple(sample for sample in row if sample.num_loss_tokens)
        self.truncated += longest > limit and bool(kept)
        self.dropped += not kept
        return kept

    def refusal(self) -> str:
        where, length = max(self.refused, key=lambda one: one[1])
        return (
            f"{where}: has {length:,} tokens, above max_context_tokens "
            f"({self.config.max_context_tokens:,}), as {len(self.refused)} rows have: raise "
            "max_context_tokens, or set too_long to truncate or drop"
        )


def _batches(config: SftConfig, rows: Sequence[Row]) -> Iterator[list[int]]:
    """Yield the rows of each batch, by index; each epoch has its own order."""
    import numpy as np

    sizes = [sum(sample.num_tokens for sample in row) for row in rows]
    for epoch in range(config.epochs):
        order = np.random.default_rng([config.seed, epoch]).permutation(len(rows)).tolist()
        batch: list[int] = []
        tokens = 0
        for index in order:
            if config.batch_tokens is None:
                is_full = len(batch) >= config.batch_rows
            else:
                is_full = bool(batch) and tokens + sizes[index] > config.batch_tokens
            if is_full:
                yield batch
                batch, tokens = [], 0
            batch.append(index)
            tokens += sizes[index]
        yield batch


def groups_of(rows: Iterable[Row]) -> list[Group]:
    """Return rows as groups of one trajectory, as the trainer receives rollouts."""
    groups = []
    for index, row in enumerate(rows):
        name = f"{index:09d}"
        task = Task("sft", "train", index, 0)
        one = Trajectory(Ticket(f"{name}.0", task, name, 0), "finished", row, reward=1.0, score=1.0)
        groups.append(Group(name, task, (one,), 1))
    return groups


def _trainer_group(
    prepared: _Prepared, model_path: str, run_dir: Path, num_batches: int
) -> TrainerGroup:
    """Return the trainer, not started, in a process for each rank."""
    from rollart_core.runtime.factories import ModelArgs
    from rollart_core.runtime.records import file_store
    from rollart_core.runtime.remote import TrainerGroup

    config = prepared.config
    return TrainerGroup(
        partial(_worker, config, run_dir),
        config.num_trainer_ranks,
        {
            "config": _with_end(config.trainer, num_batches),
            "algorithm": prepared.algorithm,
            "model": ModelArgs(model_path, config.model.dtype, config.model.device),
            "channel": None,
            "settings": {
                "deterministic": config.deterministic,
                "seed": config.seed,
                "beside": AuxiliaryModels(lora=config.lora),
            },
        },
        host="127.0.0.1",
        store=file_store(run_dir),
    )


def _worker(config: SftConfig, run_dir: Path, rank: int) -> WorkerProcess:
    from rollart_core.runtime.process import WorkerProcess

    name = f"trainer-{rank}" if rank else "trainer"
    return WorkerProcess(
        name,
        log_path=run_dir / "logs" / f"{name}.log",
        num_threads=config.trainer_threads,
        environment={RUN_VARIABLE: run_dir.name},
    )


def _with_end(trainer: Trainer, num_batches: int) -> Trainer:
    """Return the section ``trainer``; a schedule over train steps ends with the last batch."""
    schedule = trainer.schedule
    if schedule.kind == "constant" or schedule.over == "stop" or schedule.num_train_steps:
        return trainer
    end = {"num_train_steps": num_batches * trainer.updates_per_batch}
    return trainer.model_copy(update={"schedule": schedule.model_copy(update=end)})


def _show(report: SftReport) -> None:
    """Print the result for people."""
    losses = [f"{point['loss']:.4f} after {point['batch']:.0f}" for point in report.held_out_loss]
    rows = [
        ("rows", ", ".join(f"{n:,} {split}" for split, n in report.rows.items() if n)),
        ("truncated, dropped", f"{report.truncated}, {report.dropped}"),
        ("tokens", f"{report.tokens:,}, of which {report.loss_tokens:,} are trained on"),
        ("samples per row", f"{report.samples_per_row:.2f}"),
        ("batches", f"{report.batches} of {report.num_batches}"),
        ("train steps", str(report.train_steps)),
        ("held-out loss", ", ".join(losses) or "not measured"),
        ("trained model", f"after {report.chosen_batch} batches"),
        ("time", f"{report.wall_s:,.1f} s"),
        ("ended", report.stop_reason),
        ("run directory", report.run_dir),
    ]
    if not report.run_dir:
        rows = [*rows[:4], ("batches", str(report.num_batches))]
        if not report.num_batches:
            rows = [rows[0], ("model", "new: its tokenizer, lengths and batches are not known yet")]
    print_table("Fine-tuning" if report.run_dir else "This can run", ("", ""), rows)


class _Sft:
    """One fine-tuning from beginning to end."""

    def __init__(self, prepared: _Prepared, observer: RunObserver) -> None:
        self._prepared, self._config = prepared, prepared.config
        self._observer = observer
        self._report = SftReport(rows=_counts(prepared))
        self._began = time.perf_counter()
        self._earlier_s = 0.0
        self._training, self._interrupted = False, ""
        self._trackers: list[Any] = []

    async def execute(self, resume: Path | None) -> SftReport:
        """Train, or continue, and return the report."""
        config = self._config
        run_dir = resume.resolve() if resume else new_run_dir(config.runs_dir, config.name)
        if resume is None:
            content = dump_yaml(config.model_dump(mode="json"))
            (run_dir / _CONFIG).write_text(content, encoding="utf-8")
        self._report.run_dir = str(run_dir)
        with run_lock(run_dir), interrupts(self._ends_in_order):
            try:
                await self._execute(run_dir, resumes=resume is not None)
            finally:
                for tracker in list(self._trackers):
                    self._guarded(tracker, "close")
        return self._report

    async def _execute(self, run_dir: Path, *, resumes: bool) -> None:
        from rollart_core.models.tokenizer import load_tokenizer
        from rollart_core.store.checkpoints import Checkpoints

        self._observer.phase("set up", str(run_dir))
        model_path = await asyncio.to_thread(self._model, run_dir)
        kwargs = getattr(self._config.model, "chat_template_kwargs", None)
        tokenizer = await asyncio.to_thread(load_tokenizer, model_path, kwargs)
        self._data = await asyncio.to_thread(_tokenized, self._prepared, tokenizer, self._report)
        batches = list(_batches(self._config, self._data.train))
        self._report.num_batches = len(batches)
        for plugin in self._prepared.trackers:
            self._trackers.append(plugin.build())
            settings = self._config.model_dump(mode="json")
            self._guarded(self._trackers[-1], "start", run_dir, settings)
        self._trainer = _trainer_group(self._prepared, model_path, run_dir, len(batches))
        keep = self._config.checkpoint.keep
        self._checkpoints = Checkpoints(run_dir, keep, self._observer.message)
        try:
            await self._trainer.start()
            await self._train(run_dir, batches, await self._begin(resumes=resumes))
            if not self._preempted:  # then the checkpoint is all that there is time for
                await self._choose()
                self._observer.phase("save")
                await self._trainer.call("export_hf", str(run_dir / TRAINED_MODEL), model_path)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._trainer.close()))
        self._report.wall_s = self._wall_s
        write_json(run_dir / "report.json", asdict(self._report))

    def _model(self, run_dir: Path) -> str:
        """Return the path of the model; create a new one from the text of the training rows."""
        from rollart_core.models.new import new_model

        model, path = self._config.model, run_dir / "model"
        if not isinstance(model, NewModel):
            return model.path
        if not path.exists():
            train = self._prepared.demonstrations["train"]
            texts = (message["content"] for one in train for message in one.messages)
            tools = any(one.tools for one in train)
            new_model(path, model, texts, self._config.seed, tools=tools)
        return str(path)

    async def _begin(self, *, resumes: bool) -> int:
        """Return the number of batches that are done, from the newest checkpoint.

        Raises:
            ConfigError: If the data differ from those of the run to resume.
        """
        if not resumes:
            await self._measure(0)
            return 0
        state = await self._checkpoints.load_newest(self._trainer.call)
        if state.task_source.notes.get("data") != self._data.fingerprint:
            files = ", ".join(self._config.data)
            raise ConfigError(f"--resume: {files}: the rows differ from those of the run")
        self._earlier_s = state.train_wall_s
        self._report.held_out_loss = [dict(point) for point in state.validations]
        self._report.train_steps = state.train_step
        return state.policy_version

    async def _train(self, run_dir: Path, batches: Sequence[Sequence[int]], done: int) -> None:
        """Train on the batches after the first ``done``, until the last or until a signal."""
        config, total = self._config, len(batches)
        every = config.evaluate_every or -(-total // config.epochs)
        self._observer.phase("train", f"{total} batches, {len(self._data.train)} rows")
        self._training, self._report.batches = True, done
        for number, batch in enumerate(batches[done:], done + 1):
            await self._step([self._data.train[i] for i in batch], number, total)
            ends = self._interrupted or number == total
            measures = (number % every == 0 or ends) and not self._preempted
            is_best = measures and await self._measure(number)
            if ends or is_best or number % config.checkpoint.every_batches == 0:
                await self._save(run_dir, number)
            if is_best:
                self._checkpoints.mark("best", number, self._report.held_out_loss[-1])
            if ends:
                break
        self._training = False
        self._report.ok = not self._interrupted
        self._report.stop_reason = self._interrupted or f"{total} batches"
        self._report.chosen_batch = self._report.batches

    async def _step(self, rows: Sequence[Row], number: int, total: int) -> None:
        reports = await self._trainer.train_batch(groups_of(rows), 0, progress=(number - 1) / total)
        self._report.batches = number
        for one in reports:
            self._report.train_steps = one.train_step
            known = {f"train/{k}": one.metrics[k] for k in _METRICS if k in one.metrics}
            self._log(known, number)
        last = reports[-1].metrics
        line = {key: last[key] for key in ("loss", "grad_norm", "lr") if key in last}
        if self._report.held_out_loss:
            line["held_out"] = self._report.held_out_loss[-1]["loss"]
        self._observer.progress(number / total, {"batch": number, **line})

    async def _measure(self, number: int) -> bool:
        """Measure the held-out loss after a batch; return whether these weights are the best."""
        rows, loss, tokens = self._data.held_out, 0.0, 0
        for start in range(0, len(rows), _MEASURED_ROWS):
            part = [sample for row in rows[start : start + _MEASURED_ROWS] for sample in row]
            count = sum(sample.num_loss_tokens for sample in part)
            loss += count * await self._trainer.call("held_out_loss", part)
            tokens += count
        if not tokens:
            return False
        point = {"batch": float(number), "loss": loss / tokens}
        self._report.held_out_loss.append(point)
        self._log({"held_out/loss": point["loss"]}, number)
        self._observer.message(f"held-out loss {point['loss']:.4f} after {number} batches")
        trained = [p["loss"] for p in self._report.held_out_loss if p["batch"] > 0]
        return self._config.checkpoint.keep_best and point["loss"] <= min(trained, default=-1.0)

    async def _save(self, run_dir: Path, number: int) -> None:
        """Save a checkpoint."""
        folder = checkpoint_folder(run_dir, number)
        await self._trainer.call("save", str(folder), policy_version=number)
        state = RunState(
            policy_version=number,
            train_step=self._report.train_steps,
            task_source=TaskSourceState(number, notes={"data": self._data.fingerprint}),
            next_ordinal=number,
            num_requeued=0,
            open_groups={},
            train_wall_s=self._wall_s,
            validations=self._report.held_out_loss,
        )
        await self._checkpoints.finish(state)

    async def _choose(self) -> None:
        """Load the best weights, if they are kept and are not the last."""
        losses = [point["loss"] for point in self._report.held_out_loss]
        if losses and min(losses[1:], default=losses[0]) > losses[0]:
            self._observer.message(
                f"WARNING: the held-out loss rose from {losses[0]:.4f} to {min(losses[1:]):.4f} at "
                "best: lower trainer.lr"
            )
        best = self._checkpoints.marks().get("best")
        if best is not None and best != self._report.batches:
            await self._checkpoints.load(best, self._trainer.call)
            self._report.chosen_batch = best

    def _log(self, metrics: dict[str, float], number: int) -> None:
        step = self._report.train_steps
        for tracker in list(self._trackers):
            self._guarded(tracker, "log", metrics, train_step=step, policy_version=number)

    def _guarded(self, tracker: Any, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a tracker; if it raises, disable it with a message."""
        try:
            getattr(tracker, method)(*args, **kwargs)
        except BaseException as e:
            if is_from_outside(e):
                raise
            name = type(tracker).__name__
            self._observer.message(
                f"The tracker {name} is disabled: {method} raised {described(e)}"
            )
            self._trackers.remove(tracker)

    def _ends_in_order(self, reason: str) -> bool:
        """Request a stop after the current batch at the first signal during training."""
        if reason == self._interrupted == PREEMPTED:
            return True
        if not self._training or self._interrupted:
            return False
        self._interrupted = reason
        self._observer.message(f"Stopping after the current batch. {STOP_HINTS[reason]}")
        return True

    @property
    def _preempted(self) -> bool:
        return self._interrupted == PREEMPTED

    @property
    def _wall_s(self) -> float:
        """Seconds of the run, with those before it was resumed."""
        return self._earlier_s + time.perf_counter() - self._began
