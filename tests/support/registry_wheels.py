"""Wheels and registries for the tests of the community registry, made by hand in milliseconds."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollart_registry import accept, keys, operator, submission, trust
from rollart_registry.client import opened
from rollart_registry.fetcher import base_url
from rollart_registry.release import Release
from rollart_registry.tree import RegistryTree
from rollart_registry.wheel import read_wheel

MANIFEST = """\
contract_version: 2
licence: Apache-2.0
environments:
  - id: {id}
    entry_point: {package}.env:Maze
    summary: Find the way <out>.
"""


def passing(wheel: str) -> dict[str, Any]:
    """A conformance suite that everything passes."""
    result = {"id": "reward-range", "group": "semantic", "name": "reward range"}
    results = [{**result, "outcome": "PASS", "reason": ""}]
    return {"passed": True, "counts": {"PASS": 1, "FAIL": 0, "SKIP": 0}, "results": results}


def failing(wheel: str) -> dict[str, Any]:
    """A conformance suite that nothing passes."""
    report = passing(wheel)
    report["results"][0] |= {"outcome": "FAIL", "reason": "reward 7 is outside of [0, 1]"}
    return {**report, "passed": False, "counts": {"PASS": 0, "FAIL": 1, "SKIP": 0}}


def make_wheel(
    folder: Path,
    name: str = "acme-maze",
    version: str = "1.0.0",
    *,
    plugin_id: str | None = "acme/Maze-v1",
    requires: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    entry_point: bool = True,
) -> Path:
    """Write a wheel; ``files`` are added to it, and may be harmful."""
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Summary: A maze."]
    inside = {
        f"{package}/__init__.py": "",
        f"{package}/env.py": f"class Maze:\n    version = {version!r}\n",
        f"{package}/plugin.py": "",
        f"{info}/METADATA": "\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires), ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if plugin_id:
        inside[f"{package}/rollart.yaml"] = MANIFEST.format(id=plugin_id, package=package)
    if entry_point:
        inside[f"{info}/entry_points.txt"] = f"[rollart]\n{name} = {package}.plugin\n"
    return write_wheel(folder / f"{package}-{version}-py3-none-any.whl", inside | dict(files or {}))


def write_wheel(path: Path, inside: Mapping[str, str]) -> Path:
    """Write an archive with a RECORD that is true."""
    info = next(name.split("/")[0] for name in inside if ".dist-info/" in name)
    rows = [f"{name},{_record_hash(text)},{len(text)}" for name, text in inside.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in inside.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,", ""]))
    return path


def _record_hash(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return f"sha256={digest.decode().rstrip('=')}"


@dataclass
class Scene:
    """A registry with an owner, acme, and where everything of it lies."""

    folder: Path

    @property
    def tree(self) -> RegistryTree:
        return RegistryTree(self.folder / "registry")

    def operator(self, now: datetime | None = None) -> operator.Operator:
        made = operator.Operator(self.tree, self.folder / "registry-keys")
        made.now = now or datetime.now(UTC)
        return made

    def key(self, owner: str) -> Path:
        return self.folder / f"{owner}.key"

    def add_owner(self, owner: str) -> None:
        public = keys.make_key(self.key(owner), None)
        self.operator().add_owner(owner, [public])

    def trusted(self, location: str | Path | None = None) -> trust.Trusted:
        base = base_url(str(location or self.tree.path))
        return trust.trusted(base) or trust.trust(base, trust.offered_root(base))

    def publish(
        self, wheel: Path, owner: str = "acme", check: submission.Check = passing, **to: Path
    ) -> Release:
        signer = keys.load_signer(self.key(owner))
        with opened(self.trusted()) as client:
            found = submission.owner_of_key(client, signer, owner)
            publisher = submission.Owner(found, signer, to.get("to", self.tree.submissions))
            return submission.publish(client, publisher, read_wheel(wheel), check)

    def accept(self, now: datetime | None = None) -> list[accept.Accepted]:
        outcomes = accept.accept(self.operator(now))
        assert [o.refused for o in outcomes if o.refused] == []
        return outcomes

    def releases(self, location: str | Path | None = None) -> list[str]:
        with opened(self.trusted(location)) as client:
            found = [str(release) for release in client.releases()]
            assert not client.refused
            return found


def make_scene(folder: Path, **options: Any) -> Scene:
    """Make a registry with one owner and nothing published."""
    scene = Scene(folder)
    operator.init(scene.operator(options.pop("now", None)), passphrase=None, **options)
    scene.add_owner("acme")
    return scene
