"""The result of an evaluation: the object that ``--json`` prints, ``report.json`` and ``card.md``.

Takes: the cells and episodes of an evaluation. Gives: :class:`EvaluationReport`, its file, and its
card as Markdown: what was evaluated (so that others can compare it), the players, and the results.
Never: has a value that was not measured, a secret, or a hash of remote files (a server only reports
the name of its model).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollart_core.config.resolve import ResolvedEnv, ResolvedRun
from rollart_core.store.estimates import Clusters, clustered_share
from rollart_core.store.run_dir import write_json
from rollart_evals.cells import (
    NO_TURN,
    Cell,
    cell_of,
    commonest_failure,
    plain_estimate,
    wins_of,
)
from rollart_evals.episodes import Episode
from rollart_evals.plan import GREEDY, MODEL, EvalPlan, record_of
from rollart_evals.table import Table, markdown, of_report, shown_score, shown_success

KIND = "evaluation"
CARD, REPORT = "card.md", "report.json"
_PLACES = ("runs_dir", "name", "runtime", "resolved_with")
"""Keys of a config that set only locations."""
_BLOCK = 1 << 20

Json = Mapping[str, Any]
_CARD_METHOD = """\
Means are over tasks, with 95% intervals clustered by the environment's clusters of tasks, or by
task if it has none: Wilson intervals with the effective number of attempts for success, normal
intervals for scores. pass@k is the unbiased estimator of Chen et al. (2021, arXiv:2107.03374).
Failed episodes are not in the means; they are counted separately."""


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The results of players on held-out tasks."""

    run: ResolvedRun
    plan: EvalPlan
    run_dir: str
    model_path: str
    wall_s: float
    """Duration in seconds. After a resume, only of the last process."""
    cells: tuple[Cell, ...]
    episodes: tuple[Episode, ...] = field(repr=False)
    """All attempts, including failed ones."""
    made: str
    """Time of the report, in UTC."""
    num_tasks: Mapping[str, int]
    """Environment -> number of tasks: its quota, or all tasks of the split."""
    clusters: Clusters = field(default_factory=dict, repr=False)
    """(environment, split, task) -> its cluster, if the environment has clusters of tasks."""
    model_hash: str | None = None
    """Hash of the model's files. None if no local files were evaluated."""

    @property
    def ok(self) -> bool:
        """False if a player had no completed episode, had no turn, or was stopped."""
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """The problems, one line per player and environment."""
        stopped = (
            c
            for c in self.cells
            if c.why == NO_TURN or (c.why and c.failures and not self._went_on(c))
        )
        return [f"{c.column} in {c.env}: {c.why}" for c in stopped]

    @staticmethod
    def _went_on(cell: Cell) -> bool:
        return bool(cell.num_episodes) and "failures.max_rate" not in cell.why

    @property
    def model(self) -> str | None:
        """The evaluated model: a path, or its name on the server. None if only baselines played."""
        if not self.plan.has_model:
            return None
        engine = self.run.engine
        if self.is_served or not self.model_path:
            return str(engine.options.get("base_url", engine.spec.id))
        return self.model_path

    @property
    def is_served(self) -> bool:
        """True if a server has the weights. Local files are then at most its tokenizer."""
        return self.plan.has_model and not self.run.engine.spec.follows_training

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        main = MODEL if self.plan.has_model else self.plan.columns[-1]
        greedy = GREEDY in self.plan.columns
        names = [env.name for env in self.run.envs]
        return {
            "kind": KIND,
            "ok": self.ok,
            "run_dir": self.run_dir,
            "name": self.run.config.name,
            "model": self.model,
            "wall_s": self.wall_s,
            **self._pooled(main),
            "greedy": self._pooled(GREEDY) if greedy else None,
            "attempts": len(self.episodes),
            "failures": dict(Counter(str(e.failure) for e in self.episodes if e.failed)),
            "why_failed": commonest_failure(self.episodes),
            "tokens": {
                "prompt": sum(e.num_prompt_tokens for e in self.episodes),
                "new": sum(e.num_new_tokens for e in self.episodes),
            },
            "envs": {n: self._pooled(main, n) for n in names} if len(names) > 1 else {},
            "card": self._facts(),
            "columns": list(self.plan.columns),
            "cells": [cell.as_dict() for cell in self.cells],
        }

    def _pooled(self, column: str, env: str | None = None) -> dict[str, object]:
        """Return the results of one player, over all environments or in one."""
        own = [e for e in self.episodes if e.column == column and env in (None, e.env)]
        says = {e.env for e in self.episodes if e.success is not None}
        told = (e for e in own if e.env in says and not e.failed)
        cell = cell_of(env or "", column, own, 1, says_success=True, clusters=self.clusters)
        return {
            "success": plain_estimate(clustered_share(wins_of(told), self.clusters)),
            "score": plain_estimate(cell.score or clustered_share({})),
            "failed": cell.num_failed,
            "truncated": cell.num_truncated,
            "mean_turns": cell.mean_turns,
            "mean_loss_tokens": cell.mean_loss_tokens,
        }

    def _facts(self) -> dict[str, Any]:
        config = self.run.config
        envs = []
        for env in self.run.envs:
            quota = self.plan.quotas[env.name]
            own = {"tasks": self.num_tasks[env.name], "attempts": quota.attempts}
            if num_clusters := self._num_clusters(env.name):
                own["clusters"] = num_clusters
            envs.append(env_facts(self.run, env) | own)
        return {
            "made": self.made,
            "rollart": version("rollart"),
            "model": self.model,
            "served_as": self.run.engine.options.get("model") if self.plan.has_model else None,
            "tokenizer": self.model_path if self.is_served and self.model_path else None,
            "model_hash": self.model_hash,
            "config_hash": config_hash(record_of(self.run, self.plan)),
            "seed": config.seed,
            "temperature": config.rollout.temperature if self.plan.has_model else None,
            "max_new_tokens": config.rollout.max_new_tokens if self.plan.has_model else None,
            "envs": envs,
            "left_out": dict(self.plan.left_out),
        }

    def _num_clusters(self, env: str) -> int:
        """Return the number of task clusters of an environment. 0 if it has none."""
        played = {(e.env, e.split, e.task) for e in self.episodes if e.env == env}
        return len({self.clusters[task] for task in played if task in self.clusters})

    def table(self) -> Table:
        """Return the table of environments and players."""
        return of_report(self.as_dict())


