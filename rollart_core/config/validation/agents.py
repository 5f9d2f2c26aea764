"""What must hold in the config of a run with agents, and what has no effect in one without.

Takes: a RunConfig and the environments' specs. Gives: problems. Never: imports a plugin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

from rollart_core.config.problems import Problem
from rollart_core.config.run import RunConfig
from rollart_core.config.runtime import RayRuntime
from rollart_core.contracts.adapter import split_id
from rollart_core.contracts.env import EnvSpec

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def agent_problems(config: RunConfig, specs: Sequence[EnvSpec]) -> Iterator[Problem]:
    """Yield what is wrong with a run's agents, or with ``gateway`` where there are none.

    Args:
        config: The config.
        specs: Of all its environments.
    """
    agents = [spec for spec in specs if spec.kind == "agent"]
    if not agents:
        if has_no_agent(specs) and "gateway" in config.model_fields_set:
            message = "has no effect where no environment is an agent; remove it"
            yield Problem(("gateway",), message)
        return
    which = agents[0].id
    if find_spec("aiohttp") is None:
        message = f"{which} is an agent, which needs aiohttp: pip install 'rollart[gateway]'"
        yield Problem(("env",), message)
    if config.warm_start is not None:
        message = f"{which} is an agent, and has no oracle to learn from; remove it"
        yield Problem(("warm_start",), message)
    if getattr(config.model, "kind", None) == "remote":
        message = (
            f"remote: {which} is an agent, whose episodes are recorded to the token: "
            "give model.path, a folder with the tokenizer at least"
        )
        yield Problem(("model", "kind"), message)
    if len(agents) == len(specs) and "max_observation_chars" in config.rollout.model_fields_set:
        message = "has no effect where all environments are agents; remove it"
        yield Problem(("rollout", "max_observation_chars"), message)
    runtime = config.runtime
    if isinstance(runtime, RayRuntime) and runtime.address and config.gateway.host in _LOOPBACK:
        message = (
            f"{config.gateway.host}: env workers on other machines cannot reach it; give an "
            "address of this machine that they can"
        )
        yield Problem(("gateway", "host"), message)


def program_problems(
    key: tuple[str | int, ...], options: Mapping[str, Any], episode_s: float
) -> Iterator[Problem]:
    """Yield what is wrong with the time that an agent gives its program.

    Args:
        key: Where the environment stands.
        options: Its options; ``program_s`` is that time, where there is one.
        episode_s: Deadline of the episode.
    """
    program_s = options.get("program_s")
    if isinstance(program_s, int | float) and program_s >= episode_s:
        message = f"{program_s:g} s: must be shorter than deadlines.episode_s ({episode_s:g} s)"
        yield Problem((*key, "program_s"), message)


def has_no_agent(specs: Sequence[EnvSpec]) -> bool:
    """Whether that is known: of classes that nobody registered it is not."""
    return all(
        spec.kind == "step" and (":" not in spec.id or bool(split_id(spec.id))) for spec in specs
    )
