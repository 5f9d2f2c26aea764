"""Resolve the environments of a run: one, or several with weights.

Takes: the ``env`` of a run config. Gives: a :class:`ResolvedEnv` for each, with a sandbox that fits
the deadlines, and problems with the index of their environment. Never: builds an environment or
starts a sandbox.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Final

from rollart_core.config.base import PluginRef
from rollart_core.config.envs import EnvEntry, EnvRun
from rollart_core.config.evaluation import VALIDATION_SPLITS
from rollart_core.config.problems import Problem
from rollart_core.config.resolve_plugin import PluginFinder, ResolvedPlugin, ref_of
from rollart_core.config.run import Deadlines, RunConfig
from rollart_core.config.runtime import RayRuntime
from rollart_core.config.sandbox_options import SandboxedOptions
from rollart_core.config.training import Shaping
from rollart_core.config.validation.consistency import OWN_KEYS, deadline_problems, without_effect
from rollart_core.contracts.adapter import split_id
from rollart_core.contracts.algorithm import AlgorithmSpec
from rollart_core.contracts.env import ALL_TASKS, EnvSpec
from rollart_core.contracts.reward import RewardSpec
from rollart_core.errors import UserError, did_you_mean
from rollart_core.plugins import registry

ENTRY_KEYS = ("name", "weight", "run")
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")

_WAIT_SHARE: Final = 0.8
"""Share of ``reset_s``: the wait for capacity ends earlier, with a reason, and leaves time to
start."""

_UNTRUSTED_SANDBOX: Final = (
    "{} has no isolation: set its option trusted: true if you trust the code, or use "
    "another sandbox"
)


@dataclass(frozen=True, slots=True)
class ResolvedEnv:
    """One environment of a run, with its own settings."""

    name: str
    """Name in tasks, reports and the placement; the id if there is only one environment."""
    plugin: ResolvedPlugin[EnvSpec]
    weight: float
    split: str
    evaluation_split: str
    check_split: str
    max_turns: int
    reset_s: float
    step_s: float
    reward: ResolvedPlugin[RewardSpec] | None
    """None: the return of the environment is the reward."""
    validation_split: str = ""
    """Empty: validation tasks are held out of ``split`` if there are validations."""
    shaping: Shaping | None = None
    """None: its rewards are not changed."""
    algorithm: ResolvedPlugin[AlgorithmSpec] | None = None
    """The run's algorithm with the settings of this environment. None if no environment of the run
    has its own settings."""

    @property
    def spec(self) -> EnvSpec:
        """The spec of the environment."""
        return self.plugin.spec

    @property
    def decides_success(self) -> bool:
        """Whether its reward decides success, and not the environment."""
        return self.reward is not None and self.spec.success_by_reward

    @property
    def score_range(self) -> tuple[float, float] | None:
        """The range of the score of an episode: its return, or the reward if it decides success."""
        if self.reward is not None and self.spec.success_by_reward:
            return self.reward.spec.reward_range
        return self.reward_range

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """The declared range of the return of an episode; None for an unregistered class."""
        is_class = ":" in self.spec.id and split_id(self.spec.id) is None
        return None if is_class else self.spec.reward_range


@dataclass(frozen=True, slots=True)
class _Pending:
    """One environment of the config, and its key."""

    key: tuple[str | int, ...]
    ref: PluginRef
    name: str | None = None
    weight: float = 1.0
    run: EnvRun = field(default_factory=EnvRun)


def resolve_envs(
    config: RunConfig, find: PluginFinder, reward: ResolvedPlugin[RewardSpec] | None
) -> tuple[ResolvedEnv, ...]:
    """Return the environments of a run; problems are noted with ``find``.

    Args:
        config: The config to resolve.
        find: Finds plugins and notes problems, which end the run later.
        reward: The reward of the run. An environment may have another.
    """
    asked = [_with_data(config, one, find) for one in _asked(config)]
    found = [_found(config, one, find) for one in asked]
    known = [(one, plugin) for one, plugin in zip(asked, found, strict=True) if plugin]
    specs = [plugin.spec for _, plugin in known]
    problems = without_effect(config, specs) if len(specs) == len(asked) else []
    if len(specs) == len(asked):
        problems += agent_problems(config, specs)
    for one, plugin in known:
        if plugin.spec.kind == "agent":
            problems += program_problems(one.key, plugin.options, config.deadlines.episode_s)
    problems += _names_taken(asked)
    problems += _stand_twice(known)
    for problem in dict.fromkeys(problems):
        find.note(problem)
    names = _names(asked, [plugin.spec.id if plugin else "" for plugin in found])
    rewards = [
        find("rewards", one.run.reward, *one.key, "run", "reward")
        if one.run.reward
        else reward or _fitting(one, plugin, find)
        for one, plugin in zip(asked, found, strict=True)
    ]
    return tuple(
        _resolved(config, one, (names[i], plugin, rewards[i]))
        for i, (one, plugin) in enumerate(zip(asked, found, strict=True))
        if plugin
    )


def _fitting(
    one: _Pending, plugin: ResolvedPlugin[EnvSpec] | None, find: PluginFinder
) -> ResolvedPlugin[RewardSpec] | None:
    """Return the reward that the options of an environment need, in a run without a reward.

    A config model may define a method ``fitting_reward() -> Mapping | None``.
    """
    if plugin is None or registry.ISOLATION in plugin.options:
        return None
    model = registry.config_model("environments", plugin.spec.id)
    fitting = getattr(model, "fitting_reward", None)
    said = fitting(model(**plugin.options)) if model and fitting else None
    found: ResolvedPlugin[RewardSpec] | None = None
    if said is not None:
        found = find("rewards", PluginRef.model_validate(said), *one.key)
    return found


def with_algorithms(
    config: RunConfig,
    envs: tuple[ResolvedEnv, ...],
    algorithm: ResolvedPlugin[AlgorithmSpec],
    find: PluginFinder,
) -> tuple[ResolvedEnv, ...]:
    """Return the environments with an algorithm for each, if any has its own settings.

    Args:
        config: The config.
        envs: All environments of the config, as :func:`resolve_envs` found them.
        algorithm: The algorithm of the run.
        find: Finds plugins and notes problems, which end the run later.
    """
    entries = config.env if isinstance(config.env, tuple) else ()
    if not any(entry.run.algorithm for entry in entries) or len(entries) != len(envs):
        return envs
    found = []
    for i, (entry, env) in enumerate(zip(entries, envs, strict=True)):
        options = {**config.algorithm.options, **(entry.run.algorithm or {})}
        ref = PluginRef(id=config.algorithm.id, **options)
        own = find("algorithms", ref, "env", i, "run", "algorithm")
        found.append(replace(env, algorithm=own or algorithm))
    return tuple(found)


def entries_as_dicts(config: RunConfig, envs: Sequence[ResolvedEnv]) -> list[dict[str, Any]]:
    """Return the environments as plain data for a config file."""
    assert isinstance(config.env, tuple)
    dicts = []
    for entry, env in zip(config.env, envs, strict=True):
        run = entry.run.model_dump(mode="json", exclude_none=True)
        if entry.run.shaping:
            run["shaping"] = entry.run.shaping.model_dump(mode="json")
        if env.reward and (entry.run.reward or config.reward is None):
            run["reward"] = ref_of(env.reward)
        own = {"name": env.name, "weight": env.weight} | ({"run": run} if run else {})
        dicts.append({"id": env.spec.id, **own, **env.plugin.options})
    return dicts


def _asked(config: RunConfig) -> list[_Pending]:
    if not isinstance(config.env, tuple):
        return [_Pending(("env",), config.env)]
    return [_Pending(("env", i), e, e.name, e.weight, e.run) for i, e in enumerate(config.env)]


def _with_data(config: RunConfig, one: _Pending, find: PluginFinder) -> _Pending:
    """Return the environment with ``data`` as its option ``file``."""
    if config.data is None:
        return one
    problem = ""
    try:
        model = registry.config_model("environments", one.ref.id)
        if isinstance(one.ref, EnvEntry):
            problem = "has no effect with a list of environments: set the file of each"
        elif "file" in one.ref.options:
            problem = "sets env.file, which is set too: remove one"
        elif model is None or "file" not in model.model_fields:
            problem = f"{one.ref.id} reads no file: use an environment that does, such as questions"
    except UserError:  # reported when the environment is looked up
        return one
    if problem:
        find.note(Problem(("data",), problem))
        return one
    return replace(one, ref=PluginRef(**{**one.ref.model_dump(), "file": config.data}))


def _found(config: RunConfig, one: _Pending, find: PluginFinder) -> ResolvedPlugin[EnvSpec] | None:
    """Find one environment and note the problems of its own settings."""
    told: list[Problem] = []
    plugin = replace(find, note=told.append)("environments", one.ref, *one.key)
    for problem in told:
        find.note(_with_entry_keys(problem, one))
    if plugin is None:
        return None
    if plugin.options.get("tools") is True:
        plugin = replace(plugin, spec=replace(plugin.spec, tools=True))
    problems = _env_problems(config, one, plugin.spec)
    plugin, faults = _boxed(_deadlines(config, one), plugin)
    for problem in [*problems, *(fault.under(*one.key) for fault in faults)]:
        find.note(problem)
    resolved: ResolvedPlugin[EnvSpec] = plugin
    return resolved


def _with_entry_keys(problem: Problem, one: _Pending) -> Problem:
    """Return the problem; a misspelled key of the list entry looks like an option."""
    if not isinstance(one.ref, EnvEntry) or problem.path[:-1] != one.key:
        return problem
    near = did_you_mean(str(problem.path[-1]), ENTRY_KEYS)
    if not near or "unknown key" not in problem.message:
        return problem
    return Problem(problem.path, f"unknown key.{near}")


def _resolved(
    config: RunConfig,
    one: _Pending,
    rest: tuple[str, ResolvedPlugin[EnvSpec], ResolvedPlugin[RewardSpec] | None],
) -> ResolvedEnv:
    name, plugin, reward = rest
    splits, times = _splits(config, one), plugin.spec.timeouts
    deadlines = _deadlines(config, one)
    return ResolvedEnv(
        name=name,
        plugin=plugin,
        weight=one.weight,
        split=splits["split"],
        evaluation_split=splits["evaluation_split"],
        check_split=splits.get("check_split", ""),
        validation_split=splits.get("validation_split") or _own_split(config, splits, plugin.spec),
        max_turns=one.run.max_turns or config.rollout.max_turns or plugin.spec.max_turns,
        reset_s=times.reset_s if deadlines.reset_s is None else deadlines.reset_s,
        step_s=times.step_s if deadlines.step_s is None else deadlines.step_s,
        reward=reward,
        shaping=one.run.shaping or config.shaping,
    )


def _splits(config: RunConfig, one: _Pending) -> dict[str, str]:
    """Return the splits by their key in :class:`EnvRun`; that of checks only with a warm start."""
    wanted = {"split": config.rollout.split, "evaluation_split": config.evaluation.split}
    if config.warm_start:
        wanted["check_split"] = config.warm_start.check_split
    splits = {key: getattr(one.run, key) or split for key, split in wanted.items()}
    validation = one.run.validation_split or config.evaluation.validation_split
    return {**splits, "validation_split": validation} if validation else splits


def _own_split(config: RunConfig, splits: dict[str, str], spec: EnvSpec) -> str:
    """Return the split that an environment declares for validation; empty without one."""
    if config.evaluation.every_batches is None:
        return ""
    taken = splits.values()
    return next((s for s in VALIDATION_SPLITS if s in spec.splits and s not in taken), "")


def _deadlines(config: RunConfig, one: _Pending) -> Deadlines:
    own = {key: getattr(one.run, key) for key in ("reset_s", "step_s")}
    return config.deadlines.model_copy(update={k: v for k, v in own.items() if v is not None})


def _names(asked: Sequence[_Pending], ids: Sequence[str]) -> list[str]:
    times = Counter(ids)
    return [
        one.name or (env_id if times[env_id] == 1 else f"{env_id}#{i}")
        for i, (one, env_id) in enumerate(zip(asked, ids, strict=True))
    ]


def _names_taken(asked: Sequence[_Pending]) -> Iterator[Problem]:
    names = [one.name for one in asked]
    for i, name in enumerate(names):
        if name is not None and name in names[:i]:
            message = f"{name!r} is already the name of env.{names.index(name)}"
            yield Problem(("env", i, "name"), message)


def _stand_twice(known: Sequence[tuple[_Pending, ResolvedPlugin[EnvSpec]]]) -> Iterator[Problem]:
    seen: list[tuple[str, dict[str, Any], EnvRun]] = []
    for one, plugin in known:
        this = (plugin.spec.id, plugin.options, one.run)
        if this in seen:
            first = known[seen.index(this)][0]
            message = (
                f"{plugin.spec.id} with the same options is already env.{first.key[-1]}: "
                "give that one the weight of both"
            )
            yield Problem(one.key, message)
        seen.append(this)


def _env_problems(config: RunConfig, one: _Pending, spec: EnvSpec) -> list[Problem]:
    problems = list(_deadline_problems(config, one, spec))
    if spec.sandbox is not None and not runs_in_sandbox(spec.id):
        try:
            registry.find("sandboxes", spec.sandbox)
        except UserError as e:
            problems.append(Problem(one.key, f"{spec.id} runs in a sandbox: {e}"))
    if ":" not in spec.id or split_id(spec.id):  # unknown for unregistered code
        problems += _split_problems(config, one, spec)
    return problems


def _deadline_problems(config: RunConfig, one: _Pending, spec: EnvSpec) -> Iterable[Problem]:
    defaults = {"reset_s": spec.timeouts.reset_s, "step_s": spec.timeouts.step_s}
    for problem in deadline_problems(
        _deadlines(config, one), defaults, sandboxed=spec.sandbox is not None
    ):
        inner = str(problem.path[-1])
        if not isinstance(one.ref, EnvEntry) or inner not in defaults:
            yield problem
        elif getattr(one.run, inner) is not None:
            yield Problem((*one.key, "run", inner), problem.message)
        elif getattr(config.deadlines, inner) is None:
            yield Problem(one.key, f"{problem.key}: {problem.message}")
        else:
            yield problem


def _split_problems(config: RunConfig, one: _Pending, spec: EnvSpec) -> Iterable[Problem]:
    used = _splits(config, one)
    for key, split in used.items():
        if split not in spec.splits:
            message = no_split(spec, split)
        elif split == ALL_TASKS and spec.disjoint_splits and len(set(used.values())) > 1:
            message = _all_overlaps(used, key)
        else:
            continue
        if not isinstance(one.ref, EnvEntry):
            yield Problem(OWN_KEYS[key], message)
        elif getattr(one.run, key) is None:
            where = ".".join(OWN_KEYS[key])
            yield Problem((*one.key, "run", key), f"is {where} unless set, and {message}")
        else:
            yield Problem((*one.key, "run", key), message)


def _all_overlaps(used: Mapping[str, str], key: str) -> str:
    other, split = next(item for item in used.items() if item[1] != used[key])
    return (
        f"{used[key]!r} has the tasks of every split, also of {'.'.join(OWN_KEYS[other])}, which is"
        f" {split!r}: use a split without them, or rollart eval to score a model on all tasks"
    )


def no_split(spec: EnvSpec, split: str) -> str:
    """Return the message for a split that an environment does not have."""
    near = did_you_mean(split, spec.splits) or f" It has {', '.join(spec.splits)}."
    return f"{spec.id} has no split {split!r}.{near}"


def _boxed(
    deadlines: Deadlines, env: ResolvedPlugin[EnvSpec]
) -> tuple[ResolvedPlugin[EnvSpec], list[Problem]]:
    """Return an environment whose sandbox fits the run's deadlines, and its problems."""
    reset_s = deadlines.reset_s or env.spec.timeouts.reset_s
    if registry.ISOLATION in env.options:
        options, faults = registry.sandbox_service().fit(env.options, deadlines, reset_s)
        return replace(env, options=options), faults
    if "sandbox" not in env.options or not runs_in_sandbox(env.spec.id):
        return env, []
    options, faults = with_sandbox_defaults(env.options, deadlines, reset_s)
    return replace(env, options=options), faults


