"""The cases of inference engines: real servers on this machine's GPU, through RollArt's engines.

`SGLANG` and `VLLM` are the commands that launch a server, such as `/opt/sglang/bin/python -m
sglang.launch_server` and `/opt/vllm/bin/vllm serve`. Without them, this Python must have sglang or
vllm. The model is a small one with random weights, so that nothing is downloaded.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import GB, Case, Figure, Machine, need
from safetensors.torch import load_file

from rollart_core.contracts.inference import GenerateRequest, GenerateResult, InferenceEngine
from rollart_core.contracts.weights import WeightChannel
from rollart_core.training.policy import ForwardSettings, PackedPolicy
from rollart_core.types import Sample

MAX_TOKENS = 512
NUM_ANSWERS = 32
TEMPERATURE = 0.8


def sglang_files(machine: Machine) -> Iterator[Figure]:
    """SGLang: logprobs as the trainer's, pause and resume, weights as files of the channel."""
    from rollart_plugins.weights.shared_memory import SharedMemoryChannel

    yield from _sglang(machine, SharedMemoryChannel)


def sglang_broadcast(machine: Machine) -> Iterator[Figure]:
    """The same, weights by the trainer's broadcast to the server's processes, with gloo."""
    from rollart_plugins.weights.collective import CollectiveChannel

    yield from _sglang(machine, CollectiveChannel)


def _sglang(machine: Machine, channel: Callable[..., WeightChannel]) -> Iterator[Figure]:
    command = launch_command("SGLANG", "sglang", "sglang.launch_server")
    from rollart_plugins.engines.sglang import SGLangEngine

    options = {
        "command": command,
        "dtype": machine.size(cuda="bfloat16", cpu="float32"),
        "server_args": {"max_total_tokens": 65536},
    }
    yield from _figures(machine, SGLangEngine, channel, options)


def vllm_files(machine: Machine) -> Iterator[Figure]:
    """vLLM: the same, weights as files."""
    from rollart_plugins.weights.shared_memory import SharedMemoryChannel

    yield from _vllm(machine, SharedMemoryChannel)


def vllm_broadcast(machine: Machine) -> Iterator[Figure]:
    """The same, weights by the trainer's broadcast, with gloo."""
    from rollart_plugins.weights.collective import CollectiveChannel

    yield from _vllm(machine, CollectiveChannel)


def _vllm(machine: Machine, channel: Callable[..., WeightChannel]) -> Iterator[Figure]:
    command = launch_command("VLLM", "vllm", "vllm.entrypoints.cli.main", "serve")
    from rollart_plugins.engines.vllm import VllmEngine

    options = {
        "command": command,
        "dtype": machine.size(cuda="bfloat16", cpu="float32"),
        "server_args": machine.size(
            cuda={}, cpu={"num_gpu_blocks_override": 256, "max_num_seqs": 32}
        ),
    }
    yield from _figures(machine, VllmEngine, channel, options)


def _figures(
    machine: Machine,
    engine_class: type[InferenceEngine],
    channel: Callable[..., WeightChannel],
    options: Mapping[str, object],
) -> Iterator[Figure]:
    """Launch a server through an engine, and compare it with the trainer for several weights."""
    scorer = Scorer(machine)
    folder = str(machine.folder / "weights")
    ours, theirs = channel(folder, keep=10), channel(folder)
    engine: Any = engine_class(
        model_path=scorer.path,
        device=machine.device,
        max_context_tokens=MAX_TOKENS,
        channel=theirs,
        sleeps=True,
        **options,
    )
    with asyncio.Runner() as loop:
        try:
            start = time.perf_counter()
            loop.run(engine.start())
            yield Figure("start", time.perf_counter() - start, "s")
            for version in (1, 2):
                ours.publish(version, scorer.weights(version).items())
                swap = loop.run(engine.load_weights(version))
                start = time.perf_counter()
                answers = loop.run(_answers(engine))
                seconds = time.perf_counter() - start
                yield scorer.mismatch(f"version {version}", version, answers)
            num_tokens = sum(len(answer.token_ids) for answer in answers)
            yield Figure("generation", num_tokens / seconds, "tokens/s")
            yield Figure("bytes of the weights", swap.num_bytes / GB, "GB")
            yield Figure("bytes received by the engine's process", swap.moved_bytes / GB, "GB")
            yield Figure("stall", swap.stall_s, "s")
            yield loop.run(_paused_tokens(engine))
            before = _free_bytes(machine)
            loop.run(engine.sleep())
            if machine.is_cuda:  # the CPU builds free nothing
                freed = (_free_bytes(machine) - before) / GB
                yield Figure("memory that sleep frees", freed, "GB", at_least=0.1)
            before = _free_bytes(machine)
            start = time.perf_counter()
            loop.run(engine.wake(2))
            yield Figure("wake", time.perf_counter() - start, "s")
            if machine.is_cuda:
                taken = (before - _free_bytes(machine)) / GB
                yield Figure("memory that wake takes", taken, "GB", at_least=0.1)
            yield scorer.mismatch("after a wake", 2, loop.run(_answers(engine)))
        finally:
            loop.run(engine.close())
            ours.close()


