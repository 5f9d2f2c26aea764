"""Translate errors of TUF's client into readable messages.

Takes: the errors of python-tuf and of its HTTP library. Gives: a one-line :class:`RegistryError`.
Never: decides whether something is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tuf.api import exceptions as tuf
from urllib3.exceptions import HTTPError

from rollart_core.errors import RegistryError, first_line
from rollart_registry.state import state_folder


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Convert errors of TUF's client into :class:`RegistryError`.

    Args:
        where: The registry, or the file in it, that is being read.

    Raises:
        RegistryError: Chained from the original error.
    """
    try:
        yield
    except (tuf.RepositoryError, tuf.DownloadError, HTTPError, OSError) as e:
        raise RegistryError(f"{where}: {_reason(e)}") from e


def _reason(error: Exception) -> str:
    said = first_line(str(error))
    match error:
        case tuf.ExpiredMetadataError():
            return (
                f"{said}: either somebody withholds newer files from you, or the operator forgot "
                "`rollart registry refresh`"
            )
        case tuf.BadVersionNumberError():
            return f"older than the version seen here before: the registry was rolled back ({said})"
        case tuf.UnsignedMetadataError():
            return (
                f"not signed by the keys that are trusted for it ({said}): somebody changed it, or "
                f"its operator recreated it: then remove its folder in {state_folder()}"
            )
        case tuf.LengthOrHashMismatchError():
            return f"a file is not the one that was signed ({said})"
        case tuf.DownloadLengthMismatchError():
            return f"the server sends more bytes than were signed ({said})"
        case tuf.DownloadHTTPError(status_code=404):
            return "a file is missing: it is half written, or not a registry"
        case tuf.DownloadHTTPError():
            return f"the server returned HTTP status {error.status_code}"
        case tuf.SlowRetrievalError():
            return "cannot be reached: no response, or a timeout"
        case tuf.DownloadError() | HTTPError():
            return f"cannot be reached ({first_line(str(error.__cause__ or error), 160)})"
        case OSError():
            return f"cannot store fetched files: {error.strerror or said}"
    return f"refused: {said}"
