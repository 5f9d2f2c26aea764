"""From a run config to a run that can start: every plugin found, every option checked.

Takes: a RunConfig. Gives: a picklable :class:`ResolvedRun`, or one ConfigError that names every
problem at once, before anything has started. Never: builds a plugin or starts a process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Generic, TypeVar, cast

from rollart_core import config_boxes, registry
from rollart_core.config import Deadlines, PluginRef, RunConfig
from rollart_core.config_checks import deadline_problems, without_effect
from rollart_core.config_load import RECORD_KEY, dump_yaml
from rollart_core.contracts.adapter import split_id
from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.hardware import HardwareMapperSpec
from rollart_core.contracts.inference import InferenceEngineSpec
from rollart_core.contracts.reward import RewardSpec
from rollart_core.contracts.spec import PluginSpec
from rollart_core.contracts.tracker import TrackerSpec
from rollart_core.contracts.weights import WeightChannelSpec
from rollart_core.errors import ConfigError, UserError, did_you_mean
from rollart_core.plugins import Registered
from rollart_core.problems import Problem

SpecT = TypeVar("SpecT", bound=PluginSpec)
Note = Callable[[Problem], None]


@dataclass(frozen=True, slots=True)
class ResolvedPlugin(Generic[SpecT]):
    """One plugin of a run: found, and its options checked. Travels to any process."""

    kind: str
    spec: SpecT
    options: dict[str, Any]
    """Checked, converted and filled with defaults by the plugin's config model."""
    distribution: str
    version: str

    def build(self, **context: object) -> Any:
        """Build the object: its class, from this process's entry points, with the options.

        Args:
            context: What the caller brings besides the options, by keyword.

        Raises:
            UserError: When the class cannot be imported here.
        """
        return self.cls()(**self.options, **context)

    def cls(self) -> type[Any]:
        """Return the class, imported in this process."""
        return registry.resolve(self.kind, self.spec.id)


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run that can start."""

    config: RunConfig
    env: ResolvedPlugin[EnvSpec]
    reward: ResolvedPlugin[RewardSpec] | None
    """None: the return of the environment itself."""
    algorithm: ResolvedPlugin[AlgorithmSpec]
    engine: ResolvedPlugin[InferenceEngineSpec]
    weights: ResolvedPlugin[WeightChannelSpec]
    mapper: ResolvedPlugin[HardwareMapperSpec]
    trackers: tuple[ResolvedPlugin[TrackerSpec], ...]
    deadlines: Deadlines
    """As configured, with ``reset_s`` and ``step_s`` from the environment's spec where None."""
    max_turns: int

    @property
    def plugins(self) -> tuple[ResolvedPlugin[Any], ...]:
        """All plugins of the run."""
        one_each = (self.env, self.reward, self.algorithm, self.engine, self.weights, self.mapper)
        return (*(p for p in one_each if p is not None), *self.trackers)

    def as_dict(self) -> dict[str, Any]:
        """Return the whole config as plain data, with every default and the plugins' versions.

        ``load_config`` reads it back to an equal run.
        """
        data = self.config.model_dump(mode="json", exclude={"deadlines"})
        data["deadlines"] = self.deadlines.model_dump(mode="json")
        data["rollout"]["max_turns"] = self.max_turns
        if self.config.mode == "sync":
            del data["rollout"]["kv_on_swap"]
        if self.env.spec.sandbox is None:
            del data["deadlines"]["sandbox_ttl_s"]
        data["env"] = _ref(self.env)
        data["reward"] = _ref(self.reward) if self.reward else None
        for name in ("algorithm", "engine", "weights", "mapper"):
            data[name] = _ref(getattr(self, name))
        data["trackers"] = [_ref(t) for t in self.trackers]
        data[RECORD_KEY] = {"rollart": version("rollart")} | {
            p.distribution: p.version for p in self.plugins
        }
        return data

    def to_yaml(self) -> str:
        """Return :meth:`as_dict` as YAML: the ``config.yaml`` of the run directory."""
        return dump_yaml(self.as_dict())


