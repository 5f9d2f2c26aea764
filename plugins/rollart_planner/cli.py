"""Implement ``rollart plan``: place the workers of a run on a cluster and estimate the rates.

Takes: a config and a cluster file. Gives: the placement of the run's mapper, or of several mappers
to compare, with expected rates. Never: starts anything, or inspects the machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollart_core.cli.output import print_json, print_table
from rollart_core.errors import ConfigError, first_line

if TYPE_CHECKING:
    from rollart_core.config.resolve import ResolvedRun
    from rollart_core.contracts.hardware import Expectation, Placement
    from rollart_planner.cluster import Cluster
    from rollart_planner.memory import MemoryVerdict


def plan(
    config: Annotated[str, typer.Argument(help="The config file of the run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file."),
    ] = None,
    cluster: Annotated[
        Path, typer.Option("--cluster", metavar="FILE", help="The cluster file.")
    ] = Path("cluster.yaml"),
    mapper: Annotated[
        list[str] | None,
        typer.Option(
            "--mapper",
            help="Plan with this mapper, and compare it with that of the config. Can be repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show where on a cluster each worker would run, the reasons, and the expected rates."""
    from rollart_core.config.load import load_config
    from rollart_core.config.resolve import resolve_run
    from rollart_planner.cluster import load_cluster

    described = load_cluster(cluster)
    run = resolve_run(load_config(config, overrides or []), source=config)
    own = run.config.mapper.id
    names = list(dict.fromkeys([*(mapper or []), own]))
    runs = {name: run if name == own else _with_mapper(run, name, config) for name in names}
    plans = {name: _planned(one, described, config) for name, one in runs.items()}
    chosen = names[0]
    memory = _memory(runs[chosen], described, plans[chosen])
    if as_json:
        said = {"mapper": chosen, "compared": _compared(plans), "rows": _rows(run)}
        print_json({**asdict(plans[chosen]), **said, "memory": [_as_dict(v) for v in memory]})
    else:
        _show(chosen, plans[chosen], described)
        _show_memory(memory)
        _show_rows(run)
        if len(plans) > 1:
            _show_compared(plans)
    if not all(verdict.fits for verdict in memory):
        raise typer.Exit(1)


def _planned(run: ResolvedRun, cluster: Cluster, source: str) -> Placement:
    """Return the placement of a run's mapper with its expected rates."""
    from rollart_core.runtime.placement import demand_of, place, workloads_of
    from rollart_planner.solve import expect

    demand = demand_of(run, cluster.model.shape() if cluster.model else None)
    if demand.model is None:
        raise ConfigError(
            f"{source}: model: its size is unknown because its config.json is not on this machine; "
            "download it, or set model.shape in the config, or model in the cluster file"
        )
    pools = cluster.to_pools()
    placement = place(run, pools, demand)
    if placement.expected is not None:
        return placement
    try:
        expected = expect(placement, workloads_of(run), pools, demand)
    except ValueError as e:
        raise ConfigError(f"mapper {run.mapper.spec.id}: {first_line(str(e))}") from e
    return replace(placement, expected=expected)


def _memory(run: ResolvedRun, cluster: Cluster, placement: Placement) -> list[MemoryVerdict]:
    """Return whether each worker fits the memory of the device where it is placed."""
    from rollart_core.runtime.placement import demand_of, workloads_of
    from rollart_planner.memory import verdicts

    demand = demand_of(run, cluster.model.shape() if cluster.model else None)
    return verdicts(run, placement, cluster.to_pools(), demand, workloads_of(run))


def _rows(run: ResolvedRun) -> dict[str, float]:
    """Return the planned number of token rows per trajectory of each environment."""
    from rollart_core.runtime.placement import workloads_of

    return {name: load.rows for name, load in workloads_of(run).items()}


def _show_rows(run: ResolvedRun) -> None:
    from rollart_core.models.run_template import rows_note

    if note := rows_note(run.config):
        typer.echo(
            f"- the trainer processes {max(_rows(run).values()):g} rows a trajectory: {note}"
        )


def _as_dict(verdict: MemoryVerdict) -> dict[str, object]:
    return {**asdict(verdict), "needed_bytes": verdict.needed_bytes}


