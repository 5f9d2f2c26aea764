"""`rollart bench chaos`: a run whose processes are killed, compared with an undisturbed run.

The run trains a tiny model in two fast environments. At seeded random moments, a process is killed
with SIGKILL: an env worker, an engine, a trainer rank (of two), the controller (and the run is
continued with ``--resume``), with ``runtime=ray`` a whole node of a cluster of four on this
machine, and with ``kinds="reward worker"`` a process of the reward backend `pool`. A moment is an
event of the run (a number of trained batches or of started episodes). The run continues until it
has recovered from the last kill. Its audit must find no ticket that is lost or trained twice.
Nothing may be left: no process, no file in shared memory, no temporary file or socket.

With ``config=PATH``, that config is run instead, with its own limits and concurrency, and it ends
after ``steps``: `rollart bench chaos config=webshop.yaml kinds=engine`.

Takes: ``runtime``, ``steps``, ``kills``, ``seed``, ``kinds``, ``config``, ``limit_s``,
``runs_dir``, ``short``. Gives: rows with seconds to recover and seconds per train step. Never:
kills a process that it did not start.
"""

from __future__ import annotations

import random
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final, cast

import yaml

from rollart_bench.chaos_cluster import LocalCluster
from rollart_bench.chaos_run import (
    CONTROLLER,
    LIMIT_S,
    NODE,
    REWARD_WORKER,
    ROLES,
    AttackedRun,
    Kill,
    Recovery,
    planned,
)
from rollart_bench.chaos_victims import Watched, files_in
from rollart_bench.learn import example, flat, overrides_of
from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import require
from rollart_core.config.load import apply_override, load_mapping, read_run_config
from rollart_core.config.model import NewModel
from rollart_core.config.resolve import resolve_run
from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.errors import RollartError, UserError, did_you_mean
from rollart_core.models.new import new_model
from rollart_core.store.audit import AuditReport, audit
from rollart_testing import FakeEnv

TAKES: Final = (
    "runtime",
    "steps",
    "kills",
    "seed",
    "kinds",
    "config",
    "limit_s",
    "runs_dir",
    "short",
)
CONFIG: Final = True
"""With ``config``, every other option is a key of it, and is checked as such."""

MODEL = NewModel(kind="new", num_layers=1, width=32, ffn_width=48, vocab_size=320)
NUM_RANKS, NUM_ENGINES, NUM_ENV_WORKERS = 2, 2, 2
GROUPS_PER_BATCH, GROUP_SIZE = 3, 4
MOST_STEPS = 1_000_000
"""An upper bound that is never reached: the run is asked to end long before."""
GONE_WITHIN_S = 60.0
KINDS = {
    "inline": (*ROLES, CONTROLLER),
    "ray": (*ROLES, NODE, CONTROLLER),
    "ray-local": (*ROLES, CONTROLLER),
}
"""Runtime -> what is killed by default, without ``kinds``."""
CONFIG_STEPS, CONFIG_KILLS = 60, 5
"""Defaults with ``config``."""
SLOT = "slot"
"""The resource of a Ray node that each worker takes."""
NODES = {"a": {SLOT: 3.0}, "b": {SLOT: 3.0}, "c": {SLOT: 3.0}}
"""Two nodes have enough slots for all workers, so one node may be lost."""


class LetterReward(Reward):
    """Prefers some letters, so that a random model's answers get different scores."""

    def score(self, request: RewardRequest) -> RewardResult:
        """Score what the policy wrote."""
        text = "".join(m["content"] for m in request.messages if m["role"] == "assistant")
        return RewardResult(sum(map(ord, text)) % 101 / 101)


