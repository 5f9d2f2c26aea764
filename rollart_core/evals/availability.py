"""Which environments of a suite can be played on this machine.

Takes: a suite. Gives: those that ask for a sandbox which does not work here, with the reason.
Never: leaves out an environment that did not ask for it (``if_sandbox``).
"""

from __future__ import annotations

from functools import cache

from rollart_core.evals.suite import Suite, SuiteEnv
from rollart_core.plugins import registry


def left_out(suite: Suite) -> dict[str, str]:
    """Return the environments that cannot be played here, by name, each with the reason.

    Raises:
        UserError: When there is no such environment or sandbox.
    """
    pairs = zip(suite.names, suite.envs, strict=True)
    whys = {name: _why(env) for name, env in pairs if env.if_sandbox}
    return {name: why for name, why in whys.items() if why}


def _why(env: SuiteEnv) -> str:
    asked = env.options.get("sandbox") or registry.env_spec(env.id).sandbox
    name = asked.get("id") if isinstance(asked, dict) else asked
    return _fault(str(name)) if name else ""


@cache
def _fault(sandbox: str) -> str:
    """Return why a sandbox does not work here; empty when it does. Each is asked once."""
    return registry.sandbox_service().fault(sandbox)
