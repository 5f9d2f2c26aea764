"""The trainer: updates the weights with whole groups.

    groups ──canonical order──> advantages (algorithm) ──> minibatches, one per update
                                                               │
          publish(N+1) <── weights <── AdamW <── gradients <── microbatches: forward, loss, backward

Takes: groups (or demonstrations), plain records and numpy. Gives: reports of numbers, and weights
through the weight channel. Never: generates, accesses an environment, or has torch tensors in its
method signatures, so that it can run in a separate process.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rollart_core.config.run import Trainer as TrainerConfig
from rollart_core.config.training import (
    ALONE,
    AuxiliaryModels,
    LoRA,
    NormClip,
    check_auxiliary_models,
)
from rollart_core.contracts.algorithm import Algorithm
from rollart_core.contracts.weights import Publication, WeightChannel
from rollart_core.errors import BatchRefused, OutOfMemory, text_of
from rollart_core.training import batch, checkpoint, distributed, process_group
from rollart_core.training.auxiliary_models import ExtraModules, ReferencePolicy
from rollart_core.training.batch import (
    BatchRow,
    Minibatch,
    RewardShaper,
    batch_metrics,
    value_metrics,
)
from rollart_core.training.cross_check import differences
from rollart_core.training.loading import HostCopies, load_on_device, recompute_activations
from rollart_core.training.loading import load_model as load_model
from rollart_core.training.lora import put_adapters, trained_weights
from rollart_core.training.loss import MetricSums, loss_batch, mismatch_sums, spread
from rollart_core.training.optimizer import GuardedAdamW, UpdateOutcome
from rollart_core.training.phase_clock import PhaseClock
from rollart_core.training.policy import ForwardSettings, Policy, new_policy
from rollart_core.training.report import TrainStepReport
from rollart_core.training.signals import (
    TEACHER,
    LazySignals,
    check_known,
    signal_rows,
    teacher_rows,
)
from rollart_core.training.step_kl import StepKL
from rollart_core.types import FloatArray, Group, Sample

CLIP_HISTORY = "clip_history"
"""Name of the norm history of ``trainer.clip`` in a checkpoint."""

T = TypeVar("T")


class Trainer:
    """Updates one policy. There is one object per rank, and every rank gets the same batches.

    Args:
        config: The ``trainer`` section of the run.
        algorithm: Computes advantages and the loss.
        model_path: A local folder or a hub id.
        dtype: Type of published and exported weights; the trainer's own weights are float32.
        device: ``auto`` uses CUDA if it is available.
        channel: The channel on which :meth:`publish` publishes the weights.
        temperature: Sampling temperature of the inference engine; logits are divided by it.
        deterministic: Whether equal batches have bitwise equal losses.
        seed: Seed of torch's random numbers.
        beside: Models and settings besides the policy: critic, reference, teacher, shaping.

    Raises:
        ConfigError: If ``model_path`` is not a causal language model, or the algorithm requires
            signals that this trainer does not compute.
    """

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        *,
        model_path: str,
        dtype: str = "float32",
        device: str = "auto",
        channel: WeightChannel | None = None,
        temperature: float = 1.0,
        deterministic: bool = False,
        seed: int = 0,
        beside: AuxiliaryModels = ALONE,
    ) -> None:
        if deterministic:  # cuBLAS reads it at its first use, and some versions of torch require it
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.manual_seed(seed)
        self._config = config
        self._algorithm = algorithm
        self._channel = channel
        self._deterministic = deterministic
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = _device(device)
        self._model_path = model_path
        self._temperature = temperature
        self._nearby = beside
        self._shaper = RewardShaper.of(beside.shapings)
        self._budget = config.max_tokens_per_microbatch
        self._num_halvings = 0
        self._host_copies = HostCopies()
        self._clock = PhaseClock(self._device)
        self._adapts_later = beside.warms_whole
        self._take_model(None if self._adapts_later else beside.lora)

    def _take_model(self, lora: LoRA | None) -> None:
        """Load the model, and reset everything that depends on it."""
        beside = self._nearby
        self._model = self._load(recompute=self._config.activation_checkpointing, lora=lora)
        self._weights = trained_weights(self._model, lora, self._model_path)
        self._policy = self._make_policy(self._model, self._temperature)
        self._optimizer = self._new_optimizer()
        self._supervisor: GuardedAdamW | None = None
        self._progress: float | None = None
        self._reference = ReferencePolicy(
            self._policy, self._weights, load=self._load_other, named=beside.reference
        )
        self._extras = self._new_extras()

    @property
    def train_step(self) -> int:
        """Number of optimizer updates of RL so far."""
        return self._optimizer.train_step

    def train_batch(
        self, groups: Sequence[Group], policy_version: int, *, progress: float | None = None
    ) -> list[TrainStepReport]:
        """Train on a batch of groups.

        Args:
            groups: Groups in any order; the result does not depend on it.
            policy_version: The current version of the weights.
            progress: The used share of ``stop``, in [0, 1], for a schedule over it.

        Returns:
            One report per optimizer update; one with ``updated`` 0 if no sample has an advantage.

        Raises:
            BatchRefused: If the algorithm refuses the groups, or its advantages do not match them.
            TrainingDiverged: If three consecutive updates were not finite.
        """
        began = time.perf_counter()
        self._supervisor, self._progress = None, progress
        self._clock = PhaseClock(self._device)
        if self._extras:
            self._extras.begin()
        with self._determinism():
            rows, minibatches = self._prepare(groups, policy_version)
            shared = {**batch_metrics(rows), **value_metrics(rows)}
            self._clock.end("batch")
            reports = []
            for n, minibatch in enumerate(minibatches):
                metrics = self._update(minibatch, policy_version, is_first=n == 0)
                metrics.update(self._clock.seconds())
                metrics["train_s"] = time.perf_counter() - began
                metrics["tokens_per_s"] = metrics["tokens"] / metrics["train_s"]
                began, self._clock = time.perf_counter(), PhaseClock(self._device)
                reports.append(
                    TrainStepReport(self.train_step, policy_version, {**shared, **metrics})
                )
        return reports

    def supervise(self, samples: Sequence[Sample], lr: float) -> dict[str, float]:
        """Take one supervised step: mean cross-entropy of the loss tokens, at temperature 1.

        Its AdamW state is kept until the first :meth:`train_batch`.

        Args:
            samples: Demonstrations; ``loss_mask`` selects the tokens to learn.
            lr: Learning rate of this step.

        Raises:
            ValueError: If no sample has a loss token.
        """
        began = time.perf_counter()
        live = [s for s in samples if s.num_loss_tokens]
        if not live:
            raise ValueError("no sample has a loss token: there is nothing to learn")
        self._supervisor = self._supervisor or self._new_optimizer(clip=NormClip())
        total = sum(s.num_loss_tokens for s in live)
        with self._determinism(), self._policy.at_temperature(1.0):
            loss = self._fitting(live, lambda: self._supervised_gradients(live, total))
            mean = float(distributed.all_sum(loss))
            outcome = self._supervisor.update(mean, lr)
        wall_s = time.perf_counter() - began
        tokens = sum(s.num_tokens for s in live)
        return {
            "loss": mean,
            "grad_norm": outcome.grad_norm,
            "lr": lr,
            "updated": float(outcome.updated),
            "tokens": float(tokens),
            "loss_tokens": float(total),
            "tokens_per_s": tokens / wall_s,
            "train_s": wall_s,
        }

    def _supervised_gradients(self, live: Sequence[Sample], total: int) -> Tensor:
        """Add the gradients of a supervised step to zero, and return this rank's loss."""
        assert self._supervisor is not None
        self._supervisor.zero_grad()
        loss = torch.zeros((), device=self._device)
        shares = self._share(live)
        for n, (members, is_real) in enumerate(shares, 1):
            distributed.reduce_gradients(self._model, is_last=n == len(shares))
            logprobs, _ = self._policy.logprobs([live[i] for i in members])
            part = -logprobs.sum() / total * is_real
            _backward(part * distributed.world_size())
            loss += part.detach()
        return loss

    def held_out_loss(self, samples: Sequence[Sample]) -> float:
        """Return the mean cross-entropy of the loss tokens at temperature 1, without an update.

        Raises:
            ValueError: If no sample has a loss token.
        """
        total = sum(s.num_loss_tokens for s in samples)
        if not total:
            raise ValueError("no sample has a loss token: there is nothing to measure")
        with self._determinism(), self._policy.at_temperature(1.0):
            rows = self._signal("proximal_logprobs", samples)
        return -sum(float(row.sum(dtype="float64")) for row in rows) / total

    def compare(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return how much the logprobs of samples differ from the engine's, without an update.

        See :func:`rollart_core.training.cross_check.differences`.
        """
        with self._determinism():
            rows = self._signal("proximal_logprobs", samples)
        return differences(samples, rows)

    def publish(self, policy_version: int) -> Publication:
        """Publish the weights on the channel, under the names in files, without a tied head.

        Sharded tensors are gathered one by one in the published dtype, so no rank holds the whole
        model.

        Raises:
            RuntimeError: If the trainer was created without a channel.
        """
        if self._channel is None:
            raise RuntimeError("this trainer has no weight channel to publish on")
        tensors = self._weights.published(self._dtype)
        publication = Publication(policy_version, 0, 0.0)
        with distributed.together():
            try:
                if distributed.rank() == 0:
                    publication = self._channel.publish(policy_version, tensors)
            finally:
                for _ in tensors:  # every rank takes part in gathering each tensor
                    pass
        return publication

    def begin_adapters(self) -> None:
        """End a warm start of the whole model, and add adapters to the resulting model.

        The resulting model replaces the model in its folder. Engines, and a trainer that continues
        from a checkpoint, load it from there as the base.
        """
        self.export_hf(self._model_path, self._model_path)
        self._adapts_later = False
        self._take_model(self._nearby.lora)

    def save(self, path: str, *, policy_version: int, train_step: int | None = None) -> None:
        """Save weights, optimizer and counters at ``path``, which is replaced atomically."""
        if "ref_logprobs" in self._algorithm.requires:
            self._reference.begin()  # also for a checkpoint before the first batch
        if self._extras:
            self._extras.begin()
        if train_step is not None:
            self._optimizer.train_step = train_step
        checkpoint.save(path, self._state(policy_version))

    def load(self, path: str) -> tuple[int, int]:
        """Load a checkpoint of :meth:`save`; return its policy_version and train_step.

        Raises:
            ConfigError: If ``path`` contains no checkpoint, or one of another model.
        """
        if self._adapts_later:  # the model's folder contains the base of RL by now
            self._adapts_later = False
            self._take_model(self._nearby.lora)
        if "ref_logprobs" in self._algorithm.requires:
            self._reference.begin()
        state = self._state(0)
        checkpoint.load(path, state, optional=(CLIP_HISTORY,))
        self._weights.check_loaded(state, path)
        counters = state["counters"]
        assert isinstance(counters, Tensor)
        policy_version, train_step = (int(c) for c in counters)
        self._optimizer.go_on_from(train_step)
        if isinstance(history := state.get(CLIP_HISTORY), Tensor):
            self._optimizer.clipping.load_state(history.tolist())
        if self._extras:
            self._extras.go_on_from(train_step)
        return policy_version, train_step

    def set_lr_factor(self, factor: float) -> None:
        """Set the factor of the learning rates of the policy and of extra modules.

        Args:
            factor: Factor of the configured rates; it replaces the previous factor.
        """
        self._optimizer.lr_factor = factor
        if self._extras:
            self._extras.set_lr_factor(factor)

    def export_hf(self, path: str, tokenizer_path: str | None = None) -> None:
        """Write a folder that transformers loads, with the files of the tokenizer."""
        tensors = checkpoint.on_first_rank(self._weights.whole(self._dtype))
        checkpoint.export_hf(path, self._model, tensors, tokenizer_path)
        self._weights.export_with_adapters(path)

    def offload(self) -> int:
        """Move the tensors to host memory, so that engines can use the device until ``reload``.

        Gradients are dropped; each update computes its own. Between the two, call only ``close``.

        Returns:
            The bytes that this rank moved.
        """
        for optimizer in (self._optimizer, self._supervisor, self._extras):
            if optimizer is not None:
                optimizer.zero_grad()
        self._host_copies.offload(self._tensors())
        release_memory(self._device)
        return self._host_copies.num_bytes

    def reload(self) -> None:
        """Move the tensors back to the device after ``offload``; without it, do nothing."""
        self._host_copies.reload()

    def _tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that stay on the device between two calls."""
        modules = [self._model, *self._reference.modules()]
        optimizers = [self._optimizer, *([self._supervisor] if self._supervisor else [])]
        if self._extras is not None:
            modules += self._extras.modules()
            optimizers.append(self._extras.optimizer)
        for module in modules:
            yield from module.parameters()
            yield from module.buffers()
        for optimizer in optimizers:
            yield from optimizer.moments()
        yield from self._reference.adapters()

    def close(self) -> None:
        """Close the channel and leave the process group; may be called twice."""
        if self._channel is not None:
            self._channel.close()
        process_group.leave()

    def _prepare(
        self, groups: Sequence[Group], policy_version: int
    ) -> tuple[list[BatchRow], list[Minibatch]]:
        """Return all rows, and the minibatches with their signals."""
        ordered = self._shaper.shape(batch.canonical(groups))
        samples = [s for g in ordered for s in g.samples]
        requires = self._algorithm.requires
        signals = LazySignals(requires, lambda name: self._signal(name, samples))
        try:
            advantages = self._algorithm.advantages(ordered, signals)
            targets = self._algorithm.targets(ordered, signals)
        except ValueError as e:
            raise BatchRefused(f"{type(self._algorithm).__name__}: {text_of(e)}") from e
        rows = batch.make_rows(ordered, advantages, policy_version)
        self._attach_targets(rows, samples, targets)
        minibatches = batch.split(
            rows,
            self._config.updates_per_batch,
            self._algorithm.zero_advantage,
            min_effective_groups=self._algorithm.min_effective_groups,
        )
        for name in sorted(requires):
            known = signals.known(name)
            if known is not None:
                batch.attach(name, rows, samples, known)
                continue
            # The first update starts from the proximal weights: its own forward pass computes them.
            skip = 1 if name == "proximal_logprobs" else 0
            self._attach(name, [r for m in minibatches[skip:] for r in m.rows])
        return rows, minibatches

    def _attach(self, name: str, rows: Sequence[BatchRow]) -> None:
        values = self._signal(name, [r.sample for r in rows])
        for row, value in zip(rows, values, strict=True):
            if name in ("ref_logprobs", TEACHER):  # of a model that no update will fix
                batch.check_finite(name, value, row.sample, f"number {row.group} of the batch")
            row.signals[name] = value

    def _attach_targets(
        self,
        rows: Sequence[BatchRow],
        samples: Sequence[Sample],
        targets: Mapping[str, Sequence[FloatArray]],
    ) -> None:
        """Attach the algorithm's targets, which its loss uses, to the rows."""
        if taken := sorted(set(targets) & self._algorithm.requires):
            raise BatchRefused(f"the algorithm has targets named like signals: {', '.join(taken)}")
        for name, given in targets.items():
            batch.attach(name, rows, samples, given)

    def _signal(self, name: str, samples: Sequence[Sample]) -> list[FloatArray]:
        if name == TEACHER:
            return teacher_rows(samples)
        return self._fitting(samples, lambda: self._computed_signal(name, samples))

    def _computed_signal(self, name: str, samples: Sequence[Sample]) -> list[FloatArray]:
        if self._extras and name in self._extras.names:
            return self._extras.rows(name, samples, self._budget)
        if name == "ref_logprobs":
            with self._reference.in_place() as policy:
                return signal_rows(policy, samples, self._budget)
        return signal_rows(self._policy, samples, self._budget, entropy=name == "entropy")

    def _update(
        self, minibatch: Minibatch, policy_version: int, *, is_first: bool
    ) -> dict[str, float]:
        """Take one optimizer update and return its metrics."""
        if not minibatch.rows:
            nothing = {"loss": 0.0, "updated": 0.0, "tokens": 0.0}
            return {**MetricSums().finish(), **nothing, "num_updates": float(self.train_step)}
        samples = [r.sample for r in minibatch.rows]
        sums, step_kl, computed = self._fitting(
            samples, lambda: self._gradients(minibatch, policy_version, is_first=is_first)
        )
        metrics_now = sums.finish()
        outcome = self._step(metrics_now["loss"], step_kl)
        self._clock.end("optimizer")
        return {
            **metrics_now,
            **outcome.metrics(),
            "num_updates": float(self.train_step),
            "tokens": float(sum(s.num_tokens for s in samples)),
            "computed_tokens": float(distributed.all_sum(computed)),
            "microbatch_halvings": float(self._num_halvings),
            **self._waiting(samples),
        }

    def _gradients(
        self, minibatch: Minibatch, policy_version: int, *, is_first: bool
    ) -> tuple[MetricSums, StepKL | None, Tensor]:
        """Add the gradients of an update to zero.

        Returns:
            Sums of metrics, the measurement of the KL, and the number of computed tokens.
        """
        samples = [r.sample for r in minibatch.rows]
        sums, computed_before = MetricSums(), self._policy.computed_tokens
        self._optimizer.zero_grad()
        if self._extras:
            self._extras.zero_grad()
        shares, step_kl = self._share(samples), self._new_step_kl(samples)
        for n, (members, is_real) in enumerate(shares, 1):
            distributed.reduce_gradients(self._model, is_last=n == len(shares))
            part = loss_batch(minibatch, members, policy_version, self._device)
            chosen = [samples[i] for i in members]
            values, entropy, hidden = self._policy.outputs(
                chosen,
                hidden=self._wants_hidden,
                entropy_gradient=self._algorithm.wants_entropy,
            )
            logprobs = spread(values, part.loss_mask)
            if step_kl is not None and is_real:
                step_kl.see(members, chosen, values)
            part.outputs = self._said(chosen, hidden, part.loss_mask, is_last=n == len(shares))
            if self._algorithm.wants_entropy:
                part.outputs = {**part.outputs, "entropy": spread(entropy, part.loss_mask)}
            if is_first and "proximal_logprobs" in self._algorithm.requires:
                part.signals = {**part.signals, "proximal_logprobs": logprobs.detach()}
            loss, metrics = self._algorithm.loss(logprobs, part)
            loss = loss * minibatch.loss_scale
            self._clock.end("forward")
            _backward(loss * is_real * distributed.world_size())
            self._clock.end("backward")
            mismatch = mismatch_sums(logprobs, part)
            entropies = {"loss": loss, "entropy": entropy.sum()}
            sums.add({**metrics, **entropies, **mismatch}, is_real=is_real)
        return sums, step_kl, torch.tensor(self._policy.computed_tokens - computed_before)

    def _fitting(self, samples: Sequence[Sample], work: Callable[[], T]) -> T:
        """Do work in microbatches; if memory runs out, halve them and do it again.

        Raises:
            OutOfMemory: If a row alone does not fit. With several ranks, at the first time: the
                other ranks wait in a collective call, so all of them start again with half.
        """
        while True:
            try:
                return work()
            except Exception as e:
                if not is_out_of_memory(e):
                    raise
                error = OutOfMemory(out_of_memory_text(self._budget, samples))
                error.can_be_split = any(len(bin_) > 1 for bin_ in self._bins(samples))
                if distributed.world_size() > 1 or not error.can_be_split:
                    raise error from e
            # not in the handler: the error's traceback holds the tensors of the microbatch
            self._budget = max(1, self._budget // 2)
            self._num_halvings += 1
            release_memory(self._device)

    def _said(
        self, samples: Sequence[Sample], hidden: Tensor | None, mask: Tensor, *, is_last: bool
    ) -> dict[str, Tensor]:
        """Return the current outputs of the extra modules, ``[N]``, with gradient."""
        if self._extras is None:
            return {}
        self._extras.reduce_gradients(is_last=is_last)
        said = self._extras.says(samples, hidden)
        return {name: spread(values, mask) for name, values in said.items()}

    def _step(self, loss: float, step_kl: StepKL | None) -> UpdateOutcome:
        """Update both policy and extra modules with their gradients, or neither of them."""
        progress, measure_kl = self._progress, step_kl.measure if step_kl else None
        if self._extras is None:
            return self._optimizer.update(loss, progress=progress, measure_kl=measure_kl)
        if not self._extras.is_finite():
            loss = math.nan
        outcome = self._optimizer.update(
            loss,
            progress=progress,
            holds=self._extras.alone(self.train_step),
            measure_kl=measure_kl,
        )
        if outcome.updated:
            self._extras.update(loss, progress)
        return outcome

    def _new_step_kl(self, samples: Sequence[Sample]) -> StepKL | None:
        """Return the measurement of an update's KL; None if the KL is not bounded."""
        if self._config.max_kl is None:
            return None
        return StepKL(samples, self._policy, self._budget)

    @property
    def _wants_hidden(self) -> bool:
        return self._extras is not None and self._extras.reads_policy

    def _share(self, samples: Sequence[Sample]) -> list[distributed.Share]:
        """Return this rank's microbatches of an update."""
        return distributed.share(self._bins(samples))

    def _bins(self, samples: Sequence[Sample]) -> list[list[int]]:
        return self._policy.microbatches(samples, self._budget, distributed.world_size())

    def _waiting(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the imbalance of an update's tokens over the ranks; empty on one rank."""
        if distributed.world_size() == 1:
            return {}
        costs = [sum(len(batch.model_input(samples[i])) for i in b) for b in self._bins(samples)]
        return {"rank_imbalance": batch.imbalance(costs, distributed.world_size())}

    def _state(self, policy_version: int) -> checkpoint.State:
        state: checkpoint.State = {
            **self._weights.kept(),
            "optimizer": self._optimizer.state(),
            "counters": torch.tensor([policy_version, self.train_step]),
        }
        if history := self._optimizer.clipping.state():
            state[CLIP_HISTORY] = torch.tensor(history, dtype=torch.float64)
        if self._extras is not None:
            state.update(self._extras.state())
        if self._shaper.shapings:
            state["shaping"] = torch.from_numpy(self._shaper.statistics)  # loaded in place
        state.update(self._reference.kept())
        return state

    def _load_other(self, path: str | None) -> Policy:
        """Return another model as a policy; None: the model of the run, as in its files."""
        return self._make_policy(self._load(path), self._temperature)

    def _new_extras(self) -> ExtraModules | None:
        """Return the extra modules of the algorithm; None if it has none.

        Raises:
            ConfigError: If the algorithm is not compatible with the run's config.
        """
        algorithm, beside = self._algorithm, self._nearby
        heads = algorithm.extra_modules(self._policy.hidden_size)
        check_known(algorithm.requires, frozenset(heads), has_teacher=beside.has_teacher)
        check_auxiliary_models(beside, algorithm.requires, frozenset(heads))
        if not heads:
            return None
        assert beside.critic is not None
        backbone = None
        if beside.critic.backbone == "own":
            model = self._load(recompute=self._config.activation_checkpointing)
            backbone = self._make_policy(model, 1.0)
        return ExtraModules(
            heads, beside.critic, self._config, policy=self._policy, backbone=backbone
        )

    def _load(
        self, path: str | None = None, *, recompute: bool = False, lora: LoRA | None = None
    ) -> torch.nn.Module:
        def prepare(model: torch.nn.Module) -> None:
            if lora is not None:
                put_adapters(model, lora, self._model_path)
            if recompute:
                recompute_activations(model)

        return load_on_device(
            path or self._model_path, self._device, bfloat16=self._bfloat16, prepare=prepare
        )

    def _make_policy(self, model: torch.nn.Module, temperature: float) -> Policy:
        size = distributed.world_size()
        autocast = self._bfloat16 and size == 1  # FSDP2 casts the parameters that it gathers
        settings = ForwardSettings(
            temperature=temperature,
            autocast=autocast,
            recompute=self._config.activation_checkpointing,
            world_size=size,
            kernels=self._config.kernels,
        )
        return new_policy(model, settings)

    @property
    def _bfloat16(self) -> bool:
        """Whether matrix products are computed in bfloat16."""
        return self._config.autocast == "bfloat16" or self._dtype == torch.bfloat16

    def _new_optimizer(self, **changes: object) -> GuardedAdamW:
        config = self._config.model_copy(update=changes)
        return GuardedAdamW(self._weights.parameters(), config)

    @contextlib.contextmanager
    def _determinism(self) -> Iterator[None]:
        """Make torch reject nondeterministic kernels within the block, if the run requires it."""
        if not self._deterministic:
            yield
            return
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch could not allocate memory, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in said and "memory" in said


def out_of_memory_text(budget: int, samples: Sequence[Sample]) -> str:
    """Return the message of an :class:`OutOfMemory`, with the keys to lower."""
    longest = max(len(batch.model_input(s)) for s in samples)
    return (
        f"the trainer's device ran out of memory in a microbatch of at most {budget} tokens (the "
        f"longest row has {longest}): lower trainer.max_tokens_per_microbatch, or for a single row "
        "rollout.max_context_tokens; set trainer.activation_checkpointing; or use more ranks"
    )


def release_memory(device: torch.device) -> None:
    """Free the tensors of a failed microbatch."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
