"""Check that a plugin closes its sandboxes and keeps secrets out of them.

Takes: a subject, an environment or an agent task. Gives: checks that raise; a subject without a
sandbox passes them with a remark. Never: starts a sandbox.

A secret counts as readable if a file of the sandbox holds most of its characteristic lines: lines
of some length that are neither in the observation nor in the unchanged context of a patch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rollart_core.contracts.sandbox import Sandbox
from rollart_core.rollout.random_player import text_of
from rollart_testing import search_files as search_sandbox
from rollart_testing.play import GOOD, Player, Subject
from rollart_testing.results import expect

MIN_LINE_CHARS: Final = 12
MIN_ONLY_LINE_CHARS: Final = 20
_SEARCH_S: Final = 5.0
_GRACE_S: Final = 40.0


def check_no_sandbox_left(subject: Subject) -> str | None:
    """All sandboxes that it opened are closed after ``close``."""
    before = live_sandboxes_here()
    with subject.open() as player:
        subject.play(player, GOOD, {}, max_turns=subject.few_turns)
        subject.begin(player)
        during = live_sandboxes_here()
    opened = {name: left for name, left in during.items() if name not in before}
    if subject.given is not None:
        return f"not fully checked: the check may not close the given {subject.noun}"
    still = [name for name in live_sandboxes_here() if name not in before]
    expect(not still, f"{len(still)} of its sandboxes are alive after close()")
    paths = [path for left in opened.values() for path in left if Path(path).exists()]
    expect(not paths, f"after close() there is still {', '.join(paths[:3])}")
    return None if opened else "it opened no sandbox"


def live_sandboxes_here() -> dict[str, list[str]]:
    """Return the live sandboxes of this process, with their folders on the host."""
    if "rollart_sandboxes.pool.source" not in sys.modules:
        return {}
    from rollart_core.rollout import loop
    from rollart_sandboxes.pool.live import LiveSandboxes, live_sandboxes
    from rollart_sandboxes.pool.owner import owner_mark

    mine = owner_mark()
    return {
        record.name: [path for kind in ("folder", "cgroup") for path in record.left.get(kind, ())]
        for record in loop.run(live_sandboxes(LiveSandboxes()))
        if record.owner == mine
    }


def check_sandbox_hides_secrets(subject: Subject) -> str | None:
    """No file of the agent's sandbox has a secret of the task at the start or after one turn."""
    num_files, is_cut, has_sandbox = 0, False, False
    with subject.open() as player:
        if not player.has("secrets"):
            return subject.no_secrets
        for options in subject.paced(subject.tasks(player)):
            for where, page in subject.early_pages(player, options):
                sandbox = sandbox_of(player)
                if sandbox is None:
                    break
                has_sandbox = True
                found = searched(sandbox, distinctive_lines(player.call("secrets"), text_of(page)))
                held, counts = found.get("where"), found.get("lines") or (0, 0)
                expect(
                    held is None,
                    f"{where}: {held} of its sandbox holds {counts[0]} of {counts[1]} lines of a "
                    "secret",
                )
                num_files, is_cut = num_files + found["num_files"], is_cut or found["is_cut"]
            if not has_sandbox:
                return subject.no_sandbox
    return f"{num_files} files searched" + (", not all: time was up" if is_cut else "")


def distinctive_lines(secrets: Sequence[str], page: str) -> list[list[str]]:
    """Return the characteristic lines of each secret."""
    shown = {line.strip() for line in page.splitlines()}
    found = []
    for secret in secrets:
        own, known = _own_lines(secret)
        lines = {line.strip() for line in own} - {line.strip() for line in known} - shown
        selected = sorted(line for line in lines if len(line) >= MIN_LINE_CHARS)
        if len(selected) > 1 or (selected and len(selected[0]) >= MIN_ONLY_LINE_CHARS):
            found.append(selected)
    return found


def _own_lines(secret: str) -> tuple[list[str], list[str]]:
    """Return the lines of a secret, and the unchanged or removed lines of a patch."""
    lines = secret.splitlines()
    if not any(line.startswith("@@ ") for line in lines):
        return lines, []
    body = [line for line in lines if not line.startswith(("+++ ", "--- ", "diff ", "@@ "))]
    added = [line[1:] for line in body if line.startswith("+")]
    return added, [line[1:] for line in body if line[:1] in ("-", " ")]


def sandbox_of(player: Player) -> Sandbox | None:
    """Return the sandbox of an environment (its attribute ``sandbox``); None if it has none."""
    env = getattr(player.env, "unwrapped", player.env)
    named = (getattr(env, name, None) for name in ("sandbox", "box"))  # box: until 0.3
    return next((found for found in named if isinstance(found, Sandbox)), None)


def searched(sandbox: Sandbox, lines: list[list[str]]) -> dict[str, Any]:
    """Search the files of a sandbox for characteristic lines, and return the result."""
    from rollart_core.rollout import loop

    order = json.dumps({"secrets": lines, "budget_s": _SEARCH_S}).encode()
    source = Path(search_sandbox.__file__).read_text(encoding="utf-8")
    result = loop.run(
        sandbox.exec(
            ("python3", "-I", "-S", "-c", source), timeout_s=_SEARCH_S + _GRACE_S, stdin=order
        )
    )
    said = (result.stdout + result.stderr).decode(errors="replace").strip().splitlines()
    expect(result.exit_code == 0 and said, f"its sandbox cannot be searched: {' '.join(said[-1:])}")
    found: dict[str, Any] = json.loads(said[-1])
    return found
