"""`rollart bench mission`: everything in one config, in peace and under attack.

    peace    the run on a cluster of three nodes: to its end, and every ticket accounted for
    attack   the same, with an env worker, an engine and a node killed on the way
    alone    each environment alone at as many trajectories, beside what it came to in the mixture:
             that of ``peace``, or of a finished run that ``mixture`` names

The config is ``examples/mission.yaml``; ``examples/mission/engines`` starts what that needs:

    examples/mission/engines rollart bench mission

Takes: ``case`` (all, or names with commas), ``config``, ``steps``, ``seed``, ``limit_s``,
``mixture``. Gives: rows with wall times, what was lost, and success by environment. Never: starts a
Docker engine.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollart_core.bench.chaos_cluster import LocalCluster
from rollart_core.bench.chaos_run import NODE, AttackedRun, Kill, planned
from rollart_core.bench.chaos_victims import Watched
from rollart_core.bench.rows import machine, row, tell
from rollart_core.config_load import dump_yaml, read_yaml
from rollart_core.engine.audit import AuditReport, audit
from rollart_core.errors import RollartError, UserError

TAKES: Final = ("case", "cases", "config", "steps", "seed", "limit_s", "mixture", "only")

CASES: Final = ("peace", "attack", "alone")
VICTIMS: Final = ("env worker", "engine", NODE)
HOSTS_VARIABLE: Final = "MISSION_DOCKER_HOSTS"
SLOTS: Final = {"slot": 3.0}
"""Of each node: two of the three have room for all parts."""
MOST_S: Final = 1200.0
LEAST_STEPS: Final = 50
ATTACKED: Final = 1 / 3
"""Share of the run in which the attack takes place: a server that starts again takes minutes, in
which the other engines train on."""
_LIMIT_S: Final = 900.0
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to."""

    wall_s: float
    report: Mapping[str, Any]
    audited: AuditReport
    num_recovered: int

    @property
    def train_steps(self) -> int:
        """Of the weights at the end."""
        return int(self.report["train_steps"])


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``case``, or ``cases`` (all), ``config`` (``examples/mission.yaml``), ``steps``
            (its own ``stop.batches``), ``seed`` (0), ``limit_s`` (900: for a killed part to be
            back), ``mixture`` (the directory of a run of this config, for ``alone`` without
            ``peace``), ``only`` (those environments alone, with a comma between).

    Returns:
        The object of ``rollart bench --json``.

    Raises:
        UserError: When an option is none.
        RollartError: When a run did not come to its end.
    """
    cases = _cases(options.get("case", options.get("cases")))
    path = Path(str(options.get("config", "examples/mission.yaml")))
    config = _absolute(read_yaml(path))
    if steps := options.get("steps"):
        config["stop"] = {"batches": int(str(steps))}
    seed, limit_s = int(str(options.get("seed", 0))), float(str(options.get("limit_s", _LIMIT_S)))
    num_steps = int(config["stop"]["batches"])
    rows, peace, mixture = [], None, options.get("mixture")
    if "peace" in cases or ("alone" in cases and not mixture):
        peace = executed(config, [], seed, limit_s)
        rows += _peace_rows(peace, num_steps)
    if "attack" in cases:
        kills = planned(VICTIMS, 1, math.ceil(ATTACKED * num_steps), seed)
        rows += _attack_rows(executed(config, kills, seed, limit_s), peace)
    if "alone" in cases:
        report = _report(Path(str(mixture))) if mixture or not peace else peace.report
        for name, of_it in _only(report["envs"], options.get("only")).items():
            alone = executed(_alone(config, name, of_it["trained"]), [], seed, limit_s)
            rows += _alone_rows(name, of_it, alone)
            tell(f"{name}: {_success(of_it)} beside others, {_success(alone.report)} alone")
    return {"name": "mission", "machine": machine(), "rows": rows}


def _cases(given: object) -> Sequence[str]:
    asked = [case.strip() for case in str(given).split(",")] if given else list(CASES)
    unknown = [case for case in asked if case not in CASES]
    if unknown:
        raise UserError(f"case: {unknown[0]!r} is none of {', '.join(CASES)}")
    return asked


def _only(envs: Mapping[str, Any], given: object) -> Mapping[str, Any]:
    asked = [name.strip() for name in str(given).split(",")] if given else list(envs)
    if unknown := [name for name in asked if name not in envs]:
        raise UserError(f"only: {unknown[0]!r} is none of {', '.join(envs)}")
    return {name: envs[name] for name in asked}


def _absolute(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose commands and model are found from any folder."""
    if path := config["model"].get("path"):
        config["model"] = {**config["model"], "path": str(Path(path).absolute())}
    for one in config.get("engines", ()):
        engine = one["engine"]
        if isinstance(engine, dict) and "command" in engine:
            here = [str(Path(p).absolute()) if "/" in p else p for p in engine["command"]]
            one["engine"] = {**engine, "command": here}
    return config


def name_of(entry: Mapping[str, Any] | str) -> str:
    """Return what a run calls an environment of its list, each id being there once."""
    return entry if isinstance(entry, str) else str(entry.get("name") or entry["id"])


