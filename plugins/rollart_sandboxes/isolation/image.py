"""Images for isolated environments: ``rollart build`` builds one from the plugin's Dockerfile.

Takes: an installed id or a project folder. Gives: the image's names, or a UserError that explains
how to fix the build. Never: pushes or pulls itself; the Dockerfile may.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import unquote, urlsplit

import typer

from rollart_core.cli.output import print_json
from rollart_core.contracts.spec import ID_PATTERN
from rollart_core.errors import PluginError, UserError, first_line
from rollart_core.plugins import registry
from rollart_core.plugins.manifest import MANIFEST_NAME, parse_manifest
from rollart_sandboxes.isolation.recipe import image_of

_LAST_LINES: Final = 12
_PROBE_S: Final = 20.0
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Project:
    """The input of an image build."""

    folder: Path
    ids: tuple[str, ...]
    """The ids of its environments."""


@dataclass(frozen=True, slots=True)
class Build:
    """The options of an image build."""

    tags: tuple[str, ...]
    """Names of the image; empty: one for each environment of the project."""
    dockerfile: Path | None = None
    """If None, the ``Dockerfile`` of the project."""
    build_args: tuple[str, ...] = ()
    """Each one is ``NAME=value``."""
    network: str | None = None
    """Docker's ``--network`` for the steps; if None, the engine's default."""


def find_project(given: str) -> Project:
    """Return the project of an installed id, or in a folder.

    Raises:
        UserError: If there is none, or it was installed without its folder.
    """
    folder = Path(given)
    if folder.is_dir():
        return Project(folder.resolve(), tuple(_ids_in(folder)))
    if folder.is_file() or given.startswith((".", "/", "~")):
        raise UserError(f"{given}: no such folder exists: give an id or a project folder")
    found = registry.find("environments", given)
    if not ID_PATTERN.match(found.key):
        raise UserError(f"{given} is not a registered environment: give an id or a project folder")
    return Project(_source_of(found.plugin.distribution, given), (found.key,))


def build_image(project: Project, build: Build, notify: Callable[[str], None]) -> tuple[str, ...]:
    """Build an image, and return its names.

    Args:
        project: The project.
        build: The options.
        notify: Receives each line of progress.

    Raises:
        UserError: If there is no Docker engine or no Dockerfile, or a step of it fails.
    """
    tags = build.tags or tuple(image_of(env_id) for env_id in project.ids)
    if not tags:
        raise UserError(
            f"{project.folder}: no {MANIFEST_NAME} in it defines an environment: give a --tag"
        )
    dockerfile = build.dockerfile or project.folder / "Dockerfile"
    if not dockerfile.is_file():
        raise UserError(
            f"{dockerfile}: there is no such file: write a Dockerfile that installs the project "
            "(`rollart new-env` creates one), or set another one with --file"
        )
    docker = _docker()
    argv = [docker, "build", "--force-rm", "--file", str(dockerfile)]
    argv += [word for tag in tags for word in ("--tag", tag)]
    argv += [word for arg in build.build_args for word in ("--build-arg", arg)]
    argv += ["--network", build.network] if build.network else []
    _run([*argv, str(project.folder)], dockerfile, notify)
    return tags


def build(
    target: Annotated[
        str,
        typer.Argument(
            metavar="ID|PATH", help="The id of an installed environment, or a project folder."
        ),
    ],
    tag: Annotated[
        list[str] | None, typer.Option(help="Name of the image. Default: derived from the id.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="The Dockerfile. Default: the one in the project.")
    ] = None,
    build_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A value for an ARG of the Dockerfile, such as BASE=..."
        ),
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="The Docker network for the build steps, such as none.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object. Progress goes to stderr."),
    ] = False,
) -> None:
    """Build an environment's image from the Dockerfile in its project."""
    project = find_project(target)
    how = Build(tuple(tag or ()), file, tuple(build_arg or ()), network)
    tags = build_image(project, how, lambda line: typer.echo(line, err=as_json))
    if as_json:
        print_json({"images": list(tags), "folder": str(project.folder), "ids": list(project.ids)})
        return
    typer.echo(f"Built {', '.join(tags)}. To use it: env: {{id: ..., isolation: docker}}")


def _docker() -> str:
    docker = shutil.which("docker")
    if docker is None:
        raise UserError("docker is not installed: install Docker (Debian: apt install docker.io)")
    try:
        done = subprocess.run(
            [docker, "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise UserError(f"the Docker engine does not answer within {_PROBE_S:g} s") from e
    if done.returncode:
        where = os.environ.get("DOCKER_HOST") or "the default socket"
        raise UserError(
            f"no Docker engine answers at {where}: start it, or set DOCKER_HOST "
            f"({first_line(done.stderr)})"
        )
    return docker


def _run(argv: Sequence[str], dockerfile: Path, notify: Callable[[str], None]) -> None:
    env = {**os.environ, "BUILDKIT_PROGRESS": "plain"}
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=env,
    )
    last: deque[str] = deque(maxlen=_LAST_LINES)
    step = ""
    assert process.stdout is not None
    try:
        with process.stdout:
            for coloured in process.stdout:
                line = _COLOUR.sub("", coloured)
                step = line.strip() if line.startswith(("Step ", "#")) else step
                last.append(line.rstrip())
                notify(line.rstrip())
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.wait():
        said = "\n".join(f"  {line}" for line in last if line)
        raise UserError(f"{dockerfile}: the build failed at {step or 'its start'}:\n{said}")


def _ids_in(folder: Path) -> list[str]:
    """Return the ids of the environments in a project's manifests."""
    found: list[str] = []
    places = (f"*/{MANIFEST_NAME}", f"src/*/{MANIFEST_NAME}")
    for path in sorted(path for place in places for path in folder.glob(place)):
        manifest = parse_manifest(path.read_text(encoding="utf-8"), str(path))
        found += [spec.id for spec in manifest.specs.get("environments", ())]
    return found


def _source_of(name: str, given: str) -> Path:
    """Return the folder from which a distribution was installed, if pip recorded one."""
    try:
        text = distribution(name).read_text("direct_url.json")
    except (PackageNotFoundError, ValueError):
        text = None
    url = urlsplit(str(json.loads(text or "{}").get("url", "")))
    folder = Path(unquote(url.path))
    if url.scheme != "file" or not folder.is_dir():
        raise PluginError(
            f"{given} is from {name}, which was not installed from a local folder: give the folder "
            "of its project (git clone it, or unpack its sdist)"
        )
    return folder
