"""`rollart bench stability`: whether the last weights of a run are as good as its best ones.

Each arm trains an example with several seeds for a budget of batches, without a stop rule for
success. The weights of the best validation and the last ones are evaluated on the same held-out
tasks, with several sampled episodes each.

    as before     WebShop; updates are divided by the tokens of live samples only, no guard: a
                  control
    default       the unchanged example
    rate x 3      the same with three times its learning rate
    ppo           a smaller task, the bandit with two arms and two turns, 300 batches
    reinforce++   the same

The short form instead injects faults into runs on a bandit, from batch :data:`FIRST` on (see
:class:`Faulty`): gradients that are not finite, inverted rewards, a learning rate times 100. The
guard must undo harmful faults (success falls by half), and the run must end above its start.

Takes: options, see :func:`run`. Gives: a row for each arm and seed. Never: hides a run that
stopped early.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from rollart_bench import bandit
from rollart_bench.learn import SMOOTHED_OVER, Messages, example, flat, overrides_of
from rollart_bench.options import Options
from rollart_bench.rows import echo, result, row
from rollart_bench.skip import require
from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.contracts.algorithm import Algorithm, LossBatch, Signals
from rollart_core.plugins import registry
from rollart_core.runtime.launch import launch
from rollart_core.runtime.report import RunReport
from rollart_core.scheduling.evaluate import paired_gain
from rollart_core.store.audit import audit
from rollart_core.store.estimates import Estimate
from rollart_core.types import FloatArray, Group
from rollart_view.pictures import new_figure, save, smoothed

if TYPE_CHECKING:
    import torch

TAKES: Final = (
    "short",
    "seeds",
    "updates",
    "arms",
    "tasks",
    "samples",
    "config",
    "runs_dir",
    "picture",
)
CONFIG: Final = True
"""Every other option is a key of the run config, and is checked as such."""

BANDIT: Final[Mapping[str, object]] = {
    "env": {"id": bandit.ENV, "arms": 2, "turns": 2, "expert": "any"},
    "guard": "on",
    "checkpoint.every_batches": 25,
    "evaluation.every_batches": 25,
    "evaluation.validation_tasks": 128,
}
"""Differences from the bandit's example, except the algorithm."""

FIRST = 30
"""The first batch with the fault, counted from 0."""
TIMES = 100.0
"""Factor of the learning rate in :class:`HighRate`."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm of the comparison."""

    changes: Mapping[str, object]
    """Overrides of the example's config."""
    lr_factor: float = 1.0
    example: str = "webshop.yaml"
    updates: int | None = None
    """Its own budget in batches. If None, the common budget."""


ARMS: Final[Mapping[str, Arm]] = {
    "as before": Arm({"algorithm.zero_advantage": "drop", "guard": "off"}),
    "default": Arm({}),
    "rate x 3": Arm({}, lr_factor=3.0),
    "ppo": Arm(
        {**BANDIT, "algorithm": {"id": "ppo"}, "critic": {"backbone": "own"}},
        example="bandit.yaml",
        updates=300,
    ),
    "reinforce++": Arm(
        {**BANDIT, "algorithm": {"id": "reinforce++"}}, example="bandit.yaml", updates=300
    ),
}
LEAST_GAIN = -0.05
"""The lower bound for the last weights' success minus the best weights'."""
LEAST_SUCCESS = 0.92
"""The lower bound for the sampled success of the last weights on held-out tasks."""
SHORT_BATCHES = 70


