"""``rollart check``: static, runtime and semantic checks of a plugin, a project or a wheel.

Checks of one process are in :mod:`rollart_testing` (``check_env``). This package has those that
need several: new interpreters, a killed child, no network, a package that is not installed.
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
        only: Groups and names of the checks to run; empty means all.
        options: Options of the checked plugin; only for an id.
        timeout_s: Time limit in seconds for the checks of one plugin.

    Raises:
        rollart_core.errors.UserError: If there is no such target or check.
    """
    # Imported here, because a probe times imports and must not find them done already.
    from rollart_testing.check.run import run

    return run(target, only=only, options=options, timeout_s=timeout_s)
