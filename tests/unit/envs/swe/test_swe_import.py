import json
import subprocess
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from support.swe_repositories import git

from rollart_core.errors import UserError
from rollart_envs.rows import RowError
from rollart_envs.swe import environment
from rollart_envs.swe.harness import set_up_of
from rollart_envs.swe.import_rows import test_command as command_of
from rollart_envs.swe.mirror import Mirror
from rollart_envs.swe.official_rows import official_row
from rollart_envs.swe.package import (
    agrees,
    name_of,
    project_names,
    project_requirements,
    requirement_lines,
    version_commands,
    version_files,
)
from rollart_envs.swe.runs import test_run as run_of_tests
from rollart_envs.swe.task import repair_task
from rollart_envs.swe.taskbook import TaskBook

DIFF = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
TEST_DIFF = DIFF.replace("a.py", "tests/model_forms/tests.py")
BENCH = {
    "instance_id": "acme__a-1",
    "repo": "acme/a",
    "base_commit": "0123456789abcdef",
    "problem_statement": "x should be 2",
    "patch": DIFF,
    "test_patch": TEST_DIFF,
    "FAIL_TO_PASS": '["tests/t.py::test_x"]',
    "PASS_TO_PASS": "[]",
    "version": "1.2",
    "difficulty": "<15 min fix",
}


def test_a_row_of_swe_bench_keeps_its_fields_and_has_its_published_image():
    found = official_row(BENCH)
    assert (found.data_set, found.image) == (
        "SWE-bench",
        "swebench/sweb.eval.x86_64.acme_1776_a-1:latest",
    )
    assert repair_task(found.row) == repair_task(BENCH)
    assert official_row({**BENCH, "docker_image": "mine:1"}).image == "mine:1"
    gym = official_row({**BENCH, "repo": "dask/dask", "instance_id": "dask__dask-7"})
    assert (gym.data_set, gym.image) == (
        "SWE-Gym",
        "xingyaoww/sweb.eval.x86_64.dask_s_dask-7:latest",
    )


def test_names_and_lists_of_swe_bench_pro_are_read():
    lists = {"fail_to_pass": "['t.py::test_x']", "pass_to_pass": "['t.py::test_y']"}
    texts = {"requirements": "- x is 2", "interface": "x: int"}
    row = {k: v for k, v in BENCH.items() if not k.endswith("_TO_PASS")}
    found = official_row({**row, **lists, **texts, "dockerhub_tag": "tag1"})
    assert (found.data_set, found.image) == ("SWE-bench Pro", "jefzda/sweap-images:tag1")
    task = repair_task({**found.row, **found.image_fields})
    assert (task.fail_to_pass, task.pass_to_pass) == (("t.py::test_x",), ("t.py::test_y",))
    assert task.problem_statement.endswith("## Requirements\n\n- x is 2\n\n## Interface\n\nx: int")
    assert task.extra["image_repo"] == "/app"
    with pytest.raises(RowError, match=r"repo_language.*only tests in Python"):
        official_row({**row, **lists, "dockerhub_tag": "t", "repo_language": "go"})


def test_an_install_config_of_swe_rebench_is_a_set_up():
    config = {
        "python": "3.10",
        "install": "pip install -e .[dev, test]",
        "reqs_path": ["requirements/dev.txt"],
        "pip_packages": ["pytest-cov"],
        "pre_install": ["apt-get install -y gcc", "touch a.txt"],
        "test_cmd": "pytest -rA --tb=line",
    }
    own = official_row({**BENCH, "install_config": config}).set_up
    assert (own.python, own.extras, own.files) == (
        "3.10",
        ("dev", "test"),
        ("requirements/dev.txt",),
    )
    assert (own.requires, own.commands) == (("pytest-cov", "pytest"), ("touch a.txt",))
    frozen = {"install_config": json.dumps(config), "requirements": "numpy==1.26\n-e git+x\n"}
    own = official_row({**BENCH, **frozen}).set_up
    assert (own.requires, own.extras, own.files) == (("numpy==1.26", "pytest"), (), ())
    assert run_of_tests(repair_task(official_row({**BENCH, **frozen}).row)).is_signed


def test_the_patch_of_a_row_of_swe_smith_is_its_bug():
    row = {**BENCH, "repo": "swesmith/acme__a.0123abcd", "image_name": "swesmith.a", "patch": DIFF}
    found = official_row(row)
    assert (found.row["repo"], found.row["base_commit"]) == ("acme/a", "0123abcd")
    assert (found.bug, "patch" in found.row) == (DIFF, False)
    with pytest.raises(RowError, match=r"must be swesmith/OWNER__NAME\.COMMIT"):
        official_row({**row, "repo": "swesmith/acme"})