def run(options: Mapping[str, object]) -> dict[str, object]:
    """Run the benchmark.

    Args:
        options: ``seeds`` (3): the number of seeds, from the config's own on; ``updates`` (2400):
            the budget of each run on WebShop, in batches; ``arms``: their names; ``tasks`` (300)
            and ``samples`` (4) of each: held-out episodes; ``config``: a run config; ``runs_dir``:
            the folder for runs and their results, so that a later call with the same options
            continues with the rest; ``picture``: the path of the picture; ``short``: faults on the
            bandit; all others: keys of the config.

    Returns:
        The object of ``rollart bench --json``; the full form also with ``picture`` and ``runs``.
    """
    asked = Options("stability", options)
    require("torch", "transformers", extra="train")
    names, seeds = asked.names("arms", tuple(ARMS)), range(asked.integer("seeds", 3))
    picture = asked.path("picture", "runs/bench-stability.png")
    keys_of = {name: _keys(asked, ARMS[name]) for name in names}
    paths = {name: example(asked.text("config", ARMS[name].example)) for name in names}
    if asked.short:
        return result("stability", _short(asked), conditions={"batches": SHORT_BATCHES})
    require("matplotlib", extra="bench")
    outcomes: list[StabilityOutcome] = []
    for name in names:
        arm = ARMS[name]
        path = paths[name]
        keys = keys_of[name] | dict(flat({k: v for k, v in options.items() if k not in TAKES}))
        base = load_config(path, overrides_of(keys))
        keys["trainer.lr"] = arm.lr_factor * base.trainer.lr
        for n in seeds:
            seeded = overrides_of({**keys, "seed": base.seed + n})
            outcomes.append(_outcome(asked, name, base.seed + n, path, seeded))
            _draw(outcomes, picture)
    echo(f"curves: {picture}")
    rows = [row_of(outcome) for outcome in outcomes]
    told = [outcome.as_dict() for outcome in outcomes]
    return result("stability", rows, picture=str(picture), runs=told)


def _keys(asked: Options, arm: Arm) -> dict[str, object]:
    """Return the keys of the config in which an arm differs from its example."""
    runs_dir = {"runs_dir": asked.text("runs_dir", "")} if "runs_dir" in asked else {}
    updates = asked.integer("updates", 2400)
    return {
        "stop.batches": arm.updates or updates,
        "stop.wall_s": None,
        "stop.when": None,
        "checkpoint.keep_best": "validation/success",
        "evaluation.tasks": asked.integer("tasks", 300),
        "evaluation.samples_per_task": asked.integer("samples", 4),
        "evaluation.greedy": False,
        **runs_dir,
        **arm.changes,
    }


@dataclass(frozen=True, slots=True)
class StabilityOutcome:
    """The results of one run."""

    arm: str
    seed: int
    run_dir: str
    ok: bool
    stop_reason: str
    train_steps: int
    rollbacks: int
    best_version: int
    best: Estimate | None
    """Success of the best validation's weights on held-out tasks; None if the run stopped early."""
    last: Estimate | None
    """The same of the last weights."""
    gain: Estimate | None
    """Last minus best, paired by task."""
    curve: tuple[float, ...]
    """Success of each batch of training tasks."""

    def as_dict(self) -> dict[str, object]:
        """Return it as plain JSON, without the curve."""
        return {name: value for name, value in asdict(self).items() if name != "curve"}


def row_of(outcome: StabilityOutcome) -> dict[str, object]:
    """Return the row of one run: the last weights compared with the best."""
    case = f"{outcome.arm}, seed {outcome.seed}, {outcome.train_steps:,} updates"
    if outcome.rollbacks:
        case += f", {outcome.rollbacks} rollbacks"
    gain = outcome.gain
    if outcome.best is None or outcome.last is None or gain is None or not outcome.ok:
        case += f", stopped: {outcome.stop_reason}"
        mark: Mapping[str, Any] = {"mark": "a run that ends by its budget", "meets_mark": False}
        return row(f"{case}: sampled success", None, None, "best weights", "of episodes", **mark)
    case += f", last minus best {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
    last = outcome.last.mean
    return row(
        f"{case}: sampled success of the last weights",
        last,
        outcome.best.mean,
        "best weights",
        f"of {outcome.last.n} held-out episodes",
        mark=f">= {LEAST_SUCCESS}, and last minus best above {LEAST_GAIN}",
        meets_mark=last >= LEAST_SUCCESS and gain.low > LEAST_GAIN,
    )


def _outcome(
    asked: Options, arm: str, seed: int, path: Path, keys: Sequence[str]
) -> StabilityOutcome:
    """Return the results of a run: those of an earlier call, or of a new run."""
    if "runs_dir" not in asked:
        return _train(arm, seed, path, keys)
    runs_dir = Path(asked.text("runs_dir", ""))
    runs_dir.mkdir(parents=True, exist_ok=True)
    kept = runs_dir / f"stability-{arm.replace(' ', '-')}-{seed}.json"
    outcome = read_outcome(kept, keys)
    if outcome is None:
        outcome = _train(arm, seed, path, keys)
        kept.write_text(json.dumps({"keys": list(keys), **asdict(outcome)}), encoding="utf-8")
    else:
        echo(f"{arm}, seed {seed}: as in {kept}")
    return outcome


