"""The real `openai` package at the gateway, in an interpreter that has it."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.gateways import at_gateway
from support.tool_templates import call_text

from rollart_core.errors import InferenceFailure

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.agents


def the_python() -> str:
    """Return an interpreter with the package, or skip."""
    given = os.environ.get("ROLLART_OPENAI_PYTHON")
    if given:
        return given
    if importlib.util.find_spec("openai"):
        return sys.executable
    for venv in (os.environ.get("AGENTS_VENV") or ".venv-agents", ".venv-sglang"):
        python = ROOT / venv / "bin/python"
        if python.exists() and list((ROOT / venv).glob("lib/python*/site-packages/openai")):
            return str(python)
    pytest.skip("no interpreter with the openai package: set ROLLART_OPENAI_PYTHON")


def play(answers, **more):
    """Run the program at a gateway; return what it told, and the session."""
    python = the_python()

    async def main():
        async with at_gateway("hermes", answers, **more) as (_, _, gateway_session, _):
            environ = {
                **{k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")},
                "OPENAI_BASE_URL": gateway_session.base_url,
                "OPENAI_API_KEY": gateway_session.api_key,
            }
            program = await asyncio.create_subprocess_exec(
                *(python, str(ROOT / "tests/support/openai_program.py")),
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            out, err = await program.communicate()
            assert program.returncode == 0, err.decode()
            return json.loads(out), gateway_session

    return asyncio.run(main())


def test_the_openai_package_talks_to_the_gateway():
    gone = InferenceFailure("gone", boundary="generate")
    answers = [
        call_text("hermes", ("add", '{"a": 2, "b": 3}')),
        *("it is 5", "a red shirt", "one two three four five six", " [red]"),
        *("first", "second", "third", gone, gone, "at last"),
    ]
    told, gateway_session = play(answers, max_turns=12)
    assert told["agent"] == "it is 5"
    assert told["stream"] == ["a red shirt", gateway_session.turns[2].num_new_tokens]
    assert len(told["logprobs"]) == 4
    assert told["text"].strip() == "[red]"
    assert told["responses"] == ["first", "second", "third"]
    assert told["models"] == ["policy"]
    assert told["refused"] == {
        "key": ["AuthenticationError", 401, "invalid_api_key"],
        "n": ["BadRequestError", 400, "unsupported_value"],
        "long": ["BadRequestError", 400, "context_length_exceeded"],
        "path": ["NotFoundError", 404, "unknown_url"],
        "engine": ["InternalServerError", 503, "engine_error"],
        "retried": None,  # the package asked again by itself
        "turns": ["RateLimitError", 429, "insufficient_quota"],
    }
    assert len(gateway_session.turns) == 12
    assert gateway_session.failure is None
    assert gateway_session.truncated
    assert set(gateway_session.samples()[0].turn_ids.tolist()) == {-1, 0, 1}
