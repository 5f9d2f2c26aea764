"""Names from before the source was laid out anew: each leads to the same object, with a warning."""

import importlib
import importlib.util
import sys
import warnings
from types import ModuleType

import pytest

from rollart_core.plugins.old_names import REMOVED_IN, OldNames, old_members, old_modules

MEMBERS = [(module, old) for module, names in old_members().items() for old in names]


def new_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        if (e.name or "").startswith("rollart_"):
            raise
        pytest.skip(f"{e.name} is not installed here")


@pytest.mark.parametrize("old", old_modules())
def test_an_old_module_holds_what_the_new_one_holds(old: str, monkeypatch) -> None:
    new = new_module(old_modules()[old])
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"{old} is now {new.__name__}; .*{REMOVED_IN}"):
        found = importlib.import_module(old)
    assert {n for n in vars(new) if getattr(found, n, None) is not vars(new)[n]} <= OF_MODULES
    with pytest.raises(AttributeError, match=f"'?{new.__name__}'? has no attribute 'nothing'"):
        found.nothing  # noqa: B018


OF_MODULES = {f"__{n}__" for n in ("name", "doc", "package", "loader", "spec", "path", "file")} | {
    *("__cached__", "__builtins__", "__getattr__", "__dir__", "__annotations__")
}
"""What each module has of its own."""


@pytest.mark.parametrize(("module", "old"), MEMBERS)
def test_an_old_name_in_a_module_is_the_new_object(module: str, old: str) -> None:
    where, _, name = old_members()[module][old].rpartition(":")
    new = getattr(new_module(where or module), name)
    by_module = {new: old for old, new in old_modules().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        where = importlib.import_module(by_module.get(module, module))
        assert getattr(where, old) is new


def test_modules_that_are_packages_now_hold_what_they_held() -> None:
    with pytest.warns(DeprecationWarning, match=r"rollart_core.config.RunConfig is now"):
        from rollart_core.config import RunConfig
    assert RunConfig is new_module("rollart_core.config.run").RunConfig
    with pytest.raises(ImportError, match="nothing"):
        from rollart_core.config import nothing  # noqa: F401


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # packages are imported to look inside
def test_no_old_name_hides_a_module() -> None:
    specs = [importlib.util.find_spec(old) for old in old_modules()]
    assert [s.name for s in specs if s and not isinstance(s.loader, OldNames)] == []