def read_outcome(path: Path, keys: Sequence[str]) -> StabilityOutcome | None:
    """Return the outcome in a file; None if it has no run with these keys."""
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.pop("keys") != list(keys):
        return None
    for name in ("best", "last", "gain"):
        found[name] = Estimate(**found[name]) if found[name] else None
    return StabilityOutcome(**{**found, "curve": tuple(found["curve"])})


def _train(arm: str, seed: int, path: Path, keys: Sequence[str]) -> StabilityOutcome:
    """Train and evaluate the best weights; resume the ended run for the last ones.

    Raises:
        KeyboardInterrupt: If the run is interrupted, to interrupt the benchmark too.
    """
    says = Messages(f"{arm}, seed {seed}")
    best = launch(resolve_run(load_config(path, keys), source=str(path)), observer=says)
    if best.stop_reason == "interrupted":
        raise KeyboardInterrupt
    run_dir = Path(best.run_dir)
    last: RunReport | None = None
    if best.ok:
        saved = run_dir / "config.yaml"
        resolved = resolve_run(load_config(saved, ["checkpoint.keep_best=null"]), source=str(saved))
        last = launch(resolved, resume=run_dir, observer=says)
    before, after = best.after, last.after if last else None
    return StabilityOutcome(
        arm=arm,
        seed=seed,
        run_dir=best.run_dir,
        ok=best.ok and last is not None and last.ok,
        stop_reason=best.stop_reason,
        train_steps=best.train_steps,
        rollbacks=_count(best.guard, "rollbacks", 0),
        best_version=_count(best.best, "policy_version", -1),
        best=before.success if before else None,
        last=after.success if after else None,
        gain=paired_gain(before, after, "successes") if before and after else None,
        curve=bandit.success_of(run_dir),
    )


def _count(found: Mapping[str, Any] | None, key: str, otherwise: int) -> int:
    return int(found[key]) if found else otherwise


def _draw(outcomes: Sequence[StabilityOutcome], path: Path) -> None:
    """Write one picture: a panel per arm, a curve per seed, the held-out estimates at its end."""
    arms = list(dict.fromkeys(outcome.arm for outcome in outcomes))
    figure = new_figure(
        "bench stability", "bench", figsize=(8, 3 * len(arms)), layout="constrained"
    )
    panels = figure.subplots(len(arms), 1, sharey=True, squeeze=False)
    for arm, (axes,) in zip(arms, panels, strict=True):
        for outcome in outcomes:
            if outcome.arm != arm:
                continue
            curve = smoothed(outcome.curve, SMOOTHED_OVER)
            (line,) = axes.plot(curve, label=f"seed {outcome.seed}", linewidth=0.8)
            end = len(curve)
            for x, found, form in ((end * 1.01, outcome.best, "^"), (end, outcome.last, "o")):
                if found is not None:
                    axes.plot(x, found.mean, form, color=line.get_color())
        axes.axhline(LEAST_SUCCESS, color="grey", linewidth=0.8, linestyle=":")
        axes.set(title=arm, ylim=(0, 1), ylabel=f"success, mean of {SMOOTHED_OVER} batches")
        axes.legend(loc="lower right")
    panels[-1][0].set(xlabel="batch (at the end, on held-out tasks: o last weights, ^ best)")
    save(figure, path)


def _short(asked: Options) -> Iterator[dict[str, object]]:
    """Inject each fault into a run on the bandit."""
    for case, fault in FAULTS.items():
        with bandit.runs_folder(asked) as folder:
            learned = bandit.learn(faulty_run(folder, fault))
            yield fault_row(case, learned)


def faulty_run(folder: Path, fault: type[Faulty], seed: int = 0) -> dict[str, Any]:
    """Return the config of a run on the bandit with a fault, and with the guard."""
    return bandit.merged(
        bandit.run_config("stability", folder, {"arms": 2, "turns": 2}),
        {
            **bandit.short_run(),
            "seed": seed,
            "algorithm": {"id": f"{fault.__module__}:{fault.__name__}"},
            "trainer": {"lr": 2e-3},
            "guard": "on",
            "checkpoint": {"every_batches": 4},
            "evaluation": {"split": "test", "tasks": 128, "greedy": False},
            "stop": {"batches": SHORT_BATCHES},
        },
    )


