"""What a benchmark does where something that it needs is missing: it is skipped, and says why.

Takes: what is needed. Gives: one error that ``rollart bench`` tells from a failure. Never: installs
anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from rollart_core.errors import UserError


class BenchSkipped(UserError):
    """Something that a benchmark needs is missing here; says what, and how to get it."""


def require(*packages: str, extra: str) -> None:
    """Check that packages can be imported; none is.

    Args:
        packages: By the names they are imported by.
        extra: The extra of RollArt that installs them.

    Raises:
        BenchSkipped: If one is missing.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise BenchSkipped(
            f"{', '.join(missing)} {are} not installed: pip install 'rollart[{extra}]'"
        )


def why_no_sandbox(sandbox: str, options: Mapping[str, Any]) -> str:
    """Return why no box of a sandbox starts on this machine; empty if one does.

    Args:
        sandbox: Id or alias.
        options: Of the box that is tried.
    """
    from rollart_core.rollout import loop
    from rollart_sandboxes.pool.doctor import diagnose

    found = loop.run(diagnose(sandbox, options))
    bad = [finding for finding in found.findings if finding.state == "bad"]
    says = [f"{one.says} ({one.mend})" if one.mend else one.says for one in bad]
    return "" if found.works else "; ".join(says)
