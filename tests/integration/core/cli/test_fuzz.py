"""Configs and command lines that make no sense: refused in words, never with a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rollart_core.cli import COMMANDS, main
from rollart_core.config.run import AsyncRun

BASE = "env: frozenlake\nmodel: {kind: new}\nstop: {batches: 2}\n"
MOST_FIGURE = 1e24
"""No number of a config may be larger."""


def _keys(schema: dict, node: dict, prefix: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the dotted keys of a JSON schema."""
    if len(prefix) > 3:
        return
    for inner in [node, *node.get("anyOf", ()), *node.get("oneOf", ())]:
        if "$ref" in inner:
            yield from _keys(schema, schema["$defs"][inner["$ref"].rpartition("/")[2]], prefix)
        for name, value in inner.get("properties", {}).items():
            yield ".".join((*prefix, name))
            yield from _keys(schema, value, (*prefix, name))


_SCHEMA = AsyncRun.model_json_schema()
KEYS = sorted({*_keys(_SCHEMA, _SCHEMA), "mode", "env.max_turns", "algorithm.kl_coef", "x.y"})
NUMBERS = ["1e30", "-1", "0", "3", "0.5", ".inf", "-.inf", ".nan", "1e400", "9" * 400, "9" * 5000]
WORDS = [
    "x" * 300,
    "null",
    "true",
    "''",
    "off",
    "!!int x",
    "!!timestamp x",
    "&a [*a]",
    "ray",
    "new",
]
values = st.one_of(
    st.sampled_from([*NUMBERS, *WORDS, "[" * 2000, "{a: {b: [1, .nan]}}", "[1, 2]", "{1: 2}"]),
    st.text(max_size=20),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
        max_leaves=6,
    ).map(json.dumps),
)
overrides = st.lists(st.tuples(st.sampled_from(KEYS), values).map("=".join), max_size=3)
lines = st.lists(st.tuples(st.sampled_from(KEYS), values).map(": ".join), max_size=3)
texts = st.one_of(lines.map(lambda more: BASE + "\n".join(more)), st.text(max_size=60))
odd = st.sampled_from(
    ["", "-", "--", "--json", "--x", "a/" * 2500, "/dev/zero", "/dev/null", "\x1b[31m", "=", "a=b"]
) | st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)
READERS = ["audit", "diagnose", "export", "plot", "list", "info", "run", "no-such-command"]


def _said(arguments: list[str]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command line that has to end by itself."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["rollart", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as left:
                return int(left.code or 0), out.getvalue(), err.getvalue()
    finally:
        sys.argv = before
    return 0, out.getvalue(), err.getvalue()


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _dry_run(text: str, given_overrides: list[str]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "x.yaml")
        path.write_text(text, encoding="utf-8", errors="replace")
        runs = f"runs_dir={folder}"
        code, out, err = _said(["run", str(path), *given_overrides, runs, "--dry-run", "--json"])
    event(f"exit status {code}")
    assert code in (0, 1, 2), (code, err)
    assert "Traceback" not in err
    if code:
        assert err.startswith(("Error: ", "Usage: ", "Warning: ")), err
        return
    config = json.loads(out)["config"]
    large = [n for n in _numbers(config) if not math.isfinite(n) or abs(n) > MOST_FIGURE]
    assert large == []
    assert len(config["name"]) <= 100


def _command_line(command: str, arguments: list[str]) -> None:
    # Only what reads: other commands would do what they are told.
    dry = ["--dry-run"] if command == "run" else []
    code, _, err = _said([command, *arguments, *dry])
    event(f"exit status {code}")
    assert code in (0, 1, 2), (code, err)
    assert "Traceback" not in err


def _settings(num_examples: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=num_examples, deadline=None, suppress_health_check=slow)


@_settings(20)
@given(texts, overrides)
def test_configs_are_refused_in_words(text: str, changed: list[str]) -> None:
    _dry_run(text, changed)


@_settings(25)
@given(st.sampled_from(READERS), st.lists(odd, max_size=4))
def test_command_lines_are_refused_in_words(command: str, arguments: list[str]) -> None:
    assert set(READERS[:-1]) <= set(COMMANDS)
    _command_line(command, arguments)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@_settings(3000)
@given(texts, overrides)
def test_thousands_of_configs_are_refused_in_words(text: str, changed: list[str]) -> None:
    _dry_run(text, changed)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@_settings(1500)
@given(st.sampled_from(READERS), st.lists(odd, max_size=4))
def test_thousands_of_command_lines_are_refused_in_words(
    command: str, arguments: list[str]
) -> None:
    _command_line(command, arguments)
