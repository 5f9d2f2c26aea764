"""The record of each test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.report import VARIABLE

pytest_plugins = ["pytester"]


def test_each_test_has_a_line(
    pytester: pytest.Pytester, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pytester.path / "report.jsonl"
    pytester.makeconftest(
        "from support import report\ndef pytest_configure(config):\n    report.register(config)"
    )
    pytester.makepyfile(
        """
        import pytest

        def test_good():
            sum(i for i in range(10**6))

        def test_late():
            raise TimeoutError("not there")

        def test_wrong_and_late(request):
            request.addfinalizer(lambda: (_ for _ in ()).throw(TimeoutError("late")))
            assert 1 == 2

        @pytest.mark.skip
        def test_skipped():
            pass
        """
    )
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setenv("PYTHONPATH", str(repo_root / "tests"))
    pytester.runpytest_subprocess("--disable-plugin-autoload")
    written = map(json.loads, path.read_text().splitlines())
    lines = {line["id"].partition("::")[2]: line for line in written}
    assert {name: line["outcome"] for name, line in lines.items()} == {
        "test_good": "passed",
        "test_late": "failed",
        "test_wrong_and_late": "failed",
        "test_skipped": "skipped",
    }
    assert lines["test_good"]["cpu_s"] > 0
    assert lines["test_late"]["may_retry"] is True
    assert "not there" in lines["test_late"]["reason"]
    assert lines["test_wrong_and_late"]["may_retry"] is False
