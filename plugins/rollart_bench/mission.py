"""`rollart bench mission`: all features in one config, undisturbed and under attack.

    peace    the run on a cluster of three nodes: to its end, with every ticket accounted for
    attack   the same, with an env worker, an engine and a node killed during the run, until it has
             recovered from the last kill
    alone    each environment alone with as many trajectories, compared with its result in the
             mixture: that of ``peace``, or of a finished run that ``mixture`` names

The config is ``examples/mission.yaml``. ``examples/mission/engines`` starts its requirements:

    examples/mission/engines rollart bench mission

The short form needs no Docker engine, no SGLang and no other package. It uses the same config with
a new tiny model, a second class of embedded engines instead of the SGLang server, and its own
Lambda. It omits the environments that cannot run here, and kills an env worker.

Takes: ``case`` (all, or names separated by commas), ``config``, ``steps``, ``seed``, ``limit_s``,
``mixture``, ``only``, ``short``. Gives: rows with wall times, lost tickets, and success by
environment. Never: starts a Docker engine.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollart_bench.chaos_cluster import LocalCluster
from rollart_bench.chaos_run import NODE, AttackedRun, Kill, planned
from rollart_bench.chaos_victims import Watched
from rollart_bench.learn import EXAMPLES, example
from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import BenchSkipped, require, why_no_sandbox
from rollart_core.config.load import dump_yaml, read_yaml
from rollart_core.errors import RollartError, UserError
from rollart_core.plugins import registry
from rollart_core.store.audit import AuditReport, audit
from rollart_plugins.engines.server_process import free_port
from rollart_ray.local import variables

TAKES: Final = ("case", "cases", "config", "steps", "seed", "limit_s", "mixture", "only", "short")

CASES: Final = ("peace", "attack", "alone")
VICTIMS: Final = ("env worker", "engine", NODE)
SHORT_CASES, SHORT_VICTIMS, SHORT_STEPS = ("attack",), ("env worker",), 2
HOSTS_VARIABLE: Final = "MISSION_DOCKER_HOSTS"
SLOTS: Final = {"slot": 3.0}
"""The slots of each node. Two of the three nodes have enough for all workers."""
MOST_S: Final = 1200.0
LEAST_STEPS: Final = 50
ATTACKED: Final = 1 / 3
"""Share of the run in which the attack happens. A server needs minutes to restart, and the other
engines continue meanwhile."""
_LIMIT_S: Final = 900.0
_MOST_STEPS: Final = 100_000
"""An upper bound: an attacked run is asked to end long before."""
_LAMBDA_UP_S: Final = 60.0
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MissionOutcome:
    """The results of one run."""

    wall_s: float
    report: Mapping[str, Any]
    audited: AuditReport
    num_recovered: int

    @property
    def train_steps(self) -> int:
        """The batches that the final weights were trained on, one train_step each."""
        return int(self.report["batches"])


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``case``, or ``cases`` (all), ``config`` (``examples/mission.yaml``), ``steps``
            (its own ``stop.batches``), ``seed`` (0), ``limit_s`` (900: time limit for a killed
            worker to be back), ``mixture`` (the directory of a run of this config, for ``alone``
            without ``peace``), ``only`` (only those environments, separated by commas), ``short``:
            ``attack`` with one kill, 2 steps, and no additional packages.

    Returns:
        The object of ``rollart bench --json``.

    Raises:
        UserError: If an option is not valid.
        BenchSkipped: If a requirement of the config is missing.
        RollartError: If a run does not end properly.
    """
    asked = Options("mission", options)
    key = "case" if "case" in asked else "cases"
    cases = asked.names(key, CASES, SHORT_CASES if asked.short else CASES)
    path = example(asked.text("config", "mission.yaml"))
    mixture = asked.path("mixture", "") if "mixture" in asked else None
    only = asked.names("only", ())
    seed, limit_s = asked.integer("seed", 0, least=0), asked.number("limit_s", _LIMIT_S)
    require("torch", "transformers", extra="train")
    require("ray", "scipy", extra="ray")
    config = _absolute(read_yaml(path), path)
    skipped: dict[str, str] = {}
    if asked.short:
        config, skipped = _shortened(config)
    config["stop"] = {"batches": asked.integer("steps", int(config["stop"]["batches"]))}
    if lacks := _lacking(config, with_lambda=not asked.short):
        raise BenchSkipped(f"{'; '.join(lacks)}: see examples/mission/README.md")
    victims = SHORT_VICTIMS if asked.short else VICTIMS
    work = _Work(config, cases, seed, limit_s, victims, mixture, only)
    if not asked.short:
        return result("mission", _measured(work))
    with _own_lambda() as url:
        _backend(config)["endpoint_url"] = url
        return result("mission", _measured(work), skipped_cases=skipped)


@dataclass(frozen=True, slots=True)
class _Work:
    """The requested settings."""

    config: Config
    cases: Sequence[str]
    seed: int
    limit_s: float
    victims: Sequence[str]
    mixture: Path | None
    only: Sequence[str]


