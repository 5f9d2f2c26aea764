"""A learned reward model: a transformers sequence classifier of the whole conversation.

Takes: one episode's request. Gives: its output, mapped to the range from 0 to 1. Never: imports
torch before the first score, loads a model twice in a process, or runs code of a model.

Concurrent calls from several threads are scored in one batch: the first caller scores all
conversations that wait.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

from rollart_core.contracts.reward import Reward, RewardRequest, RewardResult
from rollart_core.errors import ConfigError
from rollart_rewards.config import RewardModelConfig

_Waiting = tuple[tuple[dict[str, str], ...], Future[float]]


class RewardModel(Reward):
    """Score with a classifier; see the module.

    Args:
        options: The fields of :class:`RewardModelConfig`.

    Raises:
        ConfigError: If torch or transformers is not installed.
    """

    def __init__(self, **options: object) -> None:
        self.config = RewardModelConfig.model_validate(options)
        missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
        if missing:
            raise ConfigError(f"{missing[0]} is not installed: pip install 'rollart[train]'")
        self._waiting: deque[_Waiting] = deque()
        self._turn = threading.Lock()
        self._classifier: _Classifier | None = None

    def score(self, request: RewardRequest) -> RewardResult:
        """Score one episode.

        Raises:
            OSError: If the model does not exist.
            ValueError: If it is not a classifier of this kind, or its output is not finite.
        """
        talk = tuple({"role": m["role"], "content": m["content"]} for m in request.messages)
        future: Future[float] = Future()
        self._waiting.append((talk, future))
        while not future.done():
            with self._turn:
                if not future.done():
                    self._score_next()
        output = future.result()
        return RewardResult(self._value(output), {"output": output})

    def _value(self, output: float) -> float:
        """Return an output as a value; a softmax share is already one."""
        assert self._classifier
        if self._classifier.num_labels > 1:
            return output
        x = (output - self.config.center) / self.config.scale
        # The logistic function, written so that neither side overflows.
        return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))

    def _score_next(self) -> None:
        """Score the next batch of waiting calls; each gets its own output or the failure."""
        batch = [
            self._waiting.popleft() for _ in range(min(self.config.max_batch, len(self._waiting)))
        ]
        try:
            self._classifier = self._classifier or _Classifier(self.config)
            outputs = self._classifier.outputs([talk for talk, _ in batch])
        except Exception as e:
            for _, future in batch:
                future.set_exception(e)
            return
        for (_, future), output in zip(batch, outputs, strict=True):
            if math.isfinite(output):
                future.set_result(output)
            else:
                future.set_exception(ValueError(f"the reward model's output is {output}"))


class _Classifier:
    """The model and its tokenizer."""

    def __init__(self, config: RewardModelConfig) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        where: dict[str, Any] = {
            "revision": config.revision,
            "local_files_only": config.local_only,
            "trust_remote_code": False,
        }
        dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(config.model, **where)
        self.tokenizer.truncation_side = "left"
        self.model: Any
        self.model, loading = AutoModelForSequenceClassification.from_pretrained(
            config.model, dtype=dtype, output_loading_info=True, **where
        )
        if missing := sorted(loading["missing_keys"]):  # transformers would initialise them
            raise ValueError(f"{config.model} is not a sequence classifier: no {missing[0]}")
        self.model.to(config.device).eval()
        self.config = config
        self.num_labels = int(self.model.config.num_labels)
        if config.label >= self.num_labels:
            raise ValueError(f"label {config.label} is not one of {self.num_labels} outputs")
        limits = (
            config.max_tokens,
            getattr(self.model.config, "max_position_embeddings", None) or config.max_tokens,
            self.tokenizer.model_max_length,
        )
        self.max_tokens = min(limits)
        self.pad_id: int | None = self.model.config.pad_token_id

    def outputs(self, talks: Sequence[tuple[dict[str, str], ...]]) -> list[float]:
        """Return the output of each conversation; with several labels, the softmax share."""
        rows = [self._tokens(talk) for talk in talks]
        if self.pad_id is None:  # the model could not distinguish padding from tokens
            return [self._forward([row])[0] for row in rows]
        return self._forward(rows)

    def _forward(self, rows: Sequence[list[int]]) -> list[float]:
        """Return the outputs of rows, padded on the right."""
        import torch

        longest = max(map(len, rows))
        pad = 0 if self.pad_id is None else self.pad_id
        ids = [row + [pad] * (longest - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.tensor(ids, device=self.config.device),
                attention_mask=torch.tensor(mask, device=self.config.device),
            ).logits.float()
            if self.num_labels > 1:
                logits = torch.softmax(logits / self.config.scale, dim=-1)
        column: list[float] = logits[:, self.config.label].tolist()
        return column

    def _tokens(self, talk: tuple[dict[str, str], ...]) -> list[int]:
        """Return the tokens of a conversation; only the last ones if there are too many."""
        is_chat = bool(self.tokenizer.chat_template)
        text = (
            self.tokenizer.apply_chat_template(list(talk), tokenize=False)
            if is_chat
            else "\n\n".join(f"{m['role']}: {m['content']}" for m in talk)
        )
        found: list[int] = self.tokenizer(
            text,
            add_special_tokens=not is_chat,  # a chat template adds its own
            truncation=True,
            max_length=self.max_tokens,
        )["input_ids"]
        if not found:
            raise ValueError("the conversation has no tokens")
        return found
