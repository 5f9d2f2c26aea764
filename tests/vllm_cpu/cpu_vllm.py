"""How tests launch real vLLM servers."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYTHON = HERE.parent.parent / ".venv-vllm" / "bin" / "python"
SCRIPT = "serve_vllm.py"
SERVER_ARGS = {"num_gpu_blocks_override": 256, "max_num_seqs": 32}


def command() -> tuple[str, ...]:
    """What launches a server on this machine's CPU."""
    if not PYTHON.exists():
        pytest.fail("there is no .venv-vllm: `make test-vllm` makes it and runs these tests")
    return (str(PYTHON), str(HERE / SCRIPT))
