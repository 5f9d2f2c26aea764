"""Contract checks of trackers, mappers, runtimes, forward passes, tool formats and the like.

Takes: a plugin's object or class, or a factory. Gives: check results. Never: starts a runtime,
because its resources may be missing; or needs torch, except for a forward pass.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from rollart_core.contracts.env import Workload
from rollart_core.contracts.hardware import HardwareMapper, Pool
from rollart_core.contracts.sandbox_service import SandboxService
from rollart_core.contracts.tool_format import ParsedMessage, ToolFormat, tool_call
from rollart_core.contracts.tracker import Tracker
from rollart_core.errors import UserError
from rollart_core.plugins import registry
from rollart_core.types import Sample, ToolSpec
from rollart_testing.results import CheckResult, SkipCheck, expect, run_checks, torch_or_skip

_POOLS = (Pool("first", "cpu", 2, memory_bytes=2**34), Pool("second", "H100", 8))
_WORKLOADS = {"a/A-v1": Workload(), "b/B-v1": Workload(turns=50.0)}
_ENV: Final = "toy/FrozenLake-v1"
_NUM_LOSS_TOKENS: Final = 5


def check_tracker(make: Callable[[], Tracker], run_dir: Path) -> list[CheckResult]:
    """Check a tracker.

    Args:
        make: Creates a new tracker.
        run_dir: An empty folder it may write to.
    """
    return run_checks(
        {
            "logs": partial(_check_tracker_logs, make, run_dir),
            "close_before_start": lambda: make().close(),
        }
    )


def check_mapper(mapper: HardwareMapper) -> list[CheckResult]:
    """Check a hardware mapper."""
    return run_checks(
        {
            "places_everything": partial(_check_places, mapper),
            "same_input_same_placement": partial(_check_same_placement, mapper),
            "refuses_no_pools": partial(_check_no_pools, mapper),
        }
    )


def check_tool_format(tool_format: ToolFormat) -> list[CheckResult]:
    """Check a tool format."""
    return run_checks(
        {
            "round_trip": partial(_check_round_trip, tool_format),
            "plain_text": partial(_check_plain_text, tool_format),
            "broken_calls": partial(_check_broken_calls, tool_format),
        }
    )


def check_runtime(runtime: type[Any]) -> list[CheckResult]:
    """Check the class of a runtime without creating one."""
    return run_checks({"offers_every_part": partial(_check_offers, runtime)})


def check_forward_pass(forward_pass: type[Any], model: Any) -> list[CheckResult]:
    """Check that a forward pass computes the same as the model.

    Args:
        forward_pass: A class of :class:`rollart_core.training.policy.Policy`.
        model: A causal LM of transformers, on the CPU.
    """
    return run_checks({"agrees_with_the_model": partial(_check_agrees, forward_pass, model)})


def check_sandbox_service(service: SandboxService) -> list[CheckResult]:
    """Check a sandbox service with an environment of RollArt in another Python process."""
    isolation: dict[str, object] = {"kind": "venv", "python": sys.executable}
    options: dict[str, object] = {"isolation": isolation}
    return run_checks(
        {
            "describes": partial(_check_describes, service, options),
            "isolates": partial(_check_isolates, service, options),
            "refuses": partial(_check_refuses, service),
            "collects_garbage": partial(_check_collects, service),
        }
    )


def _check_tracker_logs(make: Callable[[], Tracker], run_dir: Path) -> None:
    tracker = make()
    tracker.start(run_dir, {"name": "check", "trainer": {"lr": 1e-3}, "stop": None})
    for train_step in range(3):
        metrics = {"train/loss": 1.0 / (train_step + 1), "rollout/reward": math.nan}
        tracker.log(metrics, train_step=train_step, policy_version=train_step)
    tracker.close()
    tracker.close()


_CALLS: Final = (
    tool_call("find_all", json.dumps({"text": 'a "b"\né漢', "code": "007", "limit": 3})),
    tool_call("set", json.dumps({"deep": {"list": [1, "two", 0.5], "yes": True}})),
)
_TYPES: Final = {"text": "string", "code": "string", "limit": "integer", "deep": "object"}
_TOOLS: Final = [
    ToolSpec(
        type="function",
        function={
            "name": call["function"]["name"],
            "parameters": {
                "type": "object",
                "properties": {
                    n: {"type": _TYPES[n]} for n in json.loads(call["function"]["arguments"])
                },
            },
        },
    )
    for call in _CALLS
]


def _check_round_trip(tool_format: ToolFormat) -> None:
    for message in (
        ParsedMessage("", "", _CALLS[:1]),
        ParsedMessage("", "I think.", _CALLS),
        ParsedMessage("An answer.", "I think."),
    ):
        text = tool_format.render(message)
        parsed = tool_format.parse(text, _TOOLS)
        parts = (parsed.content, parsed.reasoning, _plain(parsed))
        wanted = (message.content, message.reasoning, _plain(message))
        expect(not parsed.errors, f"{text!r} has errors: {parsed.errors}")
        expect(parts == wanted, f"{text!r} is parsed as {parts}")


def _plain(message: ParsedMessage) -> list[tuple[str, object]]:
    """Return the calls with the values of their arguments."""
    functions = [call["function"] for call in message.calls]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


def _check_plain_text(tool_format: ToolFormat) -> None:
    for text in ("", "ok", "a <b> [c] {d}\n"):
        parsed = tool_format.parse(text, _TOOLS)
        expect(parsed == ParsedMessage(text), f"{text!r} is parsed as {parsed}")


def _check_broken_calls(tool_format: ToolFormat) -> None:
    """A message that is cut anywhere never raises, and its errors have one line."""
    text = tool_format.render(ParsedMessage("", "", _CALLS))
    for end in range(len(text)):
        for error in tool_format.parse(text[:end], _TOOLS).errors:
            reason = error.reason
            expect(reason.strip() and "\n" not in reason, f"{text[:end]!r}: reason {reason!r}")


def _check_places(mapper: HardwareMapper) -> None:
    placement = mapper.place(_WORKLOADS, _POOLS)
    names = {pool.name for pool in _POOLS}
    expect(set(placement.envs) == set(_WORKLOADS), f"envs placed: {sorted(placement.envs)}")
    expect(set(placement.engines) == set(_WORKLOADS), f"engines for: {sorted(placement.engines)}")
    expect(set(placement.envs.values()) <= names, f"unknown pools in {dict(placement.envs)}")
    expect(placement.trainer in names, f"the trainer is on unknown pool {placement.trainer!r}")
    for env_id, shares in placement.engines.items():
        expect(set(shares) <= names, f"{env_id}: unknown pools in {dict(shares)}")
        total = sum(shares.values())
        expect(math.isclose(total, 1.0), f"{env_id}: the shares add up to {total:g}, not 1")
    expect(placement.reasons, "it gives no reasons")


def _check_same_placement(mapper: HardwareMapper) -> None:
    expect(mapper.place(_WORKLOADS, _POOLS) == mapper.place(_WORKLOADS, _POOLS), "it wavers")


def _check_no_pools(mapper: HardwareMapper) -> None:
    for pools in ((), (Pool("none", "cpu", 0),)):
        try:
            mapper.place(_WORKLOADS, pools)
        except ValueError as e:
            expect(str(e), "it refuses without a reason")
        else:
            expect(False, f"it places work on {len(pools)} pools without any device")


def _check_offers(runtime: type[Any]) -> None:
    from rollart_core.runtime.workers import WorkersRuntime

    expect(issubclass(runtime, WorkersRuntime), "it does not derive from WorkersRuntime")
    lacking = sorted(getattr(runtime, "__abstractmethods__", ()))
    expect(not lacking, f"it lacks {', '.join(lacking)}")
    parameters = list(inspect.signature(runtime).parameters)
    expect(parameters == ["run", "run_dir"], f"it takes {parameters}, not run and run_dir")


def _check_agrees(forward_pass: type[Any], model: Any) -> None:
    torch = torch_or_skip()
    from rollart_core.training.policy import ForwardSettings, PaddedPolicy

    settings = ForwardSettings(temperature=0.7)
    if not forward_pass.fits(model, settings):
        raise SkipCheck(f"it does not fit a model of type {model.config.model_type}")
    samples = _samples(int(model.config.vocab_size))
    found, want = (_computed(cls(model, settings), samples) for cls in (forward_pass, PaddedPolicy))
    for name, ours, theirs in zip(("logprobs", "entropies"), found[:2], want[:2], strict=True):
        expect(torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), f"its {name} differ")
    for name, gradient in want[2].items():
        ours = found[2][name]
        expect(torch.allclose(ours, gradient, rtol=1e-3, atol=1e-4), f"its gradient of {name}")


def _computed(policy: Any, samples: Sequence[Sample]) -> tuple[Any, Any, dict[str, Any]]:
    """Return logprobs, entropies, and the gradient of each parameter."""
    policy.model.zero_grad()
    logprobs, entropies = policy.logprobs(samples)
    logprobs.sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    return logprobs.detach(), entropies.detach(), gradients


def _samples(vocab_size: int) -> list[Sample]:
    """Return rows of different lengths with a common prefix, one of them twice."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, vocab_size, 12)
    rows = []
    for length in (20, 33, 47):
        token_ids = np.concatenate([prefix, rng.integers(0, vocab_size, length - len(prefix))])
        mask = np.zeros(length, dtype=bool)
        mask[-_NUM_LOSS_TOKENS:] = True
        versions = np.where(mask, 0, -1).astype(np.int32)
        logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
        rows.append(Sample(token_ids.astype(np.int32), mask, logprobs, versions, versions))
    return [*rows, rows[0]]


