"""The run config: the schema of a YAML file with ``key=value`` overrides.

Takes: plain mappings. Gives: a frozen :class:`RunConfig`. Never: imports torch or a plugin's code
(:mod:`rollart_core.config.resolve` checks a plugin's options against the plugin's own model).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from rollart_core.config.base import (
    Count,
    Fraction,
    LearningRate,
    Name,
    PluginRef,
    PositiveInt,
    Processes,
    Seconds,
    Section,
    Seed,
)
from rollart_core.config.envs import Env, joined_id
from rollart_core.config.evaluation import Checkpoint as Checkpoint
from rollart_core.config.evaluation import Evaluation as Evaluation
from rollart_core.config.evaluation import Guard, guard_section
from rollart_core.config.evaluation import Stop as Stop
from rollart_core.config.model import Model, RequestedWorkload
from rollart_core.config.runtime import InlineRuntime, Runtime, Scaling
from rollart_core.config.scoring import Scoring
from rollart_core.config.training import Critic, Curriculum, LoRA, Reference, Shaping, Teacher
from rollart_core.config.training import Trainer as Trainer


class WarmStart(Section):
    """Supervised training on the environment's ``oracle()`` before RL."""

    lr: LearningRate = 3e-3
    """Learning rate of AdamW in the warm start. RL uses ``trainer.lr``."""
    warmup_train_steps: PositiveInt = 10
    """Number of train steps over which the learning rate rises to ``lr``."""
    batch_size: PositiveInt = 16
    """Number of demonstrations per train step. Each demonstration is used once."""
    max_train_steps: PositiveInt = 600
    """Maximum number of train steps."""
    until_success: Fraction = 0.37
    """Stop the warm start when sampled success on the check split reaches this value."""
    check_every: PositiveInt = 10
    """Number of train steps between checks. Checks start when the loss is low enough."""
    check_tasks: PositiveInt = 64
    """Number of tasks per check."""
    check_split: Name = "warm"
    """Split of the check tasks. A separate split avoids that training or test tasks decide when to
    stop."""
    max_wall_s: Seconds | None = None
    """Maximum seconds of the warm start. If not set, only ``max_train_steps`` limits it,
    independent of the speed of the machine."""


class EngineClass(Section):
    """A further class of inference engines, in addition to those of ``engine``."""

    name: Name
    """Name of the class in placements, reports and `rollart scale`. Its engines form a pool of this
    name. With ``runtime: ray``, it names one of ``runtime.pools``, which then has no other
    engines."""
    engine: PluginRef
    """Inference engine of this class."""
    count: Processes = 1
    """Number of engines of this class, in addition to ``runtime.num_engines`` of ``engine``."""


class Rollout(Section):
    """How trajectories are generated."""

    split: Name = "train"
    """Split of the training tasks."""
    groups_per_batch: PositiveInt = 16
    """Number of groups per training batch."""
    group_size: PositiveInt = 8
    """Number of trajectories per task. Increase it if many groups have equal rewards."""
    min_group_size: PositiveInt = 2
    """Minimum number of members of a group. A group that has fewer members left after failures is
    dropped and replaced."""
    small_groups: Literal["replace", "requeue"] = "replace"
    """What replaces a group that is dropped because it is too small. ``replace`` takes the next
    task, so tasks that fail often are trained less. ``requeue`` takes the same task again until its
    group is large enough."""
    equal_groups: Literal["train", "replace"] = "train"
    """What happens to a group whose rewards are all equal, which gives most algorithms no gradient.
    ``train`` keeps it in the batch. ``replace`` drops it and takes another task, so that batches
    stay full (dynamic sampling; DAPO, arXiv:2503.14476, section 3.2)."""
    max_equal_groups: PositiveInt = 1000
    """Number of consecutive equal groups that end the run (``equal_groups: replace`` only)."""
    redundant: Count = 0
    """Number of trajectories that a group starts in addition to ``group_size``. When ``group_size``
    of them have finished, the rest are cancelled. Batches then do not wait for the slowest
    trajectory, but trained trajectories are shorter on average (`rollart audit` shows by how much).
    Not allowed with ``deterministic``."""
    max_turns: PositiveInt | None = None
    """Maximum number of turns per episode. If not set, the environment's spec is used."""
    max_new_tokens: PositiveInt = 64
    """Maximum number of sampled tokens per turn."""
    max_context_tokens: PositiveInt = 2048
    """Maximum number of tokens of an episode, prompt and answers together. A longer episode is
    truncated."""
    max_observation_chars: PositiveInt = 20_000
    """Maximum number of characters of an observation. Longer ones are cut in the middle and
    counted."""
    observation_role: Literal["auto", "user", "tool"] = "auto"
    """Role of observations that are text, from the second on. (Chat messages have their own roles.)
    ``auto`` is ``user``, unless only ``tool`` keeps one token row per trajectory: Qwen3's template,
    for example, removes the thoughts before the last ``user`` message."""
    keep_thinking: bool | None = None
    """Whether earlier thoughts of the policy stay in the prompts of later turns. ``true``: each
    earlier turn stays exactly as it was sampled, so a trajectory is one row. ``false``: the chat
    template decides; if it removes thoughts, each turn begins a new row. If not set, as ``false``
    with a warning. Only for models that think."""
    max_thinking_tokens: PositiveInt | None = None
    """Maximum number of tokens of a thought. At this limit, the end mark of thoughts is appended
    (it is not trained), and the policy answers in the same turn. Must be below ``max_new_tokens``.
    Only for models that think. If not set, only ``max_new_tokens`` limits thoughts."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Sampling temperature. 1 samples from the policy unchanged."""
    max_concurrent: PositiveInt = 256
    """Maximum number of concurrent episodes. Increase it if engines have idle time."""
    workload: RequestedWorkload | None = None
    """Hardware demand of an episode, for planning a run with one environment. If not set, the
    environment's spec is used. A run measures the demand while it runs."""
    kv_on_swap: Literal["recompute", "keep"] = "recompute"
    """Whether the KV cache is recomputed after a weight swap, or kept (``mode: async`` only)."""
    in_flight: Literal["continue", "restart"] = "continue"
    """What happens to a turn during which new weights arrive. ``continue`` generates its remaining
    tokens with the new weights. ``restart`` generates the turn again from its start. Earlier turns
    are not changed, and a restart is not a failure. Only with ``max_staleness`` of 1 or more."""


