"""How to set up and test repositories: facts by repository and version.

Takes: a repository and a version. Gives: a :class:`SetUp`. Never: installs or runs anything.

The interpreters, pins and test commands are those of the published harness of SWE-bench. Everything
that is not pinned is installed as of the date of the version (``environment.as_of``). The reporter
needs Python 3.8, so that is the oldest one here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from packaging.version import InvalidVersion, Version

DJANGO: Final = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
SYMPY: Final = "bin/test -C --verbose"
_NEEDS_BUILD: Final = (
    "its C extensions have to be built for each commit: use the image of the row (--sandbox docker)"
)


@dataclass(frozen=True, slots=True)
class SetUp:
    """How to set up a repository at one version, and how to run its tests."""

    python: str = "3.9"
    """The version of the interpreter."""
    requires: tuple[str, ...] = ()
    """Requirements in addition to those of the project; those with ``==`` can be of any date."""
    extras: tuple[str, ...] = ()
    """Extras of the project."""
    files: tuple[str, ...] = ()
    """Requirement files in the repository; those that do not exist are ignored."""
    without: tuple[str, ...] = ()
    """Requirements in these files that need libraries of the system, and are not installed."""
    commands: tuple[str, ...] = ()
    """Shell commands that prepare each copy of the repository."""
    source_path: tuple[str, ...] = ()
    """Folders of the repository to import its packages from; empty: its root."""
    test_command: str = "python -m pytest"
    """The command before the test files; pytest's own arguments are in ``runs``."""
    hosts: tuple[str, ...] = ()
    """Hosts that its tests call."""
    why_not: str = ""
    """Why it can only be used with an image; empty if it can be installed."""


_PY_TEST: Final = SetUp("3.9", source_path=("src",))
_PIN_50: Final = (
    *("attrs==23.1.0", "more-itertools==10.1.0", "py==1.11.0", "packaging==23.1"),
    "importlib-metadata",
)
_PIN_70: Final = ("attrs==23.1.0", "iniconfig==2.0.0", "packaging==23.1", "pluggy==0.13.1")
_PIN_SEABORN: Final = (
    *("contourpy==1.1.0", "cycler==0.11.0", "fonttools==4.42.1", "importlib-resources==6.0.1"),
    *("kiwisolver==1.4.5", "matplotlib==3.7.2", "numpy==1.25.2", "packaging==23.1"),
    *("pillow==10.0.0", "pyparsing==3.0.9", "python-dateutil==2.8.2", "pytz==2023.3.post1"),
    *("scipy==1.11.2", "six==1.16.0", "tzdata==2023.1", "zipp==3.16.2", "pytest==7.4.0"),
)
_PIN_XARRAY: Final = (
    *("numpy==1.23.0", "packaging==23.1", "pandas==1.5.3", "pytest==7.4.0", "six==1.16.0"),
    *("python-dateutil==2.8.2", "pytz==2023.3", "scipy==1.11.1", "setuptools==68.0.0"),
    "dask==2022.8.1",
)
_PIN_FLASK: Final = ("setuptools==70.0.0", "Werkzeug==2.3.7", "itsdangerous==2.1.2", "pytest")
_FLASK: Final = SetUp(
    "3.11",
    (*_PIN_FLASK, "Jinja2==3.1.2", "click==8.1.3", "MarkupSafe==2.1.1"),
    files=("requirements/tests.txt",),
    source_path=("src",),
)
_SPHINX: Final = SetUp("3.9", extras=("test",))
_OLD_SPHINX: Final = replace(_SPHINX, requires=("Jinja2<3.0", "markupsafe<=2.0.1"))
_DJANGO: Final = SetUp(
    "3.8",
    files=("tests/requirements/py3.txt",),
    without=("pylibmc", "python-memcached", "pymemcache", "psycopg2", "mysqlclient"),
    test_command=DJANGO,
)
_PYLINT: Final = SetUp("3.9", files=("requirements_test_min.txt", "requirements_test.txt"))

_FACTS: Final[dict[str, Mapping[str, SetUp]]] = {
    "astropy/astropy": {"0": SetUp(why_not=_NEEDS_BUILD)},
    "django/django": {
        "0": SetUp(why_not="it needs a Python before 3.8: use the image of the row"),
        "3.0": _DJANGO,
        "4.1": replace(_DJANGO, python="3.9"),
        "5.0": replace(_DJANGO, python="3.11"),
    },
    "matplotlib/matplotlib": {"0": SetUp(why_not=_NEEDS_BUILD)},
    "mwaskom/seaborn": {
        "0": SetUp("3.9", (*_PIN_SEABORN, "pandas==1.3.5")),
        "0.12": SetUp("3.9", (*_PIN_SEABORN, "pandas==2.0.0")),
    },
    "pallets/flask": {
        "0": replace(
            _FLASK,
            python="3.9",
            requires=(*_PIN_FLASK, "Jinja2==3.0.1", "click==8.0.1", "MarkupSafe==2.1.3"),
        ),
        "2.1": replace(_FLASK, python="3.10"),
        "2.2": _FLASK,
    },
    "psf/requests": {"0": SetUp("3.9", ("pytest",), hosts=("httpbin.org",))},
    "pydata/xarray": {"0": SetUp("3.10", _PIN_XARRAY)},
    "pylint-dev/pylint": {"0": _PYLINT},
    "pytest-dev/pytest": {
        "0": replace(
            _PY_TEST,
            requires=(*_PIN_50, "pluggy==0.13.1", "atomicwrites==1.4.1", "six==1.16.0",
                      "setuptools==68.0.0", "wcwidth==0.2.6"),
        ),
        "5.3": replace(_PY_TEST, requires=(*_PIN_50, "pluggy==0.13.1", "wcwidth==0.2.6")),
        "6.0": replace(
            _PY_TEST,
            requires=(*_PIN_70, "py==1.11.0", "more-itertools==10.1.0", "toml==0.10.2"),
        ),
        "6.2": replace(_PY_TEST, requires=(*_PIN_70, "py==1.11.0", "toml==0.10.2")),
        "7.0": replace(_PY_TEST, requires=(*_PIN_70, "py==1.11.0", "tomli==2.0.1")),
        "7.4": replace(
            _PY_TEST,
            requires=("iniconfig==2.0.0", "packaging==23.1", "pluggy==1.3.0",
                      "exceptiongroup==1.1.3", "tomli==2.0.1"),
        ),
    },
    "scikit-learn/scikit-learn": {"0": SetUp(why_not=_NEEDS_BUILD)},
    "sphinx-doc/sphinx": {
        "0": _SPHINX,
        "3.0": _OLD_SPHINX,
        "5.0": replace(_SPHINX, requires=("Jinja2==3.0.3",)),
        "8.0": replace(_SPHINX, python="3.10"),
    },
    "sympy/sympy": {"0": SetUp("3.9", ("mpmath==1.3.0",), test_command=SYMPY)},
}  # fmt: skip
"""Repository -> the first version of each set-up."""


def set_up_of(repo: str, version: str) -> SetUp | None:
    """Return the set-up of a repository at a version; None if it is not known."""
    facts = _FACTS.get(repo)
    wanted = parsed(version)
    if facts is None or wanted is None:
        return None
    return [facts[first] for first in facts if Version(first) <= wanted][-1]


def parsed(version: str) -> Version | None:
    """Return a version; None if it is not one."""
    try:
        return Version(version)
    except InvalidVersion:
        return None
