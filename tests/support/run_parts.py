"""The processes of a live run, found from outside by the log each writes to."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from pathlib import Path


def part_pids(run_dir: Path) -> dict[str, list[int]]:
    """Return the process ids of a run's parts by the name of their log, such as ``engine-1``."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    logs = str(run_dir / "logs") + "/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            log = os.readlink(process / "fd" / "2")
            if log.startswith(logs):
                found[Path(log).stem].append(int(process.name))
    return found
