"""The sandbox of an environment, as a run has it: found, checked, and in line with the deadlines.

Takes: the checked options of an environment, and the run's deadlines. Gives: the options with what
follows from the deadlines filled in, and what is wrong. Never: starts a box, or imports a wall.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rollart_core.config.base import PluginRef
from rollart_core.config.problems import Problem
from rollart_core.config.run import Deadlines
from rollart_core.config.sandbox_options import SandboxedOptions
from rollart_core.errors import UserError
from rollart_core.plugins import registry

_WAIT_SHARE: Final = 0.8
"""Of ``reset_s``: the wait for room ends before, with a reason, and leaves time for the start."""

_UNTRUSTED: Final = (
    "{} has no wall: set its option trusted: true if the code may do whatever you may, or take "
    "another sandbox"
)


def runs_in_sandbox(env_id: str) -> bool:
    """Return whether an environment's options name a sandbox and a pool."""
    try:
        model = registry.config_model("environments", env_id)
    except UserError:
        return False
    return model is not None and issubclass(model, SandboxedOptions)


def fill(
    options: Mapping[str, Any], deadlines: Deadlines, reset_s: float
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the options of an environment that runs in a box, and what is wrong with them.

    Args:
        options: Checked by its own model.
        deadlines: Of the run.
        reset_s: Seconds a reset may take, which the wait for a box is part of.
    """
    ref = PluginRef.model_validate(options["sandbox"])
    sandbox, problems = _sandbox(ref, deadlines.sandbox_ttl_s)
    pool = dict(options["pool"])
    if pool["wait_s"] is None:
        pool["wait_s"] = _WAIT_SHARE * reset_s
    elif pool["wait_s"] >= reset_s:
        message = f"{pool['wait_s']:g} s: must be shorter than deadlines.reset_s ({reset_s:g} s)"
        problems.append(Problem(("pool", "wait_s"), message))
    return {**options, "sandbox": sandbox, "pool": pool}, problems


def _sandbox(ref: PluginRef, ttl_s: float) -> tuple[dict[str, Any], list[Problem]]:
    given = ref.options
    try:
        model = registry.config_model("sandboxes", ref.id)
        knows_ttl = model is not None and "ttl_s" in model.model_fields
        options = {"ttl_s": ttl_s, **given} if knows_ttl else given
        faults = registry.option_problems("sandboxes", ref.id, options)
        if not faults and model is not None and not getattr(model(**options), "trusted", True):
            faults.append(Problem((), _UNTRUSTED.format(ref.id)))
    except UserError as e:
        return given, [Problem(("sandbox", "id") if given else ("sandbox",), str(e))]
    if knows_ttl and not faults and float(options["ttl_s"]) < ttl_s:
        least = f"must not be shorter than deadlines.sandbox_ttl_s ({ttl_s:g} s)"
        message = f"{options['ttl_s']:g} s: {least}; leave it out to have that"
        faults = [Problem(("ttl_s",), message)]
    return {"id": ref.id, **options}, [fault.under("sandbox") for fault in faults]
