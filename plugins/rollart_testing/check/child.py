"""The child process of ``rollart check``: ``python -m rollart_testing.check.child``.

Takes: one line of JSON on stdin (the job). Gives: lines of JSON on the job's pipe: ``{"begin":
name}``, ``{"done": name, "outcome", "reason"}``, ``{"limits": {call: s}}``, and at the end
``{"transcript": ...}``. Never: outlives its parent; it ends when stdin closes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from rollart_core.contracts.reward import RewardBackendSpec, RewardRef, RewardSpec
from rollart_core.errors import first_line
from rollart_core.plugins import registry
from rollart_testing.agent_checks import AGENT_BASIC, run_agent_checks
from rollart_testing.agent_play import AgentSubject
from rollart_testing.algorithm_checks import check_algorithm
from rollart_testing.async_checks import (
    check_inference_engine,
    check_reward_backend,
    check_sandbox,
)
from rollart_testing.channel_checks import check_weight_channel
from rollart_testing.check.catalogue import AGENTS
from rollart_testing.check.offline import bring_loopback_up
from rollart_testing.check.own_tests import OWN_TESTS, run_own_tests
from rollart_testing.check.transcript import transcript
from rollart_testing.check.watch import SharedWatch
from rollart_testing.env_checks import BASIC, run_env_checks
from rollart_testing.env_play import EnvSubject
from rollart_testing.fakes import FakeReward
from rollart_testing.plugin_checks import (
    check_forward_pass,
    check_mapper,
    check_runtime,
    check_sandbox_service,
    check_tool_format,
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
        folder: An empty scratch folder.
        options: The plugin's options.

    Returns:
        ``make`` and the checks of the kind; only a failed ``make`` if it cannot be created.
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
    """Raised if a package that this check needs is not installed."""


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
        raise _NotHere(f"{e.name} is not installed; the check builds a model with it") from e
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


def _tool_format(format_id: str, options: Options, folder: Path) -> list[CheckResult]:
    return check_tool_format(registry.build("tool_formats", format_id, options))


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
    "tool_formats": _tool_format,
}
"""Kind -> function that checks one of its plugins."""


FRESH: Final = "fresh_processes_agree"


def main() -> None:
    """Run the job from stdin."""
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.set_inheritable(job["fd"], False)  # processes of an environment must not hold the pipe
    if job.get("offline"):
        bring_loopback_up()
    with os.fdopen(job["fd"], "w", encoding="utf-8", buffering=1) as pipe:
        if job["kind"] == OWN_TESTS:
            _send(pipe, begin=OWN_TESTS)
            _done(partial(_send, pipe), run_own_tests())
        elif job["kind"] in ("environments", AGENTS):
            _environment(job, partial(_send, pipe))
        else:
            _part(job, partial(_send, pipe))


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # not with sys.stdin, because its lock would outlive this thread
    os._exit(1)


def _send(pipe: Any, **message: object) -> None:
    pipe.write(json.dumps(message) + "\n")


def _environment(job: dict[str, Any], send: Callable[..., None]) -> None:
    try:
        subject = _subject(job)
    except Exception as e:
        _done(
            send,
            CheckResult("make", CheckOutcome.FAIL, f"{type(e).__name__}: {first_line(str(e))}"),
        )
        return
    spec = subject.spec
    send(limits=subject.limits_s, deterministic=spec.deterministic, network=spec.network)
    basic: Sequence[str]
    course: Callable[..., list[CheckResult]]
    if isinstance(subject, AgentSubject):
        basic, course = AGENT_BASIC, partial(run_agent_checks, subject)
    else:
        basic, course = BASIC, partial(run_env_checks, subject)
    course = partial(course, begin=lambda name: send(begin=name), done=partial(_done, send))
    needed = basic if job["transcript"] else job["checks"]
    before = course(only=[name for name in basic if name in needed])
    if job["transcript"]:
        send(begin=FRESH)
        send(transcript=transcript(subject))
        send(begin="")
    course(only=[name for name in job["checks"] if name not in basic], before=before)


def _subject(job: dict[str, Any]) -> AgentSubject | EnvSubject:
    plugin_id, options = job["id"], job["options"]
    spec = registry.env_spec(plugin_id, options)
    make = partial(registry.make, plugin_id, **options)
    of_kind = AgentSubject if job["kind"] == AGENTS else EnvSubject
    return of_kind(make, spec, watch=SharedWatch(Path(job["watch"])))


def _part(job: dict[str, Any], send: Callable[..., None]) -> None:
    folder = Path(job["folder"], "part")
    folder.mkdir()
    for result in check_part(job["kind"], job["id"], folder, job["options"]):
        _done(send, result)


def _done(send: Callable[..., None], result: CheckResult) -> None:
    send(done=result.name, outcome=result.outcome.value, reason=result.reason)


if __name__ == "__main__":
    main()
