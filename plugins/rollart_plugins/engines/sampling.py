"""Keyed sampling: which token is drawn depends on (sampling_key, token index) and the logits only.

Takes: logits, temperatures and keys. Gives: tokens and the logprobs of the temperature-scaled,
untruncated distribution. Never: holds a random state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rollart_cpu.inference.kernels import load_kernels

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BITS = 48
"""Of the hash that make the uniform; so few that ``u * total < total`` in double precision."""


def uniforms(
    keys: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Return one uniform in (0, 1) for each (key, counter), by SplitMix64.

    The generator's state is ``key + (counter + 1) * golden ratio``, hashed by its output function
    (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195).
    """
    z = keys + (counters + np.uint64(1)) * _STEP
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z = z ^ (z >> np.uint64(31))
    drawn = (z >> np.uint64(64 - _BITS)).astype(np.float64)
    return np.asarray((drawn + 0.5) * 2.0**-_BITS)


@dataclass(slots=True)
class Draws:
    """How each of ``R`` rows is to be drawn."""

    temperatures: npt.NDArray[np.float32]
    """``[R]``; 0 is greedy, and then logprobs are those of temperature 1."""
    keys: npt.NDArray[np.uint64]
    """``[R]``."""
    counters: npt.NDArray[np.uint64]
    """``[R]``; token index within the answer."""

    @property
    def inverse_temperatures(self) -> npt.NDArray[np.float32]:
        """``[R]``."""
        t = self.temperatures
        return (1.0 / np.where(t > 0, t, 1.0)).astype(np.float32)

    @property
    def targets(self) -> npt.NDArray[np.float64]:
        """``[R]``; uniforms, -1 where greedy."""
        return np.where(self.temperatures > 0, uniforms(self.keys, self.counters), -1.0)


def sample(logits: torch.Tensor, draws: Draws, *, native: bool) -> tuple[list[int], list[float]]:
    """Draw one token a row by inverse CDF.

    Args:
        logits: ``[R, vocab]`` float32.
        draws: How.
        native: Use the compiled sampler; logits must lie on the CPU.

    Returns:
        Tokens, -1 for a row that is not finite, and logprobs.
    """
    kernels = load_kernels() if native else None
    if kernels is None:
        return _sample_torch(logits, draws)
    num, vocab = logits.shape
    tokens, logprobs = np.empty(num, np.int64), np.empty(num, np.float32)
    inverse, targets = draws.inverse_temperatures, draws.targets
    kernels.rollart_sample(
        logits.data_ptr(),
        inverse.ctypes.data,
        targets.ctypes.data,
        tokens.ctypes.data,
        logprobs.ctypes.data,
        num,
        vocab,
    )
    return tokens.tolist(), logprobs.tolist()


@torch.inference_mode()
def _sample_torch(logits: torch.Tensor, draws: Draws) -> tuple[list[int], list[float]]:
    inverse = torch.from_numpy(draws.inverse_temperatures).to(logits.device)
    targets = torch.from_numpy(draws.targets).to(logits.device)
    logprobs = (logits * inverse[:, None]).log_softmax(-1)
    cdf = logprobs.double().exp().cumsum(-1)
    drawn = torch.searchsorted(cdf, (targets.clamp(min=0.0) * cdf[:, -1])[:, None], right=True)
    drawn = drawn.squeeze(1).clamp(max=logits.shape[1] - 1)
    tokens = torch.where(targets < 0, logits.argmax(-1), drawn)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    finite = logits.isfinite().all(-1)
    tokens = torch.where(finite, tokens, -1)
    return tokens.tolist(), torch.where(finite, chosen, 0.0).tolist()
