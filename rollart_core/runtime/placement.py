"""The placement of one run, which is replanned if its workloads drift from the plan.

    pools -> mapper -> placement -> runtime (where workers start) and router (shares of each env)
               ^                                                        ^
               +-- workloads, measured from finished trajectories ------+

Takes: a resolved run, its pools, finished trajectories. Gives: placements. Never: moves a worker
that has started, or plans twice for one change of a workload. A new plan changes only which engines
receive new episodes of an environment.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rollart_core.config.resolve import Resolution, ResolvedRun
from rollart_core.config.resolve_envs import ResolvedEnv
from rollart_core.config.validation.consistency import colocates, num_engines
from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import (
    Demand,
    HardwareMapper,
    ModelShape,
    Placement,
    Pool,
    Role,
)
from rollart_core.errors import ConfigError, RollartError, described, first_line, text_of
from rollart_core.inference.router import Router
from rollart_core.models.run_template import rows_note
from rollart_core.rollout.asyncio_tasks import cancel_and_wait
from rollart_core.runtime.workload import WorkloadMeter, departures, shape_of, total_tokens
from rollart_core.types import Ticket, Trajectory

RunEpisode = Callable[[Ticket, int], Awaitable[Trajectory]]


def workloads_of(run: ResolvedRun | Resolution) -> dict[str, Workload]:
    """Return the declared workload of each environment, by its name in the run."""
    asked = run.config.rollout.workload
    if asked is not None and len(run.envs) == 1:
        loads = {run.envs[0].name: Workload(**asked.model_dump())}
    else:
        loads = {env.name: env.spec.workload for env in run.envs}
    if rows_note(run.config) is None:
        return loads
    return {name: replace(load, rows=load.turns) for name, load in loads.items()}


def demand_of(run: ResolvedRun | Resolution, model: ModelShape | None = None) -> Demand:
    """Return the run's demand on the hardware, apart from workloads.

    Args:
        run: The run.
        model: The shape of its model; used if the config does not give one.
    """
    runtime, rollout = run.config.runtime, run.config.rollout
    rewards = [reward for env in run.envs if (reward := env.reward) is not None]
    kl, loads = run.config.algorithm.options.get("kl_coef"), workloads_of(run)
    return Demand(
        model=shape_of(run.config.model) or model,
        weights={env.name: env.weight for env in run.envs},
        max_concurrent=run.config.rollout.max_concurrent,
        num_engines=None
        if runtime.kind == "inline" and not run.config.engines
        else num_engines(run.config),
        engine_devices=run.engine_devices,
        num_trainer_ranks=runtime.num_trainer_ranks,
        recomputes=run.config.trainer.activation_checkpointing,
        stateless_rewards=bool(rewards) and all(r.spec.stateless for r in rewards),
        num_references=int(run.config.reference is not None or bool(kl)),
        batch_trajectories=rollout.groups_per_batch * rollout.group_size,
        max_staleness=run.config.staleness_bound,
        longest=max((_longest(run, env, loads[env.name]) for env in run.envs), default=1.0),
        shm_copies=_shm_copies(run),
        host_copies=_host_copies(run),
        colocates=colocates(run.config),
        num_trained_params=_num_adapter_params(run, model),
    )


def _num_adapter_params(run: ResolvedRun | Resolution, given: ModelShape | None) -> int:
    """Return the parameters of adapters on all matrices; 0 without ``lora`` or with experts."""
    model, lora = shape_of(run.config.model) or given, run.config.lora
    if lora is None or model is None or model.num_experts:
        return 0
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    width = model.width or queries
    layer = (model.num_params - model.num_outer_params) / model.num_layers
    inner = max(0.0, layer - width * (2 * queries + 2 * keys)) / (3 * width)
    ends = 2 * (width + queries) + 2 * (width + keys) + 3 * (width + inner)
    return int(lora.rank * model.num_layers * ends)


def _longest(run: ResolvedRun | Resolution, env: ResolvedEnv, load: Workload) -> float:
    """Return the duration of the longest trajectory that the limits allow, relative to the mean.

    All turns count as average ones. If there is only one, its answer may be as long as allowed.
    """
    rollout = run.config.rollout
    if env.max_turns > 1:
        capacity = rollout.max_context_tokens / max(1.0, total_tokens(load))
        return max(1.0, min(env.max_turns / max(1.0, load.turns), capacity))
    capacity = rollout.max_context_tokens - load.prefill_tokens
    return max(1.0, min(rollout.max_new_tokens, capacity) / max(1.0, load.decode_tokens))


def shm_fault(run: ResolvedRun, folder: str, free_bytes: float) -> str | None:
    """Return why weights do not fit in the memory that trainer and engines share; None if they do.

    Args:
        run: The run.
        folder: The file system in memory, such as ``/dev/shm``.
        free_bytes: Its free space.
    """
    copies, model = _shm_copies(run), shape_of(run.config.model)
    if model is None or copies * model.weight_bytes <= free_bytes:
        return None
    return (
        f"{folder} has {free_bytes / 1e9:.3g} GB free, but {copies} versions of the weights need "
        f"{copies * model.weight_bytes / 1e9:.3g} GB: enlarge it (in Docker: --shm-size), or use "
        "weights: collective or disk"
    )


def colocation_fault(run: ResolvedRun, device_bytes: float) -> str | None:
    """Return why a device is too small for trainer and engine in turns; None if it is not.

    ``rollart plan`` also counts activations, the rows of all episodes, and what the other side
    keeps.

    Args:
        run: A run with ``runtime.colocate``.
        device_bytes: The memory of the smallest device.
    """
    model, ranks = shape_of(run.config.model), run.config.runtime.num_trainer_ranks
    if model is None:
        return None
    adapters = _num_adapter_params(run, None)
    params = 4 * model.num_params + 16 * adapters if adapters else 16 * model.num_params
    longest = run.config.rollout.max_context_tokens
    training = params / ranks
    engine = (model.weight_bytes + longest * model.kv_bytes_per_token) / run.engine_devices
    if max(training, engine) <= device_bytes:
        return None
    return (
        f"runtime.colocate: a GPU needs {training / 1e9:.3g} GB in training (weights, gradients "
        f"and moments over {ranks} rank(s)) and {engine / 1e9:.3g} GB in generation (weights and "
        f"one row of {longest} tokens), but has {device_bytes / 1e9:.3g} GB: add lora, lower "
        "rollout.max_context_tokens, or use a smaller model or more GPUs (num_trainer_ranks)"
    )


def _host_copies(run: ResolvedRun | Resolution) -> int:
    """Return the versions of the weights that a network channel keeps in the trainer's memory."""
    found = run if isinstance(run, ResolvedRun) else run.run
    if found is None or found.weights.spec.reach != "network":
        return 0
    return int(found.weights.options.get("keep", 2))


