"""What must hold between inference engines and the rest of a run config.

Takes: a RunConfig, and the engines that were found for it. Gives: problems. Never: imports an
engine, or looks for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollart_core.config.model import RemoteModel
from rollart_core.config.problems import Problem
from rollart_core.config.resolve_plugin import ResolvedPlugin
from rollart_core.config.run import RunConfig
from rollart_core.config.runtime import RayRuntime
from rollart_core.config.validation.lora import lora_problems
from rollart_core.contracts.inference import InferenceEngineSpec


def devices_of(engine: ResolvedPlugin[InferenceEngineSpec]) -> int:
    """Return the accelerators that one engine takes."""
    option = engine.spec.devices_option
    return int(engine.options.get(option, 1)) if option else 1


def engine_problems(
    config: RunConfig,
    engines: Sequence[ResolvedPlugin[InferenceEngineSpec] | None],
    trains: bool,
) -> Iterator[Problem]:
    """Yield what engines cannot do, or have no files of the model for.

    Args:
        config: The config.
        engines: That of ``engine``, then each further class; None for what was not found.
        trains: False: the model is only evaluated.
    """
    further = (("engines", i, "engine") for i in range(len(config.engines)))
    for key, engine in zip((("engine",), *further), engines, strict=True):
        yield from _of_one(config, engine, trains, key)
        if engine and trains:
            yield from lora_problems(config, engine.spec)


def teacher_problems(
    teacher: ResolvedPlugin[InferenceEngineSpec] | None,
) -> Iterator[Problem]:
    """Yield why an engine, as far as it was found, cannot run the teacher."""
    if teacher and not teacher.spec.scores:
        message = f"{teacher.spec.id} cannot score given tokens, as a teacher must; use embedded"
        yield Problem(("teacher", "engine"), message)


def _of_one(
    config: RunConfig,
    engine: ResolvedPlugin[InferenceEngineSpec] | None,
    trains: bool,
    key: tuple[str | int, ...],
) -> Iterator[Problem]:
    if engine is None:
        return
    is_remote = isinstance(config.model, RemoteModel)
    if trains and not is_remote and not engine.spec.follows_training:
        message = (
            f"{engine.spec.id} serves the weights its server began with and cannot follow "
            "training; score with `rollart eval`, or train with another engine"
        )
        yield Problem(key, message)
    if config.deterministic and not engine.spec.keeps_deterministic:
        message = (
            f"true: no seed decides what {engine.spec.id} samples; use engine: embedded, or "
            "deterministic: false"
        )
        yield Problem(("deterministic",), message)
    if isinstance(config.runtime, RayRuntime):
        option = engine.spec.first_device_option
        if option and engine.options.get(option):
            message = "has no effect with runtime: ray, which gives each engine devices of its own"
            yield Problem((*key, option), f"{message}; remove it")
    if config.engines and devices_of(engine) > 1:
        message = (
            f"its engines take {devices_of(engine)} devices each, which several classes of engines "
            f"cannot yet: set {engine.spec.devices_option} to 1, or have one class"
        )
        yield Problem(key, message)
    if is_remote and not engine.spec.takes_text:
        message = f"{engine.spec.id} needs a model's files: give model.path, or engine: openai"
        yield Problem(key, message)
