"""Where one party's reach ends; SECURITY.md names these tests, and others beside them."""

from __future__ import annotations

import asyncio
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from jinja2.exceptions import SecurityError
from support.gateways import LIMITS, TICKET, Http, at_gateway
from support.sandbox_types import EACH_SANDBOX_TYPE, missing, opened

from rollart_core.config.load import load_config
from rollart_core.models.chat_template import ChatTemplate, TemplateRefusal
from rollart_core.plugins import registry
from rollart_core.runtime.control import SOCKET, Control

SECRET = "sk-that-nobody-may-see"
RUN = {"env": "frozenlake", "model": {"kind": "new"}, "stop": {"batches": 1}}


def test_a_program_at_the_gateway_has_its_own_episode_and_no_other() -> None:
    async def main() -> None:
        async with at_gateway(answers=["one", "two", "three"]) as (
            gateway,
            _,
            gateway_session,
            http,
        ):
            ticket = replace(TICKET, ticket_id="g0.1")
            async with gateway.episode(ticket, LIMITS) as other:
                stranger = Http(http.session, other)
                _, first = await http.post("responses", {"input": "my secret plan"})
                more = {"input": "go on", "previous_response_id": first["id"]}
                status, answer = await stranger.post("responses", more)
                assert (status, answer["error"]["param"]) == (404, "previous_response_id")
                for where, key in (
                    (gateway_session.base_url, other.api_key),
                    (other.base_url, gateway_session.api_key),
                ):
                    status, answer = await http.post("responses", more, key=key, base_url=where)
                    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert "my secret plan" not in str(answer)
                await stranger.post("responses", {"input": "mine"})
                assert [t.observation for t in gateway_session.turns] == ["my secret plan"]
                assert [t.observation for t in other.turns] == ["mine"]
                assert gateway_session.api_key[15:] not in other.base_url + gateway_session.base_url

    asyncio.run(main())


@pytest.mark.parametrize("isolation", EACH_SANDBOX_TYPE)
def test_a_sandbox_has_none_of_the_hosts_variables(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := missing(isolation):
        pytest.skip(why)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)

    command = "env"
    if (
        isolation != "process"
    ):  # which is for what is trusted: its commands may look about in the host
        command += "; cat /proc/[0-9]*/environ"

    async def main() -> bytes:
        async with opened(isolation) as sandbox:
            return (await sandbox.exec(["/bin/sh", "-c", command], timeout_s=30)).stdout

    said = asyncio.run(main())
    assert b"PATH=" in said
    assert SECRET.encode() not in said


def test_a_key_is_named_in_a_config_and_never_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    options = {"base_url": "http://127.0.0.1:9", "model": "m", "rubric": "Polite?"}
    named = {"id": "judge", **options, "api_key_env": "JUDGE_KEY"}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**RUN, "reward": named}))
    config = load_config(path, ())
    checked = registry.checked_options("rewards", "judge", {**options, "api_key_env": "JUDGE_KEY"})
    assert checked["api_key_env"] == "JUDGE_KEY"
    assert SECRET not in str(checked) + config.model_dump_json()
    problems = registry.option_problems("rewards", "judge", {**options, "api_key": SECRET})
    assert [p.path for p in problems] == [("api_key",)]
    assert SECRET not in str(problems[0].message)


def test_a_run_listens_to_its_own_user_alone(tmp_path: Path) -> None:
    async def main() -> int:
        control = Control(tmp_path, lambda request: None)  # type: ignore[arg-type,return-value]
        await control.open()
        try:
            return (tmp_path / SOCKET).stat().st_mode
        finally:
            await control.close()

    mode = asyncio.run(main())
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "'__class__' of 'str' .* unsafe"),
        ("{{ raise_exception.__globals__['os'] }}", "'__globals__' of 'function' .* unsafe"),
        ("{{ messages.append(messages[0]) }}", "'append' of 'list' .* unsafe"),
    ],
)
def test_a_chat_template_of_a_model_runs_no_python(template: str, why: str) -> None:
    with pytest.raises((TemplateRefusal, SecurityError), match=why):
        ChatTemplate(template, {}).render([{"role": "user", "content": "hi"}])


def test_no_code_of_a_model_folder_is_trusted(repo_root: Path) -> None:
    folders = ("rollart_core", "envs", "rewards", "algorithms", "plugins")
    files = [path for folder in folders for path in (repo_root / folder).rglob("*.py")]
    loads = [p for p in files if "from_pretrained(" in p.read_text(encoding="utf-8")]
    assert loads
    trusting = re.compile(r"trust_remote_code[\"']?\s*[=:](?!\s*False)|weights_only\s*=\s*False")
    assert [p for p in files if trusting.search(p.read_text(encoding="utf-8"))] == []
    assert trusting.search("load(trust_remote_code=True)")