def _check_describes(service: SandboxService, options: dict[str, object]) -> None:
    said, spec = service.describe(_ENV, options), registry.env_spec(_ENV)
    expect(said.spec.id == spec.id, f"it calls {_ENV} {said.spec.id!r}")
    expect(said.spec.splits == spec.splits, f"it reports that {_ENV} has splits {said.spec.splits}")
    expect("isolation" in said.options, "the isolation is missing from the checked options")
    expect(not said.problems, f"it reports problems without options: {said.problems}")


def _check_isolates(service: SandboxService, options: dict[str, object]) -> None:
    here: Any = registry.make(_ENV)
    there: Any = service.make(_ENV, options)
    try:
        task = {"task": 0, "split": "train"}
        first = there.reset(seed=0, options=task)[0]
        expect(first == here.reset(seed=0, options=task)[0], "a task's first observation differs")
        action = str(here.oracle())
        expect(there.step(action) == here.step(action), f"{action!r} gives a different step")
    finally:
        here.close()
        there.close()
    there.close()


def _check_refuses(service: SandboxService) -> None:
    given = {"isolation": {"kind": "no-such-kind"}}
    expect(service.option_problems(_ENV, given), "it accepts an isolation of an unknown kind")
    try:
        service.make(_ENV, given)
    except UserError:
        return
    expect(False, "it creates an environment with an isolation of an unknown kind")


def _check_collects(service: SandboxService) -> None:
    asyncio.run(service.collect_garbage("acme/NoSuchSandbox-v1"))