def resolve_run(
    config: RunConfig, *, source: str = "config", import_classes: bool = False
) -> ResolvedRun:
    """Find every plugin and check every option.

    Args:
        config: What to resolve.
        source: What to call the config in errors, such as its file.
        import_classes: Also import every plugin's class in this process (``--dry-run`` does);
            without it only modules that do not exist at all are found missing.

    Raises:
        ConfigError: With a line for each problem.
    """
    problems: list[Problem] = []
    find = _Finder(problems.append, import_classes)
    env = find("environments", config.env, "env")
    reward = find("rewards", config.reward, "reward") if config.reward else None
    algorithm = find("algorithms", config.algorithm, "algorithm")
    engine = find("inference_engines", config.engine, "engine")
    weights = find("weight_channels", config.weights, "weights")
    mapper = find("hardware_mappers", config.mapper, "mapper")
    trackers = [find("trackers", t, "trackers", i) for i, t in enumerate(config.trackers)]
    if env:
        problems += _env_problems(config, env.spec)
        env, faults = _boxed(config, env)
        problems += faults
    if algorithm:
        problems += _group_size_problems(config, algorithm, import_classes)
    if problems:
        raise ConfigError("\n".join(f"{source}: {p.within()}" for p in problems))
    spec = cast("EnvSpec", env.spec)
    return ResolvedRun(
        config=config,
        env=env,
        reward=reward,
        algorithm=algorithm,
        engine=engine,
        weights=weights,
        mapper=mapper,
        trackers=tuple(trackers),
        deadlines=_filled(config.deadlines, spec),
        max_turns=config.rollout.max_turns or spec.max_turns,
    )


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds plugins and notes what is wrong instead of stopping at the first."""

    note: Note
    import_classes: bool

    def __call__(self, kind: str, ref: PluginRef, *key: str | int) -> Any:
        if kind == "environments" and registry.ISOLATION in ref.options:
            return self._isolated(ref, key)
        try:
            found = registry.find(kind, ref.id)
        except UserError as e:
            self.note(Problem((*key, "id") if ref.options else key, str(e)))
            return None
        try:
            faults = registry.option_problems(kind, ref.id, ref.options)
            options = {} if faults else registry.checked_options(kind, ref.id, ref.options)
            self._check_class(kind, ref.id, found.spec.entry_point)
        except UserError as e:
            self.note(Problem(key, str(e)))
            return None
        for fault in faults:
            self.note(fault.under(*key))
        return self._resolved(found, options, not faults, key)

    def _resolved(
        self, found: Registered, options: dict[str, Any], complete: bool, key: tuple[str | int, ...]
    ) -> Any:
        plugin, spec = found.plugin, cast("PluginSpec", found.spec)
        if complete and split_id(spec.id):
            try:
                spec = registry.env_spec(spec.id, options)
            except UserError as e:
                self.note(Problem((*key, "id") if options else key, str(e)))
                return None
        return ResolvedPlugin(found.kind, spec, options, plugin.distribution, plugin.version)

    def _isolated(self, ref: PluginRef, key: tuple[str | int, ...]) -> Any:
        """Ask the environment's box; it need not be installed here."""
        from rollart_core.isolation.describe import describe, option_faults

        try:
            faults = option_faults(ref.id, ref.options)
            for fault in faults:
                self.note(fault.under(*key))
            if faults:
                return None
            said = describe(ref.id, ref.options)
        except UserError as e:
            self.note(Problem(key, str(e)))
            return None
        return ResolvedPlugin(
            "environments", said.spec, dict(said.options), said.distribution, said.version
        )

    def _check_class(self, kind: str, plugin_id: str, entry_point: str) -> None:
        module = entry_point.partition(":")[0]
        if self.import_classes or ":" in plugin_id or not _exists(module):
            registry.resolve(kind, plugin_id)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _ref(plugin: ResolvedPlugin[Any]) -> dict[str, Any]:
    return {"id": plugin.spec.id, **plugin.options}


def _boxed(
    config: RunConfig, env: ResolvedPlugin[EnvSpec]
) -> tuple[ResolvedPlugin[EnvSpec], list[Problem]]:
    """Return an environment whose sandbox fits the run's deadlines, and what is wrong with it."""
    reset_s = config.deadlines.reset_s or env.spec.timeouts.reset_s
    if registry.ISOLATION in env.options:
        from rollart_core.isolation.config import fit

        options, faults = fit(env.options, config.deadlines, reset_s)
        return replace(env, options=options), [fault.under("env") for fault in faults]
    if "sandbox" not in env.options or not config_boxes.runs_in_a_box(env.spec.id):
        return env, []
    options, faults = config_boxes.fill(env.options, config.deadlines, reset_s)
    return replace(env, options=options), [fault.under("env") for fault in faults]


def _env_problems(config: RunConfig, spec: EnvSpec) -> list[Problem]:
    defaults = {"reset_s": spec.timeouts.reset_s, "step_s": spec.timeouts.step_s}
    problems = deadline_problems(config.deadlines, defaults, sandboxed=spec.sandbox is not None)
    problems += without_effect(config, spec)
    if spec.sandbox is not None and not config_boxes.runs_in_a_box(spec.id):
        try:
            registry.find("sandboxes", spec.sandbox)
        except UserError as e:
            problems.append(Problem(("env",), f"{spec.id} runs in a sandbox: {e}"))
    if ":" not in spec.id or split_id(spec.id):  # of unregistered code they are not known
        problems += _split_problems(config, spec)
    return problems


def _split_problems(config: RunConfig, spec: EnvSpec) -> Iterable[Problem]:
    used = {("rollout", "split"): config.rollout.split}
    used["evaluation", "split"] = config.evaluation.split
    if config.warm_start:
        used["warm_start", "check_split"] = config.warm_start.check_split
    for key, split in used.items():
        if split not in spec.splits:
            near = did_you_mean(split, spec.splits) or f" It has {', '.join(spec.splits)}."
            yield Problem(key, f"{spec.id} has no split {split!r}.{near}")


def _group_size_problems(
    config: RunConfig, algorithm: ResolvedPlugin[AlgorithmSpec], import_classes: bool
) -> Iterable[Problem]:
    """Yield where groups could get smaller than the algorithm can use."""
    least = 2 if algorithm.spec.needs_groups else 1
    if import_classes:
        least = max(least, algorithm.cls().min_group_size)
    for name in ("group_size", "min_group_size"):
        given = getattr(config.rollout, name)
        if given < least:
            message = f"{given} is too few for {algorithm.spec.id}, which needs {least}"
            yield Problem(("rollout", name), message)


def _filled(deadlines: Deadlines, spec: EnvSpec) -> Deadlines:
    times = spec.timeouts
    return deadlines.model_copy(
        update={
            "reset_s": deadlines.reset_s if deadlines.reset_s is not None else times.reset_s,
            "step_s": deadlines.step_s if deadlines.step_s is not None else times.step_s,
        }
    )
