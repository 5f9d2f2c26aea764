"""Options for thoughts, from a run's config to its episodes."""

from pathlib import Path

import pytest
from support.chat_templates import SPECIALS, TEXTS, THINKS, THOUGHT_MARKS, write_tokenizer

from rollart_core.config.load import load_config
from rollart_core.config.resolve import resolve_run
from rollart_core.errors import ConfigError
from rollart_core.models.new import train_tokenizer
from rollart_core.rollout.episode import ThoughtLimit
from rollart_core.runtime.run_envs import RunEnvs
from rollart_testing import ScriptedEngine


@pytest.fixture
def wired(tmp_path, repo_root):
    """Return a function that connects the episodes of a run to a model that thinks."""
    backend = train_tokenizer(TEXTS, 400)
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens(THOUGHT_MARKS)
    folder = write_tokenizer(tmp_path, backend.to_str(), THINKS, "<|im_end|>")

    def wire(*overrides):
        config = load_config(Path(repo_root) / "examples/hello.yaml", list(overrides))
        envs = RunEnvs(resolve_run(config, source="hello.yaml", import_classes=False))
        envs.wire(None, ScriptedEngine(), str(folder))
        (deps,) = envs._deps.values()
        return envs, deps

    return wire


def test_the_default_needs_one_row_and_no_limit(wired):
    envs, deps = wired()
    assert envs.row_note is None
    assert isinstance(deps.engine, ScriptedEngine)
    conversation = deps.new_conversation()
    conversation.observe("one")
    assert "<|im_start|>user\none" in envs._tokenizer.decode(conversation.prompt)


def test_user_messages_have_a_reason_for_their_rows(wired):
    envs, _ = wired("rollout.observation_role=user")
    assert "rollout.keep_thinking=true" in envs.row_note
    assert wired("rollout.observation_role=user", "rollout.keep_thinking=true")[0].row_note is None


def test_a_limit_of_thoughts_is_around_the_engine(wired):
    _, deps = wired("rollout.max_new_tokens=40", "rollout.max_thinking_tokens=30")
    assert isinstance(deps.engine, ThoughtLimit)


def test_a_role_that_the_template_does_not_know_ends_the_run_before_its_first_episode(
    wired, monkeypatch
):
    monkeypatch.setattr("rollart_core.models.thinking.appends", lambda *_, **__: False)
    with pytest.raises(ConfigError, match=r"rollout.observation_role: tool: .* use user or auto"):
        wired("rollout.observation_role=tool")
