"""`rollart bench ray`: a run over a Ray cluster of three different nodes, and the same run inline.

Takes: ``config`` (examples/webshop.yaml), ``short`` (the deterministic runs only); every other
option overrides a key of the config. Gives: success on held-out tasks after RL and trajectories/s
of both runs, and whether two short deterministic runs end with bitwise equal weights. Never: runs
both concurrently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rollart_bench.learn import SHORT, example, overrides_of
from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import require
from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.runtime.launch import launch
from rollart_ray.local import local_nodes

NODES = ({"train_node": 1, "CPU": 2}, {"gen_node": 1, "CPU": 2}, {"env_node": 1, "CPU": 2})
"""One for the trainer, one for engines, one for environments."""
DETERMINISTIC = {
    **SHORT,
    "deterministic": True,
    "max_staleness": 0,
    "stop.batches": 4,
}
TAKES: Final = ("short", "config")
CONFIG: Final = True
"""Every other option is a key of the run config, and is checked as such."""


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``config``: a run config; ``short``: only the deterministic runs, of FrozenLake;
            all others: keys of the config.

    Returns:
        The object of ``rollart bench --json``, with the reports as ``runs``.
    """
    asked = Options("ray", options)
    require("torch", "transformers", extra="train")
    require("ray", extra="ray")
    path = example(asked.text("config", "webshop.yaml"))
    given = overrides_of({k: v for k, v in options.items() if k not in TAKES})
    same = overrides_of(DETERMINISTIC | {k: v for k, v in options.items() if k == "runs_dir"})
    hello = example("hello.yaml")
    inline_same = _run("inline, deterministic", hello, same)
    inline = inline_same if asked.short else _run("inline", path, given)
    with local_nodes(NODES) as cluster:
        over = _over_pools(cluster.address)
        ray_same = _run("ray, deterministic", hello, [*same, *over])
        on_ray = ray_same if asked.short else _run("ray", path, [*given, *over])
    rows = [*_rows(on_ray, inline), _same_row(_digests(ray_same), _digests(inline_same))]
    return result("ray", rows, runs={"ray": on_ray, "inline": inline})


def _over_pools(address: str) -> list[str]:
    runtime = {"kind": "ray", "address": address}
    mapper = {
        "id": "static",
        "envs": {"*": "env_node"},
        "engines": {"*": "gen_node"},
        "trainer": "train_node",
    }
    return overrides_of({"runtime": runtime, "mapper": mapper})


def _run(name: str, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    echo(f"{name}: {path.name}")
    report = launch(resolve_run(load_config(path, overrides), source=str(path))).as_dict()
    echo(f"{name}: {report['stop_reason']}, success after {report['success_after']}")
    return report


def _digests(report: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each tensor of the trained model."""
    from safetensors import safe_open

    path = Path(report["run_dir"]) / "model-trained" / "model.safetensors"
    with safe_open(path, "np") as tensors:
        return {
            name: hashlib.sha256(tensors.get_tensor(name).tobytes()).hexdigest()
            for name in tensors.keys()  # noqa: SIM118
        }


def _rows(ray: Mapping[str, Any], inline: Mapping[str, Any]) -> list[dict[str, object]]:
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
    ]


def _same_row(ray: Mapping[str, str], inline: Mapping[str, str]) -> dict[str, object]:
    num_equal = sum(digest == ray.get(name) for name, digest in inline.items())
    return row(
        "deterministic: tensors of the trained model that are equal bit for bit",
        num_equal,
        len(inline),
        "runtime: inline",
        "tensors",
        mark="all",
        meets_mark=ray == inline,
        required=True,
    )
