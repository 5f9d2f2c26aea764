"""Runtimes: start and place the workers of a run.

Takes: nothing. Gives: the spec of runtimes. Never: starts anything. The class of a spec does;
:class:`rollart_core.runtime.workers.WorkersRuntime` has its interface.

The core has the runtime ``inline``. For other runtimes, ``runtime.kind`` of a run config is the
alias. The class derives from :class:`rollart_core.runtime.workers.WorkersRuntime`. Its constructor
receives a resolved run and a run directory. Its ``check_pools`` checks before the start whether the
run fits the pools in its config.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollart_core.contracts.spec import PluginSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSpec(PluginSpec):
    """The spec of a runtime."""
