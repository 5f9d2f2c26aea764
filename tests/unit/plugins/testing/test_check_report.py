"""The verdict of a check, what may be asked of it, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from rollart_core.errors import UserError
from rollart_testing import CheckOutcome, cli
from rollart_testing.check.catalogue import AGENTS, PACKAGE, PARTS, STATIC, checked_only, checks_of
from rollart_testing.check.child import PART_CHECKS, check_part
from rollart_testing.check.report import Report, Result
from rollart_testing.check.run import FRESH, OFFLINE
from rollart_testing.check.static import CHECKS as STATIC_CHECKS
from rollart_testing.check.static import MAX_IMPORT_S
from rollart_testing.check.target import open_target
from rollart_testing.check.transcript import parting
from rollart_testing.env_checks import CHECKS, NEEDS
from rollart_testing.env_play import NUM_INSTANCES
from rollart_testing.semantic_checks import (
    FLOOR_SLACK,
    MIN_SECRET_CHARS,
    NUM_RANDOM,
    RANDOM_SHARE,
)

PASS, FAIL, SKIP = CheckOutcome.PASS, CheckOutcome.FAIL, CheckOutcome.SKIP


@pytest.mark.parametrize(
    "ends", ["def __init__(self): sys.exit('no licence')", "sys.exit('no licence')"]
)
def test_a_part_that_ends_the_process_fails_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    (tmp_path / "part_that_ends.py").write_text(f"import sys\nclass Ends:\n    {ends}\n")
    monkeypatch.syspath_prepend(tmp_path)
    (made,) = check_part("hardware_mappers", "part_that_ends:Ends", tmp_path)
    assert (made.name, made.outcome) == ("make", FAIL)
    assert made.reason == "SystemExit: no licence"


def report(*outcomes: tuple[str, CheckOutcome]) -> Report:
    return Report("x", "1", [Result(of, "runtime", "make", outcome) for of, outcome in outcomes])


@pytest.mark.parametrize(
    ("outcomes", "passed"),
    [
        ([("a", PASS)], True),
        ([("a", PASS), ("a", SKIP)], True),
        ([("a", PASS), ("b", PASS)], True),
        ([], False),
        ([("a", SKIP)], False),
        ([("a", PASS), ("a", FAIL)], False),
        ([("a", PASS), ("b", SKIP)], False),
    ],
)
def test_a_skip_is_no_pass(outcomes, passed):
    assert report(*outcomes).passed is passed


def test_a_report_in_json():
    assert report(("a", PASS), ("a", SKIP)).to_json() == {
        "subject": "x",
        "distribution": "",
        "version": "1",
        "passed": True,
        "counts": {"PASS": 1, "FAIL": 0, "SKIP": 1},
        "results": [
            {"id": "a", "group": "runtime", "name": "make", "outcome": "PASS", "reason": ""},
            {"id": "a", "group": "runtime", "name": "make", "outcome": "SKIP", "reason": ""},
        ],
    }


def test_the_catalogue_names_every_check():
    groups = PARTS["environments"]
    assert {*groups["runtime"], *groups["semantic"]} == {*CHECKS, FRESH, OFFLINE}
    assert tuple(STATIC_CHECKS) == STATIC
    assert {*PARTS} == {"environments", AGENTS, *PART_CHECKS}
    order = list(CHECKS)
    for name, needed in NEEDS.items():
        assert all(order.index(other) < order.index(name) for other in needed), name


def test_only_takes_groups_and_names():
    assert checked_only(["static,make", " reset "]) == ("static", "make", "reset")
    assert checks_of("rewards", ["semantic", "make"]) == [
        ("runtime", "make"),
        ("semantic", "score"),
        ("semantic", "same_request_same_score"),
        ("semantic", "examples"),
    ]
    with pytest.raises(UserError, match="Did you mean 'semantic'"):
        checked_only(["semantics"])


def test_what_is_no_target_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no wheel")
    (tmp_path / "acme-1-py3-none-any.whl").write_text("no zip")
    for given, why in {
        "frozenlak": "Did you mean 'frozenlake'",
        str(tmp_path): "holds no pyproject.toml",
        str(tmp_path / "notes.txt"): "an id, a project folder or a wheel",
        str(tmp_path / "acme-1-py3-none-any.whl"): "cannot be read as a wheel",
        str(tmp_path / "missing-1-py3-none-any.whl"): "no such file",
    }.items():
        with pytest.raises(UserError, match=why):
            open_target(given, tmp_path / "scratch")


def test_metadata_of_a_project_are_laid_out_as_a_build_would(tmp_path):
    folder, scratch = tmp_path / "x", tmp_path / "scratch"
    (folder / "lib" / "acme").mkdir(parents=True)
    (folder / "COPYING").write_text("all of it")
    scratch.mkdir()
    (folder / "pyproject.toml").write_text(
        """
        [project]
        name = "Acme.Things"
        license = {text = "MIT"}
        dependencies = ["rollart>=0.1"]
        dynamic = ["version"]
        [project.optional-dependencies]
        train = ["torch>=2; python_version < '4'"]
        [project.entry-points.rollart]
        things = "acme.hooks"
        [tool.setuptools.package-dir]
        "" = "lib"
        """
    )
    target = open_target(str(folder), scratch)
    assert target.dist is not None
    assert (target.name, target.version) == ("Acme.Things", "0+dynamic")
    assert target.entry_points == [("things", "acme.hooks")]
    assert list(target.paths) == [scratch, folder / "lib"]
    assert target.dist.requires == [
        "rollart>=0.1",
        "torch>=2 ; (python_version < '4') and extra == \"train\"",
    ]
    assert target.dist.metadata.get_all("License-File") == ["COPYING"]


@pytest.mark.parametrize("text", ["[project]", "project = 1", "]["])
def test_a_project_without_a_name_is_refused(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UserError, match=r"no \[project\] name|not TOML"):
        open_target(str(tmp_path), tmp_path)


def test_an_alias_is_filed_under_its_id(tmp_path):
    target = open_target("frozenlake", tmp_path)
    assert target.ids == [("environments", "toy/FrozenLake-v1")]
    assert target.is_core


def test_transcripts_part_where_they_differ():
    one = [{"what": "a", "steps": [{"observation": "1"}, {"observation": "2"}]}]
    two = [{"what": "a", "steps": [{"observation": "1"}, {"observation": "3"}]}]
    assert parting(one, one) is None
    assert parting(one, two) == "a, turn 1: observation 2 versus 3"
    assert parting(one, [{"what": "a", "steps": one[0]["steps"][:1]}])


def test_the_page_on_checks_has_a_heading_for_each(repo_root):
    page = (repo_root / "docs/reference/checks.md").read_text(encoding="utf-8")
    written: dict[str, list[str]] = {}
    group = ""
    for line in page.splitlines():
        if line.startswith("## "):
            group = line.removeprefix("## ")
        if line.startswith("### "):
            written.setdefault(group, []).append(line.strip("# `"))
    agents = dict.fromkeys(name for names in PARTS[AGENTS].values() for name in names)
    elsewhere = {name for names in PARTS["environments"].values() for name in names}
    assert written == {
        "static": list(STATIC),
        **{group: list(names) for group, names in PARTS["environments"].items()},
        "runtime": [*PACKAGE, *PARTS["environments"]["runtime"]],
        "agents": [name for name in agents if name not in elsewhere],
    }
    rows = dict(re.findall(r"^\| (\w+) \| (`.+`) \|$", page, flags=re.MULTILINE))
    assert {kind: re.findall(r"`(\w+)`", names) for kind, names in rows.items()} == {
        kind: [name for names in groups.values() for name in names]
        for kind, groups in PARTS.items()
        if kind not in ("environments", AGENTS)
    }


def test_the_page_on_checks_names_the_limits(repo_root):
    page = " ".join((repo_root / "docs/reference/checks.md").read_text(encoding="utf-8").split())
    for shown in (
        f"at most {MAX_IMPORT_S:g} s of CPU",
        f"Over {NUM_RANDOM} episodes, the mean reward of [random players]",
        f"is at most {RANDOM_SHARE:.0%} of the way from the lowest to the highest possible reward",
        f"{NUM_INSTANCES} instances",
    ):
        assert shown in page
    assert (FLOOR_SLACK, MIN_SECRET_CHARS) == (0.01, 4)


def test_the_verdict_names_the_package_of_an_id():
    assert Report("lean", "0.1.0", (), "acme-lean").title == "lean (acme-lean 0.1.0)"
    assert Report("acme-lean", "0.1.0", (), "acme-lean").title == "acme-lean 0.1.0"
    assert Report("a:B", "", ()).title == "a:B"


@pytest.mark.parametrize(
    ("distribution", "names", "is_said"),
    [
        ("acme-lean", ["make"], True),
        ("acme-lean", ["own_tests"], False),
        ("rollart", ["make"], False),
    ],
)
def test_a_check_of_an_id_says_that_its_packages_tests_did_not_run(
    distribution: str,
    names: list[str],
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = [Result("lean", "runtime", name, CheckOutcome.PASS) for name in names]
    report = Report("lean", "0.1.0", results, distribution)
    monkeypatch.setattr(cli, "run", lambda *args, **options: report)
    with pytest.raises(typer.Exit):
        cli.check_command("lean")
    out = capsys.readouterr().out
    assert f"lean ({distribution} 0.1.0) passed." in out
    assert ("The tests of its package did not run" in out) == is_said