class Deadlines(Section):
    """Time limits in seconds, which must nest: step < episode < ticket < sandbox TTL."""

    reset_s: Seconds | None = None
    """Maximum seconds for a reset. If not set, the environment's spec is used."""
    step_s: Seconds | None = None
    """Maximum seconds for a step. If not set, the environment's spec is used."""
    generate_s: Seconds = 120.0
    """Maximum seconds for one turn of the policy."""
    reward_s: Seconds = 30.0
    """Maximum seconds for the score of one trajectory, all tries together, counted from the first
    try."""
    episode_s: Seconds = 600.0
    """Maximum seconds for one attempt, from reset to the end."""
    ticket_s: Seconds = 1800.0
    """Maximum seconds for all attempts of a ticket together."""
    sandbox_ttl_s: Seconds = 3600.0
    """Maximum lifetime of a sandbox in seconds (only for environments that need one)."""


class Failures(Section):
    """How failures are handled: retries, restarts and limits."""

    max_retries: Count = 2
    """Maximum number of retries per ticket, each on a fresh environment."""
    max_rate: Fraction = 0.5
    """Maximum share of failed attempts among the last ``window``. Above it the run stops and
    reports why."""
    window: PositiveInt = 64
    """Number of most recent attempts that ``max_rate`` covers."""
    heartbeat_s: Seconds = 10.0
    """Seconds between two pings of each engine, trainer rank and env worker."""
    hang_s: Seconds | None = 60.0
    """A worker that does not answer a ping for this many seconds is killed and treated as dead. If
    null, workers are not pinged."""
    load_weights_s: Seconds = 300.0
    """An engine that has not loaded new weights after this many seconds is killed and treated as
    dead."""
    max_restarts: Count = 3
    """Maximum number of restarts of an engine, or of the trainer, within ``restart_window_s``.
    After one more death it is not restarted. The run ends when it has no engine or no trainer."""
    restart_window_s: Seconds = 600.0
    """Seconds after which a death no longer counts."""


class AgentGateway(Section):
    """Where agents (environments that own their loop) reach the policy."""

    host: str = "127.0.0.1"
    """Address to listen on. Env workers on other machines must be able to reach it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 selects any free port."""


