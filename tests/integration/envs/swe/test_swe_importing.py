"""Rows of data sets become tasks of a folder, or are listed with the reason."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.sandbox_types import no_bubblewrap
from support.swe_repositories import SHAPES, git, pytest_packages, shapes_task, write

from rollart_core.errors import SandboxFailure, UserError
from rollart_core.rollout import loop
from rollart_envs.swe import environment, official_rows
from rollart_envs.swe.harness import SetUp
from rollart_envs.swe.import_rows import Imported, ImportOrder, import_tasks
from rollart_envs.swe.mirror import Mirror
from rollart_envs.swe.reader import read_repair_tasks
from rollart_envs.swe.task_folder import TaskFolder
from rollart_envs.swe.validate import validate
from rollart_sandboxes.pool.source import sandbox_source

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
CONFIG = {"python": PYTHON, "test_cmd": "pytest -rA"}


@pytest.fixture
def sandboxes():
    if why := no_bubblewrap():
        pytest.skip(why)
    source = sandbox_source("bubblewrap")
    yield source
    loop.run(source.close())


@pytest.fixture
def installed(monkeypatch, tmp_path) -> list[dict[str, object]]:
    """Packages are copied from this environment; what was to be installed is recorded."""
    made: list[dict[str, object]] = []
    packages = pytest_packages(tmp_path / "packages")

    def install(site: Path, requirements, *, python, before, env=()) -> None:
        made.append({"site": site.name, "requirements": list(requirements), "before": before})
        if "too-old==1" in requirements:
            raise UserError("uv pip install too-old==1: no such release")
        site.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(packages, site)

    monkeypatch.setattr(environment, "install", install)
    return made


def imported(tmp_path: Path, rows: list[dict], sandboxes, **order) -> tuple[Imported, list[dict]]:
    file, folder = tmp_path / "rows.jsonl", TaskFolder(tmp_path / "out")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = {"mirror": tmp_path / "repos", **order}
    found = loop.run(
        import_tasks(ImportOrder(file, folder, **order), sandboxes, lambda what, share: None)
    )
    lines = folder.tasks.read_text().splitlines() if folder.tasks.is_file() else []
    return found, [json.loads(line) for line in lines]


def test_rows_that_run_become_sound_tasks_and_the_others_say_why_not(
    tmp_path, sandboxes, installed
):
    row = shapes_task(tmp_path / "repos", "pytest", version="1.0", install_config=CONFIG)
    bad = row["test_patch"].replace("same(area(2, 3), 6)", "same(area(2, 3), 5)")
    rows = [
        {**row, "instance_id": "good"},
        {**row, "instance_id": "gold-fails", "test_patch": bad},
        {**row, "instance_id": "no-commit", "base_commit": "0123456789"},
        {**row, "instance_id": "no-mirror", "repo": "acme/other"},
        {**row, "instance_id": "no-version", "version": "", "install_config": None},
        {**row, "instance_id": "no-facts", "install_config": None},
        {**row, "instance_id": "no-tests", "FAIL_TO_PASS": []},
        {**row, "instance_id": "old", "install_config": {**CONFIG, "pip_packages": ["too-old==1"]}},
        {**row, "instance_id": "no-python", "install_config": {**CONFIG, "python": "3.99"}},
        {**row, "instance_id": "set-up", "install_config": {**CONFIG, "pre_install": ["exit 3"]}},
        {**row, "instance_id": "good"},
    ]
    found, tasks = imported(tmp_path, rows, sandboxes)
    whys = {
        "gold-fails": "gold: 1 tests do not pass",
        "no-commit": "has no commit 0123456789",
        "no-mirror": "there is no repository acme/other in",
        "no-version": "field 'version': is missing",
        "no-facts": "it is not known how to set up acme/shapes 1.0: give the row an install_config",
        "no-tests": "field 'FAIL_TO_PASS': is empty",
        "old": "uv pip install too-old==1: no such release",
        "no-python": "no python3.99 on the PATH",
        "set-up": "a set-up command failed",
        "row 11": "good is in the file twice",
    }
    assert (found.num_rows, found.num_tasks, set(found.why_not)) == (11, 1, set(whys))
    for name, why in whys.items():
        assert why in found.why_not[name]
        assert "\n" not in found.why_not[name]
    assert [task["instance_id"] for task in tasks] == ["good"]
    report = [json.loads(r) for r in (tmp_path / "out/report.jsonl").read_text().splitlines()]
    assert {line["instance_id"]: line["why"] for line in report} == dict(found.why_not)


def test_the_folder_is_all_that_a_task_needs_and_has_no_history(tmp_path, sandboxes, installed):
    row = shapes_task(tmp_path / "repos", "pytest", version="1.0", install_config=CONFIG)
    _, (task,) = imported(tmp_path, [row], sandboxes)
    assert task["source_path"] == ["."]
    shutil.rmtree(tmp_path / "repos")
    moved = tmp_path / "moved"
    (tmp_path / "out").rename(moved)
    mirror = Mirror(moved / "repos/acme__shapes.git")
    assert mirror.git("rev-list", "--all").split() == [row["base_commit"]]
    verdicts = loop.run(validate(moved / "tasks.jsonl", sandboxes))
    assert [(v.gold, v.empty, v.why) for v in verdicts] == [("full", "none", "")]


def test_rows_are_imported_once_and_only_those_that_are_asked_for(tmp_path, sandboxes, installed):
    row = shapes_task(tmp_path / "repos", "pytest", version="1.0", install_config=CONFIG)
    rows = [{**row, "instance_id": name} for name in ("a-1", "a-2", "b-1")]
    found, tasks = imported(tmp_path, rows, sandboxes, only=("a-*",), is_validated=False)
    assert (found.num_rows, len(tasks), len(installed)) == (2, 2, 1)
    found, tasks = imported(tmp_path, rows, sandboxes, only=("acme/*",), is_validated=False)
    assert (found.num_tasks, len(tasks), len(installed)) == (3, 3, 1)
    with pytest.raises(UserError, match="no row matches z"):
        imported(tmp_path, rows, sandboxes, only=("z",))


def test_a_bug_of_swe_smith_is_put_in_and_its_tests_are_hidden(
    tmp_path, sandboxes, installed, monkeypatch
):
    row = shapes_task(tmp_path / "repos", "pytest")
    fixed = git(tmp_path / "repos/acme__shapes", "rev-parse", "HEAD").strip()
    source = Mirror(tmp_path / "repos/acme__shapes")
    bug = source.diff(fixed, str(row["base_commit"]), ("shapes/__init__.py",))
    smith = {
        **{name: row[name] for name in ("problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")},
        "instance_id": "acme__shapes.bug1",
        "repo": f"swesmith/acme__shapes.{fixed[:8]}",
        "patch": bug,
        "image_name": "swesmith.acme",
    }
    monkeypatch.setattr(official_rows, "_SMITH", SetUp(PYTHON))
    found, tasks = imported(tmp_path, [smith], sandboxes)
    assert found.why_not == {}
    (task,) = tasks
    tree = Mirror(tmp_path / "out/repos/acme__shapes.git")
    assert "tests/test_shapes.py" not in tree.files(task["base_commit"])
    assert (
        tree.read(task["base_commit"], "shapes/__init__.py")
        == SHAPES["shapes/__init__.py"].encode()
    )
    assert task["patch"].count("+    return w * h") == 1
    assert "def test_area" in task["test_patch"]


def test_a_row_without_a_mirror_needs_containers(tmp_path, sandboxes):
    row = {"instance_id": "a", "repo": "a/a"}
    with pytest.raises(UserError, match="give --mirror DIR with git repositories, or --sandbox"):
        imported(tmp_path, [row], sandboxes, mirror=None)


def test_the_base_commit_decides_which_pins_of_its_version_are_installed(
    tmp_path, sandboxes, installed
):
    row = shapes_task(tmp_path / "repos", "pytest", version="1.0")
    folder = tmp_path / "repos/acme__shapes"
    commits = []
    for allowed in ("a<2", "a>=2"):
        project = f'[project]\nname = "shapes"\nversion = "1"\ndependencies = ["{allowed}"]\n'
        write(folder, {"pyproject.toml": project})
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", "x")
        commits.append(git(folder, "rev-parse", "HEAD").strip())
    config = {**CONFIG, "pip_packages": ["a==2.1", "b==1"]}
    more = {"install_config": config, "environment_setup_commit": commits[1]}
    rows = [
        {**row, **more, "instance_id": name, "base_commit": commit}
        for name, commit in zip(("old", "new"), commits, strict=True)
    ]
    _, tasks = imported(tmp_path, rows, sandboxes, is_validated=False, jobs=1)
    assert [one["requirements"][1:] for one in installed] == [
        ["setuptools", "b==1", "pytest"],
        ["setuptools", "a==2.1", "b==1", "pytest"],
    ]
    assert len({tuple(task["python_path"]) for task in tasks}) == 2


class WithoutImages:
    """A source of sandboxes whose engine has no image."""

    def __init__(self, source) -> None:
        self._source, self.options = source, source.options
        self.give_back = source.give_back

    async def take(self, **needs):
        if "image" in needs:
            raise SandboxFailure(f"there is no image {needs['image']!r}", boundary="sandbox.start")
        return await self._source.take(**needs)


def test_a_row_whose_image_is_not_there_is_listed_and_the_others_go_on(
    tmp_path, sandboxes, installed
):
    row = shapes_task(tmp_path / "repos", "pytest", version="1.0", install_config=CONFIG)
    lost = {**row, "instance_id": "lost", "repo": "acme/other", "docker_image": "mine:1"}
    source = WithoutImages(sandboxes)
    found, tasks = imported(tmp_path, [lost, row], source, has_images=True)
    assert found.why_not == {"lost": "there is no image 'mine:1'"}
    assert [task["instance_id"] for task in tasks] == [row["instance_id"]]


def test_rows_with_images_are_written_for_containers(tmp_path, sandboxes):
    row = shapes_task(tmp_path / "repos", "pytest", version="1.0", docker_image="mine:1")
    options = {"mirror": None, "has_images": True, "is_validated": False}
    _, (task,) = imported(tmp_path, [row], sandboxes, **options)
    assert (task["image"], task["python"]) == ("mine:1", "/opt/miniconda3/envs/testbed/bin/python")
    assert task["test_command"] == "python -m pytest tests/test_shapes.py"
    (read,) = read_repair_tasks(tmp_path / "out/tasks.jsonl").tasks
    assert read.image == "mine:1"
