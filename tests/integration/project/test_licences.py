"""What pip installs with RollArt may be used on the terms that RollArt itself has."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

COPYLEFT = re.compile(r"\b(A?GPL|GNU (Affero )?General Public)", flags=re.IGNORECASE)
LESSER = re.compile(r"\b(LGPL|GNU (Lesser|Library))", flags=re.IGNORECASE)


def base(root: Path) -> dict[str, Distribution]:
    """Return every distribution of the base install, what those need in turn included."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, Distribution] = {}
    waiting = [Requirement(line) for line in project["dependencies"]]
    while waiting:
        requirement = waiting.pop()
        extras = requirement.extras or {""}
        dist = distribution(requirement.name)
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found[name] = dist
        needed = [Requirement(line) for line in dist.requires or ()]
        waiting += [
            r
            for r in needed
            if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    return found


def terms(dist: Distribution) -> list[str]:
    """Return the terms a distribution offers; whoever uses it may choose among them."""
    metadata = dist.metadata
    if expression := metadata.get("License-Expression"):
        return re.split(r"\s+OR\s+", expression)
    classifiers = metadata.get_all("Classifier") or []
    named = [c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License :: ")]
    said = (metadata.get("License") or "").strip().splitlines()
    return [n for n in named if n != "OSI Approved"] or said[:1] or texts(dist)


def texts(dist: Distribution) -> list[str]:
    """Return how the licence files of a distribution begin, which says no more of its terms."""
    files = [f for f in dist.files or () if re.match(r"(LICEN[CS]E|COPYING)", f.name)]
    return [" ".join(f.read_text().split())[:400] for f in files]


def test_nothing_of_the_base_install_is_under_the_gpl(repo_root: Path) -> None:
    found = base(repo_root)
    assert len(found) > 20
    offered = {name: terms(dist) for name, dist in found.items()}
    assert {name for name, given in offered.items() if not given} == set()
    bound = {
        name: given
        for name, given in offered.items()
        if all(COPYLEFT.search(LESSER.sub("", one)) for one in given)
    }
    assert bound == {}


def test_the_licence_is_stated_and_lies_in_the_distribution(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    text = (repo_root / project["license-files"][0]).read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0" in text


def test_what_would_be_refused_is_told_apart() -> None:
    def bound(*given: str) -> bool:
        return all(COPYLEFT.search(LESSER.sub("", one)) for one in given)

    assert bound("AGPL-3.0-or-later")
    assert bound("GNU General Public License v3 (GPLv3)", "GPL-2.0-only")
    assert not bound("GNU General Public License (GPL)", "Artistic License")
    assert not bound("LGPL-2.1-or-later")
    assert not bound("MIT")