def fault_row(case: str, learned: bandit.Learned) -> dict[str, object]:
    """Return the row of a run with a fault."""
    report = learned.report
    trips: list[Any] = list(cast(Any, report.guard)["trips"]) if report.guard else []
    checked = audit(Path(report.run_dir))
    rules = ", ".join(f"{t['rule']} at {t['policy_version']}" for t in trips) or "no trip"
    case = f"{case}, {rules}, {checked.discarded_by_guard} trajectories discarded"
    ok = report.ok and checked.ok
    fell = _lowest(learned.success[FIRST:]) < fmean(learned.success[FIRST - 8 : FIRST]) / 2
    return row(
        f"{case}: sampled success",
        learned.after,
        learned.before,
        "before RL",
        "of held-out tasks",
        mark="undone if it does harm, audit clean, above its start",
        meets_mark=ok and (bool(trips) or not fell) and learned.after > learned.before,
        required=True,
    )


def _lowest(curve: Sequence[float]) -> float:
    """Return the lowest mean of 4 batches in a row."""
    return min(fmean(curve[i : i + 4]) for i in range(len(curve) - 3))


class Faulty(Algorithm):
    """GRPO that counts batches."""

    faulty: ClassVar[Container[int]] = range(FIRST, FIRST + 2)
    min_group_size: ClassVar[int] = 2

    def __init__(self) -> None:
        self._grpo: Algorithm = registry.build("algorithms", "grpo")
        self.requires, self.zero_advantage = self._grpo.requires, self._grpo.zero_advantage
        self._batch = -1

    @property
    def is_faulty(self) -> bool:
        """Whether the current training batch has the fault."""
        return self._batch in self.faulty

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return GRPO's advantages."""
        self._batch += 1
        return self._grpo.advantages(groups, signals)

    def targets(self, groups: Sequence[Group], signals: Signals) -> dict[str, list[FloatArray]]:
        """Return GRPO's targets."""
        return self._grpo.targets(groups, signals)

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return GRPO's loss."""
        return self._grpo.loss(trainer_logprobs, batch)


class NotFinite(Faulty):
    """Two batches have gradients that are not finite."""

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return GRPO's loss, or NaN."""
        loss, metrics = super().loss(trainer_logprobs, batch)
        return (loss * math.nan if self.is_faulty else loss), metrics


class InvertedRewards(Faulty):
    """For some batches, samples with more reward than their group are penalised."""

    faulty = range(FIRST, FIRST + 10)

    def advantages(self, groups: Sequence[Group], signals: Signals) -> list[FloatArray]:
        """Return GRPO's advantages, or their opposites."""
        rows = super().advantages(groups, signals)
        return [-row for row in rows] if self.is_faulty else rows


class HighRate(Faulty):
    """The learning rate is :data:`TIMES` its configured value for five updates.

    Without the guard, success falls to 0 within ten batches and stays there for at least 20. At 10
    or 30 times, the fault does little or no harm.
    """

    faulty = range(FIRST, FIRST + 5)

    def loss(
        self, trainer_logprobs: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return GRPO's loss; the update that follows has the batch's rate."""
        _multiply_rate(TIMES if self.is_faulty else 1.0)
        return super().loss(trainer_logprobs, batch)


def _multiply_rate(factor: float) -> None:
    """Make the optimizer of this process multiply its learning rate by ``factor``."""
    from rollart_core.training.optimizer import GuardedAdamW

    original: Any = getattr(GuardedAdamW, "without_fault", GuardedAdamW.update)

    def update(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        configured = optimizer.lr_factor
        optimizer.lr_factor = configured * factor
        try:
            return original(optimizer, *args, **kwargs)
        finally:
            optimizer.lr_factor = configured

    GuardedAdamW.without_fault = original  # type: ignore[attr-defined]
    GuardedAdamW.update = update  # type: ignore[assignment, method-assign]


FAULTS: dict[str, type[Faulty]] = {
    "2 batches without finite gradients": NotFinite,
    "10 batches with inverted rewards": InvertedRewards,
    "5 updates at 100 times the learning rate": HighRate,
}
