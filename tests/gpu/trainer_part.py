"""The cases of the trainer on one device: they need torch, transformers and numpy only.

Each function yields figures with their marks; see `cases.py`. Sizes on CUDA are those of a real
run, sizes on the CPU are the smallest that run the same code.
"""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing  # it registers how tensors are pickled
from cases import (
    GB,
    QWEN3_06B,
    QWEN3_8B,
    SMALL,
    VOCABULARY,
    Case,
    Figure,
    Machine,
    Skipped,
    clear_gradients,
    in_ranks,
    need,
    new_model,
    new_optimizer,
    new_samples,
    relative_error,
)
from safetensors.torch import load_file
from torch import Tensor, nn

from rollart_core.training import checkpoint, head
from rollart_core.training.batch import model_input
from rollart_core.training.loading import HostCopies, recompute_activations
from rollart_core.training.optimizer import GuardedAdamW
from rollart_core.training.policy import ForwardSettings, PackedPolicy, PaddedPolicy, Policy
from rollart_core.types import Group, Sample, Task, Ticket, Trajectory
from rollart_planner.devices import find_device

if TYPE_CHECKING:
    from rollart_core.training.trainer import Trainer

LENGTHS = (300, 2900, 850, 1600, 480, 2100, 1200, 700, 350, 1000, 2500, 600, 900, 400, 1800, 550)
"""Rows of a microbatch as multi-turn episodes give them: mean 1,140 tokens, the longest 2,900."""
TEMPERATURE = 0.7


def logprobs_and_gradients(machine: Machine) -> Iterator[Figure]:
    """Packed and padded rows have the logprobs and gradients of plain transformers, row by row."""
    model, samples = _model_and_rows(machine)
    wanted, slopes = _plain(model, samples, autocast=False)
    for kind in (PaddedPolicy, PackedPolicy):
        policy = kind(model, ForwardSettings(TEMPERATURE))
        values, _ = policy.logprobs(samples)
        found = _gradients(model, values)
        off = float((values.detach() - wanted).abs().max())
        yield Figure(f"{_name(policy)}, float32, largest difference", off, "nat", at_most=1e-4)
        error = relative_error(found, slopes)
        yield Figure(f"{_name(policy)}, float32, gradient error", error, at_most=1e-4)


def bfloat16_logprobs(machine: Machine) -> Iterator[Figure]:
    """In bfloat16, packed and padded rows are as close to float32 as plain transformers is."""
    model, samples = _model_and_rows(machine)
    with torch.no_grad():
        exact, _ = _plain(model, samples, autocast=False)
        plain, _ = _plain(model, samples, autocast=True)
        noise = float((plain - exact).abs().mean())
        yield Figure("plain, mean difference from float32", noise, "nat")
        for kind in (PaddedPolicy, PackedPolicy):
            policy = kind(model, ForwardSettings(TEMPERATURE, autocast=True))
            off = float((policy.logprobs(samples)[0] - exact).abs().mean())
            name = f"{_name(policy)}, mean difference from float32, of plain's"
            yield Figure(name, off / noise, at_most=1.5)


def _model_and_rows(machine: Machine) -> tuple[nn.Module, list[Sample]]:
    vocabulary = machine.size(cuda=VOCABULARY, cpu=97)
    layers = machine.size(cuda=8, cpu=2)
    shape = machine.size(cuda=QWEN3_06B, cpu=SMALL)
    lengths = machine.size(cuda=(17, 300, 1025, 2048, 96, 700), cpu=(5, 17, 140))
    model = new_model(machine, vocab_size=vocabulary, num_hidden_layers=layers, **shape)
    return model, new_samples(lengths, vocabulary)