@dataclass(frozen=True, slots=True)
class ChaosOutcome:
    """The results of one run."""

    wall_s: float
    recoveries: tuple[Recovery, ...]
    audited: AuditReport
    left: Mapping[str, Sequence[str]]
    """What was left after its end, by kind."""

    @property
    def num_steps(self) -> int:
        """The number of train steps in the lineage of its last weights."""
        return self.audited.batches

    @property
    def step_s(self) -> float:
        """Seconds per train step, including the start and the end of the run."""
        return self.wall_s / max(1, self.num_steps)


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``short``: one kill of each kind in 6 train_steps or more, and no undisturbed run;
            ``steps`` (200), ``kills`` of each kind (3), ``seed`` (0), ``runtime`` (``inline``,
            ``ray``: a cluster of four nodes, or ``ray-local``: one that the run starts), ``kinds``
            (all but ``reward worker``, or names separated by commas); ``config``: a run config,
            which ends after exactly ``steps`` (60), with 5 kills of each kind and no undisturbed
            run; ``limit_s`` (240): the time limit to recover, or to reach the next kill;
            ``runs_dir``: the folder to keep runs in; with ``config``, all others are keys of it.

    Returns:
        The object of ``rollart bench --json``.

    Raises:
        UserError: If an option is wrong.
        RollartError: If a run does not end properly.
    """
    asked = Options("chaos", options)
    runtime = asked.choice("runtime", tuple(KINDS), "inline")
    kinds = asked.names("kinds", (*KINDS[runtime], REWARD_WORKER), KINDS[runtime])
    keys = {name: value for name, value in options.items() if name not in TAKES}
    if "config" in asked:
        steps, kills = (
            asked.integer("steps", CONFIG_STEPS),
            asked.integer("kills", CONFIG_KILLS),
        )
    else:
        _refuse_keys(keys)
        steps = asked.integer("steps", 6 if asked.short else 200)
        kills = asked.integer("kills", 1 if asked.short else 3)
    seed, limit_s = asked.integer("seed", 0, least=0), asked.number("limit_s", LIMIT_S)
    require("torch", "transformers", extra="train")
    if runtime != "inline":
        require("ray", extra="ray")
    with tempfile.TemporaryDirectory(prefix="rollart-chaos-") as folder:
        kept = _kept_in(asked)
        if "config" in asked:
            config, per_step = _from_file(example(asked.text("config", "")), keys, steps)
            work = _Work(config, per_step, steps, seed, runtime, limit_s, kept, ends_itself=True)
        else:
            model = str(new_model(Path(folder) / "model", MODEL, FakeEnv().corpus(), seed=0))
            per_step = GROUPS_PER_BATCH * GROUP_SIZE
            work = _Work(_config(model), per_step, steps, seed, runtime, limit_s, kept)
        peace = None
        if not asked.short and not work.ends_itself:
            peace = _executed(Path(folder) / "p", work, [])
            echo(f"in peace: {peace.num_steps} train_steps in {peace.wall_s:.1f} s")
        plan = planned(kinds, kills, steps, seed, episodes_per_step=work.episodes_per_step)
        chaos = _executed(Path(folder) / "c", work, plan)
    return result("chaos", [*_recovery_rows(chaos, kinds, kills), *_rows(chaos, peace, steps)])


def _refuse_keys(keys: Mapping[str, object]) -> None:
    for name in keys:
        near = did_you_mean(name, TAKES)
        raise UserError(
            f"bench chaos has no {name!r}.{near} It takes: {', '.join(TAKES)}, and with "
            "config=PATH the keys of that config"
        )


def _kept_in(asked: Options) -> Path | None:
    """Return a new folder for the runs; None if they are not kept."""
    if "runs_dir" not in asked:
        return None
    return asked.path("runs_dir", "").absolute() / f"chaos-{uuid.uuid4().hex[:8]}"


def _from_file(
    path: Path, keys: Mapping[str, object], steps: int
) -> tuple[Mapping[str, object], int]:
    """Return a run config that ends after a number of train steps, and its episodes per step.

    Raises:
        ConfigError: If it is not valid.
    """
    config = read_run_config(path)
    overrides = overrides_of(dict(flat(keys)))
    overridden = [apply_override(config, override) for override in overrides]
    config["stop"] = {"batches": steps}
    if isinstance(model := config.get("model"), str):
        config["model"] = str(Path(model).absolute())
    checked = load_mapping(config, path, overridden)
    resolve_run(checked, source=str(path))
    return config, checked.rollout.groups_per_batch * checked.rollout.group_size


@dataclass(frozen=True, slots=True)
class _Work:
    """The settings that the runs share."""

    config: Mapping[str, object]
    episodes_per_step: int
    steps: int
    """The minimum number of train steps; the exact number for a run with its own limit."""
    seed: int
    runtime: str
    limit_s: float
    runs_dir: Path | None = None
    """The folder to keep runs in; None if they are not kept."""
    ends_itself: bool = False


def _executed(folder: Path, work: _Work, plan: Sequence[Kill]) -> ChaosOutcome:
    """Run a config to its end in a new folder, and check what is left."""
    config = work.config
    kept = work.runs_dir / folder.name if work.runs_dir else folder
    runs_dir, temp_dir = kept / "runs", folder / "tmp"
    for path in (runs_dir, temp_dir):
        path.mkdir(parents=True)
    watched = Watched(uuid.uuid4().hex)
    cluster = LocalCluster(watched.mark, folder / "r") if work.runtime == "ray" else None
    if work.runtime != "inline":
        config = {**config, "runtime": _on_ray(config)}
    try:
        if cluster is not None:
            cluster.start()
            for name, resources in NODES.items():
                cluster.add(name, resources)
            cluster.wait_for(*NODES)
            config = {**config, "runtime": _joining(cluster.address, config)}
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump({**config, "runs_dir": str(runs_dir)}), encoding="utf-8")
        rng = random.Random(work.seed)
        attacked = AttackedRun(path, runs_dir, temp_dir, watched, rng, cluster, work.limit_s)
        wall_s = attacked.execute(plan, None if work.ends_itself else work.steps)
        parts = _workers_left(attacked)  # before the cluster's end stops them too
    finally:
        if cluster is not None:
            cluster.close()
    if attacked.run_dir is None:
        raise RollartError("the run did not create a run directory")
    audited, recoveries = audit(attacked.run_dir), tuple(attacked.recoveries)
    left = _left(watched, temp_dir)
    left["processes"] = [*parts, *left["processes"]]
    return ChaosOutcome(wall_s, recoveries, audited, left)


def _workers_left(attacked: AttackedRun) -> list[str]:
    """Return the worker processes of a run that outlive it."""
    if attacked.run_dir is None:
        return []
    until = time.monotonic() + GONE_WITHIN_S
    while (found := attacked.watched.parts(attacked.run_dir)) and time.monotonic() < until:
        time.sleep(0.1)
    return sorted(found)


def _left(watched: Watched, temp_dir: Path) -> dict[str, Sequence[str]]:
    until = time.monotonic() + GONE_WITHIN_S
    while watched.alive() and time.monotonic() < until:
        time.sleep(0.1)
    return {
        "processes": [str(pid) for pid in watched.alive()],
        "files in shared memory": watched.shared_files(),
        "temporary files": files_in(temp_dir),
    }


def _recovery_rows(
    chaos: ChaosOutcome, kinds: Sequence[str], kills: int
) -> list[dict[str, object]]:
    rows = []
    for kind in kinds:
        took = [r.seconds for r in chaos.recoveries if r.kind == kind]
        case = f"{kind} killed {kills} times: recovered {len(took)} times, mean seconds"
        worst = f"all recovered (longest {max(took):.1f} s)" if took else "all recovered"
        mean_s = mean(took) if took else None
        met = len(took) == kills
        rows.append(row(case, mean_s, None, None, "s", mark=worst, meets_mark=met, required=True))
    return rows


def _rows(chaos: ChaosOutcome, peace: ChaosOutcome | None, steps: int) -> list[dict[str, object]]:
    audited = chaos.audited
    num_kills = len(chaos.recoveries)
    num_lost = sum(audited.lost.values()) + audited.open
    num_wrong = len(audited.violations)
    both = {n: [*f, *(peace.left[n] if peace else ())] for n, f in chaos.left.items()}
    left = {name: found for name, found in both.items() if found}
    said = "; ".join(f"{name}: {', '.join(found)}" for name, found in left.items())
    in_peace = "in peace" if peace else None
    return [
        row(
            f"a train_step of a run of {chaos.num_steps} with {num_kills} kills, start included",
            chaos.step_s,
            peace.step_s if peace else None,
            in_peace,
            "s",
            ratios=[peace.step_s / chaos.step_s] if peace else None,
        ),
        row(
            "train_steps rolled back and done again",
            audited.batches_rolled_back,
            peace.audited.batches_rolled_back if peace else None,
            in_peace,
            "train_steps",
            mark=f"{steps} or more in the lineage at the end",
            meets_mark=audited.batches >= steps,
            required=True,
        ),
        *(
            row(f"attempts failed: {name}", audited.failures.get(name, 0), None, None, "attempts")
            for name in ("infrastructure", "collateral")
        ),
        _none(f"tickets lost, of {audited.num_tickets}", num_lost, "tickets"),
        _none(
            "tickets trained twice, and other violations of the audit"
            + (f": {audited.violations[0]}" if num_wrong else ""),
            num_wrong,
            "violations",
        ),
        _none(
            "processes, shared memory, temporary files and sockets left"
            + (f": {said}" if said else ""),
            sum(map(len, left.values())),
            "left",
        ),
    ]


def _none(case: str, found: int, unit: str) -> dict[str, object]:
    met = found == 0
    return row(case, found, None, None, unit, mark="0", meets_mark=met, required=True)


def _on_ray(config: Mapping[str, object]) -> dict[str, Any]:
    """Return the runtime section for Ray on this machine, with the same numbers of workers."""
    inline = cast("Mapping[str, int]", config.get("runtime", {}))
    return {
        "kind": "ray",
        "num_engines": inline.get("num_engines", 1),
        "num_trainer_ranks": inline.get("num_trainer_ranks", 1),
        "num_env_workers": inline.get("env_processes", 1),
    }


def _joining(address: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runtime section for a cluster whose nodes have slots."""
    runtime = config["runtime"]
    num_parts = sum(count for name, count in runtime.items() if name.startswith("num_"))
    pool = {"name": "machines", "count": num_parts, "resources": {SLOT: 1}}
    return {**runtime, "address": address, "pools": [pool]}


