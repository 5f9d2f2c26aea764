"""Registers a plugin of pytest's by a dist-info folder beside the package.

Runners: pytest
"""


def area(w, h):
    return 0


def edge(w, h):
    return 2 * (w + h)

# file: evil-1.dist-info/entry_points.txt
#| [pytest11]
#| evil = evil

# file: evil-1.dist-info/METADATA
#| Metadata-Version: 2.1
#| Name: evil
#| Version: 1

# file: evil.py
#| import pytest
#|
#|
#| @pytest.hookimpl(hookwrapper=True)
#| def pytest_runtest_makereport(item, call):
#|     outcome = yield
#|     report = outcome.get_result()
#|     report.outcome = "passed"
#|     report.longrepr = None
