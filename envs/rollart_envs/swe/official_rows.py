"""Rows of published data sets, with the field names of SWE-bench.

Takes: one row. Gives: an :class:`OfficialRow`. Never: reads a repository, or guesses a value that
the row does not have.

    data set         recognized by                    what differs
    SWE-bench        no other                         its image has a name derived from the id
    SWE-Gym          ``repo`` is one of its eleven    as SWE-bench, with other image names
    SWE-bench Pro    ``dockerhub_tag``                lower-case names, lists in Python's notation
    SWE-smith        ``repo`` begins with swesmith/   ``patch`` puts the bug in
    R2E-Gym          ``parsed_commit_content``        files before and after, tests as texts
    SWE-rebench      ``install_config``               its own set-up
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollart_envs.rows import Row, RowError
from rollart_envs.swe.harness import SetUp
from rollart_envs.swe.logs import read_pytest

DATA_SETS: Final = (
    *("SWE-bench (Lite, Verified)", "SWE-bench Pro", "SWE-Gym", "SWE-smith", "R2E-Gym"),
    "SWE-rebench",
)
_GYM: Final = frozenset(
    (
        *("getmoto/moto", "python/mypy", "iterative/dvc", "dask/dask", "modin-project/modin"),
        *("pydantic/pydantic", "conan-io/conan", "Project-MONAI/MONAI", "bokeh/bokeh"),
        *("facebookresearch/hydra", "pandas-dev/pandas"),
    )
)
_CONDA_PYTHON: Final = "/opt/miniconda3/envs/testbed/bin/python"
_SMITH: Final = SetUp("3.10", ("pytest",))
_R2E_TESTS: Final = "r2e_tests"
_KEPT: Final = (
    *("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch", "version"),
    *("FAIL_TO_PASS", "PASS_TO_PASS", "hints_text", "environment_setup_commit", "created_at"),
    *("test_command", "files", "framework", "gold_statuses", "setup", "source_path"),
)
"""Fields of SWE-bench, and those of RollArt that a row may have already."""


@dataclass(frozen=True, slots=True)
class OfficialRow:
    """A row, with what its data set says about its environment."""

    data_set: str
    row: Row
    """The fields of SWE-bench's format."""
    image: str = ""
    """The name of its container image."""
    image_fields: Row = ()  # type: ignore[assignment]
    """Fields of a row that uses the image."""
    set_up: SetUp | None = None
    """Its own set-up."""
    bug: str = ""
    """A patch that puts the bug into the base commit, and is the gold patch in reverse; empty: the
    base commit has the bug."""


def official_row(row: Row) -> OfficialRow:
    """Return a row of any of the data sets.

    Raises:
        RowError: If a field is missing, or the row cannot be used; the message has the reason.
    """
    if "parsed_commit_content" in row:
        return _of_r2e(row)
    repo = str(row.get("repo") or "")
    if repo.startswith("swesmith/"):
        return _of_smith(row)
    if "dockerhub_tag" in row:
        return _of_pro(row)
    if isinstance(row.get("install_config"), Mapping | str):
        return _of_rebench(row)
    return _of_bench(row, "SWE-Gym" if repo in _GYM else "SWE-bench")


def _of_bench(row: Row, data_set: str) -> OfficialRow:
    between, owner = ("_s_", "xingyaoww") if data_set == "SWE-Gym" else ("_1776_", "swebench")
    name = str(row.get("instance_id") or "").lower().replace("__", between)
    found = _image(row) or f"{owner}/sweb.eval.x86_64.{name}:latest"
    return OfficialRow(data_set, _kept(row), found, {"python": _CONDA_PYTHON})


def _of_rebench(row: Row) -> OfficialRow:
    config = _loaded(row, "install_config")
    name = str(row.get("instance_id") or "").lower().replace("__", "_1776_")
    found = _image(row) or f"swerebench/sweb.eval.x86_64.{name}:latest"
    own = _set_up(config, str(row.get("requirements") or ""))
    kept = {**_kept(row), "test_command": own.test_command}
    return OfficialRow("SWE-rebench", kept, found, {"python": _CONDA_PYTHON}, own)


def _set_up(config: Mapping[str, Any], frozen: str) -> SetUp:
    """Return the set-up in an ``install_config``.

    Args:
        config: The field.
        frozen: The row's ``requirements``: the output of ``pip freeze`` in its environment.
    """
    pinned = tuple(line.strip() for line in frozen.splitlines() if "==" in line)
    extras = re.search(r"-e \.\[([^\]]+)\]", str(config.get("install") or ""))
    return SetUp(
        python=str(config.get("python") or "3.9"),
        requires=(*(pinned or _texts(config, "pip_packages")), "pytest"),
        extras=tuple(extras[1].replace(" ", "").split(",")) if extras and not pinned else (),
        files=() if pinned else _texts(config, "reqs_path"),
        test_command=str(config.get("test_cmd") or "pytest"),
        commands=tuple(c for c in _texts(config, "pre_install") if not _installs(c)),
    )


