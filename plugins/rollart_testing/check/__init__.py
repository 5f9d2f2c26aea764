"""``rollart check``: static, runtime and semantic checks of a plugin, a project or a wheel.

What one process can check is in :mod:`rollart_testing` (``check_env``); here is what needs
several: fresh interpreters, a killed child, a network that is off, a package that is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollart_testing.check.report import Report

__all__ = ["check"]


def check(
    target: str,
    *,
    only: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    timeout_s: float = 600.0,
) -> Report:
    """Check a plugin, a project folder or a wheel.

    Args:
        target: An id, alias, ``module:Class``, ``ADAPTER::FOREIGN_ID``, folder or wheel.
        only: Groups and names of the checks to run; empty: all.
        options: Options of the plugin that is checked; for an id alone.
        timeout_s: Seconds for the checks of one plugin, after which it is ended.

    Raises:
        rollart_core.errors.UserError: When there is no such target or check.
    """
    # Imported here, because a probe, which times imports, must not find everything imported.
    from rollart_testing.check.run import run

    return run(target, only=only, options=options, timeout_s=timeout_s)
