"""A small library with a history: features and fixes, each with tests, told as steps.

``write(folder)`` makes a git repository of it: a commit for each step, with notes and merges
between them, as a repository has that people work on.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """One commit."""

    module: str
    subject: str
    old: str
    """What becomes ``new``; empty: ``new`` is put at the end."""
    new: str
    test: str
    """Put at the end of the module's tests; empty: tests stay."""


def feature(module: str, subject: str, code: str, test: str) -> Step:
    return Step(module, subject, "", code, test)


STEPS = [
    feature(
        "text",
        "Shorten long texts",
        "def shorten(text, width):\n"
        "    if len(text) < width:\n"
        "        return text\n"
        "    return text[: width - 1] + '…'\n",
        "def test_shorten_cuts():\n    assert text.shorten('abcdef', 4) == 'abc…'\n",
    ),
    Step(
        "text",
        "A text that just fits is not cut",
        "    if len(text) < width:",
        "    if len(text) <= width:",
        "def test_shorten_leaves_what_fits():\n    assert text.shorten('abcd', 4) == 'abcd'\n",
    ),
    feature(
        "text",
        "Words of a title",
        "def words(title):\n    return title.split(' ')\n",
        "def test_words():\n    assert text.words('one two') == ['one', 'two']\n",
    ),
    Step(
        "text",
        "Several spaces are one",
        "    return title.split(' ')",
        "    return title.split()",
        "def test_words_with_many_spaces():\n"
        '    """Spaces in a row separate words once."""\n'
        "    assert text.words(' one   two ') == ['one', 'two']\n",
    ),
    feature(
        "text",
        "Slugs",
        "def slug(title):\n    return '-'.join(words(title.lower()))\n",
        "def test_slug():\n    assert text.slug('One Two') == 'one-two'\n",
    ),
    Step(
        "text",
        "Slugs hold only letters and digits",
        "    return '-'.join(words(title.lower()))",
        "    kept = [c if c.isalnum() else ' ' for c in title.lower()]\n"
        "    return '-'.join(words(''.join(kept)))",
        "def test_slug_without_marks():\n    assert text.slug('What? No!') == 'what-no'\n",
    ),
    feature(
        "numbers",
        "Mean",
        "def mean(values):\n    return sum(values) / len(values)\n",
        "def test_mean():\n    assert numbers.mean([1, 2, 3]) == 2\n",
    ),
    Step(
        "numbers",
        "The mean of nothing is an error with a message",
        "    return sum(values) / len(values)",
        "    if not values:\n"
        "        raise ValueError('the mean of no values')\n"
        "    return sum(values) / len(values)",
        "def test_mean_of_nothing():\n"
        "    with pytest.raises(ValueError, match='no values'):\n"
        "        numbers.mean([])\n",
    ),
    feature(
        "numbers",
        "Median",
        "def median(values):\n    return sorted(values)[len(values) // 2]\n",
        "def test_median_of_three():\n    assert numbers.median([3, 1, 2]) == 2\n",
    ),
    Step(
        "numbers",
        "The median of an even count is between two",
        "    return sorted(values)[len(values) // 2]",
        "    ordered, half = sorted(values), len(values) // 2\n"
        "    if len(ordered) % 2:\n"
        "        return ordered[half]\n"
        "    return (ordered[half - 1] + ordered[half]) / 2",
        "@pytest.mark.parametrize(('values', 'wanted'), [([1, 2], 1.5), ([4, 1, 3, 2], 2.5)])\n"
        "def test_median_of_even(values, wanted):\n"
        "    assert numbers.median(values) == wanted\n",
    ),
    feature(
        "numbers",
        "Clamp",
        "def clamp(value, low, high):\n    return max(low, min(value, high))\n",
        "def test_clamp():\n    assert [numbers.clamp(v, 0, 5) for v in (-1, 3, 9)] == [0, 3, 5]\n",
    ),
    Step(
        "numbers",
        "Clamping to an empty range is refused",
        "    return max(low, min(value, high))",
        "    if low > high:\n"
        "        raise ValueError(f'no number is from {low} to {high}')\n"
        "    return max(low, min(value, high))",
        "def test_clamp_refuses_an_empty_range():\n"
        "    with pytest.raises(ValueError):\n        numbers.clamp(1, 5, 0)\n",
    ),
    feature(
        "numbers",
        "Ratios as percents",
        "def percent(part, whole):\n    return f'{100 * part // whole}%'\n",
        "def test_percent():\n    assert numbers.percent(1, 2) == '50%'\n",
    ),
    Step(
        "numbers",
        "Percents are rounded, not cut",
        "    return f'{100 * part // whole}%'",
        "    return f'{round(100 * part / whole)}%'",
        "def test_percent_is_rounded():\n    assert numbers.percent(2, 3) == '67%'\n",
    ),
    feature(
        "queue",
        "A queue with a limit",
        "class Bounded:\n"
        "    def __init__(self, limit):\n"
        "        self.limit = limit\n"
        "        self.items = []\n\n"
        "    def put(self, item):\n"
        "        if len(self.items) > self.limit:\n"
        "            raise OverflowError('full')\n"
        "        self.items.append(item)\n\n"
        "    def take(self):\n"
        "        return self.items.pop()\n",
        "class TestBounded:\n"
        "    def test_gives_what_was_put(self):\n"
        "        held = queue.Bounded(2)\n"
        "        held.put(1)\n"
        "        assert held.take() == 1\n",
    ),
    Step(
        "queue",
        "First in, first out",
        "        return self.items.pop()",
        "        return self.items.pop(0)",
        "def test_order():\n"
        "    held = queue.Bounded(2)\n"
        "    held.put(1)\n"
        "    held.put(2)\n"
        "    assert [held.take(), held.take()] == [1, 2]\n",
    ),
    Step(
        "queue",
        "The limit is the limit",
        "        if len(self.items) > self.limit:",
        "        if len(self.items) >= self.limit:",
        "def test_limit():\n"
        "    held = queue.Bounded(1)\n"
        "    held.put(1)\n"
        "    with pytest.raises(OverflowError):\n        held.put(2)\n",
    ),
    Step(
        "queue",
        "A length for queues",
        "    def take(self):",
        "    def __len__(self):\n        return len(self.items)\n\n    def take(self):",
        "def test_length():\n    assert len(queue.Bounded(3)) == 0\n",
    ),
    feature(
        "tree",
        "Flatten nested lists",
        "def flat(nested):\n"
        "    out = []\n"
        "    for item in nested:\n"
        "        out += item if isinstance(item, list) else [item]\n"
        "    return out\n",
        "def test_flat():\n    assert tree.flat([1, [2, 3]]) == [1, 2, 3]\n",
    ),
    Step(
        "tree",
        "Flatten at any depth",
        "        out += item if isinstance(item, list) else [item]",
        "        out += flat(item) if isinstance(item, list) else [item]",
        "def test_flat_at_depth():\n    assert tree.flat([[1, [2]], [[[3]]]]) == [1, 2, 3]\n",
    ),
    feature(
        "tree",
        "Depth",
        "def depth(nested):\n"
        "    return 1 + max(depth(item) for item in nested if isinstance(item, list))\n",
        "def test_depth_is_there():\n    assert callable(tree.depth)\n",
    ),
    Step(
        "tree",
        "A flat list has depth one",
        "    return 1 + max(depth(item) for item in nested if isinstance(item, list))",
        "    inner = [depth(item) for item in nested if isinstance(item, list)]\n"
        "    return 1 + max(inner, default=0)",
        "def test_depth():\n"
        "    assert [tree.depth(n) for n in ([], [1], [[1], [[2]]])] == [1, 1, 3]\n",
    ),
    feature(
        "tree",
        "Paths to values",
        "def paths(tree, start=()):\n"
        "    for key, value in tree.items():\n"
        "        if isinstance(value, dict):\n"
        "            yield from paths(value, (key,))\n"
        "        else:\n"
        "            yield (*start, key), value\n",
        "def test_paths():\n    assert dict(tree.paths({'a': {'b': 1}})) == {('a', 'b'): 1}\n",
    ),
    Step(
        "tree",
        "Paths keep all of their parts",
        "            yield from paths(value, (key,))",
        "            yield from paths(value, (*start, key))",
        "def test_paths_at_depth():\n"
        "    assert dict(tree.paths({'a': {'b': {'c': 1}}})) == {('a', 'b', 'c'): 1}\n",
    ),
    feature(
        "text",
        "Lines of a width",
        "def wrap(text, width):\n"
        "    lines = ['']\n"
        "    for word in words(text):\n"
        "        if len(lines[-1]) + len(word) > width:\n"
        "            lines.append(word)\n"
        "        else:\n"
        "            lines[-1] = f'{lines[-1]} {word}'.strip()\n"
        "    return lines\n",
        "def test_wrap():\n    assert text.wrap('aa bb cc', 6) == ['aa bb', 'cc']\n",
    ),
    Step(
        "text",
        "Lines count their spaces",
        "        if len(lines[-1]) + len(word) > width:",
        "        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:",
        "def test_wrap_counts_spaces():\n    assert text.wrap('aaa bbb', 6) == ['aaa', 'bbb']\n",
    ),
]
"""Twenty-six commits with source and tests; the last but some are fixes of what came before."""