def _shm_copies(run: ResolvedRun | Resolution) -> int:
    """Return the versions of the weights that a machine keeps in ``/dev/shm``."""
    found = run if isinstance(run, ResolvedRun) else run.run
    if found is None:
        return 0
    folder = str(found.engine.options.get("weights_folder") or "")
    in_engine = 2 if folder.startswith("/dev/shm") else 0  # the version in use, and the next
    if found.weights.spec.reach != "machine":
        return in_engine
    return max(in_engine, int(found.weights.options.get("keep", 2)))


def place(
    run: ResolvedRun | Resolution,
    pools: Sequence[Pool],
    demand: Demand,
    workloads: Mapping[str, Workload] | None = None,
) -> Placement:
    """Return the placement of the run by its mapper.

    Args:
        run: The run.
        pools: The available pools.
        demand: The demand of the run.
        workloads: The measured workloads; None: the declared ones.

    Raises:
        ConfigError: If the mapper cannot place the run.
    """
    assert run.mapper is not None
    mapper: HardwareMapper = run.mapper.build()
    mapper.demand = demand
    try:
        return mapper.place(workloads or workloads_of(run), pools)
    except ConfigError:
        raise
    except ValueError as e:
        lines = [first_line(line) for line in str(e).splitlines() or [type(e).__name__]]
        name = run.mapper.spec.id
        raise ConfigError("\n".join(f"mapper {name}: {line}" for line in lines)) from e


class RunPlan:
    """Plans and replans a run; see the module docstring.

    Args:
        run: The run.
        event: Event callback of the run.
    """

    def __init__(
        self, run: ResolvedRun, event: Callable[[str, Mapping[str, object]], None]
    ) -> None:
        self._run = run
        self._event = event
        self._demand = Demand()
        self._pools: Sequence[Pool] = ()
        self._replanner = Replanner(workloads_of(run))
        self._planning: asyncio.Task[None] | None = None
        self._due: Departure | None = None
        self.placement: Placement | None = None

    def begin(self, pools: Sequence[Pool]) -> Placement:
        """Place the run.

        Raises:
            ConfigError: If the mapper cannot place it on these pools.
        """
        self._pools = pools
        if len(pools) > 1:  # one pool needs no planning
            self._demand = demand_of(self._run)
        self.placement = place(self._run, pools, self._demand)
        self._note(self.placement, workloads_of(self._run), ())
        return self.placement

    def watched(self, run_episode: RunEpisode, router: Router) -> RunEpisode:
        """Wrap the function to measure its trajectories and replan if workloads drift.

        Demonstrations are not measured, because no engine generates them.
        """
        if self._run.demonstrates:
            return run_episode

        async def watch(ticket: Ticket, start_version: int) -> Trajectory:
            trajectory = await run_episode(ticket, start_version)
            departure = self._replanner.observe(trajectory)
            if departure is not None and len({state.pool for state in router.engine_states}) > 1:
                self._due = departure
                if self._planning is None or self._planning.done():
                    self._planning = asyncio.create_task(self._catch_up(router))
            return trajectory

        return watch

    async def close(self) -> None:
        """Cancel a running plan."""
        await cancel_and_wait(self._planning)

    async def _catch_up(self, router: Router) -> None:
        """Plan until no further drift has been detected meanwhile."""
        while (departure := self._due) is not None:
            self._due = None
            await self._again(departure, router)

    async def _again(self, departure: Departure, router: Router) -> None:
        """Replan with measured workloads for the current engines; on failure keep the plan."""
        assert self.placement is not None
        num_engines = Counter(state.pool for state in router.engine_states)
        group = self._demand.engine_devices
        devices = {pool: group * num for pool, num in num_engines.items()}
        pools = as_built(self._pools, self.placement, devices, self._demand.num_trainer_ranks)
        demand = replace(self._demand, num_engines=None)
        try:
            placement = await asyncio.to_thread(
                place, self._run, pools, demand, departure.workloads
            )
        except Exception as e:  # a mapper may raise any error; the run keeps its plan
            error = first_line(text_of(e))
            if not isinstance(e, RollartError):
                error = f"the mapper raised {described(e)}"
            self._event("plan_kept", {"why": list(departure.why), "error": error})
            return
        if placement.engines != self.placement.engines:
            self.placement = replace(placement, envs=self.placement.envs)
            router.place(self.placement)
            self._note(self.placement, departure.workloads, departure.why)

    def _note(
        self, placement: Placement, workloads: Mapping[str, Workload], why: Sequence[str]
    ) -> None:
        measured = {env_id: asdict(workload) for env_id, workload in workloads.items()}
        self._event(
            "plan", {"placement": asdict(placement), "workloads": measured, "why": list(why)}
        )


