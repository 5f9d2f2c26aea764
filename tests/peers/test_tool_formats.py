"""Our tool formats and the parsers of renderers return the same calls."""

import importlib.util
import sys
from pathlib import Path

import pytest
from support.tool_cases import FAMILIES, KINDS, cases

pytestmark = pytest.mark.peers

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PAGE = SCRIPTS.parent / "docs" / "reference" / "tool-formats.md"
NUM_CASES = 20
NEEDS_A_DOWNLOAD = ("harmony",)


def _script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


formats, oracle = _script("tool_formats"), _script("tool_format_oracle")
COMPARED = [
    family
    for family in FAMILIES
    if family.alias in oracle.RENDERERS and family.alias not in NEEDS_A_DOWNLOAD
]


@pytest.mark.parametrize("family", COMPARED, ids=lambda family: family.name)
def test_each_difference_from_renderers_is_explained(family, shared_dir):
    templates = shared_dir / "data" / "chat_templates"
    known = [
        line.split(" | ")[1] for line in PAGE.read_text().splitlines() if "| renderers |" in line
    ]
    parse, num_same = None, 0
    for kind in KINDS:
        for case in cases(family, formats.drawn(kind), NUM_CASES, templates):
            asked = formats.case_for_oracles(family, kind, case)
            own = formats.own_answer(family, kind, case, asked["text"])
            assert own["right"], asked["text"]
            parse = parse or oracle.renderers(asked)
            answer = oracle.answered(parse, asked)
            if formats.agrees(own, answer):
                num_same += 1
            else:
                assert formats.reason(asked, own, answer) in known, (asked["text"], own, answer)
    assert num_same > NUM_CASES * len(KINDS) / 2
