"""Resolve a run config: find every plugin and check every option.

Takes: a RunConfig. Gives: a picklable :class:`ResolvedRun`, or one ConfigError that lists all
problems before anything starts. Never: builds a plugin or starts a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, cast

from rollart_core.config.load import RECORD_KEY, as_error, dump_yaml
from rollart_core.config.model import NewModel, RemoteModel
from rollart_core.config.problems import Problem
from rollart_core.config.resolve_envs import ResolvedEnv as ResolvedEnv
from rollart_core.config.resolve_envs import (
    entries_as_dicts,
    has_no_agent,
    resolve_envs,
    with_algorithms,
)
from rollart_core.config.resolve_plugin import PluginFinder, ref_of
from rollart_core.config.resolve_plugin import ResolvedPlugin as ResolvedPlugin
from rollart_core.config.run import Deadlines, EngineClass, RunConfig
from rollart_core.config.scoring import Scoring, idle_scoring, reward_problems, with_effect
from rollart_core.config.training import AuxiliaryModels
from rollart_core.config.validation.consistency import replaced_everywhere, success_problems
from rollart_core.config.validation.plugins import (
    algorithm_problems,
    colocation_problems,
    devices_of,
    engine_problems,
    learning_problems,
    teacher_problems,
)
from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.contracts.env import EnvSpec
from rollart_core.contracts.hardware import HardwareMapperSpec
from rollart_core.contracts.inference import InferenceEngineSpec
from rollart_core.contracts.reward import RewardBackendSpec, RewardSpec
from rollart_core.contracts.tracker import TrackerSpec
from rollart_core.contracts.weights import WeightChannelSpec
from rollart_core.errors import UserError
from rollart_core.plugins import registry


@dataclass(frozen=True, slots=True)
class ResolvedScoring:
    """Where the rewards of a run are computed."""

    backend: ResolvedPlugin[RewardBackendSpec]
    fallback: ResolvedPlugin[RewardBackendSpec] | None = None

    @property
    def backends(self) -> tuple[ResolvedPlugin[RewardBackendSpec], ...]:
        """The backend, and the fallback if there is one."""
        return (self.backend,) if self.fallback is None else (self.backend, self.fallback)

    def as_dict(self, asked: Scoring, rewards: Sequence[RewardSpec]) -> dict[str, Any]:
        """Return the section ``scoring`` as plain data for a config file."""
        fallback = {"fallback": ref_of(self.fallback)} if self.fallback else {}
        return {**with_effect(asked, rewards), "backend": ref_of(self.backend), **fallback}


@dataclass(frozen=True, slots=True)
class ResolvedEngines:
    """A further class of engines."""

    name: str
    """Name of the class, and of its pool."""
    plugin: ResolvedPlugin[InferenceEngineSpec]
    count: int


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run that can start."""

    config: RunConfig
    envs: tuple[ResolvedEnv, ...]
    """At least one."""
    reward: ResolvedPlugin[RewardSpec] | None
    """None: the return of the environment is the reward."""
    algorithm: ResolvedPlugin[AlgorithmSpec]
    engine: ResolvedPlugin[InferenceEngineSpec]
    weights: ResolvedPlugin[WeightChannelSpec]
    mapper: ResolvedPlugin[HardwareMapperSpec]
    trackers: tuple[ResolvedPlugin[TrackerSpec], ...]
    scoring: ResolvedScoring
    """Where rewards are computed."""
    deadlines: Deadlines
    """The deadlines of the config. In a run with one environment, ``reset_s`` and ``step_s`` come
    from its spec if they are None (in a mix, each environment has its own)."""
    teacher: ResolvedPlugin[InferenceEngineSpec] | None = None
    """The engine that runs the teacher, or None."""
    engines: tuple[ResolvedEngines, ...] = ()
    """Further classes of engines."""

    @property
    def env(self) -> ResolvedPlugin[EnvSpec]:
        """The environment, or the first of several."""
        return self.envs[0].plugin

    def engine_on(self, pool: str) -> ResolvedPlugin[InferenceEngineSpec]:
        """Return the inference engine of a pool."""
        return next((e.plugin for e in self.engines if e.name == pool), self.engine)

    @property
    def max_turns(self) -> int:
        """Maximum number of turns over all environments."""
        return max(env.max_turns for env in self.envs)

    @property
    def has_rewards(self) -> bool:
        """Whether a reward function scores any environment."""
        return any(env.reward is not None for env in self.envs)

    @property
    def is_mixed(self) -> bool:
        """Whether the config has a list of environments."""
        return isinstance(self.config.env, tuple)

    @property
    def plugins(self) -> tuple[ResolvedPlugin[Any], ...]:
        """All plugins of the run."""
        own = (p for env in self.envs for p in (env.plugin, env.reward))
        parts = (self.reward, self.algorithm, self.engine, self.weights, self.mapper, self.teacher)
        backends = self.scoring.backends if self.has_rewards else ()
        further = (one.plugin for one in self.engines)
        found = [p for p in (*own, *parts, *further, *backends, *self.trackers) if p is not None]
        return tuple({(p.kind, p.spec.id): p for p in found}.values())

    @property
    def engine_devices(self) -> int:
        """Number of accelerators that one inference engine uses."""
        return devices_of(self.engine)

    @property
    def trained_temperature(self) -> float:
        """Divisor of logits in the trainer: the sampling temperature, or 1 for demonstrations."""
        return 1.0 if self.demonstrates else self.config.rollout.temperature

    @property
    def demonstrates(self) -> bool:
        """Whether trajectories come from the environments' experts and not from the policy."""
        return self.algorithm.spec.learns_from == "demonstrations"

    @property
    def beside(self) -> AuxiliaryModels:
        """The auxiliary models of the trainer."""
        config = self.config
        return AuxiliaryModels(
            lora=config.lora,
            warms_whole=config.lora is not None and isinstance(config.model, NewModel),
            critic=config.critic,
            reference=config.reference,
            has_teacher=config.teacher is not None,
            shapings={env.name: env.shaping for env in self.envs if env.shaping},
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the whole config as plain data, with every default and the plugins' versions.

        ``load_config`` reads it as an equal run.
        """
        data = self.config.model_dump(mode="json", exclude={"deadlines", "data"})
        data["deadlines"] = self.deadlines.model_dump(mode="json")
        if self.config.mode == "sync":
            del data["rollout"]["kv_on_swap"]
        if self.config.staleness_bound == 0:
            del data["rollout"]["in_flight"]
        if isinstance(self.config.model, RemoteModel):
            del data["rollout"]["max_context_tokens"]
        if self.config.evaluation.every_batches is None:
            del data["evaluation"]["validation_tasks"], data["evaluation"]["validation_split"]
        elif not self.is_mixed:
            data["evaluation"]["validation_split"] = self.envs[0].validation_split or None
        if self.config.rollout.equal_groups == "train":
            del data["rollout"]["max_equal_groups"]
        specs = [env.spec for env in self.envs]
        if has_no_agent(specs):
            del data["gateway"]
        if all(spec.kind == "agent" for spec in specs):
            del data["rollout"]["max_observation_chars"]
        if all(env.spec.sandbox is None for env in self.envs):
            del data["deadlines"]["sandbox_ttl_s"]
        if self.is_mixed:
            data["env"] = entries_as_dicts(self.config, self.envs)
        else:
            data["env"] = ref_of(self.env)
            data["rollout"]["max_turns"] = self.max_turns
        reward = self.reward if self.is_mixed else self.envs[0].reward
        data["reward"] = ref_of(reward) if reward else None
        rewards = [env.reward.spec for env in self.envs if env.reward]
        if rewards:
            data["scoring"] = self.scoring.as_dict(self.config.scoring, rewards)
        else:
            del data["scoring"]
        if rewards and not any(env.decides_success for env in self.envs):
            del data["scoring"]["success_from"]
        for name in ("algorithm", "engine", "weights", "mapper"):
            data[name] = ref_of(getattr(self, name))
        data["engines"] = [
            {"name": e.name, "engine": ref_of(e.plugin), "count": e.count} for e in self.engines
        ]
        if self.teacher:
            data["teacher"]["engine"] = ref_of(self.teacher)
        data["trackers"] = [ref_of(t) for t in self.trackers]
        data[RECORD_KEY] = {"rollart": version("rollart")} | {
            p.distribution: p.version for p in self.plugins
        }
        for section, key in replaced_everywhere(self.config):
            data[section].pop(key, None)
        return data

    def to_yaml(self) -> str:
        """Return :meth:`as_dict` as YAML: the ``config.yaml`` of the run directory."""
        return dump_yaml(self.as_dict())


def resolve_run(
    config: RunConfig,
    *,
    source: str = "config",
    import_classes: bool = False,
    trains: bool = True,
    generates: bool = True,
) -> ResolvedRun:
    """Find every plugin and check every option.

    Args:
        config: The config to resolve.
        source: The name of the config in errors, such as its file.
        import_classes: Also import every plugin's class in this process (``--dry-run`` does). If
            False, only missing modules are detected.
        trains: False: the model is only evaluated.
        generates: False: no model is used, and engine and model are not checked.

    Raises:
        ConfigError: With a line for each problem.
    """
    found = resolve_all(config, import_classes=import_classes, trains=trains, generates=generates)
    if found.run is None or found.problems:
        raise as_error(found.problems, source)
    return found.run


@dataclass(frozen=True, slots=True)
class Resolution:
    """The plugins of a run that were found, and all problems."""

    config: RunConfig
    envs: tuple[ResolvedEnv, ...]
    """The environments that were found."""
    engine: ResolvedPlugin[InferenceEngineSpec] | None
    mapper: ResolvedPlugin[HardwareMapperSpec] | None
    run: ResolvedRun | None
    """None if a plugin is missing."""
    problems: list[Problem]
    """All problems."""

    @property
    def engine_devices(self) -> int:
        """Number of accelerators that one inference engine uses; 1 if it was not found."""
        return devices_of(self.engine) if self.engine else 1


def resolve_all(
    config: RunConfig,
    *,
    import_classes: bool = False,
    trains: bool = True,
    generates: bool = True,
    look_here: bool = False,
    joins: bool = False,
    recorded: bool = False,
) -> Resolution:
    """Find every plugin and check every option; return the result and all problems.

    Args:
        config: The config to resolve.
        import_classes: As in :func:`resolve_run`.
        trains: As in :func:`resolve_run`.
        generates: As in :func:`resolve_run`.
        look_here: Executables, images and files in options must exist on this machine.
        joins: Engines and environments run on a cluster: check only what this process uses.
        recorded: The config is from a run directory, so options without effect are allowed.
    """
    problems: list[Problem] = []
    find = PluginFinder(problems.append, import_classes, look_here and not joins)
    find_own = PluginFinder(problems.append, import_classes, look_here)
    reward = find("rewards", config.reward, "reward") if config.reward else None
    algorithm = find("algorithms", config.algorithm, "algorithm")
    engine, *engines = _engines(config, find)
    weights = find("weight_channels", config.weights, "weights")
    mapper = find("hardware_mappers", config.mapper, "mapper")
    find_tracker = replace(find_own, look_here=look_here and trains)  # else they are not used
    trackers = [find_tracker("trackers", t, "trackers", i) for i, t in enumerate(config.trackers)]
    teacher = _teacher(config, find)
    envs = resolve_envs(config, find, reward)
    scoring = _scoring(config, find_own, [env.reward for env in envs])
    problems += _model_kind_problems(config, trains)
    if generates:
        problems += engine_problems(config, (engine, *engines), trains)
    if algorithm:
        problems += _group_size_problems(config, algorithm, import_classes)
        problems += _learning_problems(config, algorithm, envs, recorded) if trains else ()
        envs = with_algorithms(config, envs, algorithm, find)
    found = (algorithm, engine, *engines, weights, mapper, scoring.backend, *trackers)
    if any(plugin is None for plugin in found) or not envs:
        return Resolution(config, envs, engine, mapper, None, problems)
    run = ResolvedRun(
        config=config,
        envs=envs,
        reward=reward,
        algorithm=algorithm,
        engine=engine,
        weights=_reaching(weights),
        mapper=mapper,
        trackers=tuple(trackers),
        scoring=scoring,
        deadlines=_filled(config, envs),
        teacher=teacher,
        engines=tuple(map(_class, config.engines, engines)),
    )
    problems += colocation_problems(config, run.engine, run.weights.spec) if trains else ()
    return Resolution(config, envs, engine, mapper, run, problems)


def _engines(config: RunConfig, find: PluginFinder) -> list[ResolvedPlugin[InferenceEngineSpec]]:
    """Find the engine, then those of further classes."""
    further = [
        find("inference_engines", one.engine, "engines", i, "engine")
        for i, one in enumerate(config.engines)
    ]
    return [find("inference_engines", config.engine, "engine"), *further]


def _class(one: EngineClass, plugin: ResolvedPlugin[InferenceEngineSpec]) -> ResolvedEngines:
    return ResolvedEngines(one.name, plugin, one.count)


def _teacher(config: RunConfig, find: PluginFinder) -> ResolvedPlugin[InferenceEngineSpec] | None:
    """Find the engine of the teacher, if there is one, and note its problems."""
    if config.teacher is None:
        return None
    teacher: ResolvedPlugin[InferenceEngineSpec] | None = find(
        "inference_engines", config.teacher.engine, "teacher", "engine"
    )
    for problem in teacher_problems(teacher):
        find.note(problem)
    return teacher


def _scoring(
    config: RunConfig,
    find: PluginFinder,
    rewards: Sequence[ResolvedPlugin[RewardSpec] | None],
) -> ResolvedScoring:
    """Find the backends of rewards, and note their problems."""
    for problem in idle_scoring(config, rewards):
        find.note(problem)
    asked = config.scoring
    specs = [reward.spec for reward in rewards if reward is not None]
    backend = find("reward_backends", asked.backend_for(specs), "scoring", "backend")
    fallback = None
    if asked.fallback is not None:
        fallback = find("reward_backends", asked.fallback, "scoring", "fallback")
    found = [plugin.spec for plugin in (backend, fallback) if plugin is not None]
    if len(found) == 1 + (asked.fallback is not None):
        for problem in reward_problems(asked, specs, found):
            find.note(problem)
    return ResolvedScoring(backend, fallback)


def _reaching(
    channel: ResolvedPlugin[WeightChannelSpec],
) -> ResolvedPlugin[WeightChannelSpec]:
    """Return the channel; one that runs over another (``over``) has the reach of the other."""
    over = channel.options.get("over")
    carrier = over.get("id") if isinstance(over, dict) else over
    if not isinstance(carrier, str):
        return channel
    try:
        beneath = cast("WeightChannelSpec", registry.find("weight_channels", carrier).spec)
    except UserError:  # reported by the check of its options
        return channel
    return replace(channel, spec=replace(channel.spec, reach=beneath.reach))


def _model_kind_problems(config: RunConfig, trains: bool) -> Iterable[Problem]:
    """Yield why a model of this kind cannot be trained or scored."""
    if trains and isinstance(config.model, RemoteModel):
        message = "remote: it has no local weights to train; score it with `rollart eval`"
        yield Problem(("model", "kind"), message)
    if not trains and isinstance(config.model, NewModel):
        message = "new: it is untrained; give a model with --model, or a run directory"
        yield Problem(("model", "kind"), message)


def _learning_problems(
    config: RunConfig,
    algorithm: ResolvedPlugin[AlgorithmSpec],
    envs: Sequence[ResolvedEnv],
    recorded: bool,
) -> Iterable[Problem]:
    """Yield contradictions in the settings of training."""
    yield from learning_problems(config, algorithm.spec, [env.spec for env in envs])
    if len(envs) == (len(config.env) if isinstance(config.env, tuple) else 1):
        yield from success_problems(config, [env.spec for env in envs])
    if not recorded:
        yield from algorithm_problems(config, config.algorithm.id)


def _group_size_problems(
    config: RunConfig, algorithm: ResolvedPlugin[AlgorithmSpec], import_classes: bool
) -> Iterable[Problem]:
    """Yield settings that allow groups smaller than the algorithm needs."""
    least = 2 if algorithm.spec.needs_groups else 1
    if import_classes:
        least = max(least, algorithm.cls().min_group_size)
    for name in ("group_size", "min_group_size"):
        given = getattr(config.rollout, name)
        if given < least:
            message = f"{given} is too few for {algorithm.spec.id}, which needs {least}"
            yield Problem(("rollout", name), message)


def _filled(config: RunConfig, envs: tuple[ResolvedEnv, ...]) -> Deadlines:
    if isinstance(config.env, tuple):
        return config.deadlines
    times = {"reset_s": envs[0].reset_s, "step_s": envs[0].step_s}
    return config.deadlines.model_copy(update=times)