def _show_memory(memory: Sequence[MemoryVerdict]) -> None:
    from rollart_planner.devices import GB

    if not memory:  # CPU cores only, which have no memory of their own
        return
    rows = []
    for verdict in memory:
        have = verdict.have_bytes
        rows.append(
            (
                verdict.pool,
                f"{verdict.count} x {verdict.part}",
                ", ".join(f"{n / GB:.3g} {name}" for name, n in verdict.needed.items()),
                f"{verdict.needed_bytes / GB:.1f}",
                f"{have / GB:.1f}" if have else "?",
                "yes" if verdict.fits else "NO",
            )
        )
    columns = ("pool", "worker", "GB of each device, estimated", "needed", "available", "fits")
    print_table("Memory", columns, rows)
    for verdict in memory:
        if verdict.says:
            typer.echo(f"- {verdict.says}")


def _with_mapper(run: ResolvedRun, name: str, source: str) -> ResolvedRun:
    from rollart_core.config.base import PluginRef
    from rollart_core.config.resolve import resolve_run

    config = run.config.model_copy(update={"mapper": PluginRef(id=name)})
    return resolve_run(config, source=source)


def _compared(plans: Mapping[str, Placement]) -> dict[str, object]:
    return {
        name: {
            "trajectories_per_s": _expected(p).trajectories_per_s,
            "price_per_hour": _expected(p).price_per_hour,
            "engines": p.engines,
        }
        for name, p in plans.items()
    }


def _show(mapper: str, placement: Placement, cluster: Cluster) -> None:
    expected = _expected(placement)
    rows = [
        (
            env_id,
            placement.envs[env_id],
            ", ".join(f"{share:.0%} {pool}" for pool, share in shares.items()),
            ", ".join(
                f"{prefill * 1e3:.3g} + {decode * 1e3:.3g}"
                for prefill, decode in expected.turn_s.get(env_id, {}).values()
            ),
            f"{expected.envs[env_id]:.3g}",
        )
        for env_id, shares in placement.engines.items()
    ]
    columns = ("environment", "envs on", "generates on", "ms a turn: prefill + decode", "traj/s")
    print_table(f"{mapper}: {expected.trajectories_per_s:.3g} trajectories/s", columns, rows)
    engines = placement.num_engines
    pools = [
        (
            pool.name,
            f"{pool.count} x {pool.device}",
            str(engines.get(pool.name, "")),
            "trainer" if pool.name == placement.trainer else "",
            f"{expected.pools.get(pool.name, 0.0):.0%}",
        )
        for pool in cluster.pools
    ]
    print_table("Pools", ("pool", "devices", "engines", "", "in use"), pools)
    for reason in placement.reasons:
        typer.echo(f"- {reason}")
    _show_version(expected)
    typer.echo(f"\nLimited by {expected.bottleneck}.")
    if expected.price_per_hour:
        per_hour = 3600 * expected.trajectories_per_s
        typer.echo(
            f"The devices in use cost {expected.price_per_hour:.2f} an hour, "
            f"{1000 * expected.price_per_hour / per_hour:.3g} for 1000 trajectories."
        )


def _show_version(expected: Expectation) -> None:
    version = expected.version
    if version is None:
        return
    share = 1 - expected.trajectories_per_s / expected.free_versions_per_s
    typer.echo(
        f"- a new version of the weights takes the trainer {version.trainer_s:.2g} s (gather "
        f"{version.gather_s:.2g} s, send {version.send_s:.2g} s) and stops engines for "
        f"{version.stall_s:.2g} s (load {version.swap_s:.2g} s): {share:.1%} of the rate"
    )


def _show_compared(plans: Mapping[str, Placement]) -> None:
    best = _expected(next(iter(plans.values()))).trajectories_per_s
    rows = []
    for name, placement in plans.items():
        expected = _expected(placement)
        rate = expected.trajectories_per_s
        cells = (f"{rate:.3g}", f"{rate / best:.2f}", f"{expected.price_per_hour:.2f}")
        rows.append((name, *cells, expected.bottleneck))
    columns = ("mapper", "traj/s", "relative to the first", "price/hour", "limited by")
    print_table("Compared", columns, rows)


def _expected(placement: Placement) -> Expectation:
    assert placement.expected is not None
    return placement.expected