_AFTER_EACH = 6
"""Steps between two commits that hold only a note."""


def write(folder: Path) -> Path:
    """Make the repository and return its folder."""
    folder.mkdir(parents=True)
    _git(folder, "init", "-q", "--initial-branch=main")
    (folder / "pyproject.toml").write_text('[project]\nname = "shelf"\nversion = "1.0"\n')
    (folder / "NEWS").write_text("")
    (folder / "shelf").mkdir()
    (folder / "tests").mkdir()
    (folder / "shelf" / "__init__.py").write_text('"""A shelf of small functions."""\n')
    _commit(folder, "Begin", 0)
    for number, step in enumerate(STEPS, start=1):
        _write(folder, step)
        _commit(folder, step.subject, number)
        if number % _AFTER_EACH == 0:
            _note(folder, number)
    return folder


def _write(folder: Path, step: Step) -> None:
    source, tests = (
        folder / "shelf" / f"{step.module}.py",
        folder / "tests" / f"test_{step.module}.py",
    )
    before = source.read_text() if source.exists() else ""
    if step.old:
        assert before.count(step.old) == 1, step.subject
        source.write_text(before.replace(step.old, step.new))
    else:
        source.write_text(f"{before}\n\n{step.new}" if before else step.new)
    if not tests.exists():
        tests.write_text(f"import pytest\n\nfrom shelf import {step.module}\n")
    with tests.open("a") as file:
        file.write(f"\n\n{step.test}")


def _note(folder: Path, number: int) -> None:
    """Merge a branch that only tells the news."""
    _git(folder, "checkout", "-q", "-b", f"news-{number}")
    with (folder / "NEWS").open("a") as file:
        file.write(f"{number} steps\n")
    _commit(folder, "News", number)
    _git(folder, "checkout", "-q", "main")
    _git(folder, "merge", "-q", "--no-ff", "-m", "Merge the news", f"news-{number}")


def _commit(folder: Path, subject: str, number: int) -> None:
    _git(folder, "add", "--all")
    _git(folder, "commit", "-q", "-m", subject, day=number % 28 + 1)


def _git(folder: Path, *arguments: str, day: int = 1) -> None:
    when = f"2021-02-{day:02}T12:00:00+0000"
    env = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_AUTHOR_NAME": "Ada",
        "GIT_AUTHOR_EMAIL": "ada@example.org",
        "GIT_COMMITTER_NAME": "Ada",
        "GIT_COMMITTER_EMAIL": "ada@example.org",
        "GIT_AUTHOR_DATE": when,
        "GIT_COMMITTER_DATE": when,
    }
    subprocess.run(("git", *arguments), cwd=folder, env=env, check=True, capture_output=True)
