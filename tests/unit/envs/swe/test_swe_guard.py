"""The quick comparison of the judge's guard finds all that its whole comparison finds."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollart_envs.swe import guard

SOURCE = """
class Base:
    def run(self): return 1
    @staticmethod
    def plain(): return 1
    @classmethod
    def of(cls): return 1
    @property
    def size(self): return 1

def check(value): return value
def other(*values): return 2
"""


@pytest.fixture
def module() -> Iterator[Any]:
    """A module that stands for the runner's."""
    made = types.ModuleType("rollart_watched")
    exec(SOURCE, vars(made))
    for value in vars(made)["Base"], vars(made)["check"], vars(made)["other"]:
        value.__module__ = made.__name__
    sys.modules[made.__name__] = made
    yield made
    sys.modules.pop("rollart_watched", None)


def parts() -> dict[Any, Any]:
    return guard.parts(lambda name: name == "rollart_watched")


def replace_module(m: Any) -> None:
    copy = types.ModuleType(m.__name__)
    vars(copy).update({**vars(m), "check": m.other})
    sys.modules[m.__name__] = copy


CHANGES: dict[str, Callable[[Any], None]] = {
    "a function": lambda m: setattr(m, "check", m.other),
    "the code of a function": lambda m: setattr(m.check, "__code__", m.other.__code__),
    "a class": lambda m: setattr(m, "Base", type("Base", (m.Base,), {"__module__": m.__name__})),
    "a method": lambda m: setattr(m.Base, "run", m.other),
    "the code of a method": lambda m: setattr(m.Base.run, "__code__", m.other.__code__),
    "a static method": lambda m: setattr(m.Base, "plain", staticmethod(m.other)),
    "the function in a static method": lambda m: vars(m.Base)["plain"].__init__(m.other),
    "the code in a static method": lambda m: setattr(
        vars(m.Base)["plain"].__func__, "__code__", m.other.__code__
    ),
    "the function in a class method": lambda m: vars(m.Base)["of"].__init__(m.other),
    "a property": lambda m: setattr(m.Base, "size", property(m.other)),
    "the function in a property": lambda m: vars(m.Base)["size"].__init__(m.other),
    "a function that is gone": lambda m: delattr(m, "check"),
    "a method that is gone": lambda m: delattr(m.Base, "run"),
    "the module of a class": lambda m: setattr(m.Base, "__module__", "elsewhere"),
    "the module": replace_module,
    "the module that is gone": lambda m: sys.modules.pop(m.__name__) and None,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_whatever_the_whole_comparison_finds_is_found(
    module: Any, change: Callable[[Any], None]
) -> None:
    before = parts()
    seen = guard.Seen(before)
    assert seen.is_same()
    change(module)
    assert parts() != before
    assert not seen.is_same()


def test_code_that_changes_during_a_comparison_is_not_taken_as_compared(module: Any) -> None:
    compared = parts()
    module.Base.run.__code__ = module.other.__code__
    with pytest.raises(ValueError, match=r"Base\.run was changed meanwhile"):
        guard.Seen(compared)


def test_objects_that_equal_everything_are_not_the_same(module: Any) -> None:
    class Equal:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    seen = guard.Seen(parts())
    module.check = Equal()
    assert not seen.is_same()


@pytest.mark.parametrize("name", ["a function", "the code of a function", "the module"])
def test_it_uses_the_builtins_from_before(module: Any, name: str) -> None:
    seen = guard.Seen(parts())
    CHANGES[name](module)
    names = ("all", "map", "len", "vars", "bool", "list", "getattr", "isinstance")
    vars(guard).update({name: lambda *values: True for name in names})
    try:
        assert not seen.is_same()
    finally:
        for name in names:
            del vars(guard)[name]


def test_a_file_that_pytest_could_not_rewrite_has_no_code():
    own = guard.Guard({"base": {}}, lambda why: None)
    assert own.known(None) is None
    assert not own.codes


def test_hooks_are_checked_again_if_one_has_other_code(module: Any) -> None:
    told: list[str] = []
    own = guard.Guard({"base": {"patched.py": ""}}, told.append)
    code = compile("def hook(): pass", f"{own.root}/patched.py", "exec")
    scope: dict[str, Any] = {}
    exec(code, scope)
    hooks = [("pytest_x", module.check)]
    own.expect_hooks(hooks)
    own.expect_hooks(hooks)
    assert told == []
    module.check.__code__ = scope["hook"].__code__
    own.expect_hooks(hooks)
    assert told == ["the patch has a hook of pytest's: pytest_x"]
