"""`rollart bench ray`: a run over a Ray cluster of three unlike nodes, beside the same run inline.

Takes: ``config`` (examples/webshop.yaml), ``short``; every other option overrides a key of the
config. Gives: success on held-out tasks after RL and trajectories/s of both runs, and whether two
short deterministic runs end with the same weights, bit for bit. Never: runs both at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rollart_core.bench.learn import EXAMPLES, SHORT
from rollart_core.bench.rows import machine, row, tell
from rollart_core.config_load import load_config
from rollart_core.resolve import resolve_run
from rollart_core.runtime.launch import launch
from rollart_core.runtime.ray_several import several_nodes

NODES = ({"train_node": 1, "CPU": 2}, {"gen_node": 1, "CPU": 2}, {"env_node": 1, "CPU": 2})
"""One for the trainer, one for engines, one for environments."""
DETERMINISTIC = {
    **SHORT,
    "deterministic": True,
    "max_staleness": 0,
    "stop.wall_s": None,
    "stop.batches": 4,
    "evaluation.tasks": 16,
    "evaluation.greedy": False,
}
OWN = ("short", "config")
TAKES: Final = None
"""Any: what is not in ``OWN`` is a key of the config, and is checked as one."""


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``config``: a run config; ``short``: FrozenLake, some seconds; all others: keys of
            the config.

    Returns:
        The object of ``rollart bench --json``, with the reports as ``runs``.
    """
    short = bool(options.get("short"))
    name = str(options.get("config", "hello.yaml" if short else "webshop.yaml"))
    path = Path(name) if Path(name).is_file() else EXAMPLES / name
    given = [f"{k}={json.dumps(v)}" for k, v in options.items() if k not in OWN]
    learning = [*([_set(k, v) for k, v in SHORT.items()] if short else []), *given]
    same = [_set(k, v) for k, v in DETERMINISTIC.items()]
    same += [_set(k, v) for k, v in options.items() if k == "runs_dir"]
    hello = EXAMPLES / "hello.yaml"
    inline = _run("inline", path, learning)
    inline_same = _run("inline, deterministic", hello, same)
    with several_nodes(NODES) as cluster:
        over = _over_pools(cluster.address)
        on_ray = _run("ray", path, [*learning, *over])
        ray_same = _run("ray, deterministic", hello, [*same, *over])
    return {
        "name": "ray",
        "machine": machine(),
        "rows": _rows(on_ray, inline, _digest(ray_same) == _digest(inline_same)),
        "runs": {"ray": on_ray, "inline": inline},
    }


def _over_pools(address: str) -> list[str]:
    runtime = {"kind": "ray", "address": address}
    mapper = {
        "id": "static",
        "envs": {"*": "env_node"},
        "engines": {"*": "gen_node"},
        "trainer": "train_node",
    }
    return [_set("runtime", runtime), _set("mapper", mapper)]


def _set(key: str, value: object) -> str:
    return f"{key}={json.dumps(value)}"


def _run(name: str, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    tell(f"{name}: {path.name}")
    report = launch(resolve_run(load_config(path, overrides), source=str(path))).as_dict()
    tell(f"{name}: {report['stop_reason']}, success after {report['success_after']}")
    return report


def _digest(report: Mapping[str, Any]) -> str:
    weights = Path(report["run_dir"]) / "model-trained" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def _rows(
    ray: Mapping[str, Any], inline: Mapping[str, Any], is_same: bool
) -> list[dict[str, object]]:
    after, before = ray["success_after"], inline["success_after"]
    return [
        row(
            "success after RL",
            after["mean"],
            before["mean"],
            "runtime: inline",
            "share of held-out tasks",
            mark="the 95% intervals overlap",
            meets_mark=after["high"] >= before["low"] and before["high"] >= after["low"],
        ),
        row(
            "tokens of finished trajectories",
            ray["tokens_per_s"],
            inline["tokens_per_s"],
            "runtime: inline",
            "tokens/s",
        ),
        row(
            "deterministic: weights after 4 batches",
            None,
            None,
            "runtime: inline",
            "",
            mark="equal bit for bit",
            meets_mark=is_same,
        ),
    ]