def write_report(folder: Path, report: EvaluationReport) -> Mapping[str, Any]:
    """Write ``report.json`` and ``card.md``, each to a temporary file that is then renamed."""
    plain = report.as_dict()
    write_json(folder / REPORT, plain)
    beside = folder / f"{CARD}.part"
    beside.write_text(card(plain), encoding="utf-8")
    beside.replace(folder / CARD)
    return plain


def card(report: Json) -> str:
    """Return the card as Markdown."""
    facts = report["card"]
    parts = [
        f"# {report['name']}",
        _markdown_table(("", ""), _card_facts(report)),
        "## Success",
        markdown(of_report(report)),
        "## All figures",
        _markdown_table(
            ("environment", "player", "success", "score", "pass@k", "episodes", "failed"),
            (_cell_row(cell) for cell in report["cells"]),
        ),
        _CARD_METHOD,
        "## Environments",
        _markdown_table(
            ("environment", "id", "package", "split", "tasks", "attempts", "options"),
            (_env_row(env) for env in facts["envs"]),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _card_facts(report: Json) -> Iterable[tuple[str, str]]:
    facts = report["card"]
    yield "model", f"`{facts['model']}`" if facts["model"] else "none: baselines only"
    if facts.get("served_as"):
        yield "served as", f"`{facts['served_as']}`"
    if facts.get("tokenizer"):
        yield "its tokenizer", f"`{facts['tokenizer']}`"
    if facts["model_hash"]:
        yield "SHA-256 of its files", f"`{facts['model_hash']}`"
    yield "SHA-256 of the config", f"`{facts['config_hash']}`"
    yield "seed", str(facts["seed"])
    if facts["temperature"] is not None:
        yield "temperature", f"{facts['temperature']:g}"
        yield "maximum new tokens per turn", str(facts["max_new_tokens"])
    yield "RollArt", facts["rollart"]
    yield "made", facts["made"]
    yield "attempts that failed", _failure_kinds(report["failures"]) or "none"


def _cell_row(cell: Json) -> tuple[str, ...]:
    passes = (f"@{k} {100 * e['mean']:.1f}%" for k, e in cell["pass_at"].items() if e["n"])
    kinds = f" ({_failure_kinds(cell['failures'])})" if cell["failures"] else ""
    has_success = bool(cell["success"] and cell["success"]["n"])
    return (
        f"`{cell['env']}`",
        cell["column"],
        shown_success(cell) if has_success else "-",
        shown_score(cell["score"]),
        " ".join(passes) or "-",
        str(cell["episodes"]),
        f"{cell['failed']}{kinds}",
    )


def _env_row(env: Json) -> tuple[str, ...]:
    options = json.dumps(env["options"], sort_keys=True)
    return (
        f"`{env['name']}`",
        f"`{env['id']}`",
        f"{env['package']} {env['version']}",
        env["split"],
        f"{env['tasks']} in {env['clusters']} clusters" if "clusters" in env else str(env["tasks"]),
        str(env["attempts"]),
        f"`{options}`" if env["options"] else "defaults",
    )


def _failure_kinds(failures: Json) -> str:
    return ", ".join(f"{kind}: {n}" for kind, n in failures.items())


def _markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *(list(row) for row in rows)]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a config without the keys that set only locations."""
    said = {key: value for key, value in config.items() if key not in _PLACES}
    text = json.dumps(said, sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()


def model_hash(path: str) -> str | None:
    """Return the SHA-256 of the names and contents of a model's files. None if not a folder."""
    folder = Path(path)
    if not path or not folder.is_dir():
        return None
    total = sha256()
    for file in sorted(p for p in folder.iterdir() if p.is_file()):
        content = sha256()
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                content.update(block)
        total.update(f"{file.name}\0{content.hexdigest()}\n".encode())
    return total.hexdigest()


def env_facts(run: ResolvedRun, env: ResolvedEnv) -> dict[str, Any]:
    """Return the id, version, options and tasks of an environment."""
    return {
        "name": env.name,
        "id": env.spec.id,
        "package": env.plugin.distribution,
        "version": env.plugin.version,
        "split": env.evaluation_split,
        "max_turns": env.max_turns,
        "seed": run.config.seed,
        "task_seeds": run.config.task_seeds,
        "options": json.loads(json.dumps(dict(env.plugin.options), default=str)),
    }
