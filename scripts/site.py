"""Build the documentation site: ``make site``, or ``python scripts/site.py ZENSICAL [OUT]``.

    docs/ and the project's own pages --> build/site-src --> zensical build --strict --> build/site

Takes: the program ``zensical``. Gives: static pages, with the order and titles of
``docs/index.md``. The table of all modules is generated here and is not committed. Never: writes
into ``docs/``.
"""

from __future__ import annotations

import json
import posixpath
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
PROJECT = {
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changes.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "examples/mission/README.md": "project/mission.md",
}
"""Pages outside ``docs/`` and their paths on the site."""
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
ENTRY = re.compile(r"^- \[(.+?)\]\((.+?)\)", flags=re.MULTILINE)
MODULES = "reference/modules.md"


def place_of(path: str) -> str | None:
    """Return the path of a repository file on the site; None if it is not on the site."""
    return PROJECT.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)


def on_the_site(text: str, source: str, target: str) -> str:
    """Return a page with the links of the site. Links to other files become plain text.

    Args:
        text: Markdown.
        source: The page in the repository.
        target: The page on the site.
    """

    def link(found: re.Match[str]) -> str:
        url, anchor = found[1], found[2] or ""
        if "://" in url or url.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), url))
        place = place_of(path)
        if place is None:
            return f"] (`{path}`)"
        return f"]({posixpath.relpath(place, posixpath.dirname(target) or '.')}{anchor})"

    text = LINK.sub(link, text)
    return re.sub(r"\[([^\]]+)\] \(`([^`]+)`\)", r"\1 (`\2`)", text)


def navigation(index: str) -> list[dict[str, object]]:
    """Return the sections of ``docs/index.md`` with their pages."""
    sections: list[dict[str, object]] = [{"Home": "index.md"}]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        pages: list[dict[str, str]] = []
        for name, url in ENTRY.findall(section):
            place = place_of(posixpath.normpath(posixpath.join("docs", url)))
            assert place is not None, f"{url} of docs/index.md is not on the site"
            pages.append({name: place})
        if title == "Reference":
            pages.append({"Modules": MODULES})
        sections.append({title: pages})
    return sections


def assemble(folder: Path) -> None:
    """Write the source files of the site."""
    tables = runpy.run_path(str(ROOT / "docs/tables.py"))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.py", "review", "__pycache__")
    )
    sources = {f"docs/{p.relative_to(folder)}": p for p in folder.rglob("*.md")}
    for source, target in {**sources, **{s: folder / t for s, t in PROJECT.items()}}.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        target.parent.mkdir(parents=True, exist_ok=True)
        page = on_the_site(text, source, str(target.relative_to(folder)))
        target.write_text(page, encoding="utf-8")
    head = "# Modules\n\nFind the module for a change: every module in one sentence.\n\n"
    (folder / MODULES).write_text(head + tables["modules"]() + "\n", encoding="utf-8")


def settings(folder: Path, out: Path) -> str:
    """Return the configuration of zensical. JSON's strings, lists and booleans are valid TOML."""
    features = ["content.code.copy", "navigation.sections", "navigation.top", "search.highlight"]
    nav = navigation((ROOT / "docs/index.md").read_text(encoding="utf-8"))
    entries = ", ".join(_toml(entry) for entry in nav)
    return "\n".join(
        (
            "[project]",
            'site_name = "RollArt"',
            'site_description = "Reinforcement learning for LLM agents"',
            f"docs_dir = {json.dumps(str(folder.relative_to(BUILD)))}",
            f"site_dir = {json.dumps(str(out.relative_to(BUILD)))}",
            "use_directory_urls = false",
            f"nav = [{entries}]",
            "[project.theme]",
            f"features = {json.dumps(features)}",
            "font = false",
            "[project.markdown_extensions.tables]",
            "[project.markdown_extensions.toc]",
            "permalink = true",
            "[project.markdown_extensions.pymdownx.highlight]",
            "[project.markdown_extensions.pymdownx.superfences]",
            "",
        )
    )


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def main() -> None:
    """Build the site."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).exists():
        sys.exit("usage: python scripts/site.py ZENSICAL   (the program; `make site` installs it)")
    source, out = BUILD / "site-src", BUILD / "site"
    assemble(source)
    (BUILD / "zensical.toml").write_text(settings(source, out), encoding="utf-8")
    command = [Path(sys.argv[1]).absolute(), "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=BUILD, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    pages = sum(1 for _ in out.rglob("*.html"))
    print(f"{pages} pages: {out / 'index.html'}")


if __name__ == "__main__":
    main()