def as_built(
    pools: Sequence[Pool],
    placement: Placement,
    engine_devices: Mapping[str, int],
    num_trainer_ranks: int,
) -> list[Pool]:
    """Return the pools restricted to the roles and devices that a running run uses on them.

    Args:
        pools: The initial pools.
        placement: The current placement.
        engine_devices: Pool -> number of devices of its current engines.
        num_trainer_ranks: The number of trainer ranks.
    """
    built = []
    for pool in pools:
        roles: list[Role] = []
        roles += ["envs"] if pool.name in placement.envs.values() else []
        roles += ["engines"] if engine_devices.get(pool.name) else []
        roles += ["trainer"] if pool.name == placement.trainer else []
        roles += ["rewards"] if pool.name == placement.rewards else []
        count = engine_devices.get(pool.name, 0)
        count += num_trainer_ranks if "trainer" in roles else 0
        if "envs" in roles or "rewards" in roles:
            count = max(count, pool.count)
        if roles:
            built.append(replace(pool, count=count, roles=tuple(roles)))
    return built


@dataclass(frozen=True, slots=True)
class Departure:
    """Workloads that have drifted from the plan."""

    workloads: Mapping[str, Workload]
    """The workloads for the new plan: measured if there are enough trajectories, else unchanged."""
    why: tuple[str, ...]
    """A phrase for each environment that drifted, such as ``toy/X-v1: turns 9 instead of 3``."""


class Replanner:
    """Measures the workloads of a run and detects drift.

    Hysteresis: measured workloads become the planned ones, so the next plan needs a drift by
    another ``factor``, and at least ``min_trajectories`` more trajectories of the environment.

    Args:
        declared: Env id -> workload of the first plan.
        factor: The ratio to the planned figure above which a figure has drifted.
        min_trajectories: Number of trajectories after which an environment may start a plan. After
            half of them its means are used in a plan that another environment started.
    """

    def __init__(
        self,
        declared: Mapping[str, Workload],
        *,
        factor: float = 1.5,
        min_trajectories: int = 64,
    ) -> None:
        if factor <= 1:
            raise ValueError(f"factor is {factor:g}; give a number above 1")
        self._factor = factor
        self._min_trajectories = min_trajectories
        self._planned = dict(declared)
        self._meters = {env_id: WorkloadMeter(w) for env_id, w in declared.items()}
        self._due_at = dict.fromkeys(declared, min_trajectories)

    def observe(self, trajectory: Trajectory) -> Departure | None:
        """Add a finished trajectory; return the drift if a new plan is due."""
        env_id = trajectory.ticket.task.env_id
        meter = self._meters.get(env_id)
        if meter is None:
            return None
        meter.add(trajectory)
        if meter.count < self._due_at[env_id]:
            return None
        self._due_at[env_id] = meter.count + self._min_trajectories
        if not departures(self._planned[env_id], meter.measured, self._factor):
            return None
        return self._depart()

    def _depart(self) -> Departure:
        """Use the measured workloads as the planned ones."""
        why = []
        for env_id, meter in self._meters.items():
            if 2 * meter.count < self._min_trajectories:
                continue
            found = departures(self._planned[env_id], meter.measured, self._factor)
            why += [f"{env_id}: {', '.join(found)}"] if found else []
            self._planned[env_id] = meter.measured
            self._due_at[env_id] = meter.count + self._min_trajectories
        return Departure(dict(self._planned), tuple(why))