def _measured(work: _Work) -> list[dict[str, object]]:
    """Run the cases and return their rows."""
    config, seed, limit_s = work.config, work.seed, work.limit_s
    num_steps = int(config["stop"]["batches"])
    rows, peace = [], None
    if "peace" in work.cases or ("alone" in work.cases and not work.mixture):
        peace = executed(config, [], seed, limit_s)
        rows += _peace_rows(peace, num_steps)
    if "attack" in work.cases:
        span, rollout = math.ceil(ATTACKED * num_steps), config["rollout"]
        per_step = rollout["groups_per_batch"] * rollout["group_size"]
        kills = planned(work.victims, 1, span, seed, episodes_per_step=per_step)
        rows += _attack_rows(executed(config, kills, seed, limit_s), peace, work.victims)
    if "alone" in work.cases:
        mixture = _report(work.mixture) if work.mixture else peace.report if peace else {}
        for name, of_it in _only(mixture["envs"], work.only).items():
            alone = executed(_alone(config, name, of_it["trained"]), [], seed, limit_s)
            rows += _alone_rows(name, of_it, alone)
            echo(f"{name}: {_success(of_it)} in the mixture, {_success(alone.report)} alone")
    return rows


def _shortened(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config of the short form, and the environments that it omits here."""
    skipped: dict[str, str] = {}
    envs = []
    for entry in config["env"]:
        if why := _env_lacks(entry):
            skipped[name_of(entry)] = why
        else:
            envs.append(entry)
    served = [{**one, "engine": "embedded"} for one in config.get("engines", ())]
    small = {"groups_per_batch": 2, "group_size": 4, "max_new_tokens": 16, "max_concurrent": 16}
    short = {
        **config,
        "model": {"kind": "new", "num_layers": 1, "width": 64, "num_heads": 1, "vocab_size": 512},
        "engines": served,
        "env": envs,
        "rollout": {**config["rollout"], **small},
        "evaluation": {"tasks": 4, "greedy": False},
        "stop": {"batches": SHORT_STEPS},
    }
    return short, skipped


def _lacking(config: Config, *, with_lambda: bool) -> list[str]:
    """Return the missing requirements of a config, one sentence each."""
    found = [f"{name_of(entry)}: {why}" for entry in config["env"] if (why := _env_lacks(entry))]
    path = config["model"].get("path")
    if path and not Path(path).is_dir():
        found.append(f"there is no model {path}")
    for one in config.get("engines", ()):
        command = one["engine"].get("command", ()) if isinstance(one["engine"], dict) else ()
        if command and not Path(command[0]).exists():
            found.append(f"the engine {one['name']} needs {command[0]}")
    if with_lambda:
        url = str(_backend(config).get("endpoint_url", ""))
        host, _, port = url.removeprefix("http://").partition(":")
        if url and not _answers(host, int(port)):
            found.append(f"no Lambda answers at {url}")
    return found


def _env_lacks(entry: Mapping[str, Any] | str) -> str:
    """Return the missing requirement of an environment; empty if there is none."""
    env_id = entry if isinstance(entry, str) else str(entry["id"])
    if env_id not in registry.names("environments"):
        return "not installed: examples/mission/setup installs it"
    sandbox = None if isinstance(entry, str) else entry.get("sandbox")
    if sandbox is None:
        return ""
    options = {} if isinstance(sandbox, str) else {k: v for k, v in sandbox.items() if k != "id"}
    return why_no_sandbox(sandbox if isinstance(sandbox, str) else str(sandbox["id"]), options)


def _backend(config: Config) -> dict[str, Any]:
    """Return the options of the reward backend; those of a config may be modified."""
    backend = config.get("scoring", {}).get("backend")
    return backend if isinstance(backend, dict) else {}


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError:
        return False
    return True


@contextmanager
def _own_lambda() -> Iterator[str]:
    """Run the mission's Lambda in a separate process, and provide its address."""
    require("boto3", "awslambdaric", extra="lambda")
    require("aiohttp", extra="serverless")
    port = free_port()
    program = EXAMPLES / "mission" / "lambda_here.py"
    process = subprocess.Popen([sys.executable, str(program), str(port)], stdin=subprocess.DEVNULL)
    keys = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local"}
    try:
        until = time.monotonic() + _LAMBDA_UP_S
        while not _answers("127.0.0.1", port):
            if process.poll() is not None or time.monotonic() > until:
                raise RollartError(f"{program} did not start")
            time.sleep(0.05)
        with variables(keys):  # the run's processes inherit them
            yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _only(envs: Mapping[str, Any], asked: Sequence[str]) -> Mapping[str, Any]:
    """Return the requested environments of a report. Default: all.

    Raises:
        UserError: If one does not exist.
    """
    if unknown := [name for name in asked if name not in envs]:
        raise UserError(f"only: {unknown[0]!r} is none of {', '.join(envs)}")
    return {name: envs[name] for name in asked or envs}


def _absolute(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return a config whose commands and model are found from any folder.

    Args:
        config: Its paths are relative to the parent folder of the examples.
        source: The file that it was read from.
    """
    root = EXAMPLES.parent if source.resolve().parent == EXAMPLES else Path.cwd()
    if path := config["model"].get("path"):
        config["model"] = {**config["model"], "path": str(root / path)}
    for one in config.get("engines", ()):
        engine = one["engine"]
        if isinstance(engine, dict) and "command" in engine:
            here = [str(root / p) if "/" in p else p for p in engine["command"]]
            one["engine"] = {**engine, "command": here}
    return config


def name_of(entry: Mapping[str, Any] | str) -> str:
    """Return the name of an entry of the run's environment list. Ids are unique."""
    return entry if isinstance(entry, str) else str(entry.get("name") or entry["id"])


def _alone(config: Config, name: str, num_trained: int) -> Config:
    """Return the config for one environment alone, with its trajectories of the mixture."""
    entry = next(entry for entry in config["env"] if name_of(entry) == name)
    plain = entry if isinstance(entry, str) else {k: v for k, v in entry.items() if k != "weight"}
    rollout = config["rollout"]
    batch = rollout["groups_per_batch"] * rollout["group_size"]
    return {**config, "env": [plain], "stop": {"batches": max(1, math.ceil(num_trained / batch))}}


def executed(config: Config, kills: Sequence[Kill], seed: int, limit_s: float) -> MissionOutcome:
    """Run a config to its end on a cluster of three nodes on this machine.

    Args:
        config: A run on Ray whose workers take a ``slot`` each. With kills, it continues after the
            steps of its ``stop`` until it has recovered from the last kill.
        kills: The kills during the run.
        seed: The seed for the choice of victims.
        limit_s: Time limit for a killed worker to be back, or for the next batch.

    Raises:
        RollartError: If the run fails.
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
            num_steps = int(config["stop"]["batches"]) if kills else None
            if kills:
                here["stop"] = {"batches": _MOST_STEPS}
            path.write_text(dump_yaml(here), encoding="utf-8")
            rng = random.Random(seed)
            attacked = AttackedRun(path, runs_dir, temp_dir, watched, rng, cluster, limit_s)
            wall_s = attacked.execute(kills, num_steps)
        finally:
            cluster.close()
        if attacked.run_dir is None:
            raise RollartError("the run did not create a run directory")
        report = _report(attacked.run_dir)
        echo(f"{report['batches']} batches in {wall_s:.0f} s, {len(kills)} kills")
        return MissionOutcome(wall_s, report, audit(attacked.run_dir), len(attacked.recoveries))


def _report(run_dir: Path) -> Mapping[str, Any]:
    """Return the results of a finished run.

    Raises:
        UserError: If there are none.
    """
    try:
        found: Mapping[str, Any] = json.loads((run_dir / "report.json").read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"mixture: {run_dir} has no report of a finished run: {e}") from e
    return found


def _success(report: Mapping[str, Any]) -> str:
    found = report["success_after"]
    return f"{found['mean']:.1%} [{found['low']:.1%}, {found['high']:.1%}]"


def _start(cluster: LocalCluster) -> None:
    """Start three nodes. Those of env workers use their own Docker engine."""
    hosts = os.environ.get(HOSTS_VARIABLE, "").split(",")
    cluster.start()
    for number, name in enumerate("abc"):
        host = hosts[number % len(hosts)]
        cluster.add(name, SLOTS, {"DOCKER_HOST": host} if host else {})
    cluster.wait_for(*"abc")


def _peace_rows(peace: MissionOutcome, num_steps: int) -> list[dict[str, object]]:
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


def _attack_rows(
    attack: MissionOutcome, peace: MissionOutcome | None, victims: Sequence[str]
) -> list[dict[str, object]]:
    num = len(victims)
    step_s = attack.wall_s / attack.train_steps
    peace_s = peace.wall_s / peace.train_steps if peace else None
    return [
        row(
            f"attack: a train_step of a run of {attack.train_steps} (start included), "
            f"{', '.join(victims)} killed",
            step_s,
            peace_s,
            "in peace" if peace else None,
            "s",
            ratios=[peace_s / step_s] if peace_s else None,
        ),
        row(
            "attack: kills that the run recovered from",
            attack.num_recovered,
            None,
            None,
            "kills",
            mark=f"{num}",
            meets_mark=attack.num_recovered == num,
            required=True,
        ),
        _audit_row("attack", attack.audited),
    ]


def _audit_row(case: str, audited: AuditReport) -> dict[str, object]:
    found = sum(audited.lost.values()) + audited.open + len(audited.violations)
    why = f": {audited.violations[0]}" if audited.violations else ""
    said = f"{case}: tickets lost, open or trained twice, of {audited.num_tickets}{why}"
    met = found == 0
    return row(said, found, None, None, "tickets", mark="0", meets_mark=met, required=True)


def _alone_rows(
    name: str, mixed: Mapping[str, Any], alone: MissionOutcome
) -> list[dict[str, object]]:
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