def _plain(model: Any, samples: Sequence[Sample], *, autocast: bool) -> tuple[Tensor, list[Tensor]]:
    """Return logprobs ``[K]`` of plain transformers, row by row, and gradients if enabled."""
    device = next(model.parameters()).device
    rows = []
    for s in samples:
        ids = torch.from_numpy(s.token_ids.astype("int64")).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits.float() / TEMPERATURE, -1)
        at = torch.from_numpy(s.loss_mask).to(device).nonzero()[:, 0]
        rows.append(logprobs[at - 1, ids[at]])
    values = torch.cat(rows)
    return values.detach(), _gradients(model, values) if values.requires_grad else []


def _gradients(model: nn.Module, values: Tensor) -> list[Tensor]:
    """Return the gradients of a weighted sum of logprobs."""
    clear_gradients(model)
    weights = torch.linspace(-1.0, 1.0, len(values), device=values.device)
    (values * weights).sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    clear_gradients(model)
    return found


def _name(policy: Policy) -> str:
    return "packed" if isinstance(policy, PackedPolicy) else "padded"


def chunked_head(machine: Machine) -> Iterator[Figure]:
    """Logprobs and entropies in chunks have the gradients of the plain form, in little memory."""
    vocabulary, hidden = machine.size(cuda=(VOCABULARY, 1024), cpu=(997, 32))
    if not machine.is_cuda:
        head.CHUNK_BYTES = 4 * vocabulary * 100  # several chunks also at small sizes
    for dtype, mark in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        torch.manual_seed(0)
        kind: Any = {"dtype": dtype, "device": machine.device}
        states = torch.randn(machine.size(cuda=1000, cpu=250), hidden, **kind).requires_grad_()
        weight = (torch.randn(vocabulary, hidden, **kind) / hidden**0.5).requires_grad_()
        tokens = torch.arange(len(states), device=machine.device)
        assert head.chunk_rows(vocabulary) < len(states)
        targets, scoring = head.Targets.one_per_row(tokens), head.Scoring(TEMPERATURE, True)
        chunked = head.score_in_chunks(states, (weight, None), targets, scoring)
        found = _head_gradients(chunked, states, weight)
        logp = torch.log_softmax(states @ weight.T / TEMPERATURE, -1)
        plain = (logp[tokens, tokens], -(logp.exp() * logp).sum(-1))
        error = relative_error(found, _head_gradients(plain, states, weight))
        yield Figure(f"{_short(dtype)}, gradient error", error, at_most=mark)
        del states, weight, chunked, found, logp, plain
    shape = {**SMALL, "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": 0}
    model = new_model(machine, **shape)
    length = machine.size(cuda=4096, cpu=64)
    rows = new_samples([length + 1] * 8, vocabulary, sampled=1.0)
    for autocast in (False, True):
        policy = PackedPolicy(model, ForwardSettings(autocast=autocast))
        run = _forward_backward(policy, rows)
        way = "autocast" if autocast else "float32"
        if machine.is_cuda:
            clear_gradients(model)
            above = machine.peak_bytes(run) - sum(p.nbytes for p in model.parameters())
            name = f"{way}, memory above weights and gradients"
            yield Figure(name, above / GB, "GB", at_most=2.0)
        seconds = machine.seconds(run)
        yield Figure(f"{way}, forward and backward", 8 * length / seconds, "tokens/s")