def _alone(config: Config, name: str, num_trained: int) -> Config:
    """Return the run of one environment alone, at as many trajectories as it had beside others."""
    entry = next(entry for entry in config["env"] if name_of(entry) == name)
    plain = entry if isinstance(entry, str) else {k: v for k, v in entry.items() if k != "weight"}
    rollout = config["rollout"]
    batch = rollout["groups_per_batch"] * rollout["group_size"]
    return {**config, "env": [plain], "stop": {"batches": max(1, math.ceil(num_trained / batch))}}


def executed(config: Config, kills: Sequence[Kill], seed: int, limit_s: float) -> Outcome:
    """Run a config to its end on a cluster of three nodes of this machine.

    Args:
        config: Of a run on Ray, whose parts take a ``slot`` each.
        kills: What is killed on the way.
        seed: Of who is killed.
        limit_s: For a part that was killed to be back, or for the next batch.

    Raises:
        RollartError: When it does not get there.
    """
    with tempfile.TemporaryDirectory(prefix="rollart-m-") as folder:
        runs_dir, temp_dir = Path(folder) / "runs", Path(folder) / "tmp"
        for made in (runs_dir, temp_dir):
            made.mkdir()
        watched = Watched(uuid.uuid4().hex)
        cluster = LocalCluster(watched.mark, Path(folder) / "r")
        try:
            _start(cluster)
            runtime = {**config["runtime"], "address": cluster.address}
            path = Path(folder) / "run.yaml"
            here = {**config, "runtime": runtime, "runs_dir": str(runs_dir)}
            path.write_text(dump_yaml(here), encoding="utf-8")
            rng = random.Random(seed)
            attacked = AttackedRun(path, runs_dir, temp_dir, watched, rng, cluster, limit_s)
            wall_s = attacked.execute(kills)
        finally:
            cluster.close()
        if attacked.run_dir is None:
            raise RollartError("the run made no run directory")
        report = _report(attacked.run_dir)
        tell(f"{report['train_steps']} train_steps in {wall_s:.0f} s, {len(kills)} kills")
        return Outcome(wall_s, report, audit(attacked.run_dir), len(attacked.recoveries))


def _report(run_dir: Path) -> Mapping[str, Any]:
    """Return what a finished run came to.

    Raises:
        UserError: When there is none.
    """
    try:
        found: Mapping[str, Any] = json.loads((run_dir / "report.json").read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"mixture: {run_dir} holds no report of a finished run: {e}") from e
    return found


def _success(report: Mapping[str, Any]) -> str:
    found = report["success_after"]
    return f"{found['mean']:.1%} [{found['low']:.1%}, {found['high']:.1%}]"


def _start(cluster: LocalCluster) -> None:
    """Start three nodes; those of env workers ask a Docker engine of their own."""
    hosts = os.environ.get(HOSTS_VARIABLE, "").split(",")
    cluster.start()
    for number, name in enumerate("abc"):
        host = hosts[number % len(hosts)]
        cluster.add(name, SLOTS, {"DOCKER_HOST": host} if host else {})
    cluster.wait_for(*"abc")


def _peace_rows(peace: Outcome, num_steps: int) -> list[dict[str, object]]:
    return [
        row(
            f"peace: wall time of {num_steps} train_steps",
            peace.wall_s,
            None,
            None,
            "s",
            mark=f"< {MOST_S:g} s, {LEAST_STEPS} train_steps or more",
            meets_mark=peace.wall_s < MOST_S and peace.train_steps >= LEAST_STEPS,
        ),
        _audit_row("peace", peace.audited),
    ]


def _attack_rows(attack: Outcome, peace: Outcome | None) -> list[dict[str, object]]:
    num = len(VICTIMS)
    return [
        row(
            f"attack: wall time, {', '.join(VICTIMS)} killed",
            attack.wall_s,
            peace.wall_s if peace else None,
            "in peace" if peace else None,
            "s",
            ratios=[peace.wall_s / attack.wall_s] if peace else None,
        ),
        row(
            "attack: kills that the run recovered from",
            attack.num_recovered,
            None,
            None,
            "kills",
            mark=f"{num}",
            meets_mark=attack.num_recovered == num,
        ),
        _audit_row("attack", attack.audited),
    ]


def _audit_row(case: str, audited: AuditReport) -> dict[str, object]:
    found = sum(audited.lost.values()) + audited.open + len(audited.violations)
    why = f": {audited.violations[0]}" if audited.violations else ""
    said = f"{case}: tickets lost, open or trained twice, of {audited.num_tickets}{why}"
    return row(said, found, None, None, "tickets", mark="0", meets_mark=found == 0)


def _alone_rows(name: str, mixed: Mapping[str, Any], alone: Outcome) -> list[dict[str, object]]:
    found = []
    for what in ("success", "score"):
        ours, theirs = mixed[f"{what}_after"], alone.report[f"{what}_after"]
        found.append(
            row(
                f"{name}: {what} after {mixed['trained']} trajectories beside others",
                ours["mean"],
                theirs["mean"],
                "alone",
                what,
                mark="at least as much as alone, within the intervals (95%)",
                meets_mark=ours["high"] >= theirs["low"],
            )
        )
    return found
