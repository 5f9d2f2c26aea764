"""Weights in memory that the processes of one machine share.

The files are those of the disk channel, in a folder under ``/dev/shm`` (or any other folder, such
as a temporary one on macOS). Readers map them, so nothing is copied. A mapping stays valid after
the file is removed.
"""

from __future__ import annotations

from typing import ClassVar

from rollart_plugins.weights.disk import DiskChannel


class SharedMemoryChannel(DiskChannel):
    """Weights in memory that the processes of one machine share."""

    survives: ClassVar[bool] = False
