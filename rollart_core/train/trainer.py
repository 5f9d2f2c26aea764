"""The trainer: from whole groups to updated weights.

    groups ──canonical order──> advantages (algorithm) ──> minibatches, one an update
                                                               │
          publish(N+1) <── weights <── AdamW <── gradients <── microbatches: forward, loss, backward

Takes: groups (or demonstrations), plain records and numpy. Gives: reports of numbers; weights leave
it through the weight channel. Never: generates, talks to an environment, or lets a tensor of torch
through its methods, so that it can live in a process of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rollart_core.config import Trainer as TrainerConfig
from rollart_core.contracts.algorithm import Algorithm
from rollart_core.contracts.weights import Publication, WeightChannel
from rollart_core.errors import ConfigError, first_line
from rollart_core.train import batch, checkpoint, distributed, process_group
from rollart_core.train.batch import Minibatch, Row
from rollart_core.train.kernels import TorchOps
from rollart_core.train.loss import MetricSums, loss_batch, mismatch_sums, spread
from rollart_core.train.native import native_ops
from rollart_core.train.optimizer import GuardedAdamW
from rollart_core.train.policy import Policy, choose_road, make_policy
from rollart_core.train.recompute import recompute_activations
from rollart_core.train.report import TrainStepReport
from rollart_core.train.signals import LazySignals, check_known, signal_rows
from rollart_core.types import FloatArray, Group, Sample


class Trainer:
    """Updates one policy. One object a rank; every rank is given the same batches.

    Args:
        config: The ``trainer`` section of the run.
        algorithm: Gives advantages and the loss.
        model_path: A local folder or a hub id.
        dtype: Of published and exported weights; the trainer's own are float32.
        device: ``auto`` takes CUDA where it is.
        channel: Where :meth:`publish` puts the weights.
        temperature: What the inference engine samples at; logits are divided by it.
        deterministic: Equal batches give equal losses, bit for bit.
        seed: Of torch's random numbers.

    Raises:
        ConfigError: When ``model_path`` is no causal language model, or the algorithm requires
            signals this trainer does not compute.
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
    ) -> None:
        check_known(algorithm.requires)
        if algorithm.extra_modules():
            raise ConfigError("this trainer does not train extra modules, such as a critic, yet")
        torch.manual_seed(seed)
        self._config = config
        self._algorithm = algorithm
        self._channel = channel
        self._deterministic = deterministic
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = _device(device)
        self._model_path = model_path
        self._model = self._load(recompute=config.activation_checkpointing)
        self._policy = self._make_policy(self._model, temperature)
        self._optimizer = self._new_optimizer()
        self._supervisor: GuardedAdamW | None = None
        self._reference: Policy | None = None

    @property
    def train_step(self) -> int:
        """Optimizer updates of RL so far."""
        return self._optimizer.train_step

    def train_batch(self, groups: Sequence[Group], policy_version: int) -> list[TrainStepReport]:
        """Learn from a batch of groups.

        Args:
            groups: In any order; their order never reaches a number.
            policy_version: The version of the weights now.

        Returns:
            One report an optimizer update; one with ``updated`` 0 when no sample teaches anything.

        Raises:
            ValueError: When the algorithm's advantages do not fit the samples.
            TrainingDiverged: When three updates in a row were not finite.
        """
        began = time.perf_counter()
        self._supervisor = None
        with self._determinism():
            rows, minibatches = self._prepare(groups, policy_version)
            shared = _batch_metrics(rows)
            reports = []
            for n, minibatch in enumerate(minibatches):
                metrics = self._update(minibatch, policy_version, is_first=n == 0)
                metrics["train_s"] = time.perf_counter() - began
                metrics["tokens_per_s"] = metrics["tokens"] / metrics["train_s"]
                began = time.perf_counter()
                reports.append(
                    TrainStepReport(self.train_step, policy_version, {**shared, **metrics})
                )
        return reports

    def supervise(self, samples: Sequence[Sample], lr: float) -> dict[str, float]:
        """Take one supervised step: mean cross-entropy of the loss tokens, at temperature 1.

        Its AdamW state lives until the first :meth:`train_batch`.

        Args:
            samples: Demonstrations; ``loss_mask`` says what to learn.
            lr: Learning rate of this step.

        Raises:
            ValueError: When no sample has a loss token.
        """
        began = time.perf_counter()
        live = [s for s in samples if s.num_loss_tokens]
        if not live:
            raise ValueError("no sample has a loss token: there is nothing to learn")
        self._supervisor = self._supervisor or self._new_optimizer()
        total = sum(s.num_loss_tokens for s in live)
        loss = torch.zeros((), device=self._device)
        with self._determinism(), self._policy.at_temperature(1.0):
            self._supervisor.zero_grad()
            shares = self._share(live)
            for n, (members, is_real) in enumerate(shares, 1):
                distributed.reduce_gradients(self._model, is_last=n == len(shares))
                logprobs, _ = self._policy.logprobs([live[i] for i in members])
                part = -logprobs.sum() / total * is_real
                _backward(part * distributed.world_size())
                loss += part.detach()
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

    def publish(self, policy_version: int) -> Publication:
        """Put the weights on the channel, under transformers' names; a tied head is left out.

        Sharded ones are made whole one by one, already in the dtype published: no rank holds the
        whole model for it.

        Raises:
            RuntimeError: When the trainer was built without a channel.
        """
        if self._channel is None:
            raise RuntimeError("this trainer has no weight channel to publish on")
        tensors = checkpoint.stream(checkpoint.named_tensors(self._model), self._dtype)
        publication = Publication(policy_version, 0, 0.0)
        with distributed.together():
            try:
                if distributed.rank() == 0:
                    publication = self._channel.publish(policy_version, tensors)
            finally:
                for _ in tensors:  # every rank takes part in making each whole
                    pass
        return publication

    def save(self, path: str, *, policy_version: int, train_step: int | None = None) -> None:
        """Save weights, optimizer and counters at ``path``, replacing it at once when whole."""
        if "ref_logprobs" in self._algorithm.requires:
            self._ensure_reference()  # also in a checkpoint from before the first batch
        if train_step is not None:
            self._optimizer.train_step = train_step
        checkpoint.save(path, self._state(policy_version))

    def load(self, path: str) -> tuple[int, int]:
        """Load what :meth:`save` saved; return its policy_version and train_step.

        Raises:
            ConfigError: When ``path`` holds no checkpoint, or one of another model.
        """
        if "ref_logprobs" in self._algorithm.requires:
            self._ensure_reference()
        state = self._state(0)
        checkpoint.load(path, state)
        counters = state["counters"]
        assert isinstance(counters, Tensor)
        policy_version, train_step = (int(c) for c in counters)
        self._optimizer.train_step = train_step
        return policy_version, train_step

    def export_hf(self, path: str, tokenizer_path: str | None = None) -> None:
        """Write a folder that transformers loads, with the files of the tokenizer."""
        tensors = checkpoint.on_first_rank(checkpoint.named_tensors(self._model), self._dtype)
        checkpoint.export_hf(path, self._model, tensors, tokenizer_path)

    def close(self) -> None:
        """Free the channel and leave the other ranks; may be called twice."""
        if self._channel is not None:
            self._channel.close()
        process_group.leave()

    def _prepare(
        self, groups: Sequence[Group], policy_version: int
    ) -> tuple[list[Row], list[Minibatch]]:
        """Return all rows, and the minibatches with the signals they need."""
        ordered = batch.canonical(groups)
        samples = [s for g in ordered for s in g.samples]
        requires = self._algorithm.requires
        signals = LazySignals(requires, lambda name: self._signal(name, samples))
        advantages = self._algorithm.advantages(ordered, signals)
        rows = batch.make_rows(ordered, advantages, policy_version)
        minibatches = batch.split(
            rows, self._config.updates_per_batch, self._algorithm.zero_advantage
        )
        for name in sorted(requires):
            # The first update starts from the proximal weights: its own forward gives the signal.
            skip = 1 if name == "proximal_logprobs" else 0
            self._attach(name, [r for m in minibatches[skip:] for r in m.rows])
        return rows, minibatches

    def _attach(self, name: str, rows: Sequence[Row]) -> None:
        values = self._signal(name, [r.sample for r in rows])
        for row, value in zip(rows, values, strict=True):
            row.signals[name] = value

    def _signal(self, name: str, samples: Sequence[Sample]) -> list[FloatArray]:
        policy = self._ensure_reference() if name == "ref_logprobs" else self._policy
        budget = self._config.max_tokens_per_microbatch
        return signal_rows(policy, samples, budget, entropy=name == "entropy")

    def _update(
        self, minibatch: Minibatch, policy_version: int, *, is_first: bool
    ) -> dict[str, float]:
        """Take one optimizer update and return its metrics."""
        sums = MetricSums()
        if not minibatch.rows:
            return {**sums.finish(), "loss": 0.0, "updated": 0.0, "tokens": 0.0}
        samples = [r.sample for r in minibatch.rows]
        computed_before = self._policy.computed_tokens
        self._optimizer.zero_grad()
        shares = self._share(samples)
        for n, (members, is_real) in enumerate(shares, 1):
            distributed.reduce_gradients(self._model, is_last=n == len(shares))
            part = loss_batch(minibatch, members, policy_version, self._device)
            values, entropy = self._policy.logprobs([samples[i] for i in members])
            logprobs = spread(values, part.loss_mask)
            if is_first and "proximal_logprobs" in self._algorithm.requires:
                part.signals = {**part.signals, "proximal_logprobs": logprobs.detach()}
            loss, metrics = self._algorithm.loss(logprobs, part)
            _backward(loss * is_real * distributed.world_size())
            mismatch = mismatch_sums(logprobs, part)
            entropies = {"loss": loss, "entropy": entropy.sum()}
            sums.add({**metrics, **entropies, **mismatch}, is_real=is_real)
        computed = torch.tensor(self._policy.computed_tokens - computed_before)
        metrics_now = sums.finish()
        outcome = self._optimizer.update(metrics_now["loss"])
        return {
            **metrics_now,
            "grad_norm": outcome.grad_norm,
            "lr": outcome.lr,
            "updated": float(outcome.updated),
            "not_finite": float(not outcome.updated),
            "tokens": float(sum(s.num_tokens for s in samples)),
            "computed_tokens": float(distributed.all_sum(computed)),
            **self._waiting(samples),
        }

    def _share(self, samples: Sequence[Sample]) -> list[distributed.Share]:
        """Return this rank's microbatches of an update."""
        return distributed.share(self._bins(samples))

    def _bins(self, samples: Sequence[Sample]) -> list[list[int]]:
        budget = self._config.max_tokens_per_microbatch
        return self._policy.microbatches(samples, budget, distributed.world_size())

    def _waiting(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return how evenly the tokens of an update lie on the ranks; nothing on one rank."""
        if distributed.world_size() == 1:
            return {}
        costs = [sum(len(batch.model_input(samples[i])) for i in b) for b in self._bins(samples)]
        return {"rank_imbalance": batch.imbalance(costs, distributed.world_size())}

    def _state(self, policy_version: int) -> checkpoint.State:
        state: checkpoint.State = {
            "model": checkpoint.named_tensors(self._model),
            "optimizer": self._optimizer.state(),
            "counters": torch.tensor([policy_version, self.train_step]),
        }
        if self._reference is not None:
            state["reference"] = checkpoint.named_tensors(self._reference.model)
        return state

    def _ensure_reference(self) -> Policy:
        """Return the reference policy: the weights as they are when it is first asked for."""
        if self._reference is None:
            model = self._load()
            with torch.no_grad():
                now = checkpoint.named_tensors(self._model)
                for name, kept in checkpoint.named_tensors(model).items():
                    kept.copy_(now[name])
            model.requires_grad_(False)
            self._reference = self._make_policy(model, self._policy.temperature)
        return self._reference

    def _load(self, *, recompute: bool = False) -> torch.nn.Module:
        model = load_model(self._model_path)
        if recompute:
            recompute_activations(model)
        return distributed.shard(model, self._device, bfloat16=self._bfloat16)

    def _make_policy(self, model: torch.nn.Module, temperature: float) -> Policy:
        size = distributed.world_size()
        autocast = self._bfloat16 and size == 1  # FSDP2 casts by itself what it gathers
        recompute = self._config.activation_checkpointing
        road = choose_road(model, world_size=size, autocast=autocast, recompute=recompute)
        return make_policy(road, model, temperature, autocast=autocast, ops=self._ops())

    @property
    def _bfloat16(self) -> bool:
        """Whether matrix products are computed in bfloat16."""
        return self._config.autocast == "bfloat16" or self._dtype == torch.bfloat16

    def _ops(self) -> TorchOps | None:
        """Return the functions in C where the config and the device allow it; None for torch's."""
        if self._config.kernels == "torch" or self._device.type != "cpu":
            return None
        return native_ops(required=self._config.kernels == "native")

    def _new_optimizer(self) -> GuardedAdamW:
        return GuardedAdamW(dict(self._model.named_parameters()), self._config)

    @contextlib.contextmanager
    def _determinism(self) -> Iterator[None]:
        """Make torch refuse kernels whose result depends on chance, where the run asks for it."""
        if not self._deterministic:
            yield
            return
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def load_model(model_path: str) -> torch.nn.Module:
    """Load a causal LM in float32, without dropout.

    Raises:
        ConfigError: When there is none at ``model_path``.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # they would draw over the run's own
    try:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"model.path: {model_path!r} is no causal language model: {first_line(str(e))}"
        ) from e
    return model.eval()  # type: ignore[no-any-return]


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _batch_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Return what every report of a batch says of the whole batch."""
    live: dict[int, bool] = {}
    for row in rows:
        live[row.group] = live.get(row.group, False) or row.is_live
    staleness = np.array([r.staleness for r in rows] or [0])
    return {
        "zero_advantage_groups": float(sum(not is_live for is_live in live.values())),
        "batch_groups": float(len(live)),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
    }
