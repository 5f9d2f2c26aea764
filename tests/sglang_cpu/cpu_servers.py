"""How tests launch real SGLang servers."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYTHON = HERE.parent.parent / ".venv-sglang" / "bin" / "python"
SERVER_ARGS = {"max_total_tokens": 16384}


def command() -> tuple[str, ...]:
    """What launches a server on this machine's CPU."""
    if not PYTHON.exists():
        pytest.fail("there is no .venv-sglang: `make test-sglang` makes it and runs these tests")
    return (str(PYTHON), str(HERE / "serve_cpu.py"))
