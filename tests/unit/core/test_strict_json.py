"""JSON that any reader can read."""

import json
import math
from pathlib import Path

from rollart_core.store.run_dir import write_json


def test_what_json_does_not_have_becomes_null(tmp_path: Path):
    held = {"low": -math.inf, "many": (1, math.nan), 3: {"path": tmp_path}}
    write_json(tmp_path / "report.json", held)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert read == {"low": None, "many": [1, None], "3": {"path": str(tmp_path)}}
    assert held["low"] == -math.inf
