"""Select 100 random sentences of the documentation: ``python scripts/sentences.py COMMIT``.

Takes: a commit. Gives: numbered sentences of ``README.md`` and ``docs/`` at that commit, for a
review. The random generator is seeded with the commit's hash, so that nobody can choose them.
Never: selects from code blocks, tables or headings.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_SENTENCES = 100
LEAST_WORDS = 4


def sentences(page: str) -> list[str]:
    """Return the sentences of a Markdown page, in order.

    Code, tables, headings, comments and pictures are omitted. A list item counts as a paragraph.
    """
    text = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    paragraphs: list[list[str]] = [[]]
    item = False
    for line in text.splitlines():
        begins = re.match(r" *(?:[-*]|\d+\.) ", line)
        code = line.startswith("    ") and not (item and line.strip())
        if not line.strip() or code or re.match(r"[#|!]", line):
            paragraphs.append([])
            item = item and line.startswith("    ")
            continue
        if begins:
            paragraphs.append([])
            line, item = line[begins.end() :], True
        paragraphs[-1].append(line.strip())
    found = []
    for lines in paragraphs:
        joined = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(lines))
        whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), joined)
        found += re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(*])", whole)
    plain = (s.replace("**", "").replace("\0", " ").strip() for s in found)
    return [s for s in plain if len(s.split()) >= LEAST_WORDS]


def git(*arguments: str) -> str:
    """Return the output of git."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def drawn(commit: str) -> list[tuple[str, str]]:
    """Return pages and sentences, selected with the hash of a commit."""
    names = git("ls-tree", "-r", "--name-only", commit, "README.md", "docs").split()
    pages = [name for name in names if name.endswith(".md") and not name.startswith("docs/review/")]
    found = [(page, s) for page in pages for s in sentences(git("show", f"{commit}:{page}"))]
    return random.Random(commit).sample(found, min(NUM_SENTENCES, len(found)))


def main() -> None:
    """Print the sentences of the commit named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/sentences.py COMMIT")
    commit = git("rev-parse", f"{sys.argv[1]}^{{commit}}").strip()
    print(f"# {NUM_SENTENCES} sentences of README.md and docs/ at {commit}\n")
    for number, (page, sentence) in enumerate(drawn(commit), start=1):
        print(f"{number}. ({page}) {sentence}")


if __name__ == "__main__":
    main()
