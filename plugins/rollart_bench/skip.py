"""Skip a benchmark whose requirements are missing, with the reason.

Takes: the requirements. Gives: an error that ``rollart bench`` does not treat as a failure. Never:
installs anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from rollart_core.errors import UserError


class BenchSkipped(UserError):
    """A requirement of a benchmark is missing here. Names it and how to get it."""


def require(*packages: str, extra: str) -> None:
    """Check that packages can be imported, without importing them.

    Args:
        packages: Their import names.
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
    """Return why no sandbox of a kind starts on this machine; empty if one starts.

    Args:
        sandbox: Id or alias.
        options: Options of the sandbox that is started as a test.
    """
    from rollart_core.rollout import loop
    from rollart_sandboxes.pool.doctor import diagnose

    found = loop.run(diagnose(sandbox, options))
    bad = [finding for finding in found.findings if finding.state == "bad"]
    says = [f"{one.says} ({one.mend})" if one.mend else one.says for one in bad]
    return "" if found.works else "; ".join(says)
