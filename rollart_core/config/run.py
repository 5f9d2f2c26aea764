"""The run config: what a YAML file and ``key=value`` overrides become.

Takes: plain mappings. Gives: a frozen :class:`RunConfig`. Never: imports torch, or a plugin's code
(:mod:`rollart_core.config.resolve` checks the options of a plugin, against the plugin's own model).
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
    """Supervised steps on the env's ``oracle()`` before RL."""

    lr: LearningRate = 3e-3
    """Of AdamW, apart from the one RL uses."""
    warmup_train_steps: PositiveInt = 10
    """Train steps over which the learning rate rises to ``lr``."""
    batch_size: PositiveInt = 16
    """Demonstrations a train step, each used once."""
    max_train_steps: PositiveInt = 600
    """Most train steps."""
    until_success: Fraction = 0.37
    """Stop when sampled success on the check split reaches this."""
    check_every: PositiveInt = 10
    """Train steps between checks (once the loss is low enough to be worth it)."""
    check_tasks: PositiveInt = 64
    """Tasks of a check."""
    check_split: Name = "warm"
    """Split of the checks, so that neither training nor test tasks choose when to stop."""
    max_wall_s: Seconds | None = None
    """Most seconds; none: ``max_train_steps`` is the only limit, on machines of any speed."""


class EngineClass(Section):
    """A further class of inference engines, beside those of ``engine``."""

    name: Name
    """What placements, reports and `rollart scale` call it: its engines are a pool of this name.
    With ``runtime: ray`` it is one of ``runtime.pools``, which then has no other engines."""
    engine: PluginRef
    """What generates there."""
    count: Processes = 1
    """How many, beside ``runtime.num_engines`` of ``engine``."""


class Rollout(Section):
    """How trajectories are made."""

    split: Name = "train"
    """Tasks to train on."""
    groups_per_batch: PositiveInt = 16
    """Groups the trainer takes at once."""
    group_size: PositiveInt = 8
    """Trajectories of one task."""
    min_group_size: PositiveInt = 2
    """A group left with fewer members than this by failures is dropped and replaced."""
    small_groups: Literal["replace", "requeue"] = "replace"
    """What comes for a group that is dropped for being too small: the next task (those that fail
    often are then trained less), or the same one again, until it holds."""
    equal_groups: Literal["train", "replace"] = "train"
    """What becomes of a group whose rewards are all equal, which teaches most algorithms nothing:
    it is part of its batch; or it is dropped and another task takes its place, so that batches stay
    full (dynamic sampling; DAPO, arXiv:2503.14476, section 3.2)."""
    max_equal_groups: PositiveInt = 1000
    """So many equal groups in a row end the run (``equal_groups: replace`` only)."""
    redundant: Count = 0
    """Trajectories a group begins with beyond ``group_size``. Once so many have finished, the rest
    are cancelled: no batch waits for the slowest, and what is trained is shorter for it
    (`rollart audit` says by how much). Not with ``deterministic``."""
    max_turns: PositiveInt | None = None
    """None: what the environment's spec says."""
    max_new_tokens: PositiveInt = 64
    """Most tokens a turn."""
    max_context_tokens: PositiveInt = 2048
    """Longest token row; an episode that would outgrow it is truncated."""
    max_observation_chars: PositiveInt = 20_000
    """Longer observations are cut in the middle, and that is counted."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Of sampling; 1 is the policy as it is."""
    max_concurrent: PositiveInt = 256
    """Most episodes at once."""
    workload: RequestedWorkload | None = None
    """What an episode asks of the hardware, for the plan of a run with one environment; none: what
    its spec declares. A run measures it as it goes on."""
    kv_on_swap: Literal["recompute", "keep"] = "recompute"
    """Whether the KV cache is computed again after a weight swap, or kept (``mode: async``
    only)."""
    in_flight: Literal["continue", "restart"] = "continue"
    """What becomes of a turn that new weights come under: it goes on with them, its first tokens
    being of the version before; or it is generated again from its beginning (``max_staleness`` of
    1 or more only). Earlier turns stay as they are; a restart is no failure."""


class Deadlines(Section):
    """Seconds; each shorter than the next one out: step < episode < ticket < sandbox TTL."""

    reset_s: Seconds | None = None
    """None: what the environment's spec says."""
    step_s: Seconds | None = None
    """None: what the environment's spec says."""
    generate_s: Seconds = 120.0
    """One turn of the policy."""
    reward_s: Seconds = 30.0
    """The score of one trajectory, all tries together (from the first try on)."""
    episode_s: Seconds = 600.0
    """One attempt, from reset to the end."""
    ticket_s: Seconds = 1800.0
    """All attempts of a ticket together."""
    sandbox_ttl_s: Seconds = 3600.0
    """How long a box may live (environments that need a sandbox only)."""


class Failures(Section):
    """What failures cost."""

    max_retries: Count = 2
    """Per ticket, each on a fresh environment."""
    max_rate: Fraction = 0.5
    """Share of failed attempts among the last ``window``; above it the run stops and says why."""
    window: PositiveInt = 64
    """How many of the last attempts ``max_rate`` looks at."""
    heartbeat_s: Seconds = 10.0
    """Seconds between two pings of each engine, trainer rank and env worker."""
    hang_s: Seconds | None = 60.0
    """One that does not answer a ping for this long is killed, and treated as dead; none: a part
    that hangs is left alone."""
    load_weights_s: Seconds = 300.0
    """So is an engine that has not loaded new weights after this long."""
    max_restarts: Count = 3
    """How often an engine, or the trainer, is started again within ``restart_window_s``. After one
    more death it is given up: without any engine, or without the trainer, the run ends."""
    restart_window_s: Seconds = 600.0
    """After this long a death no longer counts."""