def _head_gradients(outputs: tuple[Tensor, Tensor], *leaves: Tensor) -> list[Tensor]:
    """Return the gradients of a sum of logprobs and entropies, with different weights."""
    values, entropy = outputs
    weights = torch.linspace(-1.0, 1.0, len(values), device=values.device, dtype=values.dtype)
    loss = (values * weights).sum() + 0.3 * (entropy * weights.flip(0)).sum()
    return [*torch.autograd.grad(loss, leaves)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def training_speed(machine: Machine) -> Iterator[Figure]:
    """Forward and backward passes of a few layers of Qwen3-8B: model FLOPs utilization (MFU).

    FLOPs of a token, forward and backward: 6 P + 12 L H c, for P parameters in matrices, L layers,
    H = heads x head_dim, and c tokens attended on average, half of the row (arXiv:2204.02311,
    appendix B, with the causal half). Recomputed activations do not count. The peak is that of the
    data sheet in `rollart_planner.devices`.
    """
    shape = machine.size(cuda=QWEN3_8B, cpu=SMALL)
    layers, length = machine.size(cuda=(4, 2048), cpu=(2, 64))
    samples = new_samples([length] * machine.size(cuda=8, cpu=2), 1024, sampled=0.01)
    num_tokens = sum(len(model_input(s)) for s in samples)
    peak = find_device(torch.cuda.get_device_name()) if machine.is_cuda else None
    ways = {
        "float32 weights, autocast": (torch.float32, False),
        "bfloat16 weights, as several ranks compute": (torch.bfloat16, False),
        "bfloat16 weights, recomputed": (torch.bfloat16, True),
    }
    for way, (dtype, recompute) in ways.items():
        model = new_model(machine, dtype=dtype, vocab_size=1024, num_hidden_layers=layers, **shape)
        if recompute:
            recompute_activations(model)
        policy = PackedPolicy(model, ForwardSettings(autocast=dtype == torch.float32))
        run = _forward_backward(policy, samples)
        named = [(name, p) for name, p in model.named_parameters() if "embed" not in name]
        matrices = sum(p.numel() for _, p in named if p.dim() > 1)
        attention = 12 * layers * shape["num_attention_heads"] * shape["head_dim"] * length / 2
        flops = num_tokens * (6 * matrices + attention)
        seconds = machine.seconds(run, repeats=5, warmups=2)
        yield Figure(f"{way}: speed", flops / seconds / 1e12, "TFLOP/s")
        yield Figure(f"{way}: tokens", num_tokens / seconds, "tokens/s")
        if peak is not None:
            yield Figure(f"{way}: MFU", flops / seconds / peak.flops_per_s, at_most=1.0)
        if machine.is_cuda:
            clear_gradients(model)
            above = machine.peak_bytes(run) - sum(p.nbytes for p in model.parameters())
            yield Figure(f"{way}: activations", above / num_tokens / layers, "bytes/token/layer")
        del model, policy, run


def _forward_backward(policy: Policy, samples: Sequence[Sample]) -> Callable[[], None]:
    def run() -> None:
        clear_gradients(policy.model)
        policy.logprobs(samples)[0].mean().backward()

    return run


def packed_speed(machine: Machine) -> Iterator[Figure]:
    """Packed rows against padded rows, at the lengths of a microbatch of episodes."""
    shape = machine.size(cuda=QWEN3_06B, cpu=SMALL)
    layers, divisor = machine.size(cuda=(8, 1), cpu=(1, 20))
    model = new_model(machine, vocab_size=1024, num_hidden_layers=layers, **shape)
    samples = new_samples([n // divisor for n in LENGTHS], 1024)
    num_tokens = sum(len(model_input(s)) for s in samples)
    speeds = {}
    for kind in (PaddedPolicy, PackedPolicy):
        policy = kind(model, ForwardSettings(autocast=True))
        seconds = machine.seconds(_forward_backward(policy, samples), repeats=5, warmups=2)
        speeds[kind] = num_tokens / seconds
        yield Figure(_name(policy), speeds[kind], "tokens/s")
    ratio = speeds[PackedPolicy] / speeds[PaddedPolicy]
    yield Figure("packed, of padded", ratio, at_least=1.0 if machine.is_cuda else None)


def long_row(machine: Machine) -> Iterator[Figure]:
    """One row of 32k tokens through one layer of Qwen3-8B: attention needs no [T, T] matrix."""
    shape = machine.size(cuda=QWEN3_8B, cpu=SMALL)
    length = machine.size(cuda=32_768, cpu=512)
    model = new_model(machine, dtype=torch.bfloat16, vocab_size=1024, num_hidden_layers=1, **shape)
    policy = PackedPolicy(model, ForwardSettings())
    run = _forward_backward(policy, new_samples([length], 1024, sampled=0.01))
    yield Figure("forward and backward", machine.seconds(run), "s")
    if machine.is_cuda:
        yield Figure("kernel of attention", _longest_kernel(run, "attention|flash|fmha|sdp"))
        clear_gradients(model)
        above = machine.peak_bytes(run) - sum(p.nbytes for p in model.parameters())
        matrix = 2 * shape["num_attention_heads"] * length**2  # bfloat16 scores of all heads
        yield Figure(
            "memory above weights and gradients", above / GB, "GB", at_most=matrix / 4 / GB
        )


def _longest_kernel(run: Callable[[], None], pattern: str) -> str:
    """Return the name of the CUDA kernel with the longest time whose name has the pattern."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    times = {e.key: e.device_time_total for e in seen.key_averages()}
    found = {name: t for name, t in times.items() if re.search(pattern, name, re.IGNORECASE)}
    return max(found, key=lambda name: found[name])[:120] if found else "none of these names"


def update_and_checkpoint(machine: Machine) -> Iterator[Figure]:
    """A loaded checkpoint is equal bit for bit, and so is the update after it."""
    model, optimizer = _trained_model(machine, seed=0)
    policy = PackedPolicy(model, ForwardSettings(autocast=True))
    samples = new_samples(machine.size(cuda=LENGTHS, cpu=(5, 17, 40)), 97)

    def update() -> None:
        optimizer.zero_grad()
        policy.logprobs(samples)[0].mean().neg().backward()
        assert optimizer.update(1.0).updated

    yield Figure("update", machine.seconds(update), "s")
    state, path = _state(model, optimizer), str(machine.folder / "checkpoint")
    num_bytes = sum(t.nbytes for t in _tensors(state))
    seconds = machine.seconds(lambda: checkpoint.save(path, state), repeats=1, warmups=0)
    yield Figure("checkpoint", num_bytes / GB, "GB")
    yield Figure("save", num_bytes / seconds / GB, "GB/s")
    other, other_optimizer = _trained_model(machine, seed=1)
    loaded = _state(other, other_optimizer)
    seconds = machine.seconds(lambda: checkpoint.load(path, loaded), repeats=1, warmups=0)
    yield Figure("load", num_bytes / seconds / GB, "GB/s")
    yield Figure("tensors that differ", _num_different(state, loaded), at_most=0)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        q.grad = p.grad.clone()
    optimizer.update(1.0)
    other_optimizer.update(1.0)
    after = _num_different(_state(model, optimizer), _state(other, other_optimizer))
    yield Figure("tensors that differ after one more update", after, at_most=0)


def _trained_model(machine: Machine, seed: int) -> tuple[nn.Module, GuardedAdamW]:
    shape = machine.size(cuda=QWEN3_06B, cpu=SMALL)
    layers = machine.size(cuda=8, cpu=2)
    model = new_model(machine, vocab_size=97, num_hidden_layers=layers, **shape)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(seed)
    return model, new_optimizer(model)


def _state(model: nn.Module, optimizer: GuardedAdamW) -> checkpoint.State:
    return {"model": checkpoint.named_tensors(model), "optimizer": optimizer.state()}


def _tensors(state: object) -> list[Tensor]:
    if isinstance(state, dict):
        return [tensor for _, value in sorted(state.items()) for tensor in _tensors(value)]
    assert isinstance(state, Tensor)
    return [state]


def _num_different(a: checkpoint.State, b: checkpoint.State) -> int:
    pairs = zip(_tensors(a), _tensors(b), strict=True)
    return sum(not torch.equal(x, y) for x, y in pairs)


def grpo_batch(machine: Machine) -> Iterator[Figure]:
    """The trainer has the loss, gradient norm and weights of a deterministic one on the CPU."""
    need("pydantic", "pluggy")
    path = str(machine.folder / "model")
    new_model(machine, vocab_size=97, num_hidden_layers=2, **SMALL).save_pretrained(path)
    lengths = [20 + 7 * i for i in range(8)]
    losses, norms, weights = [], [], []
    for device, deterministic in (("cpu", True), (machine.device, False)):
        trainer = _grpo_trainer(path, device, 256, deterministic=deterministic)
        reports = [trainer.train_batch(_groups(lengths, seed), 0)[0].metrics for seed in range(3)]
        losses.append([report["loss"] for report in reports])
        norms.append([report["grad_norm"] for report in reports])
        trainer.export_hf(str(machine.folder / device), path)
        weights.append(load_file(machine.folder / device / "model.safetensors"))
        trainer.close()
    assert min(norms[0]) > 0
    off = max(abs(a - b) for a, b in zip(*losses, strict=True))
    yield Figure("largest difference of losses", off, at_most=1e-5)
    off = max(abs(a / b - 1) for a, b in zip(*norms, strict=True))
    yield Figure("largest relative difference of gradient norms", off, at_most=1e-3)
    wanted, found = weights
    error = relative_error([found[name] for name in wanted], [*wanted.values()])
    yield Figure("error of the weights after three updates", error, at_most=1e-3)


def out_of_memory(machine: Machine) -> Iterator[Figure]:
    """If memory runs out, microbatches are halved, and the gradient is that of small ones."""
    need("pydantic", "pluggy")
    if not machine.is_cuda:
        raise Skipped("only the memory of a GPU can be limited")
    path = str(machine.folder / "model")
    new_model(machine, vocab_size=97, num_hidden_layers=4, **QWEN3_06B).save_pretrained(path)
    torch.cuda.empty_cache()
    norms = []
    for budget in (1024, 16384):
        trainer = _grpo_trainer(path, "cuda", budget)
        if budget > 1024:
            limit = torch.cuda.memory_reserved() + 3 * GB  # a microbatch of 16k tokens needs more
            torch.cuda.set_per_process_memory_fraction(
                limit / torch.cuda.get_device_properties(0).total_memory
            )
        metrics = trainer.train_batch(_groups([1000] * 16, 0), 0)[0].metrics
        norms.append(metrics["grad_norm"])
        trainer.close()
        del trainer
        torch.cuda.empty_cache()
    yield Figure("halvings", metrics["microbatch_halvings"], at_least=1)
    off = abs(norms[1] / norms[0] - 1)
    yield Figure("relative difference of gradient norms", off, at_most=1e-3)


def _grpo_trainer(path: str, device: str, budget: int, *, deterministic: bool = False) -> Trainer:
    from rollart_algorithms.grpo import GRPO
    from rollart_core.config.run import Trainer as TrainerConfig
    from rollart_core.training.trainer import Trainer

    config = TrainerConfig(warmup_train_steps=0, max_tokens_per_microbatch=budget, kernels="torch")
    return Trainer(config, GRPO(), model_path=path, device=device, deterministic=deterministic)


def _groups(lengths: Sequence[int], seed: int) -> list[Group]:
    """Return groups of four random rows with different rewards."""
    rows = new_samples([length + seed for length in lengths], 97)
    groups = []
    for first in range(0, len(rows), 4):
        name = f"g{seed}-{first}"
        task = Task("test/Env-v1", "train", first, 0)
        members = tuple(
            Trajectory(
                Ticket(f"{name}.{i}", task, name, i), "finished", (rows[first + i],), reward=i / 3
            )
            for i in range(4)
        )
        groups.append(Group(name, task, members, 4))
    return groups


def offload(machine: Machine) -> Iterator[Figure]:
    """Weights to pinned host memory and back: equal bit for bit, the device's memory is free."""
    numel = machine.size(cuda=GB, cpu=10**5)
    tensors = [torch.randn(numel, device=machine.device) for _ in range(2)]
    sums = [_checksum(t) for t in tensors]
    num_bytes = sum(t.nbytes for t in tensors)
    copies = HostCopies()
    copies.offload(tensors)  # allocates the host memory
    copies.reload()
    free = torch.cuda.mem_get_info()[0] if machine.is_cuda else 0

    start = time.perf_counter()
    copies.offload(tensors)
    yield Figure("to the host", num_bytes / (time.perf_counter() - start) / GB, "GB/s")
    if machine.is_cuda:
        torch.cuda.empty_cache()
        freed = torch.cuda.mem_get_info()[0] - free
        yield Figure("freed, of the weights", freed / num_bytes, at_least=0.99)
    start = time.perf_counter()
    copies.reload()
    yield Figure("to the device", num_bytes / (time.perf_counter() - start) / GB, "GB/s")
    same = sum(_checksum(t) == s for t, s in zip(tensors, sums, strict=True))
    yield Figure("tensors that differ", len(tensors) - same, at_most=0)


def _checksum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bits, exactly."""
    bits = torch.int16 if tensor.element_size() == 2 else torch.int32
    return int(tensor.view(bits).sum(dtype=torch.int64))


def weights_to_another_process(machine: Machine) -> Iterator[Figure]:
    """A bucket of weights for a second process on this device, by CUDA IPC: no copy by the sender.

    The sender pickles a handle with `torch.multiprocessing.reductions`, as for SGLang's
    `update_weights_from_tensor`. On the CPU the same code shares memory of the host.
    """
    numel = machine.size(cuda=GB // 2, cpu=10**5)  # bfloat16: buckets of 1 GB
    to_receiver, to_sender = Pipe()
    sender, receiver = in_ranks(_share_weights, 2, machine, numel, (to_receiver, to_sender))
    num_bytes = 2 * numel
    differ = sum(a != b for a, b in zip(sender["sums"], receiver["sums"], strict=True))
    yield Figure("buckets that differ", differ, at_most=0)
    yield Figure("message", sender["message_bytes"], "bytes", at_most=10_000)
    yield Figure("opening the first bucket", receiver["first_open_s"], "s")
    yield Figure("copy to the receiver's weights", num_bytes / receiver["copy_s"] / GB, "GB/s")
    if machine.is_cuda:
        own = receiver["allocated_bytes"] / num_bytes
        yield Figure("memory of the receiver, of its weights", own, at_most=1.01)


def _share_weights(rank: int, machine: Machine, numel: int, ends: Sequence[Any]) -> dict[str, Any]:
    return (_send_buckets if rank == 0 else _receive_buckets)(machine, numel, ends[rank])


def _send_buckets(machine: Machine, numel: int, end: Any) -> dict[str, Any]:
    sums, size = [], 0
    bucket = torch.empty(numel, dtype=torch.bfloat16, device=machine.device)
    for version in range(4):
        bucket.normal_().mul_(version + 1)
        machine.synchronize()
        message = bytes(ForkingPickler.dumps(bucket))
        size = max(size, len(message))
        end.send_bytes(message)
        end.recv()  # the bucket is free again
        sums.append(_checksum(bucket))
    return {"sums": sums, "message_bytes": size}


def _receive_buckets(machine: Machine, numel: int, end: Any) -> dict[str, Any]:
    weights = torch.empty(numel, dtype=torch.bfloat16, device=machine.device)
    sums, opened, copied = [], [], []
    for _ in range(4):
        message = end.recv_bytes()
        start = time.perf_counter()
        bucket = pickle.loads(message)
        opened.append(time.perf_counter() - start)
        copied.append(machine.seconds(partial(weights.copy_, bucket), warmups=0))
        allocated = torch.cuda.memory_allocated() if machine.is_cuda else 0
        del bucket
        sums.append(_checksum(weights))
        end.send("done")
    return {
        "sums": sums,
        "first_open_s": opened[0],
        "copy_s": min(copied),
        "allocated_bytes": allocated,
    }


CASES: dict[Case, float] = {
    logprobs_and_gradients: 120,
    bfloat16_logprobs: 90,
    chunked_head: 90,
    training_speed: 120,
    packed_speed: 90,
    long_row: 90,
    update_and_checkpoint: 120,
    grpo_batch: 60,
    out_of_memory: 60,
    offload: 90,
    weights_to_another_process: 90,
}
"""Case -> its time limit in seconds, in the order of their importance."""
