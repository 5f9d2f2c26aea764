import hashlib
import hmac
import json
from types import SimpleNamespace

import pytest

from rollart_envs.swe.logs import (
    READERS,
    MarkersMissing,
    between_markers,
    framework_of,
    marked,
    read_pytest,
    read_pytest_options,
    read_sympy,
    read_unittest,
)
from rollart_envs.swe.repair_judge import ReportError, grade, read_report
from rollart_envs.swe.report_plugin import signed_text, status_of

PYTEST = """\
============================= test session starts ==============================
t.py .Fsx                                                                 [100%]
==================================== PASSES ====================================
PASSED t.py::test_b
PASSED t.py::test_never_ran
=========================== short test summary info ============================
\x1b[32mPASSED\x1b[0m t.py::test_a
PASSED t.py::test_x[*arg, **kwargs]
SKIPPED [1] t.py:3: why not
XFAIL t.py::test_c - later
ERROR t.py::test_d - fixture
FAILED t.py::test_b - assert 1 == 2
========================= 1 failed, 2 passed in 0.01s ==========================
"""


def test_pytest_passes_count_in_the_summary_only_and_a_failure_stays():
    assert read_pytest(PYTEST) == {
        "t.py::test_a": "PASSED",
        "t.py::test_x[*arg,": "PASSED",
        "[1]": "SKIPPED",
        "t.py::test_c": "XFAIL",
        "t.py::test_d": "ERROR",
        "t.py::test_b": "FAILED",
    }
    forged = PYTEST + "=== short test summary info ===\nPASSED t.py::test_b\n"
    assert read_pytest(forged)["t.py::test_b"] == "FAILED"


def test_pytest_without_a_summary_is_read_line_by_line():
    log = "t.py::test_a PASSED [ 50%]\nt.py::test_b FAILED\nt.py::test_c SKIPPED (why) [ 99%]\n"
    assert read_pytest(log + "PASSED t.py::test_b\n") == {
        "t.py::test_a": "PASSED",
        "t.py::test_b": "FAILED",
        "t.py::test_c": "SKIPPED",
    }


def test_options_that_are_paths_are_shortened():
    log = "PASSED t.py::t[/tmp/x/y]\nPASSED t.py::t[//host/y]\nPASSED t.py::t[/*/y]\nFAILED u"
    assert list(read_pytest_options(log)) == [
        "t.py::t[/y]",
        "t.py::t[//host/y]",
        "t.py::t[/*/y]",
        "u",
    ]


def test_unittest_and_django():
    log = """\
test_a (app.tests.A) ... ok
Docstring of a test ... ok
test_b (app.tests.A) ... skipped 'no database'
test_c (app.tests.A) ... FAIL
test_d (app.tests.A) ... Internal Server Error: /x/
ok
test_e (app.tests.A) ... expected failure
test_f (app.tests.A) ... test_g (app.tests.A) ... ok
Applying sites.0002_x...test_h (app.tests.A) ... ok
test_i (app.tests.A) ... ok
test_c (app.tests.A) ... ok
======
ERROR: test_i (app.tests.A) (case=1)
"""
    statuses = read_unittest(log)
    cls = "(app.tests.A)"
    assert statuses["Docstring of a test"] == "PASSED"
    got = {name: statuses.get(f"test_{name} {cls}") for name in "abcdeghi"}
    assert got == {
        "a": "PASSED",
        "b": "SKIPPED",
        "c": "FAILED",
        "d": "PASSED",
        "e": "XFAIL",
        "g": "PASSED",
        "h": "PASSED",
        "i": "ERROR",
    }


def test_sympy():
    log = """\
sympy/core/tests/test_a.py[5]
test_a ok
test_b F
test_c E
test_d f
test_e ok                                                     [FAIL]
________________ sympy/core/tests/test_a.py:test_f ________________
test_f ok
"""
    assert read_sympy(log) == {
        "test_a": "PASSED",
        "test_b": "FAILED",
        "test_c": "ERROR",
        "test_d": "XFAIL",
        "test_e": "PASSED",
        "test_f": "FAILED",
    }


def test_every_repository_has_a_reader():
    assert framework_of("django/django") == "unittest"
    assert framework_of("acme/unknown") == "pytest"
    assert {framework_of(r) for r in ("sympy/sympy", "matplotlib/matplotlib")} <= set(READERS)


def test_only_what_stands_between_the_markers_counts():
    start, _, end = [
        line.removeprefix("echo ").strip("'") for line in marked("x", "n1").splitlines()
    ]
    assert between_markers(f"a\n{start}\nb\n{end}\nc", "n1") == "b"
    for log in ("b", f"{start}\nb", f"{end}\n{start}", f"{start}\n{start}\n{end}"):
        with pytest.raises(MarkersMissing):
            between_markers(log, "n1")
    with pytest.raises(MarkersMissing):
        between_markers(f"{start}\nb\n{end}", "n2")