def _config(model_path: str) -> dict[str, object]:
    fake = "rollart_testing:AsyncFakeEnv"
    return {
        "name": "chaos",
        "mode": "async",
        "max_staleness": 1,
        "runtime": {
            "num_engines": NUM_ENGINES,
            "num_trainer_ranks": NUM_RANKS,
            "env_processes": NUM_ENV_WORKERS,
        },
        "model": {"path": model_path, "device": "cpu"},
        "env": [
            {"id": fake, "name": "short", "turns": 1, "delay_s": 0.1, "weight": 2},
            {"id": fake, "name": "long", "turns": 3, "delay_s": 0.1},
        ],
        "reward": f"{__name__}:LetterReward",
        "trackers": [],
        "rollout": {
            "groups_per_batch": GROUPS_PER_BATCH,
            "group_size": GROUP_SIZE,
            "max_turns": 3,
            "max_new_tokens": 4,
            "max_context_tokens": 160,
        },
        "failures": {
            "max_restarts": 100,  # kills are more frequent than a run normally allows
            "hang_s": 240.0,  # a busy machine must not count as a hang
        },
        "evaluation": {"tasks": 2, "greedy": False},
        "checkpoint": {"every_batches": 5, "keep": 2},
        "stop": {"batches": MOST_STEPS},
    }
