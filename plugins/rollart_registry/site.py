"""The registry as static pages: a list to search, and a page for each package.

Takes: a verified view of a registry. Gives: HTML files that need no server and load nothing from
elsewhere. Never: puts a text of a package on a page unescaped.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from rollart_core.errors import RegistryError
from rollart_registry.client import RegistryClient
from rollart_registry.fetcher import local_folder
from rollart_registry.release import Release

SITE_MARK: Final = ".rollart-site"


def build_site(client: RegistryClient, out: Path, title: str) -> list[Path]:
    """Write the pages of a registry.

    Args:
        client: The registry.
        out: A folder that does not exist, is empty, or holds an earlier site.
        title: Of the pages.

    Returns:
        The pages.

    Raises:
        RegistryError: When the folder holds something else, or cannot be written.
    """
    if out.exists() and (
        not out.is_dir() or (any(out.iterdir()) and not (out / SITE_MARK).exists())
    ):
        raise RegistryError(f"{out} holds something else than a site: name a new folder")
    pages = _pages(client, title)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            new = Path(folder) / "site"
            new.mkdir()
            (new / SITE_MARK).touch()
            for name, html in pages.items():
                (new / name).write_text(html, "utf-8")
            if out.exists():
                shutil.move(out, Path(folder) / "old")
            shutil.move(new, out)
    except OSError as e:
        raise RegistryError(f"cannot write {out}: {e.strerror}") from e
    return [out / name for name in pages]


def _pages(client: RegistryClient, title: str) -> dict[str, str]:
    environment = Environment(
        loader=PackageLoader("rollart_registry", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    packages: defaultdict[str, list[Release]] = defaultdict(list)
    for release in client.releases():
        packages[release.distribution].append(release)
    where = client.base if local_folder(client.base) is None else None
    common: dict[str, Any] = {
        "title": title,
        "registry": where or "URL",
        "fingerprint": client.trusted.fingerprint,
    }
    newest = [_shown_first(releases) for _, releases in sorted(packages.items())]
    index = environment.get_template("index.html.jinja")
    pages = {"index.html": index.render(releases=newest, refused=client.refused, **common)}
    package = environment.get_template("package.html.jinja")
    for release in newest:
        releases = packages[release.distribution][::-1]
        name = f"{release.distribution}.html"
        pages[name] = package.render(release=release, releases=releases, **common)
    return pages


def _shown_first(releases: list[Release]) -> Release:
    usable = [r for r in releases if r.yanked is None] or releases
    return max(usable, key=lambda r: (not r.order.is_prerelease, r.order))
