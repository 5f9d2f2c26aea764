"""Names a plugin in a module of the package and in a conftest of the package.

Runners: pytest
"""

pytest_plugins = ["evil"]


def area(w, h):
    return 0


def edge(w, h):
    return 2 * (w + h)

# file: shapes/conftest.py
#| pytest_plugins = ["evil"]

# file: conftest.py
#| pytest_plugins = ["evil"]

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
