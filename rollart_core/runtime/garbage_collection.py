"""Short pauses for the controller: garbage collection that leaves alone what stays anyway.

Takes: nothing. Gives: a context in which what was made before it is not looked at. Never: turns
collection off.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def short_gc_pauses() -> Iterator[None]:
    """Take what there is now (modules, mostly) out of collection, until the block ends.

    A full collection looks at every object: with torch imported that is 80 ms in which the loop
    stands still, and every episode with it.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
