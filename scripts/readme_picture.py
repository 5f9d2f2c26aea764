"""Draw the README's picture: ``python scripts/readme_picture.py RUN``.

Takes: the directory of a finished run. Gives: ``docs/pictures/run.svg``, the same bytes for the
same run. Never: trains.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

from rollart_view.plot import plot

PICTURE = Path(__file__).resolve().parent.parent / "docs/pictures/run.svg"


def main() -> None:
    """Draw the run named on the command line."""
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "journal.db").exists():
        sys.exit("usage: python scripts/readme_picture.py RUN   (a run directory)")
    # Text stays text, and the file does not depend on the date or on randomness.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rollart", "path.simplify": True})
    plot([Path(sys.argv[1])], PICTURE)


if __name__ == "__main__":
    main()