def _free_bytes(machine: Machine) -> int:
    return torch.cuda.mem_get_info()[0] if machine.is_cuda else 0


async def _answers(engine: InferenceEngine) -> list[GenerateResult]:
    """Return the answers to all requests, which the engine batches."""
    return await asyncio.gather(*(engine.generate(request(i)) for i in range(NUM_ANSWERS)))


async def _paused_tokens(engine: InferenceEngine) -> Figure:
    """Pause an engine with a request in flight, and let it finish after `resume`."""
    flying = asyncio.create_task(engine.generate(request(0, max_new_tokens=400)))
    while not (await engine.stats()).num_running and not flying.done():
        await asyncio.sleep(0.005)
    await engine.pause()
    await engine.resume()
    found = await flying
    share = len(found.token_ids) / len(found.inference_logprobs)
    return Figure("logprobs of a token after a pause", share, at_least=1.0, at_most=1.0)


def launch_command(variable: str, package: str, *arguments: str) -> list[str]:
    """Return the command of a server: of an environment variable, or of this Python."""
    if given := os.environ.get(variable):
        return shlex.split(given)
    need(package)
    return [sys.executable, "-m", *arguments]


def request(i: int, max_new_tokens: int = 64) -> GenerateRequest:
    """Return the request `i`; prompts have different lengths."""
    prompt = [5 + i % 250, 6, 7, 8, 9 + i // 250] * (4 + i)
    name = f"t{i}#0"
    return GenerateRequest(
        f"{name}/0", prompt, max_new_tokens, session_id=name, temperature=TEMPERATURE
    )


class Scorer:
    """A small model on the device, with several versions of its weights, as the trainer scores it.

    Attributes:
        path: The model's folder.
    """

    def __init__(self, machine: Machine) -> None:
        from transformers import AutoModelForCausalLM

        from rollart_core.config.model import NewModel
        from rollart_core.models.new import new_model

        texts = ["search [red shoes] click [buy now] item 1, price under 40 dollars. " * 40]
        shape = NewModel(
            num_layers=4, width=256, num_heads=4, num_kv_heads=2, ffn_width=512, kind="new"
        )
        self.path = str(machine.folder / "model")
        new_model(self.path, shape, texts, 0)
        self._machine = machine
        self._base = load_file(Path(self.path) / "model.safetensors")
        self._model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        self._model.to(machine.device).eval()
        self._policy = PackedPolicy(
            self._model, ForwardSettings(TEMPERATURE, autocast=machine.is_cuda)
        )

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Return the weights of a version, in the dtype of the engine."""
        torch.manual_seed(version)
        dtype = self._machine.size(cuda=torch.bfloat16, cpu=torch.float32)
        noise = 0.02 * version
        return {k: (t + torch.randn_like(t) * noise).to(dtype) for k, t in self._base.items()}

    def mismatch(self, name: str, version: int, answers: Sequence[GenerateResult]) -> Figure:
        """Return the mean difference between an engine's logprobs and the trainer's."""
        self._model.load_state_dict(self.weights(version), strict=False)
        samples = [_sample(request(i).token_ids, a) for i, a in enumerate(answers)]
        with torch.no_grad():
            wanted = self._policy.logprobs(samples)[0].cpu().numpy()
        given = np.concatenate([s.inference_logprobs[s.loss_mask] for s in samples])
        off = float(np.abs(wanted - given).mean())
        mark = self._machine.size(cuda=0.05, cpu=1e-4)
        return Figure(f"{name}, mean difference from the trainer", off, "nat", at_most=mark)


def _sample(prompt: Sequence[int], answer: GenerateResult) -> Sample:
    ids = np.array([*prompt, *answer.token_ids], dtype=np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    logprobs = np.array([0.0] * len(prompt) + answer.inference_logprobs, dtype=np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Sample(ids, mask, logprobs, versions, versions)


CASES: dict[Case, float] = {
    sglang_files: 240,
    vllm_files: 240,
    sglang_broadcast: 240,
    vllm_broadcast: 240,
}
"""Case -> its time limit in seconds. On a slow machine, the limit of the part ends first."""