@pytest.mark.parametrize(
    ("statuses", "resolution"),
    [
        ({"f": "PASSED", "g": "XFAIL", "p": "PASSED"}, "full"),
        ({"f": "PASSED", "g": "FAILED", "p": "PASSED"}, "partial"),
        ({"f": "PASSED", "g": "SKIPPED", "p": "PASSED"}, "partial"),
        ({"f": "PASSED", "g": "XPASS", "p": "PASSED"}, "partial"),
        ({"f": "PASSED", "p": "PASSED"}, "partial"),
        ({"p": "PASSED"}, "none"),
        ({"f": "PASSED", "g": "PASSED"}, "none"),
        ({"f": "PASSED", "g": "PASSED", "p": "SKIPPED"}, "none"),
        ({}, "none"),
    ],
)
def test_resolution(statuses, resolution):
    result = grade(statuses, fail_to_pass=["f", "g"], pass_to_pass=["p"])
    assert (result.resolution, result.reward) == (resolution, float(resolution == "full"))


def test_cut_ids_stand_for_all_their_tests_and_the_worst_counts():
    expected = {"fail_to_pass": ["t.py::t[*arg"], "pass_to_pass": ["t.py::t[b"]}
    ran = {"t.py::t[*arg x]": "PASSED", "t.py::t[b c]": "PASSED", "t.py::t[b d]": "PASSED"}
    assert grade(ran, **expected).resolution == "full"
    ran["t.py::t[b d]"] = "FAILED"
    assert grade(ran, **expected).failed == ("t.py::t[b",)
    whole = grade(ran, fail_to_pass=["t.py::t[b c]"], pass_to_pass=[])
    assert whole.resolution == "full"


def test_reports_ids_are_changed_as_the_frameworks_log_reader_does():
    ran = {"t.py::t[/tmp/1/y]": "PASSED", "t.py::u[MouseButton.LEFT]": "PASSED"}
    kinds = {"pytest-options": "t.py::t[/y]", "matplotlib": "t.py::u[1]"}
    for framework, test in kinds.items():
        good = grade(ran, fail_to_pass=[test], pass_to_pass=[], framework=framework)
        assert good.resolution == "full"
        assert grade(ran, fail_to_pass=[test], pass_to_pass=[]).resolution == "none"


def test_ids_that_name_no_test_are_left_out_and_named():
    result = grade({"t.py::f": "PASSED"}, fail_to_pass=["t.py::f"], pass_to_pass=["[", "[100%]--"])
    assert (result.resolution, result.left_out) == ("full", ("[", "[100%]--"))
    assert grade({}, fail_to_pass=["["], pass_to_pass=[]).resolution == "none"


@pytest.mark.parametrize(
    ("when", "outcome", "xfail", "status"),
    [
        ("call", "passed", False, "PASSED"),
        ("call", "passed", True, "XPASS"),
        ("call", "failed", False, "FAILED"),
        ("call", "skipped", True, "XFAIL"),
        ("setup", "skipped", False, "SKIPPED"),
        ("setup", "failed", False, "ERROR"),
        ("teardown", "failed", False, "ERROR"),
        ("teardown", "passed", False, None),
        ("call", "rerun", False, None),
    ],
)
def test_status_of_a_phase(when, outcome, xfail, status):
    report = SimpleNamespace(
        when=when, **{o: o == outcome for o in ("passed", "failed", "skipped")}
    )
    if xfail:
        report.wasxfail = ""
    assert status_of(report) == status


def signed(records, nonce="n"):
    lines = []
    for number, record in enumerate(records):
        record = {"n": number, **record}
        mac = hmac.new(nonce.encode(), signed_text(record), hashlib.sha256).hexdigest()
        lines.append(json.dumps({**record, "mac": mac}).encode())
    return lines


GOOD = signed([{"id": "t::a", "status": "PASSED"}, {"id": "t::b", "status": "FAILED"}, {"end": 1}])


def test_a_whole_report_is_read():
    assert read_report(b"\n".join(GOOD), "n") == {"t::a": "PASSED", "t::b": "FAILED"}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "no end"),
        (GOOD[:2], "no end"),
        ([GOOD[0], *GOOD[2:]], "out of its order"),
        ([GOOD[1], GOOD[0], GOOD[2]], "out of its order"),
        ([GOOD[0], GOOD[1].replace(b"FAILED", b"PASSED"), GOOD[2]], "not signed"),
        ([*GOOD, b"PASSED t::b"], "not the plugin's"),
        ([*GOOD, *GOOD[2:]], "out of its order"),
        (signed([{"end": 0}], nonce="other"), "not signed"),
        (signed([{"end": 2}]), "code 2"),
        (signed([{"id": "t::a", "status": "GOOD"}, {"end": 0}]), "GOOD"),
    ],
)
def test_a_report_that_was_touched_proves_nothing(lines, why):
    with pytest.raises(ReportError, match=why):
        read_report(b"\n".join(lines), "n")
