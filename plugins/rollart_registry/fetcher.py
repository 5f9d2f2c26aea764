"""Where a registry's files come from: a folder, or an HTTP server.

Takes: a location as the user writes it. Gives: the base URL, and the fetcher for TUF's client.
Never: inspects the fetched files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from tuf.api.exceptions import DownloadHTTPError
from tuf.ngclient import FetcherInterface
from tuf.ngclient.urllib3_fetcher import Urllib3Fetcher

from rollart_core.errors import RegistryError

_CHUNK_BYTES: Final = 2**18
_SOCKET_TIMEOUT_S: Final = 20


def base_url(location: str) -> str:
    """Return the base URL of a registry, without a slash at its end.

    Args:
        location: A folder, a ``file:`` URL, or an ``http(s)`` URL.

    Raises:
        RegistryError: If it is none of these.
    """
    try:
        return _base_url(location)
    except (ValueError, RuntimeError) as e:  # unmatched brackets; ~ of an unknown user
        raise RegistryError(
            f"{location!r} is not a registry ({e}): give a folder or an http(s) URL"
        ) from e


def _base_url(location: str) -> str:
    parts = urlsplit(location)
    if parts.scheme in {"http", "https"} and parts.hostname:
        if parts.username or parts.password or parts.query or parts.fragment:
            raise RegistryError(f"{parts.hostname}: give a URL without user, query or fragment")
        return location.rstrip("/")
    if parts.scheme == "file":
        return Path(unquote(parts.path)).resolve().as_uri()
    if "://" in location:
        raise RegistryError(f"{location!r} is not a registry: give a folder or an http(s) URL")
    return Path(location).expanduser().resolve().as_uri()


def local_folder(base: str) -> Path | None:
    """Return the folder behind a base URL; None for a server."""
    parts = urlsplit(base)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def fetcher_for(base: str) -> FetcherInterface:
    """Return the fetcher for a registry's files."""
    if local_folder(base) is not None:
        return FolderFetcher()
    return Urllib3Fetcher(socket_timeout=_SOCKET_TIMEOUT_S, app_user_agent="rollart")


class FolderFetcher(FetcherInterface):
    """Fetch from a folder; a missing file gives HTTP status 404, as on a server."""

    def _fetch(self, url: str) -> Iterator[bytes]:
        path = local_folder(url)
        if path is None or not path.is_file():
            raise DownloadHTTPError(f"{path} does not exist", 404)
        return _chunks(path)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