class AgentGateway(Section):
    """Where agents (environments that own their loop) find the policy."""

    host: str = "127.0.0.1"
    """Address to listen on; env workers on other machines must reach it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0: any that is free."""


class _RunBase(Section):
    name: Name = "run"
    """The run directory is ``<runs_dir>/<name>-<time>``."""
    seed: Seed = 0
    """Of tasks, new models and sampling."""
    task_seeds: Literal["by_split", "by_index"] = "by_split"
    """What the seed of a task is made from besides ``seed``: its split and index, or its index
    alone, as in earlier releases (a run of one is resumed so): then an environment that draws its
    tasks from the seed has the same tasks in all splits."""
    deterministic: bool = False
    """Randomness keyed by task, turn and token, and computations whose result does not hang on
    what runs beside them; slower."""
    runs_dir: str = "runs"
    """Where run directories are made."""
    runtime: Runtime = InlineRuntime()
    """Where the parts run: ``inline`` on this machine, ``ray`` over a cluster."""
    model: Model = Field(description="a model's folder, a hub id, {kind: new} or {kind: remote}")
    env: Env = Field(
        description="an environment's id (`rollart list environments`), or an `adapter` and the "
        "`id` it knows; or a list of several"
    )
    reward: PluginRef | None = None
    """None: the return of the environment itself."""
    scoring: Scoring = Scoring()
    """Where and how the reward is computed."""
    algorithm: PluginRef = PluginRef(id="grpo")
    """What makes advantages and the loss."""
    lora: LoRA | None = None
    """Adapters that are trained in place of the model; none: all of it is trained."""
    critic: Critic | None = None
    """For algorithms with a critic, which need it; others have none."""
    reference: Reference | None = None
    """What a KL penalty compares with; none: the weights RL began with."""
    teacher: Teacher | None = None
    """For algorithms that distil, which need it; others have none."""
    shaping: Shaping | None = None
    """What rewards become on their way to the algorithm; none: they stay as they are."""
    curriculum: Curriculum | None = None
    """Which tasks come how often; none: as the weights of the environments say."""
    engine: PluginRef = PluginRef(id="embedded")
    """What generates."""
    engines: tuple[EngineClass, ...] = ()
    """Further classes of engines: the mapper says which environment goes to which, as to pools."""
    weights: PluginRef = PluginRef(id="shared-memory")
    """How new weights reach the engines."""
    mapper: PluginRef = PluginRef(id="affinity")
    """What places the parts on the hardware."""
    trackers: tuple[PluginRef, ...] = (PluginRef(id="tensorboard"),)
    """Where metrics go besides the journal; ``[]``: nowhere."""
    warm_start: WarmStart | None = None
    """Supervised steps first; None: RL begins with the model as it is."""
    rollout: Rollout = Rollout()
    """How trajectories are made."""
    trainer: Trainer = Trainer()
    """How weights are updated."""
    deadlines: Deadlines = Deadlines()
    """How long things may take."""
    failures: Failures = Failures()
    """What failures cost."""
    guard: Guard | None = None
    """``on``, or a section of keys: training that goes wrong is undone; none or ``off``: it is not
    watched."""
    scaling: Scaling | None = None
    """When parts join and leave by themselves; none: only by hand."""
    gateway: AgentGateway = AgentGateway()
    """Where agents find the policy."""
    evaluation: Evaluation = Evaluation()
    """Held-out tasks: before and after training, and while it goes on."""
    checkpoint: Checkpoint = Checkpoint()
    """What is kept for ``--resume``, and which weights are the result."""
    stop: Stop = Field(description="when training ends: stop.batches, stop.wall_s or both")

    @field_validator("name", mode="before")
    @classmethod
    def _one_folder(cls, value: Any) -> Any:
        is_text = isinstance(value, str)
        if is_text and (value in ("", ".", "..") or any(c in value for c in "/\\\0")):
            raise ValueError(f"{value!r} cannot be part of a folder's name: leave out / and \\")
        return value

    @field_validator("runtime", mode="before")
    @classmethod
    def _runtime_by_name(cls, value: Any) -> Any:
        given = {"kind": value} if isinstance(value, str) else value
        kind = given.get("kind", "inline") if isinstance(given, dict) else "inline"
        if kind not in ("inline", "ray"):
            raise ValueError(f"there is no runtime {kind!r}: it is inline or ray")
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
        """Options alone are those of the default plugin."""
        if not isinstance(value, dict) or "id" in value or info.field_name is None:
            return value
        return {"id": cls.model_fields[info.field_name].default.id, **value}

    @field_validator("model", mode="before")
    @classmethod
    def _model_by_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class SyncRun(_RunBase):
    """Roll out, train, publish, one after the other."""

    case: ClassVar[str] = "mode: sync"

    mode: Literal["sync"]
    """Roll out, train, publish, one after the other."""

    @property
    def staleness_bound(self) -> int:
        """Largest staleness a trained sample may have."""
        return 0


class AsyncRun(_RunBase):
    """Roll out while training, under a staleness bound."""

    case: ClassVar[str] = "mode: async"

    mode: Literal["async"] = "async"
    """Roll out while training."""
    max_staleness: Count = 1
    """In versions."""
    on_stale: Literal["wait", "drop"] = "wait"
    """What happens to a group that the next batch would leave too stale: the trainer waits for it
    (no waste, no length bias), or it is dropped and its task put back."""

    @property
    def staleness_bound(self) -> int:
        """Largest staleness a trained sample may have."""
        return self.max_staleness


RunConfig = SyncRun | AsyncRun