class _RunBase(Section):
    name: Name = "run"
    """Name of the run. The run directory is ``<runs_dir>/<name>-<time>``."""
    seed: Seed = 0
    """Seed of tasks, new models and sampling."""
    task_seeds: Literal["by_split", "by_index"] = "by_split"
    """What determines the seed of a task besides ``seed``. ``by_split`` uses its split and index.
    ``by_index`` uses only its index, as in earlier releases, so an environment that draws its tasks
    from the seed has the same tasks in all splits. Use ``by_index`` to resume an old run."""
    deterministic: bool = False
    """Make results independent of what runs concurrently: randomness is keyed by task, turn and
    token. Slower; use it to reproduce a run."""
    runs_dir: str = "runs"
    """Folder in which run directories are created."""
    runtime: Runtime = InlineRuntime()
    """Where workers run: ``inline`` on this machine, ``ray`` on a cluster."""
    model: Model = Field(description="a model's folder, a hub id, {kind: new} or {kind: remote}")
    env: Env = Field(
        description="an environment's id (`rollart list environments`), an `adapter` and the `id` "
        "of its environment, or a list of environments"
    )
    data: Name | None = None
    """Dataset: short for the option ``file`` of the environment."""
    reward: PluginRef | None = None
    """Reward function. If not set, the return of the environment is the reward."""
    scoring: Scoring = Scoring()
    """Where and how the reward is computed."""
    algorithm: PluginRef = PluginRef(id="grpo")
    """Training algorithm, which computes advantages and the loss."""
    lora: LoRA | None = None
    """Train LoRA adapters instead of the whole model. If not set, the whole model is trained."""
    critic: Critic | None = None
    """Critic of the policy. Required by algorithms with a critic, and not allowed with others."""
    reference: Reference | None = None
    """Reference model of the KL penalty. If not set, the weights at the start of RL are used."""
    teacher: Teacher | None = None
    """Teacher model. Required by algorithms that distil, and not allowed with others."""
    shaping: Shaping | None = None
    """Changes to rewards before the algorithm receives them. If not set, rewards are not
    changed."""
    curriculum: Curriculum | None = None
    """Adapt how often tasks are drawn. If not set, only the weights of the environments count."""
    engine: PluginRef = PluginRef(id="embedded")
    """Inference engine that generates trajectories."""
    engines: tuple[EngineClass, ...] = ()
    """Further classes of inference engines. The mapper assigns environments to classes, as to
    pools."""
    weights: PluginRef = PluginRef(id="shared-memory")
    """Weight channel that sends new weights to the engines."""
    mapper: PluginRef = PluginRef(id="affinity")
    """Hardware mapper that places workers on the hardware."""
    trackers: tuple[PluginRef, ...] = (PluginRef(id="tensorboard"),)
    """Trackers that receive metrics in addition to the journal. ``[]`` disables them."""
    warm_start: WarmStart | None = None
    """Supervised training before RL. If not set, RL starts with the model unchanged."""
    rollout: Rollout = Rollout()
    """How trajectories are generated."""
    trainer: Trainer = Trainer()
    """How weights are updated."""
    deadlines: Deadlines = Deadlines()
    """Time limits."""
    failures: Failures = Failures()
    """How failures are handled."""
    guard: Guard | None = None
    """Detect training that goes wrong and undo it: ``on``, or a section of keys. If not set or
    ``off``, training is not watched."""
    scaling: Scaling | None = None
    """Add and remove engines and env workers automatically. If not set, only `rollart scale`
    changes their number."""
    gateway: AgentGateway = AgentGateway()
    """Where agents reach the policy."""
    evaluation: Evaluation = Evaluation()
    """Evaluation on held-out tasks before, during and after training."""
    checkpoint: Checkpoint = Checkpoint()
    """Which checkpoints are kept for ``--resume``, and which weights are the result."""
    stop: Stop = Field(description="when training ends: stop.batches, stop.wall_s or both")

    @field_validator("name", mode="before")
    @classmethod
    def _one_folder(cls, value: Any) -> Any:
        is_text = isinstance(value, str)
        if is_text and (value in ("", ".", "..") or any(c in value for c in "/\\\0")):
            raise ValueError(f"{value!r} cannot be part of a folder's name: remove / and \\")
        return value

    @field_validator("runtime", mode="before")
    @classmethod
    def _runtime_by_name(cls, value: Any) -> Any:
        given = {"kind": value} if isinstance(value, str) else value
        kind = given.get("kind", "inline") if isinstance(given, dict) else "inline"
        if kind not in ("inline", "ray"):
            raise ValueError(f"there is no runtime {kind!r}: use inline or ray")
        return given

    @field_validator("guard", mode="before")
    @classmethod
    def _guard_by_switch(cls, value: Any) -> Any:
        return guard_section(value)

    @field_validator("env", mode="before")
    @classmethod
    def _one_env_or_several(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and not value:
            raise ValueError("a list of environments needs at least one")
        return joined_id(value)

    @field_validator("algorithm", "engine", "weights", "mapper", mode="before")
    @classmethod
    def _default_plugin(cls, value: Any, info: ValidationInfo) -> Any:
        """Give options without an id to the default plugin."""
        if not isinstance(value, dict) or "id" in value or info.field_name is None:
            return value
        return {"id": cls.model_fields[info.field_name].default.id, **value}

    @field_validator("model", mode="before")
    @classmethod
    def _model_by_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class SyncRun(_RunBase):
    """Generate trajectories, train and publish weights one after the other."""

    case: ClassVar[str] = "mode: sync"

    mode: Literal["sync"]
    """Generate trajectories, train and publish weights one after the other."""

    @property
    def staleness_bound(self) -> int:
        """Largest staleness a trained sample may have."""
        return 0


class AsyncRun(_RunBase):
    """Generate trajectories while training, under a staleness bound."""

    case: ClassVar[str] = "mode: async"

    mode: Literal["async"] = "async"
    """``async`` generates trajectories while training. ``sync`` generates and trains
    alternately."""
    max_staleness: Count = 1
    """Maximum staleness of a trained sample, in weight versions. Increase it for throughput."""
    on_stale: Literal["wait", "drop"] = "wait"
    """What happens to a group that would be too stale after the next batch. ``wait``: the trainer
    waits for it, without waste or length bias. ``drop``: it is dropped and its task is queued
    again."""

    @property
    def staleness_bound(self) -> int:
        """Largest staleness a trained sample may have."""
        return self.max_staleness


RunConfig = SyncRun | AsyncRun
