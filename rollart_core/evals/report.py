"""What an evaluation came to, as the object that ``--json`` prints and ``report.json`` keeps.

Takes: the cells and episodes of an evaluation. Gives: :class:`EvaluationReport`, ``report.json``
and ``card.md``. Never: a figure that was not measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollart_core.config.resolve import ResolvedRun
from rollart_core.evals.card import card
from rollart_core.evals.cells import (
    NO_TURN,
    Cell,
    cell_of,
    commonest_failure,
    plain_estimate,
    wins_of,
)
from rollart_core.evals.episodes import Episode
from rollart_core.evals.identity import config_hash, env_facts
from rollart_core.evals.plan import GREEDY, MODEL, EvalPlan, record_of
from rollart_core.evals.table import Table, of_report
from rollart_core.store.estimates import Clusters, clustered_share
from rollart_core.store.run_dir import write_json

KIND = "evaluation"
CARD, REPORT = "card.md", "report.json"


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """What players are worth on held-out tasks."""

    run: ResolvedRun
    plan: EvalPlan
    run_dir: str
    model_path: str
    wall_s: float
    """Of this process alone, where the evaluation was gone on with."""
    cells: tuple[Cell, ...]
    episodes: tuple[Episode, ...] = field(repr=False)
    """All attempts, failed ones too."""
    made: str
    """When, in UTC."""
    num_tasks: Mapping[str, int]
    """By environment: its quota, or all that it has."""
    clusters: Clusters = field(default_factory=dict, repr=False)
    """(environment, split, task) -> its cluster, where the environment has clusters of tasks."""
    model_hash: str | None = None
    """Of the model's files, where those here were scored."""

    @property
    def ok(self) -> bool:
        """False when a player that played had no episode or no turn of its own, or was stopped."""
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """What went wrong, a line for each player and environment."""
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
        """What was scored: a path, or what the engine says of it; None: baselines alone."""
        if not self.plan.has_model:
            return None
        engine = self.run.engine
        if self.is_served or not self.model_path:
            return str(engine.options.get("base_url", engine.spec.id))
        return self.model_path

    @property
    def is_served(self) -> bool:
        """True when a server's own weights were scored: files here are its tokenizer at most."""
        return self.plan.has_model and not self.run.engine.spec.follows_training

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
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
        """Return what one player reached, over all environments or in one."""
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
        """Return how many clusters the tasks of an environment are in; 0: it has none."""
        played = {(e.env, e.split, e.task) for e in self.episodes if e.env == env}
        return len({self.clusters[task] for task in played if task in self.clusters})

    def table(self) -> Table:
        """Return the table of environments and players."""
        return of_report(self.as_dict())


def write_report(folder: Path, report: EvaluationReport) -> Mapping[str, Any]:
    """Write ``report.json`` and ``card.md``, each beside and renamed."""
    plain = report.as_dict()
    write_json(folder / REPORT, plain)
    beside = folder / f"{CARD}.part"
    beside.write_text(card(plain), encoding="utf-8")
    beside.replace(folder / CARD)
    return plain
