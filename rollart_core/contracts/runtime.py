"""Runtimes: where the parts of a run execute.

Takes: nothing. Gives: the spec of runtimes. Never: starts anything: the class that a spec names
does, and :mod:`rollart_core.runtime.base` says what it offers.

The core has ``inline`` of its own. ``runtime.kind`` of a run config is the alias of any other one.
Its class is made with a resolved run and a run directory, derives from
:class:`rollart_core.runtime.workers.WorkersRuntime`, and its ``check_pools`` says before anything
starts whether the run fits the pools that its config declares.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollart_core.contracts.spec import PluginSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSpec(PluginSpec):
    """What a runtime says of itself."""
