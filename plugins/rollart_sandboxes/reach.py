"""Folders that only root may enter, for boxes that root starts as somebody else.

Takes: the folders that a box is to read. Gives: a launcher that binds those which the box's user
could not get at (a Python below ``/root``, say) to where it can, in a mount namespace that ends
with the box. Never: changes what the host itself has mounted.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PLACES: Final = ("/mnt", "/media", "/srv")
_SCRIPT: Final = """
place=$1; shift; n=0
mount -t tmpfs -o mode=0755,size=1m rollart "$place" || exit 1
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir "$place/$n"; else : > "$place/$n"; fi
  mount --bind "$1" "$place/$n" || exit 1
  n=$((n + 1)); shift
done
shift; exec "$@"
"""


def reach(paths: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return how to start a box so that it finds these paths, and where it finds them.

    Only root needs it; anybody else's boxes read what the run itself can read.
    """
    sources = {path: path for path in paths}
    closed = [p for p in paths if os.geteuid() == 0 and not _open_to_all(Path(p).resolve())]
    unshare = shutil.which("unshare")
    place = next((p for p in _PLACES if _free(p, paths)), None)
    if not closed or unshare is None or place is None:
        return (), sources
    sources.update({path: f"{place}/{n}" for n, path in enumerate(closed)})
    prefix = (unshare, "--mount", "--propagation", "private", "--", "/bin/sh", "-c", _SCRIPT)
    return (*prefix, "sh", place, *closed, "--"), sources


def _open_to_all(path: Path) -> bool:
    """Whether everybody may pass through the folders above."""
    try:
        return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)
    except OSError:
        return True  # bubblewrap says what is wrong with it


def _free(place: str, paths: Sequence[str]) -> bool:
    return Path(place).is_dir() and not any(p == place or p.startswith(f"{place}/") for p in paths)
