"""docs/benchmarks.md shows every row of the committed results, and says why a mark was missed."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rollart_bench.rows import result, row


@pytest.fixture(scope="module")
def generator(repo_root: Path) -> Mapping[str, Any]:
    return runpy.run_path(str(repo_root / "docs/benchmarks.py"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "benchmarks/missed.toml").touch()
    folder = tmp_path / "plugins/rollart_bench"
    folder.mkdir(parents=True)
    (folder / "speed.py").write_text('"""`rollart bench speed`: ours compared with ``theirs``."""')
    return tmp_path


@pytest.fixture
def save(root: Path) -> Callable[..., None]:
    def save(
        *rows: Mapping[str, object], command: str = "rollart bench speed", **more: Any
    ) -> None:
        found = {"command": command, "date": "2026-01-02", **result("speed", rows, **more)}
        (root / "benchmarks/results/speed.json").write_text(json.dumps(found))

    return save


FAST = row("a | b", 3.0, 1.0, "theirs", "steps/s", ratios=[2.0, 3.0, 4.0], mark=2.0)
SLOW = row("c", 1.0, 2.0, "theirs", "steps/s", ratios=[0.5], mark=1.0)
ALONE = row("d", 1234.5, None, None, "bytes")


def test_the_page_and_its_pictures_are_up_to_date(
    generator: Mapping[str, Any], repo_root: Path
) -> None:
    written = generator["pages"](repo_root)
    names = {str(p.relative_to(repo_root)) for p in repo_root.glob("docs/pictures/bench-*.svg")}
    assert names | {"docs/benchmarks.md"} == set(written), "run `python docs/benchmarks.py`"
    for name, text in written.items():
        assert (repo_root / name).read_text(encoding="utf-8") == text, (
            f"{name} is out of date: run `python docs/benchmarks.py`"
        )


def test_a_page_has_every_row_with_ratio_peer_and_mark(
    generator: Mapping[str, Any], root: Path, save: Callable[..., None]
) -> None:
    save(FAST, ALONE, skipped_cases={"e": "theirs is not installed"})
    written = generator["pages"](root)
    page = written["docs/benchmarks.md"]
    assert "| a \\| b | 3 | 1 (theirs) | steps/s | 2, 3, 4 | 2 | yes |" in page
    assert "| d | 1,234 |  | bytes |  |  |  |" in page
    assert "Ours compared with `theirs`." in page
    assert "    rollart bench speed\n" in page
    assert "Not measured:\n\n- e: theirs is not installed" in page
    picture = ElementTree.fromstring(written["docs/pictures/bench-speed.svg"])
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert "a | b" in texts
    assert "d" not in texts


def test_a_missed_mark_needs_a_reason_and_shows_it(
    generator: Mapping[str, Any], root: Path, save: Callable[..., None]
) -> None:
    save(FAST, SLOW)
    with pytest.raises(generator["InvalidResults"], match=r"\[speed\] needs reasons for \['c'\]"):
        generator["pages"](root)
    (root / "benchmarks/missed.toml").write_text('[speed]\nc = "the peer is written in C"\n')
    page = generator["pages"](root)["docs/benchmarks.md"]
    assert "| c | 1 | 2 (theirs) | steps/s | 0.5, 0.5, 0.5 | 1 | **no** |" in page
    assert "Missed:\n\n- c: the peer is written in C" in page


def test_a_reason_without_a_missed_mark_is_an_error(
    generator: Mapping[str, Any], root: Path, save: Callable[..., None]
) -> None:
    save(FAST)
    for text, said in (("[speed]\n'a | b' = 'why'", "not for"), ("[gone]\nx = 'y'", "gone")):
        (root / "benchmarks/missed.toml").write_text(text)
        with pytest.raises(generator["InvalidResults"], match=said):
            generator["pages"](root)


def test_results_of_the_short_form_are_not_published(
    generator: Mapping[str, Any], root: Path, save: Callable[..., None]
) -> None:
    save(FAST, command="rollart bench speed short=true")
    with pytest.raises(generator["InvalidResults"], match="short form"):
        generator["pages"](root)
