from __future__ import annotations

from pathlib import Path

import pytest

from rollart_bench import skip
from rollart_bench.options import Options
from rollart_bench.rows import result, row
from rollart_bench.skip import BenchSkipped, require
from rollart_core.cli.options import as_options
from rollart_core.errors import UserError


def options(*arguments: str) -> Options:
    return Options("engine", as_options(arguments))


@pytest.mark.parametrize("word", ["true", "True", "yes", "on", "1", "'true'", "'1'"])
def test_a_flag_that_is_true(word: str) -> None:
    assert options(f"short={word}").short is True


@pytest.mark.parametrize("word", ["false", "False", "no", "off", "0", "'false'", "'no'"])
def test_a_flag_that_is_false(word: str) -> None:
    assert options(f"short={word}").short is False
    assert options().short is False


@pytest.mark.parametrize("word", ["maybe", "2", "1.0", "", "[]", "null", "tru"])
def test_a_flag_that_is_neither(word: str) -> None:
    with pytest.raises(UserError, match=r"^bench engine: short=.*: must be true or false, such as"):
        options(f"short={word}")


def test_numbers() -> None:
    given = options("pairs=7", "rate=2", "wait=1e-3", "seed=0", "seconds='3'")
    assert given.integer("pairs", 3) == 7
    assert given.integer("rounds", 3) == 3
    assert given.integer("seed", 1, least=0) == 0
    assert given.number("rate", 1) == 2.0
    assert given.number("wait", 1) == 0.001
    assert given.number("seconds", 1) == 3.0
    assert given.number("other", 2.5) == 2.5


@pytest.mark.parametrize("value", ["many", "0", "-1", "1.5", "true", "", "[1]", "{a: 1}", ".nan"])
def test_what_is_no_whole_number(value: str) -> None:
    with pytest.raises(UserError) as e:
        options(f"pairs={value}").integer("pairs", 3)
    said = str(e.value)
    assert said.startswith("bench engine: pairs=")
    assert said.endswith(": must be a whole number, 1 or more, such as pairs=3")
    assert "\n" not in said


@pytest.mark.parametrize("value", ["soon", "0", "-1", "true", "", "[1]", ".nan", ".inf", "-.inf"])
def test_what_is_no_number_above_0(value: str) -> None:
    with pytest.raises(UserError, match=r"must be a number above 0, such as seconds=0\.5$"):
        options(f"seconds={value}").number("seconds", 0.5)


def test_numbers_without_measure() -> None:
    given = options("pairs=1.0e+30", "seconds=1.0e+30", "rate=1.0e+9")
    with pytest.raises(UserError, match="must be a whole number, 1000000000 at most, such as"):
        given.integer("pairs", 3)
    with pytest.raises(UserError, match="must be a number, 1000000000 at most, such as"):
        given.number("seconds", 3)
    assert given.number("rate", 1) == 1e9


def test_texts_and_paths() -> None:
    given = options("image=a:b", "number=3", "empty=")
    assert given.text("image", "") == "a:b"
    assert given.text("other", "default") == "default"
    assert given.path("image", "x") == Path("a:b")
    assert "image" in given
    assert "other" not in given
    for name in ("number", "empty"):
        with pytest.raises(UserError, match=f"{name}=.*must be a text, such as {name}=x"):
            given.text(name, "x")


@pytest.mark.parametrize("value", ["a,b", "a, b ,", "[a, b]", "[a, b, a]"])
def test_names(value: str) -> None:
    assert options(f"only={value}").names("only", ("a", "b", "c")) == ("a", "b")
    assert options(f"only={value}").names("only", ()) == ("a", "b")


def test_names_that_are_not_given() -> None:
    assert options().names("only", ("a", "b")) == ("a", "b")
    assert options().names("only", ("a", "b"), ("b",)) == ("b",)
    assert options().names("only", ()) == ()
    assert options().choice("runtime", ("inline", "ray"), "ray") == "ray"


@pytest.mark.parametrize("value", ["3", "", "','", "[1]", "[]", "true", "{a: 1}"])
def test_what_are_no_names(value: str) -> None:
    with pytest.raises(UserError, match=r"^bench engine: only=.*must be one of alpha, beta, such"):
        options(f"only={value}").names("only", ("alpha", "beta"))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    says = r"^bench engine: only: 'alpa' is none of alpha, beta\. Did you mean 'alpha'\?$"
    with pytest.raises(UserError, match=says):
        options("only=beta,alpa").names("only", ("alpha", "beta"))
    with pytest.raises(UserError, match="must be one of inline, ray"):
        options("runtime=inline,ray").choice("runtime", ("inline", "ray"), "inline")


def test_what_is_missing_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require("json", "pathlib", extra="train")
    says = r"^no_such_a, no_such_b are not installed: pip install 'rollart\[train\]'$"
    with pytest.raises(BenchSkipped, match=says):
        require("json", "no_such_a", "no_such_b", extra="train")
    monkeypatch.setattr(skip, "find_spec", lambda name: None)
    with pytest.raises(BenchSkipped, match=r"^json is not installed"):
        require("json", extra="train")


def test_a_result_names_what_was_skipped() -> None:
    one = row("a", 1.0, None, None, "s")
    told = result("x", [one], skipped_cases={"b": "no room"}, conditions={"threads": 1}, runs=[])
    assert list(told) == ["name", "machine", "rows", "skipped_cases", "runs"]
    assert told["skipped_cases"] == {"b": "no room"}
    assert told["machine"]["threads"] == 1  # type: ignore[index]
    assert result("x", [one])["skipped_cases"] == {}


def test_a_benchmark_of_which_nothing_is_left_is_skipped_as_a_whole() -> None:
    with pytest.raises(BenchSkipped, match=r"^a: no room; b: no engine$"):
        result("x", [], skipped_cases={"a": "no room", "b": "no engine"})
