"""Errors about paths that are not there name the nearest that is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollart_core.errors import did_you_mean
from rollart_core.suggestions import no_run, no_such_file


def _made(folder: Path, *files: str) -> None:
    for number, name in enumerate(files):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (number, number))


def test_a_config_beside_or_among_the_examples_is_named(tmp_path: Path):
    _made(tmp_path, "webshop.yaml", "webshop.txt", "examples/hello.yaml")
    said = no_such_file(tmp_path / "webshp.yaml")
    assert said.endswith(f"there is no such file. Did you mean '{tmp_path}/webshop.yaml'?")
    assert no_such_file(tmp_path / "hello.yaml").endswith(f"'{tmp_path}/examples/hello.yaml'?")
    assert no_such_file(tmp_path / "hello").endswith(f"'{tmp_path}/examples/hello.yaml'?")
    assert no_such_file(tmp_path / "zzz.yaml").endswith("there is no such file")


@pytest.mark.parametrize(
    ("word", "known", "said"),
    [
        ("nope", "openai", ""),
        ("ler", "lr", " Did you mean 'lr'?"),
        ("bog", "big", " Did you mean 'big'?"),
        ("webshp", "webshop", " Did you mean 'webshop'?"),
    ],
)
def test_half_of_another_word_is_not_near(word: str, known: str, said: str):
    assert did_you_mean(word, [known]) == said


def test_an_ending_that_all_have_makes_no_file_near(tmp_path: Path):
    _made(tmp_path, "bin.yaml")
    assert no_such_file(tmp_path / "missing.yaml").endswith("there is no such file")


def test_a_folder_that_is_not_there_is_said(tmp_path: Path):
    said = no_such_file(tmp_path / "exmples" / "hello.yaml")
    assert said.endswith(f"there is no such file, nor a folder {tmp_path}/exmples")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("runs", "The last run in it is {}/runs/hello-3"),
        ("runs/hello", "Did you mean '{}/runs/hello-4'?"),
        ("runs/helo-4", "Did you mean '{}/runs/hello-4'?"),
        ("hello-4", "Did you mean '{}/runs/hello-4'?"),
        ("runs/nothing", "it has no journal.db"),
    ],
)
def test_a_run_near_by_is_named(tmp_path: Path, given: str, named: str):
    _made(tmp_path / "runs", "hello-4/journal.db", "hello-3/journal.db", "hello-9/config.yaml")
    assert no_run(tmp_path / given, "journal.db").endswith(named.format(tmp_path))


def test_a_file_that_is_no_folder_is_no_run(tmp_path: Path):
    _made(tmp_path, "file")
    assert no_run(tmp_path / "file", "config.yaml").endswith("it has no config.yaml")