def runs_in_sandbox(env_id: str) -> bool:
    """Return whether an environment's options include a sandbox and a pool."""
    try:
        model = registry.config_model("environments", env_id)
    except UserError:
        return False
    return model is not None and issubclass(model, SandboxedOptions)


def with_sandbox_defaults(
    options: Mapping[str, Any], deadlines: Deadlines, reset_s: float
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the options of an environment that runs in a sandbox, and its problems.

    Args:
        options: Options that the environment's config model checked.
        deadlines: The deadlines of the run.
        reset_s: Maximum seconds of a reset, including the wait for a sandbox.
    """
    ref = PluginRef.model_validate(options["sandbox"])
    sandbox, problems = _resolved_sandbox(ref, deadlines.sandbox_ttl_s)
    pool = dict(options["pool"])
    if pool["wait_s"] is None:
        pool["wait_s"] = _WAIT_SHARE * reset_s
    elif pool["wait_s"] >= reset_s:
        message = f"{pool['wait_s']:g} s: must be shorter than deadlines.reset_s ({reset_s:g} s)"
        problems.append(Problem(("pool", "wait_s"), message))
    return {**options, "sandbox": sandbox, "pool": pool}, problems


def _resolved_sandbox(ref: PluginRef, ttl_s: float) -> tuple[dict[str, Any], list[Problem]]:
    given = ref.options
    try:
        model = registry.config_model("sandboxes", ref.id)
        knows_ttl = model is not None and "ttl_s" in model.model_fields
        options = {"ttl_s": ttl_s, **given} if knows_ttl else given
        faults = registry.option_problems("sandboxes", ref.id, options)
        if not faults and model is not None and not getattr(model(**options), "trusted", True):
            faults.append(Problem((), _UNTRUSTED_SANDBOX.format(ref.id)))
    except UserError as e:
        return given, [Problem(("sandbox", "id") if given else ("sandbox",), str(e))]
    if knows_ttl and not faults and float(options["ttl_s"]) < ttl_s:
        least = f"must not be shorter than deadlines.sandbox_ttl_s ({ttl_s:g} s)"
        message = f"{options['ttl_s']:g} s: {least}; remove it to use that value"
        faults = [Problem(("ttl_s",), message)]
    return {"id": ref.id, **options}, [fault.under("sandbox") for fault in faults]


def agent_problems(config: RunConfig, specs: Sequence[EnvSpec]) -> Iterator[Problem]:
    """Yield problems of a run's agents, or of ``gateway`` without an agent.

    Args:
        config: The config.
        specs: The specs of all its environments.
    """
    agents = [spec for spec in specs if spec.kind == "agent"]
    if not agents:
        if has_no_agent(specs) and "gateway" in config.model_fields_set:
            message = "has no effect because no environment is an agent; remove it"
            yield Problem(("gateway",), message)
        return
    which = agents[0].id
    if find_spec("aiohttp") is None:
        message = f"{which} is an agent, which needs aiohttp: pip install 'rollart[gateway]'"
        yield Problem(("env",), message)
    if config.warm_start is not None:
        message = f"{which} is an agent, which has no oracle to learn from; remove it"
        yield Problem(("warm_start",), message)
    if getattr(config.model, "kind", None) == "remote":
        message = (
            f"remote: {which} is an agent, whose episodes are recorded as tokens: "
            "set model.path to a folder that has at least the tokenizer"
        )
        yield Problem(("model", "kind"), message)
    if len(agents) == len(specs) and "max_observation_chars" in config.rollout.model_fields_set:
        message = "has no effect because all environments are agents; remove it"
        yield Problem(("rollout", "max_observation_chars"), message)
    runtime = config.runtime
    if isinstance(runtime, RayRuntime) and runtime.address and config.gateway.host in _LOOPBACK:
        message = (
            f"{config.gateway.host}: env workers on other machines cannot reach it; set an "
            "address of this machine that they can reach"
        )
        yield Problem(("gateway", "host"), message)


def program_problems(
    key: tuple[str | int, ...], options: Mapping[str, Any], episode_s: float
) -> Iterator[Problem]:
    """Yield problems of the time limit that an agent sets for its program.

    Args:
        key: Key of the environment in the config.
        options: Its options; ``program_s`` is the time limit, if it is set.
        episode_s: Deadline of the episode.
    """
    program_s = options.get("program_s")
    if isinstance(program_s, int | float) and program_s >= episode_s:
        message = f"{program_s:g} s: must be shorter than deadlines.episode_s ({episode_s:g} s)"
        yield Problem((*key, "program_s"), message)


def has_no_agent(specs: Sequence[EnvSpec]) -> bool:
    """Return whether no environment can be an agent; False if an unregistered class may be one."""
    return all(
        spec.kind == "step" and (":" not in spec.id or bool(split_id(spec.id))) for spec in specs
    )
