"""The checks of every kind but environments, found by id.

Takes: a kind, an id, options and a folder to write in. Gives: the results of the kind's own check.
Never: imports torch or transformers for a kind that does not need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from rollart_core.contracts.reward import RewardBackendSpec, RewardRef, RewardSpec
from rollart_core.plugins import registry
from rollart_testing.algorithm_checks import check_algorithm
from rollart_testing.async_checks import (
    check_inference_engine,
    check_reward_backend,
    check_sandbox,
)
from rollart_testing.channel_checks import check_weight_channel
from rollart_testing.fakes import FakeReward
from rollart_testing.plugin_checks import (
    check_forward_pass,
    check_mapper,
    check_runtime,
    check_sandbox_service,
    check_tracker,
)
from rollart_testing.results import CheckOutcome, CheckResult
from rollart_testing.reward_checks import check_reward

Options: TypeAlias = Mapping[str, object]
_PartCheck: TypeAlias = Callable[[str, Options, Path], list[CheckResult]]

_KEEP: Final = 2
_TINY_MODEL: Final = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def check_part(
    kind: str, plugin_id: str, folder: Path, options: Options | None = None
) -> list[CheckResult]:
    """Check one plugin of a kind of ``PART_CHECKS``.

    Args:
        kind: Such as ``"rewards"``.
        plugin_id: Id, alias or ``module:Class``.
        folder: An empty folder to write in.
        options: The plugin's options.

    Returns:
        ``make`` and the checks of the kind; ``make`` alone, failed, when it cannot be made.
    """
    try:
        registry.resolve(kind, plugin_id)
        results = PART_CHECKS[kind](plugin_id, options or {}, folder)
    except _NotHere as e:
        return [CheckResult("make", CheckOutcome.SKIP, str(e))]
    except (Exception, SystemExit) as e:
        return [CheckResult("make", CheckOutcome.FAIL, f"{type(e).__name__}: {e}")]
    return [CheckResult("make", CheckOutcome.PASS), *results]


class _NotHere(Exception):
    """What the check of this kind needs is not installed."""


def _reward(reward_id: str, options: Options, folder: Path) -> list[CheckResult]:
    spec = cast("RewardSpec", registry.spec("rewards", reward_id))
    made = registry.build("rewards", reward_id, options)
    return check_reward(made, reward_range=spec.reward_range)


def _algorithm(algorithm_id: str, options: Options, folder: Path) -> list[CheckResult]:
    return check_algorithm(registry.build("algorithms", algorithm_id, options))


def _mapper(mapper_id: str, options: Options, folder: Path) -> list[CheckResult]:
    return check_mapper(registry.build("hardware_mappers", mapper_id, options))


def _engine(engine_id: str, options: Options, folder: Path) -> list[CheckResult]:
    make = _builder(
        "inference_engines",
        engine_id,
        options,
        model_path=str(_tiny_model(folder)),
        device="cpu",
        max_context_tokens=_TINY_MODEL["max_position_embeddings"],
    )
    return check_inference_engine(make)


def _tiny_model(folder: Path) -> Path:
    try:
        import torch
        import transformers
    except ModuleNotFoundError as e:
        raise _NotHere(f"{e.name} is not installed, and it makes the model for the engine") from e
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_TINY_MODEL))
    model.save_pretrained(folder / "model")
    return folder / "model"


def _sandbox(sandbox_id: str, options: Options, folder: Path) -> list[CheckResult]:
    return check_sandbox(_builder("sandboxes", sandbox_id, options))


def _backend(backend_id: str, options: Options, folder: Path) -> list[CheckResult]:
    spec = cast("RewardBackendSpec", registry.spec("reward_backends", backend_id))
    fake = FakeReward() if spec.in_process else RewardRef("rollart_testing:FakeReward")
    context = {"reward": fake, "reward_range": (0.0, 1.0), "timeout_s": 30.0}
    return check_reward_backend(_builder("reward_backends", backend_id, options, **context))


def _channel(channel_id: str, options: Options, folder: Path) -> list[CheckResult]:
    keep = {"keep": _KEEP, **options}
    location = str(folder / "channel")
    return check_weight_channel(_builder("weight_channels", channel_id, keep, location=location))


def _tracker(tracker_id: str, options: Options, folder: Path) -> list[CheckResult]:
    return check_tracker(_builder("trackers", tracker_id, options), folder)


def _runtime(runtime_id: str, options: Options, folder: Path) -> list[CheckResult]:
    return check_runtime(registry.resolve("runtimes", runtime_id))


def _forward_pass(pass_id: str, options: Options, folder: Path) -> list[CheckResult]:
    path = str(_tiny_model(folder))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    return check_forward_pass(registry.resolve("forward_passes", pass_id), model)


def _service(service_id: str, options: Options, folder: Path) -> list[CheckResult]:
    return check_sandbox_service(registry.build("sandbox_services", service_id, options))


def _builder(kind: str, plugin_id: str, options: Options, **context: object) -> Callable[[], Any]:
    return partial(registry.build, kind, plugin_id, options, **context)


PART_CHECKS: Final[Mapping[str, _PartCheck]] = {
    "rewards": _reward,
    "algorithms": _algorithm,
    "hardware_mappers": _mapper,
    "inference_engines": _engine,
    "sandboxes": _sandbox,
    "reward_backends": _backend,
    "weight_channels": _channel,
    "trackers": _tracker,
    "runtimes": _runtime,
    "forward_passes": _forward_pass,
    "sandbox_services": _service,
}
"""Kind -> what checks one of its plugins."""