def _installs(command: str) -> bool:
    """Return whether a command needs the network or root: packages are installed otherwise."""
    return re.search(r"\b(apt|apt-get|pip|conda|curl|wget|sudo)\b", command) is not None


def _of_pro(row: Row) -> OfficialRow:
    language = str(row.get("repo_language") or "python").lower()
    if language != "python":
        raise RowError("repo_language", f"is {language}; only tests in Python can be run")
    kept = {
        **_kept(row),
        "FAIL_TO_PASS": _listed(row, "fail_to_pass"),
        "PASS_TO_PASS": _listed(row, "pass_to_pass"),
        "problem_statement": _joined(row, "problem_statement", "requirements", "interface"),
    }
    image = f"jefzda/sweap-images:{row['dockerhub_tag']}"
    return OfficialRow("SWE-bench Pro", kept, _image(row) or image, {"image_repo": "/app"})


def _of_smith(row: Row) -> OfficialRow:
    """Return a row whose ``patch`` puts a bug into a commit."""
    named = re.fullmatch(r"swesmith/(.+)\.([0-9a-f]{7,40})", str(row["repo"]))
    if named is None:
        raise RowError("repo", f"is {row['repo']!r}; it must be swesmith/OWNER__NAME.COMMIT")
    bug = str(row.get("patch") or "")
    kept = {
        **{name: value for name, value in _kept(row).items() if name != "patch"},
        "repo": named[1].replace("__", "/", 1),
        "base_commit": named[2],
        "version": row.get("version") or "0",
    }
    return OfficialRow("SWE-smith", kept, _image(row), set_up=_SMITH, bug=bug)


def _of_r2e(row: Row) -> OfficialRow:
    commit, ran = _loaded(row, "parsed_commit_content"), _loaded(row, "execution_result_content")
    before, after = (
        read_pytest(str(ran.get(f"{which}_commit_res_stdout") or "")) for which in ("old", "new")
    )
    passed = {test for test, status in after.items() if status == "PASSED"}
    kept_up = {test for test in passed if before.get(test) == "PASSED"}
    tests = zip(ran.get("test_file_names") or (), ran.get("test_file_codes") or (), strict=False)
    names = {f"{_R2E_TESTS}/{name}": str(code) for name, code in tests}
    patches = [
        _file_patch(
            _path(one), str(one.get("old_file_content") or ""), str(one["new_file_content"])
        )
        for one in commit.get("file_diffs") or ()
        if not _is_test(_path(one)) and one.get("new_file_content") is not None
    ]
    kept = {
        "instance_id": f"{row['repo_name']}-{row['commit_hash']}",
        "repo": row["repo_name"],
        "base_commit": commit.get("old_commit_hash"),
        "problem_statement": row.get("problem_statement"),
        "patch": "".join(patches),
        "test_patch": "".join(_file_patch(path, "", code) for path, code in names.items()),
        "FAIL_TO_PASS": sorted(passed - kept_up),
        "PASS_TO_PASS": sorted(kept_up),
        "version": "0",
        "test_command": " ".join(("python -m pytest", *names)),
    }
    fields = {"python": "/testbed/.venv/bin/python", "setup": [f"rm -rf /{_R2E_TESTS}"]}
    return OfficialRow("R2E-Gym", kept, _image(row), fields)


def _path(diff: Mapping[str, Any]) -> str:
    return str(diff["header"]["file"]["path"])


def _is_test(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name.startswith("test_") or name.endswith("_test.py") or "/tests/" in f"/{path}"


def _file_patch(path: str, before: str, after: str) -> str:
    """Return a patch of one file; an empty text is a file that does not exist."""
    if before in ("", "/dev/null"):
        head, names = "new file mode 100644\n", ("/dev/null", f"b/{path}")
        before = ""
    else:
        head, names = "", (f"a/{path}", f"b/{path}")
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), *names
    )
    text = "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
    return f"diff --git a/{path} b/{path}\n{head}{text}" if text else ""


def _kept(row: Row) -> dict[str, object]:
    return {name: row[name] for name in _KEPT if row.get(name) is not None}


def _image(row: Row) -> str:
    for name in ("image", "docker_image", "image_name"):
        if row.get(name):
            return str(row[name])
    return ""


def _loaded(row: Row, name: str) -> Mapping[str, Any]:
    value = row.get(name)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RowError(name, f"is no JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise RowError(name, "is missing" if value is None else "is not an object")
    return value


def _listed(row: Row, name: str) -> list[str]:
    """Return a list of texts, or one in JSON or in Python's notation."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise RowError(name, f"is {value[:60]!r}; it must be a list") from None
    if not isinstance(value, Sequence):
        raise RowError(name, "is missing" if value is None else "is not a list")
    return [str(item) for item in value]


def _joined(row: Row, *names: str) -> str:
    texts = [(name, str(row.get(name) or "").strip()) for name in names]
    first, *rest = [text if name == names[0] else f"## {name.title()}\n\n{text}"
                    for name, text in texts if text] or [""]  # fmt: skip
    return "\n\n".join((first, *rest))


def _texts(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = config.get(name) or ()
    if isinstance(value, str):
        return (value,)
    return tuple(str(item) for item in value)
