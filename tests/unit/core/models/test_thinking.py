"""What templates do with thoughts, found by rendering them."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.chat_templates import CHATML, TEMPLATES, tokenizer_with, write_tokenizer

from rollart_core.config.load import validate
from rollart_core.config.model import ModelPath
from rollart_core.config.run import Rollout
from rollart_core.errors import ConfigError
from rollart_core.models.chat_template import ChatTemplate
from rollart_core.models.run_template import rows_note, run_tokenizer, template_problems
from rollart_core.models.thinking import (
    History,
    appends,
    find_thinking,
    history_of,
    observation_role,
    thinking_problems,
    why_rows,
)
from rollart_core.types import Message

EMPTY = "<think>\n\n</think>\n\n"


def template(name, **kwargs):
    return ChatTemplate(TEMPLATES[name][0], {}, kwargs)


def test_variables_are_those_that_the_template_does_not_set_itself():
    assert template("thinks").variables == ("enable_thinking", "preserve_thinking")
    assert template("chatml").variables == ()
    own = "{% set a = 1 %}{% if b is defined %}{{ a }}{% endif %}{% if c is not defined %}"
    own += "{% set c = 2 %}{% endif %}{{ c }}{% set d = d | default(3) %}{{ eos_token }}{{ tools }}"
    assert ChatTemplate(own, {}).variables == ("b", "c", "d")


def test_kwargs_reach_the_template_in_every_rendering():
    off = template("thinks", enable_thinking=False)
    user = [Message(role="user", content="a")]
    assert off.render(user, True).endswith("assistant\n" + EMPTY)
    assert off.with_kwargs({"preserve_thinking": True}).render(user, True).endswith(EMPTY)
    assert not template("thinks").render(user, True).endswith(EMPTY)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("thinks", "its variables are enable_thinking, preserve_thinking. Did you mean 'enable_th"),
        ("chatml", "has no variable 'enable_thinkin'; it has none."),
    ],
)
def test_an_unknown_variable_is_refused_with_those_that_exist(name, line):
    with pytest.raises(ConfigError, match=line) as caught:
        template(name, enable_thinkin=False)
    assert str(caught.value).startswith("model.chat_template_kwargs: ")


@pytest.mark.parametrize(
    ("name", "kwargs", "state"),
    [
        ("thinks", {}, "free"),
        ("thinks", {"enable_thinking": False}, "closed"),
        ("opens", {}, "opened"),
    ],
)
def test_marks_are_found_by_rendering(name, kwargs, state):
    thinking = find_thinking(template(name, **kwargs))
    assert (thinking.opening, thinking.closing) == ("<think>", "\n</think>\n\n")
    assert thinking.state == state


@pytest.mark.parametrize("name", ["ours", "chatml", "trims", "alternates"])
def test_a_template_that_only_copies_text_has_no_marks(name):
    assert find_thinking(template(name)) is None


def test_marks_inside_of_the_content_count_if_the_template_removes_the_thought():
    assert find_thinking(template("forgets_thinking")).opening == "<think>"


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("thinks", "<think>\nhm\n</think>\n\nclick", ("hm", "click")),
        ("thinks", "<think>hm</think>click", ("hm", "click")),
        ("thinks", "<think>\n\n</think>\n\nclick", ("", "click")),
        ("thinks", "click", ("", "click")),
        ("thinks", "<think>\ncut", ("cut", "")),
        ("opens", "hm\n</think>\n\nclick", ("hm", "click")),
        ("opens", "cut", ("cut", "")),
        ("thinks", "a < b </think> c", ("", "a < b </think> c")),
    ],
)
def test_a_text_is_split_into_thought_and_answer(name, text, parts):
    assert find_thinking(template(name)).split(text) == parts


@pytest.mark.parametrize(
    ("name", "role", "keeps", "one_row"),
    [
        ("thinks", "user", False, False),
        ("thinks", "tool", False, True),
        ("thinks", "user", True, True),
        ("forgets_thinking", "user", False, False),
        ("forgets_thinking", "tool", False, False),
        ("forgets_thinking", "user", True, True),
        ("alternates", "user", False, True),
        ("alternates", "tool", False, False),
    ],
)
def test_whether_turns_extend_one_row(name, role, keeps, one_row):
    assert appends(template(name), role, keeps=keeps) is one_row


@pytest.mark.parametrize(
    ("name", "asked", "keeps", "role"),
    [
        ("thinks", "auto", False, "tool"),
        ("thinks", "auto", True, "user"),
        ("thinks", "user", False, "user"),
        ("chatml", "auto", False, "user"),
        ("chatml", "tool", False, "tool"),
        ("forgets_thinking", "auto", False, "user"),
    ],
)
def test_the_role_of_observations(name, asked, keeps, role):
    assert observation_role(template(name), asked, keeps=keeps) == role


def test_the_warning_says_why_and_what_helps():
    assert why_rows(template("thinks"), History("tool")) is None
    said = why_rows(template("thinks"), History("user"))
    assert said.startswith("the chat template removes earlier thoughts when a turn is added; set ")
    assert "model.chat_template_kwargs.preserve_thinking=true or rollout.keep_thinking=true" in said
    assert why_rows(template("thinks", preserve_thinking=True), History("user")) is None
    assert "preserve" not in why_rows(template("forgets_thinking"), History())


@pytest.mark.parametrize(
    ("name", "kwargs", "rollout", "key", "said"),
    [
        ("chatml", {}, {"keep_thinking": True}, "keep_thinking", "no marks for thoughts"),
        ("chatml", {}, {"max_thinking_tokens": 5}, "max_thinking_tokens", "no marks for thoughts"),
        (
            *("thinks", {"enable_thinking": False}),
            *({"max_thinking_tokens": 5}, "max_thinking_tokens", "turns thinking off"),
        ),
        ("alternates", {}, {"observation_role": "tool"}, "observation_role", "use user or auto"),
    ],
)
def test_an_option_that_the_template_does_not_support(name, kwargs, rollout, key, said):
    (problem,) = thinking_problems(template(name, **kwargs), Rollout(**rollout))
    assert problem.path == ("rollout", key)
    assert said in problem.message


def test_options_of_a_template_that_supports_them():
    rollout = Rollout(keep_thinking=True, max_thinking_tokens=5, observation_role="tool")
    assert list(thinking_problems(template("thinks"), rollout)) == []
    assert history_of(template("thinks"), rollout) == History("tool", keeps_thinking=True)
    off = template("thinks", enable_thinking=False)
    assert list(thinking_problems(off, Rollout(keep_thinking=True))) == []


def _config(folder: Path, **changes):
    rollout = changes.pop("rollout", {})
    config, _ = validate({"env": "webshop", "model": str(folder), "stop": {"batches": 1}})
    model = ModelPath(path=str(folder), chat_template_kwargs=changes)
    return config.model_copy(update={"model": model, "rollout": Rollout(**rollout)})


@pytest.fixture
def folder(tmp_path):
    backend = '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'
    return write_tokenizer(tmp_path, backend, TEMPLATES["thinks"][0], "<|im_end|>")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"enable_thinkin": False},
            "model.chat_template_kwargs: the chat template of this model ha",
        ),
        ({"rollout": {"observation_role": "tool"}}, None),
        ({"rollout": {"keep_thinking": True}}, None),
        ({"enable_thinking": True}, None),
    ],
)
def test_a_dry_run_checks_the_template_without_a_tokenizer(folder, changes, line):
    problems = template_problems(_config(folder, **changes))
    assert bool(problems) == bool(line)
    assert not line or problems[0].within().startswith(line)


def test_a_template_with_an_unknown_tag_is_one_line(folder):
    (folder / "chat_template.jinja").write_text("{% mystery %}")
    (problem,) = template_problems(_config(folder))
    assert problem.key == "model.path"
    assert "unknown tag 'mystery'" in problem.message
    assert "\n" not in problem.message


def test_the_plan_knows_rows_only_from_files_on_this_machine(folder, tmp_path):
    assert rows_note(_config(folder)) is None
    said = rows_note(_config(folder, rollout={"observation_role": "user"}))
    assert said.startswith("the chat template removes earlier thoughts")
    assert rows_note(_config(Path("Owner/missing"))) is None
    (folder / "chat_template.jinja").write_text(CHATML)
    assert rows_note(_config(folder, rollout={"observation_role": "user"})) is None


def test_the_start_of_a_run_checks_again(monkeypatch):
    config = _config(Path("Owner/hub"), rollout={"keep_thinking": True})
    loaded = tokenizer_with("chatml")
    monkeypatch.setattr("rollart_core.models.run_template.load_tokenizer", lambda *_: loaded)
    with pytest.raises(ConfigError, match=r"rollout.keep_thinking: the chat template of this"):
        run_tokenizer("Owner/hub", config)


@pytest.mark.parametrize(
    ("name", "message", "text"),
    [
        ("thinks", {"content": "go"}, "go"),
        ("opens", {"content": "go"}, "</think>\n\ngo"),
        ("thinks", {"content": "go", "reasoning_content": "hm"}, "<think>\nhm\n</think>\n\ngo"),
        ("opens", {"content": "go", "reasoning_content": "hm"}, "hm\n</think>\n\ngo"),
    ],
)
def test_a_message_as_the_policy_writes_it(name, message, text):
    tokenizer = tokenizer_with(name)
    assert tokenizer.write(Message(role="assistant", **message)) == text
    thinking = replace(tokenizer.thinking)
    assert thinking.split(text) == (message.get("reasoning_content", ""), "go")