def test_a_row_of_r2e_gym_has_patches_from_its_files_and_ids_from_its_logs():
    before, after = "x = 1\ny = 1\n", "x = 2\ny = 1"
    change = {"header": {"file": {"path": "a.py"}}}
    test = {"header": {"file": {"path": "tests/test_a.py"}}}
    commit = {
        "old_commit_hash": "0123456789",
        "file_diffs": [
            {**change, "old_file_content": before, "new_file_content": after},
            {**test, "old_file_content": "", "new_file_content": "def test(): pass\n"},
        ],
    }
    ran = {
        "test_file_names": ["test_1.py"],
        "test_file_codes": ["def test_x():\n    assert True\n"],
        "old_commit_res_stdout": "FAILED r2e_tests/test_1.py::test_x\n"
        "PASSED r2e_tests/test_1.py::test_y\n",
        "new_commit_res_stdout": "PASSED r2e_tests/test_1.py::test_x\n"
        "PASSED r2e_tests/test_1.py::test_y\n",
    }
    summary = "=== short test summary info ===\n"
    ran = {k: summary + v if k.endswith("stdout") else v for k, v in ran.items()}
    row = {
        "repo_name": "a",
        "docker_image": "r2e/a:1",
        "commit_hash": "abc",
        "problem_statement": "x should be 2",
        "parsed_commit_content": json.dumps(commit),
        "execution_result_content": json.dumps(ran),
    }
    found = official_row(row)
    task = repair_task(found.row)
    assert (found.data_set, found.image, task.base_commit) == ("R2E-Gym", "r2e/a:1", "0123456789")
    assert task.fail_to_pass == ("r2e_tests/test_1.py::test_x",)
    assert task.pass_to_pass == ("r2e_tests/test_1.py::test_y",)
    assert "tests/test_a.py" not in task.patch
    assert "-x = 1\n-y = 1\n+x = 2\n+y = 1\n\\ No newline" in task.patch
    assert "--- /dev/null\n+++ b/r2e_tests/test_1.py\n" in task.test_patch


def test_a_version_has_the_set_up_of_the_last_one_that_is_known_before_it():
    assert set_up_of("django/django", "3.2").python == "3.8"
    assert set_up_of("django/django", "4.2").python == "3.9"
    assert set_up_of("pallets/flask", "2.10").python == "3.11"  # after 2.2, as a version
    assert set_up_of("django/django", "2.2").why_not
    assert set_up_of("acme/a", "1") is set_up_of("pallets/flask", "no version") is None


def test_django_and_sympy_get_the_runners_that_sign_their_results():
    for repo, version, runner in (
        ("django/django", "4.1", "django"),
        ("sympy/sympy", "1.9", "sympy"),
        ("pallets/flask", "2.0", "pytest"),
    ):
        ids = ["tests/t.py::test_x"] if runner == "pytest" else ["test_x (model_forms.tests.T)"]
        row = {**BENCH, "FAIL_TO_PASS": ids}
        task = repair_task({**row, "repo": repo, "version": version})
        command = command_of(set_up_of(repo, version), task)
        run = run_of_tests(repair_task({**row, "repo": repo, "test_command": command}))
        assert (run.runner, run.is_signed) == (runner, True)
        words = {"django": "model_forms.tests", "sympy": "tests/model_forms/tests.py"}
        assert command.endswith(words.get(runner, "tests/t.py"))


def test_requirement_files_are_read_with_those_they_include(tmp_path):
    (tmp_path / "min.txt").write_text("-e .\nattrs>=1  # why\n./local\ngit+https://x/y\n")
    (tmp_path / "all.txt").write_text("-r min.txt\n--pre\nNumPy [x] ~= 1.0 ; python_version>'3'\n")
    lines = list(requirement_lines(tmp_path / "all.txt"))
    assert lines == ["attrs>=1", "NumPy [x] ~= 1.0 ; python_version>'3'"]
    assert [name_of(line) for line in lines] == ["attrs", "numpy"]
    assert list(requirement_lines(tmp_path / "none.txt")) == []


def test_packages_are_as_of_a_date_at_which_the_python_was_usable():
    old, new = datetime(2014, 1, 1, tzinfo=UTC), datetime(2030, 1, 1, tzinfo=UTC)
    assert environment.as_of(old, "3.9") == datetime(2021, 10, 5, tzinfo=UTC)
    assert environment.as_of(new, "3.9") == new


def test_a_missing_python_and_requirements_that_cannot_be_installed_are_named(
    tmp_path, monkeypatch
):
    with pytest.raises(UserError, match=r"no python3\.99 on the PATH"):
        environment.interpreter("3.99")
    monkeypatch.setenv("UV_OFFLINE", "1")
    here = environment.Interpreter("3", environment.Path(environment.sys.executable), tmp_path)
    with pytest.raises(UserError, match=r"uv pip install no-such-package-at-all==1: .*no-such"):
        environment.install(
            tmp_path / "site", ["no-such-package-at-all==1"], python=here, before=None
        )
    assert not (tmp_path / "site").exists()


