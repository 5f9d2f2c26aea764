"""What tests on real SGLang servers share: a small model, versions of its weights, their scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rollart_core.contracts.inference import GenerateRequest, GenerateResult

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).parent
PYTHON = HERE.parent.parent / ".venv-sglang" / "bin" / "python"
MAX_TOKENS = 512
SERVER_ARGS = {"max_total_tokens": 16384}


def command() -> tuple[str, ...]:
    """What launches a server on this machine's CPU."""
    if not PYTHON.exists():
        pytest.fail("there is no .venv-sglang: `make test-sglang` makes it and runs these tests")
    return (str(PYTHON), str(HERE / "serve_cpu.py"))


def make_model(folder: Path, seed: int = 0) -> str:
    """A small Qwen3 and a tokenizer of little text."""
    from rollart_core.config_model import NewModel
    from rollart_core.models.new import new_model

    texts = [
        "search [red shoes] click [buy now] item 1, price under 40 dollars. naïve café 日本 🙂 "
        * 20,
        f"Turn {seed}: you see a page of results. What now? " * (20 + seed),
    ]
    new_model(str(folder), NewModel(num_layers=2, width=64, kind="new"), texts, seed)
    return str(folder)


class Versions:
    """Weights of several policy versions, and what they say of tokens."""

    def __init__(self, model_path: str, num: int, *, same_kv: bool) -> None:
        """``same_kv``: they differ only in what comes after the last layer's keys and values."""
        import torch
        from safetensors.torch import load_file

        torch.manual_seed(0)
        self._path = model_path
        base = load_file(Path(model_path) / "model.safetensors")
        self.weights: list[dict[str, torch.Tensor]] = []
        for v in range(num):
            if same_kv:
                now = {k: t * (1 + v) if k == "model.norm.weight" else t for k, t in base.items()}
            else:
                now = {k: t + torch.randn_like(t) * 0.05 * v for k, t in base.items()}
            self.weights.append(now)

    def off(self, prompt: list[int], result: GenerateResult, temperature: float) -> float:
        """The largest difference between the logprobs and those of each span's own version."""
        worst = 0.0
        for span in result.spans:
            row = [*prompt, *result.token_ids[: span.stop]]
            wanted = self._logprobs(span.policy_version, row, temperature)
            given = result.inference_logprobs[span.start : span.stop]
            worst = max(worst, float(np.abs(wanted[-len(given) :] - given).max()))
        return worst

    def _logprobs(self, version: int, row: list[int], temperature: float) -> np.ndarray:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32).eval()
        model.load_state_dict(self.weights[version], strict=False)
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([row])).logits[0] / temperature, -1)
        return logprobs[torch.arange(len(row) - 1), torch.tensor(row[1:])].numpy()


def request(i: int, num_tokens: int = 60, temperature: float = 0.8, **more) -> GenerateRequest:
    """The turn ``i``."""
    prompt = [5 + i, 6, 7, 8, 9] * 4
    name = f"t{i}#0"
    return GenerateRequest(
        f"{name}/0", prompt, num_tokens, session_id=name, temperature=temperature, **more
    )