def test_a_copied_python_has_no_installed_packages(tmp_path):
    home = tmp_path / "home"
    for name in ("bin/python3.99", "lib/python3.99/os.py", "lib/python3.99/test/test_os.py"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("")
    (home / "lib/python3.99/site-packages/toolz").mkdir(parents=True)
    (home / "bin/python3.99").write_text('#!/bin/sh\ntouch "$5/$3"\n')  # -I -m compileall -q lib
    (home / "bin/python3.99").chmod(0o755)
    found = environment.Interpreter("3.99", home / "bin/python3.99", home).placed(tmp_path)
    assert found == {"python": "pythons/3.99/bin/python3.99", "python_home": "pythons/3.99"}
    copied = {p.name for p in (tmp_path / "pythons/3.99").rglob("*")}
    assert copied == {"bin", "lib", "python3.99", "os.py", "site-packages", "compileall"}
    system = environment.Interpreter("3.11", environment.Path("/usr/bin/x"), tmp_path)
    usr = replace(system, home=environment.Path("/usr"))
    assert usr.placed(tmp_path) == {"python": "/usr/bin/x"}


def test_a_commit_gets_the_newest_python_that_was_a_year_old(monkeypatch):
    def interpreter(version):
        if version not in ("3.9", "3.11", "3.13"):
            raise UserError("none")

    monkeypatch.setattr(environment, "interpreter", interpreter)
    for year, version in ((2010, "3.9"), (2022, "3.9"), (2024, "3.11"), (2026, "3.13")):
        assert environment.version_for(datetime(year, 6, 1, tzinfo=UTC)) == version


def test_the_names_of_a_project_are_those_of_its_files(tmp_path):
    (tmp_path / "setup.py").write_text('setup(\n    name="Tool_Z",\n    version="1")\n')
    assert project_names(tmp_path, "toolz-repo") == {"toolz-repo", "tool-z"}
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "toolz"\n')
    assert project_names(tmp_path, "toolz") == {"toolz", "tool-z"}


def test_version_files_that_a_build_writes_are_those_that_the_tree_does_not_have():
    tree = {
        "pyproject.toml": b'[tool.setuptools_scm]\nversion_file = "src/a/_version.py"\n'
        b'[tool.hatch.build.hooks.vcs]\nversion-file = "../out.py"\n',
        "setup.py": b"setup(use_scm_version={'write_to': 'a/_version.py'}, x={'write_to': 'b.py'})",
        "b.py": b"",
    }
    files = version_files(tree.get, "1.6.0rc1")
    assert list(files) == ["src/a/_version.py", "a/_version.py"]
    found: dict[str, object] = {}
    exec(files["a/_version.py"], found)
    assert (found["version"], found["__version__"]) == ("1.6.0rc1", "1.6.0rc1")
    assert found["version_tuple"] == found["__version_tuple__"] == (1, 6, 0)
    assert version_files({}.get, "1") == {}


def test_requirements_of_a_project_are_read_from_its_files(tmp_path):
    lines = ("file: x.txt", "a<2  # old", "b;python_version<'3.9'")
    config = "".join(f"\n    {line}" for line in lines)
    (tmp_path / "setup.cfg").write_text(f"[options]\ninstall_requires ={config}\n")
    assert project_requirements(tmp_path) == ["a<2", "b;python_version<'3.9'"]
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["a>=2"]\n')
    assert project_requirements(tmp_path) == ["a>=2"]
    (tmp_path / "pyproject.toml").unlink()
    (tmp_path / "setup.cfg").write_text("no section")
    assert project_requirements(tmp_path) == []


def test_a_pin_that_a_project_does_not_allow_does_not_agree():
    own = ["Astroid>=2.11.6,<=2.12.0-dev0", "tomli>=1; python_version<'3.11'"]
    assert not agrees("astroid==2.12.13", own)
    assert agrees("astroid==2.11.7", own)
    assert agrees("astroid==2.12.13", ["astroid>=2.12"])
    assert agrees("astroid~=2.12.13", own)
    assert agrees("pytest==7.2", own)
    assert agrees("astroid==2.12.13", ["astroid (>1; <2"])


def test_commands_write_version_files(tmp_path):
    files = {"it's.py": b"version = '1'\na = (1,)\n"}
    (command,) = version_commands(files)
    subprocess.run(("sh", "-c", command), cwd=tmp_path, check=True)
    assert (tmp_path / "it's.py").read_bytes() == files["it's.py"]


def test_the_version_of_a_commit_is_that_of_the_last_tag_before_it(tmp_path):
    git(tmp_path, "init", "-q", "--initial-branch=main")
    for tag in ("", "v1.2.0", "later"):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
        if tag:
            git(tmp_path, "tag", tag)
    mirror = Mirror(tmp_path)
    assert [mirror.version(name) for name in ("HEAD", "HEAD^", "HEAD^^")] == ["1.2.0", "1.2.0", "0"]


def test_the_split_all_has_every_task():
    book = TaskBook({str(n): n for n in range(20)})
    assert book.ids("all") == tuple(map(str, range(20)))
    assert sorted(book.ids("train") + book.ids("warm") + book.ids("test")) == sorted(book.tasks)
    with pytest.raises(ValueError, match="there are train, warm, test, all"):
        book.ids("dev")
